"""RecordIo: one read or write of records in a segment file. Blocks: it runs in IoThreads."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from moonpool.ids import BlockHash
from moonpool.native import Kernels, LeafGeometry, leaf_checks
from moonpool.store.base import BlockRecord, BlockTarget, ByteArray, ReadOutcome
from moonpool.store.log_identity import LogIdentity
from moonpool.store.segment_files import SegmentFiles, read_fully, write_fully
from moonpool.store.segment_format import TOMBSTONE, RecordFormat, sequence_of
from moonpool.store.segment_index import Place


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


class RecordIo:
    """Reads and writes records of one identity; holds no state, so that any thread may."""

    def __init__(self, files: SegmentFiles, identity: LogIdentity, kernels: Kernels) -> None:
        self.files = files
        self.format = RecordFormat.of(identity)
        self._kernels = kernels
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
            buffers += self._around(record.payload, footer)
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
        """Read records of one segment, one after another; fewer if `stop` is set meanwhile.

        In order of their slots, so that the kernel sees what comes next and reads ahead.
        """
        reads: list[RecordRead] = []
        for target, place in zip(targets, places, strict=True):
            if stop is not None and stop.is_set():
                break
            reads.append(self._read(fd, target, place.segment, place.slot))
        return reads

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

    def _read(self, fd: int, target: BlockTarget, segment: int, slot: int) -> RecordRead:
        """Read a record into `target` and check every leaf there."""
        padding = np.empty_like(self._padding)
        footer: ByteArray = np.empty(self.format.footer_bytes, np.uint8)
        buffers = [target.payload, *([padding] if padding.size else []), footer]
        offset = slot * self.format.slot_bytes
        try:
            num_bytes = read_fully(self.files, fd, buffers, offset)
        except OSError as error:
            return RecordRead(block_hash=target.block_hash, outcome=ReadOutcome.FAILED, error=error)
        is_whole = num_bytes == sum(buffer.size for buffer in buffers)
        is_right = is_whole and self._is_right(target, footer, sequence_of(segment, slot))
        return RecordRead(
            block_hash=target.block_hash,
            outcome=ReadOutcome.OK if is_right else ReadOutcome.CORRUPT,
        )

    def _is_right(self, target: BlockTarget, footer: ByteArray, sequence: int) -> bool:
        leaves = self.format.leaves_of(footer, target.block_hash, sequence)
        if leaves is None:
            return False
        target.leaves[:] = leaves
        checks = self._checks.copy()
        checks["expected"] = leaves
        return not self._kernels.verify_leaves(target.payload, self._geometry, checks).any()

    def _around(self, payload: ByteArray, footer: ByteArray) -> list[ByteArray]:
        return [payload, self._padding, footer] if self._padding.size else [payload, footer]
