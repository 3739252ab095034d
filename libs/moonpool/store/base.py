"""BlockLog: blocks on a disk, as the shell of a store node sees them.

Life of a block
1. `write` appends it: its bytes as they lie in the arena, and its leaf digests.
2. It is there when `write` says so, and from then on after any crash of the process.
3. `read` brings it back and checks every leaf on the caller's copy, any number of times.
4. It goes by `drop` or `clear`; or by the log's own doing, which tells `on_dropped`: its segment is
   reclaimed for room, or it does not read as it was written.

Rules
- One event loop, which never waits for the disk. Every method but those marked async is immediate.
- The caller's memory is the caller's: `write` reads it and `read` writes it until the call has returned
  or raised, and no longer. A call that is cancelled first waits for its IO, then raises.
- The disk's failures are answers here (a miss, blocks not kept), never exceptions: `health()` says why.
  What raises is opening a log, and a wrong shape of the caller's memory (ValueError).
- Every change of what is there is told once: in `contents()` at the start, in the result of `write`, to
  `on_dropped`, or by the caller's own drop.
- What concerns many blocks is asked and told in parts of PART_BLOCKS, with turns of the loop between.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from moonpool.ids import BlockHash

#: What the loop can do with so many blocks in a few milliseconds it can do.
PART_BLOCKS = 1_024

ByteArray = npt.NDArray[np.uint8]
DigestArray = npt.NDArray[np.uint64]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class BlockRecord:
    """A block to write."""

    block_hash: BlockHash
    #: uint8[block_bytes], contiguous: the block's run in the arena.
    payload: ByteArray
    #: uint64[num_layers], contiguous: its row of the arena's leaf digests.
    leaves: DigestArray
    #: 64 bits for the caller each, kept with the record and told by `contents`: whose it is, and what it follows on.
    tag: int = 0
    link: int = 0


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class BlockTarget:
    """Where a block is to be read to; both arrays hold anything unless the outcome is OK."""

    block_hash: BlockHash
    #: uint8[block_bytes], contiguous, writable.
    payload: ByteArray
    #: uint64[num_layers], contiguous, writable.
    leaves: DigestArray


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredRecord:
    """A block that was found when the log was opened."""

    block_hash: BlockHash
    tag: int
    link: int = 0


class ReadOutcome(enum.StrEnum):
    """What became of one read. All but OK are a miss."""

    #: The target holds the block, and every leaf was checked on it.
    OK = "ok"
    #: It is not there.
    ABSENT = "absent"
    #: It does not read as it was written; it is dropped, and `on_dropped` was told.
    CORRUPT = "corrupt"
    #: The disk gave an error for it; it is dropped, and `on_dropped` was told.
    FAILED = "failed"


class DropReason(enum.StrEnum):
    """Why the log dropped blocks that nobody told it to drop."""

    #: Its segment went to make room.
    RECLAIMED = "reclaimed"
    CORRUPT = "corrupt"
    FAILED = "failed"


@dataclass(frozen=True, slots=True, kw_only=True)
class WriteResult:
    """What is on disk after a write."""

    #: In the order given; those that were there before are among them.
    kept: tuple[BlockHash, ...]
    #: Why the others are not, one sentence; empty if all are.
    problem: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class LogHealth:
    """Whether writes are taken. Reads go on whatever this says."""

    #: The next write is tried.
    is_writable: bool
    #: Why the last write was refused, one sentence for the operator; empty from one that works on.
    problem: str
    #: The next write is tried after so long.
    retry_after_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class LogStats:
    """Counts since the log was opened, and what is there now (num_records to foreign_bytes)."""

    num_records: int
    num_segments: int
    #: Of records that can be read, footers included.
    live_bytes: int
    #: Of all files of this identity, dropped records included.
    file_bytes: int
    #: Of files that other models or layouts left in the directory, reclaimed before any of ours; and of
    #: segments that could not be read at the start, which stay for the next one.
    foreign_bytes: int
    capacity_bytes: int

    #: Everything that was sent to the disk: records, those carried over, marks of drops. For a budget.
    written_bytes: int
    #: Of these, what `write` was asked for.
    written_record_bytes: int
    #: Of these, what was copied out of reclaimed segments.
    carried_bytes: int
    read_bytes: int

    num_writes: int
    num_reads: int
    num_write_errors: int
    num_sync_errors: int
    num_read_errors: int
    #: Records that did not read as they were written.
    num_corrupt_records: int
    #: Found by the scan: places whose footer is damaged, and places that a crash left unfinished.
    num_corrupt_footers: int
    num_torn_records: int
    num_reclaimed_segments: int
    num_reclaimed_records: int
    num_carried_records: int


#: Told on the loop when blocks are gone without having been dropped by the caller; must not block.
OnDropped = Callable[[Sequence[BlockHash], DropReason], None]

#: Asked on the loop when a segment is reclaimed: which of these blocks of it, oldest first, are worth
#: another write, best first, and how many at most. All others are dropped.
KeepHot = Callable[[Sequence[BlockHash], int], Sequence[BlockHash]]


class BlockLog(Protocol):
    """Blocks on disk."""

    @property
    def record_bytes(self) -> int:
        """What one block takes on the disk."""
        ...

    def contents(self) -> Iterator[tuple[StoredRecord, ...]]:
        """All blocks that are there, the oldest first, in parts; for the start.

        A part says what is there when it is taken. What changes between two parts is told as ever: none
        is left out, but one that is written meanwhile is told twice.
        """
        ...

    def has(self, block_hash: BlockHash) -> bool:
        """Whether a read is worth trying."""
        ...

    async def write(self, records: Sequence[BlockRecord]) -> WriteResult:
        """Append blocks, in order; neighbours in one IO. Blocks that are there are not written again.

        Calls take turns. Room is made by reclaiming segments, on which blocks that this call has
        written are never lost unless they alone exceed the capacity.

        Raises:
            ValueError: An array has another size or type than the log's identity says.
        """
        ...

    async def read(self, targets: Sequence[BlockTarget]) -> tuple[ReadOutcome, ...]:
        """Read blocks, one IO each, and check them; outcomes in the order given.

        Blocks that were written one after another are read so, and others side by side: a chain is
        best given in one call.

        Raises:
            ValueError: As for `write`.
        """
        ...

    async def drop(self, hashes: Sequence[BlockHash]) -> int:
        """Forget blocks, also for after a restart as far as the disk allows; how many were there.

        They are out of reach before anything is awaited; a write of them that runs loses, a read of
        them that runs may still end well.
        """
        ...

    async def clear(self) -> int:
        """Forget all blocks and give their space back; how many there were."""
        ...

    def health(self) -> LogHealth:
        """Whether writes are taken, as of now."""
        ...

    def stats(self) -> LogStats:
        """What has been counted, and what is there, as of now."""
        ...

    async def close(self) -> None:
        """Wait for what runs, sync, release the directory. May be called twice; nothing may follow."""
        ...
