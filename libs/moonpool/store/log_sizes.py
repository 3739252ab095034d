"""LogSizes: how much a log may hold, and in what pieces."""

from __future__ import annotations

from dataclasses import dataclass

from moonpool.errors import ConfigError
from moonpool.store.segment_format import MAX_SLOTS

_MAX_WRITE_BYTES = 8 * 1024 * 1024
#: Three buffers each; the system takes 1,024 in one call.
_MAX_WRITE_RECORDS = 256
_SEGMENTS_IN_CAPACITY = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class LogSizes:
    """One log's."""

    capacity_bytes: int
    slot_bytes: int
    slots_per_segment: int

    @classmethod
    def of(cls, capacity_bytes: int, slot_bytes: int, segment_bytes: int | None = None) -> LogSizes:
        """Segments of about `segment_bytes`, a 64th of the capacity if None; of one record at least.

        Raises:
            ConfigError: Four segments are more than the capacity.
        """
        if segment_bytes is None:
            segment_bytes = capacity_bytes // _SEGMENTS_IN_CAPACITY
        slots = max(1, min(segment_bytes // slot_bytes, MAX_SLOTS))
        needed = 4 * slots * slot_bytes
        if capacity_bytes < needed:
            raise ConfigError(
                f"the SSD tier has {capacity_bytes} bytes, and needs at least {needed}:"
                f" four segments of {slots} blocks of this model",
                code="ssd_too_small",
            )
        return cls(capacity_bytes=capacity_bytes, slot_bytes=slot_bytes, slots_per_segment=slots)

    @property
    def segment_bytes(self) -> int:
        return self.slots_per_segment * self.slot_bytes

    @property
    def write_records(self) -> int:
        """How many records go out in one call at most."""
        return max(1, min(_MAX_WRITE_BYTES // self.slot_bytes, _MAX_WRITE_RECORDS))
