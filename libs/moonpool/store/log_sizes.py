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
    def of(cls, capacity_bytes: int, slot_bytes: int) -> LogSizes:
        """Segments of a 64th of the capacity, or of one record if that is more.

        Raises:
            ConfigError: Four records are more than the capacity.
        """
        if capacity_bytes < 4 * slot_bytes:
            raise ConfigError(
                f"the SSD tier has {capacity_bytes} bytes, and needs at least {4 * slot_bytes}:"
                " four blocks of this model",
                code="ssd_too_small",
            )
        slots = capacity_bytes // _SEGMENTS_IN_CAPACITY // slot_bytes
        return cls(
            capacity_bytes=capacity_bytes,
            slot_bytes=slot_bytes,
            slots_per_segment=max(1, min(slots, MAX_SLOTS)),
        )

    @property
    def segment_bytes(self) -> int:
        return self.slots_per_segment * self.slot_bytes

    @property
    def write_records(self) -> int:
        """How many records go out in one call at most."""
        return max(1, min(_MAX_WRITE_BYTES // self.slot_bytes, _MAX_WRITE_RECORDS))
