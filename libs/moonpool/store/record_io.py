"""RecordIo: one read or write of records in a segment file. Blocks: it runs in IoThreads."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass
from functools import partial

import numpy as np

from moonpool.ids import BlockHash
from moonpool.native import Kernels, LeafGeometry, leaf_checks
from moonpool.store.base import BlockRecord, BlockTarget, ByteArray, ReadOutcome
from moonpool.store.log_identity import LogIdentity
from moonpool.store.segment_files import SegmentFiles, read_fully, write_fully
from moonpool.store.segment_format import TOMBSTONE, RecordFormat, sequence_of
from moonpool.store.segment_index import Place

#: Few enough that they still lie in a cache, enough that handing them on costs little.
_CHECKED_TOGETHER = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordRead:
    """What one read gave."""

    block_hash: BlockHash
    outcome: ReadOutcome
    error: OSError | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Appended:
    """What one write gave."""

    #: Leading records of those given that are whole in the file.
    num_records: int
    num_bytes: int
    error: OSError | None


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Copy:
    """A record that was read and not checked."""

    target: BlockTarget
    footer: ByteArray
    sequence: int
    is_whole: bool
    error: OSError | None


class RecordIo:
    """Reads and writes records of one identity; holds no state, so that any thread may.

    Args:
        assist: Does a piece of work in another thread.
    """

    def __init__(
        self,
        files: SegmentFiles,
        identity: LogIdentity,
        kernels: Kernels,
        assist: Callable[[Callable[[], list[RecordRead]]], Future[list[RecordRead]]],
    ) -> None:
        self.files = files
        self.format = RecordFormat.of(identity)
        self._kernels = kernels
        self._assist = assist
        self._geometry = LeafGeometry.of_layout(identity.block_layout)
        #: Of a block on its own, but for what is expected.
        self._checks = leaf_checks(0, np.arange(self.format.num_leaves), 0)
        self._padding: ByteArray = np.zeros(self.format.padding_bytes, np.uint8)
        self._tombstone: ByteArray = np.frombuffer(TOMBSTONE, np.uint8)

    def append(
        self, fd: int, records: Sequence[BlockRecord], segment: int, first_slot: int
    ) -> Appended:
        """Write records into consecutive slots, in one call to the system if that takes them all."""
        footers = self.format.footers(records, sequence_of(segment, first_slot))
        buffers: list[ByteArray] = []
        for record, footer in zip(records, footers, strict=True):
            buffers += self._around(record.payload, footer, self._padding)
        slot_bytes = self.format.slot_bytes
        num_bytes, error = write_fully(self.files, fd, buffers, first_slot * slot_bytes)
        return Appended(num_records=num_bytes // slot_bytes, num_bytes=num_bytes, error=error)

    def read_run(
        self,
        fd: int,
        targets: Sequence[BlockTarget],
        places: Sequence[Place],
        stop: threading.Event | None = None,
    ) -> list[RecordRead]:
        """Read records of one segment and check every leaf; fewer if `stop` is set meanwhile.

        One after another in order of their slots, so that the kernel sees what comes next and reads
        ahead. While the next are read, the last are checked by another thread.
        """
        checks: list[Future[list[RecordRead]]] = []
        try:
            for first in range(0, len(targets), _CHECKED_TOGETHER):
                if stop is not None and stop.is_set():
                    break
                last = first + _CHECKED_TOGETHER
                pairs = zip(targets[first:last], places[first:last], strict=True)
                copies = [self._copy(fd, target, place) for target, place in pairs]
                if len(targets) <= _CHECKED_TOGETHER:
                    return [self._check(copy) for copy in copies]
                checks.append(self._assist(partial(self._check_all, copies)))
        finally:
            # They look at the caller's memory, which is the caller's again when this ends.
            wait(checks)
        return [read for check in checks for read in check.result()]

    def bury(self, fd: int, slots: Sequence[int]) -> OSError | None:
        """Mark records as dropped, for the next scan; the first error, after trying all."""
        first_error: OSError | None = None
        for slot in slots:
            offset = slot * self.format.slot_bytes + self.format.footer_offset
            _, error = write_fully(self.files, fd, [self._tombstone], offset)
            first_error = first_error or error
        return first_error

    def sync(self, fd: int) -> OSError | None:
        """Send what was written to the medium, and wait for that."""
        try:
            self.files.sync(fd)
        except OSError as error:
            return error
        return None

    def _copy(self, fd: int, target: BlockTarget, place: Place) -> _Copy:
        """Bring a record into `target`; nothing is known of it yet."""
        padding = np.empty_like(self._padding)
        footer: ByteArray = np.empty(self.format.footer_bytes, np.uint8)
        buffers = self._around(target.payload, footer, padding)
        error: OSError | None = None
        num_bytes = 0
        try:
            num_bytes = read_fully(self.files, fd, buffers, place.slot * self.format.slot_bytes)
        except OSError as raised:
            error = raised
        return _Copy(
            target=target,
            footer=footer,
            sequence=sequence_of(place.segment, place.slot),
            is_whole=num_bytes == self.format.footer_offset + self.format.footer_bytes,
            error=error,
        )

    def _check_all(self, copies: Sequence[_Copy]) -> list[RecordRead]:
        return [self._check(copy) for copy in copies]

    def _check(self, copy: _Copy) -> RecordRead:
        """Whether the target holds the record as it was written; its leaves go there too."""
        outcome = ReadOutcome.CORRUPT
        if copy.error is not None:
            outcome = ReadOutcome.FAILED
        elif copy.is_whole and self._is_right(copy):
            outcome = ReadOutcome.OK
        return RecordRead(block_hash=copy.target.block_hash, outcome=outcome, error=copy.error)

    def _is_right(self, copy: _Copy) -> bool:
        target = copy.target
        leaves = self.format.leaves_of(copy.footer, target.block_hash, copy.sequence)
        if leaves is None:
            return False
        target.leaves[:] = leaves
        checks = self._checks.copy()
        checks["expected"] = leaves
        return not self._kernels.verify_leaves(target.payload, self._geometry, checks).any()

    def _around(self, payload: ByteArray, footer: ByteArray, padding: ByteArray) -> list[ByteArray]:
        return [payload, padding, footer] if padding.size else [payload, footer]
