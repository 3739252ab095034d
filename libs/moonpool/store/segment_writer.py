"""SegmentWriter: appends records, and makes room by whole segments. One caller at a time.

Life of a write
1. There must be an open segment with a free slot: the open one, or a new one. A new one may exist only
   if it fits when it is full: foreign segments go first, then victims (segment_index).
2. Blocks of a victim that are still hot are copied into the new segment; the rest is dropped, and told.
   A victim is removed only then: one segment of the capacity is kept free for that.
3. As many records as fit, up to 8 MiB, go out in one pwritev. Those that are whole in the file count,
   also when it failed; a segment in which a write failed is sealed.
4. A full disk is answered by giving up one segment more than the capacity asks for, once. If that does
   not help, and for every other error, writes pause (write_pause).
5. After every 64 MiB, and when a segment is sealed, its bytes are sent to the medium in the background.
   The next 64 MiB wait for that: so much may be dirty, and so much a power failure may cost.

What it does not do: wait for the medium before a record counts. A crash of the process loses nothing
that was written; what a power failure loses, the scan or the leaf digests find out.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from functools import partial

import numpy as np

from moonpool.clock import Clock
from moonpool.ids import BlockHash
from moonpool.store.base import (
    PART_BLOCKS,
    BlockRecord,
    BlockTarget,
    DropReason,
    KeepHot,
    OnDropped,
    ReadOutcome,
)
from moonpool.store.disk_errors import explain, is_full
from moonpool.store.io_threads import IoThreads
from moonpool.store.log_books import LogBooks
from moonpool.store.log_directory import ForeignSegment, LogDirectory
from moonpool.store.log_sizes import LogSizes
from moonpool.store.rare_log import RareLog
from moonpool.store.record_io import RecordIo
from moonpool.store.segment_index import Place, Segment
from moonpool.store.segment_table import SegmentTable
from moonpool.store.write_pause import WritePause

_SYNC_BYTES = 64 * 1024 * 1024
#: Each is an open file. More than the capacity has only after many restarts, each of which leaves one
#: that is not full.
_MAX_SEGMENTS = 256


def _parts(hashes: Sequence[BlockHash]) -> Iterator[Sequence[BlockHash]]:
    for start in range(0, len(hashes), PART_BLOCKS):
        yield hashes[start : start + PART_BLOCKS]


class SegmentWriter:
    """Whoever calls `write`, `seal` or `clear` has made sure that nobody else does.

    Args:
        unreadable: Sizes of segments that are left where they are, unless all is cleared.
    """

    def __init__(
        self,
        *,
        sizes: LogSizes,
        table: SegmentTable,
        io: RecordIo,
        threads: IoThreads,
        directory: LogDirectory,
        foreign: Sequence[ForeignSegment],
        unreadable: Mapping[str, int],
        next_number: int,
        books: LogBooks,
        rare_log: RareLog,
        clock: Clock,
        on_dropped: OnDropped,
        keep_hot: KeepHot | None,
    ) -> None:
        self.sizes = sizes
        self.foreign_bytes = sum(segment.num_bytes for segment in foreign) + sum(
            unreadable.values()
        )
        self._table = table
        self._io = io
        self._threads = threads
        self._directory = directory
        self._foreign = deque(foreign)
        self._unreadable = dict(unreadable)
        self._next_number = next_number
        self._books = books
        self._log = rare_log
        self._clock = clock
        self._on_dropped = on_dropped
        self._keep_hot = keep_hot
        self._pause = WritePause()
        #: What running writes still want to be there; a drop takes it out.
        self._wanted: list[set[BlockHash]] = []
        self._unsynced_bytes = 0
        self._sync: asyncio.Future[OSError | None] | None = None

    @property
    def pause(self) -> WritePause:
        return self._pause

    def forget(self, hashes: Sequence[BlockHash] | None) -> None:
        """What runs or waits shall not leave these blocks (None: any) in the index."""
        for wanted in self._wanted:
            if hashes is None:
                wanted.clear()
            else:
                wanted.difference_update(hashes)

    @contextlib.contextmanager
    def wanting(self, hashes: Sequence[BlockHash]) -> Iterator[set[BlockHash]]:
        """Blocks that are going to be written, until `forget` says otherwise."""
        wanted = set(hashes)
        self._wanted.append(wanted)
        try:
            yield wanted
        finally:
            self._wanted = [other for other in self._wanted if other is not wanted]

    async def fit(self) -> None:
        """Give up what exceeds the capacity, before anyone is told what is there."""
        while self._file_bytes() > self.sizes.capacity_bytes and await self._reclaim(is_told=False):
            pass

    async def write(self, records: Sequence[BlockRecord], wanted: set[BlockHash]) -> str:
        """Append those that are wanted and not there; all are distinct.

        Returns:
            Why some are not there, or the empty string.
        """
        queue = deque(records)
        has_given_way = False
        while self._skip(queue, wanted):
            health = self._pause.health(self._clock.now())
            if not health.is_writable:
                return health.problem
            segment = await self._room()
            if segment is None:
                return self._pause.health(self._clock.now()).problem
            batch = self._take(queue, self.sizes.slots_per_segment - segment.num_slots, wanted)
            num_done, error = await self._append(segment, batch, wanted)
            self._books.written_record_bytes += num_done * self.sizes.slot_bytes
            if error is None:
                self._pause.succeed(self._clock.now())
                has_given_way = False
                continue
            await self.seal()
            can_give_way = is_full(error) and not has_given_way
            if not can_give_way or not await self._reclaim(keep=segment.number):
                return self._refused(error)
            has_given_way = True
            queue.extendleft(reversed(batch[num_done:]))
        return ""

    async def seal(self) -> None:
        """Write no more into the open segment."""
        number = self._table.open_number
        if number is not None:
            await self._start_sync(number)
            self._table.open_number = None
            self._table.retire_if_empty(number)

    def clear(self) -> list[asyncio.Future[OSError | None]]:
        """Give up every segment, the open one too, in which nothing is live; when that is done."""
        segment = self._open_segment()
        if segment is not None and not segment.num_live:
            self._table.open_number = None
        numbers = [other.number for other in self._table.index.segments()]
        running = [removal for number in numbers for removal in self._table.retire_if_empty(number)]
        running += [
            self._threads.start(partial(self._unlink, name), partial(self._on_unlinked, name))
            for name in self._unreadable
        ]
        return running

    def _take(
        self, queue: deque[BlockRecord], num_free: int, wanted: set[BlockHash]
    ) -> list[BlockRecord]:
        """The next records for one call to the system."""
        batch: list[BlockRecord] = []
        while len(batch) < min(num_free, self.sizes.write_records) and self._skip(queue, wanted):
            batch.append(queue.popleft())
        return batch

    def _skip(self, queue: deque[BlockRecord], wanted: set[BlockHash]) -> bool:
        """Pass over what need not be written; whether anything is left."""
        while queue:
            block_hash = queue[0].block_hash
            if block_hash in wanted and self._table.index.place(block_hash) is None:
                return True
            queue.popleft()
        return False

    async def _append(
        self, segment: Segment, records: Sequence[BlockRecord], wanted: set[BlockHash]
    ) -> tuple[int, OSError | None]:
        """Write into the open segment; how many are whole, and what went wrong with the others."""
        number = segment.number
        first = self._table.index.give_out(number, len(records))
        handle = self._table.hold(number)
        try:
            appended = await self._threads.run(
                partial(self._io.append, handle.fd, records, number, first)
            )
        except asyncio.CancelledError:
            # It may have been written: a budget rather counts too much.
            self._books.written_bytes += len(records) * self.sizes.slot_bytes
            raise
        finally:
            self._table.release(handle)
        num_reached = -(-appended.num_bytes // self.sizes.slot_bytes)
        self._table.index.give_back(number, len(records) - num_reached)
        unwanted: list[Place] = []
        for slot, record in enumerate(records[: appended.num_records], first):
            place = Place(number, slot, record.tag, record.link)
            if record.block_hash in wanted:
                self._table.index.put(record.block_hash, place)
            else:
                unwanted.append(place)
        self._table.bury(unwanted)
        self._books.num_writes += 1
        self._books.written_bytes += appended.num_bytes
        self._unsynced_bytes += appended.num_bytes
        if self._unsynced_bytes >= _SYNC_BYTES:
            await self._start_sync(number)
        return appended.num_records, appended.error

    async def _room(self) -> Segment | None:
        """The open segment, with a free slot; None, and writes pause, if there is none to be had."""
        segment = self._open_segment()
        if segment is None or segment.num_slots >= self.sizes.slots_per_segment:
            await self.seal()
            error = await self._create()
            if error is not None and is_full(error) and await self._reclaim():
                error = await self._create()
            if error is not None:
                self._refused(error)
                return None
        while self._is_over():
            if not await self._reclaim():
                self._paused(
                    "what other models left in the SSD directory, or what cannot be read in it,"
                    " takes the room and cannot be removed"
                )
                return None
            if self._open_segment() is None:
                return None
        return self._open_segment()

    def _open_segment(self) -> Segment | None:
        number = self._table.open_number
        return None if number is None else self._table.index.segment(number)

    def _is_over(self) -> bool:
        """Whether the files, the open one as if it was full, leave less than a segment free."""
        index, segment = self._table.index, self._open_segment()
        num_open = 0 if segment is None else segment.num_slots
        num_bytes = (2 * self.sizes.slots_per_segment - num_open) * self.sizes.slot_bytes
        is_over = self._file_bytes() + num_bytes > self.sizes.capacity_bytes
        return is_over or index.num_segments > _MAX_SEGMENTS

    def _file_bytes(self) -> int:
        return self._table.index.num_slots * self.sizes.slot_bytes + self.foreign_bytes

    async def _create(self) -> OSError | None:
        number = self._next_number
        self._next_number += 1
        try:
            await self._table.create(number)
        except OSError as error:
            return error
        return None

    async def _reclaim(self, *, keep: int | None = None, is_told: bool = True) -> bool:
        """Give up a segment, not the open one or `keep`; False if there is none to give up.

        If what is hot in it cannot be carried over, writes pause and no segment is open afterwards; it is
        given up all the same if the disk is full.
        """
        if self._foreign:
            await self._remove_foreign(self._foreign.popleft())
            return True
        victim = self._table.index.victim(keep=(self._table.open_number, keep))
        if victim is None:
            return False
        error = await self._carry_over(victim)
        if error is not None and not is_full(error):
            return True
        for part in _parts(victim.live_hashes()):
            await asyncio.sleep(0)
            gone = self._still_in(victim, part)
            for block_hash in gone:
                self._table.index.remove(block_hash)
            self._books.num_reclaimed_records += len(gone)
            if gone and is_told:
                self._on_dropped(gone, DropReason.RECLAIMED)
        if self._table.index.segment(victim.number) is victim:
            _, removal = self._table.retire(victim.number)
            self._books.num_reclaimed_segments += 1
            # Until its name is gone its room is not there.
            await asyncio.wait([removal])
        return True

    async def _carry_over(self, victim: Segment) -> OSError | None:
        """Copy what is hot in `victim` into the open segment: at most half of it, and what fits."""
        target, live = self._open_segment(), victim.live_hashes()
        if self._keep_hot is None or target is None:
            return None
        num_left = min(victim.num_slots // 2, self.sizes.slots_per_segment - target.num_slots - 1)
        for part in _parts(live):
            await asyncio.sleep(0)
            if num_left <= 0:
                return None
            part = self._still_in(victim, part)
            here = set(part)
            hot = dict.fromkeys(self._keep_hot(part, num_left))
            chosen = [block_hash for block_hash in hot if block_hash in here][:num_left]
            num_left -= len(chosen)
            error = await self._copy(victim, target, chosen)
            if error is not None:
                await self.seal()
                self._refused(error)
                return error
        return None

    def _still_in(self, segment: Segment, hashes: Sequence[BlockHash]) -> list[BlockHash]:
        """Those of these blocks that lie in this segment now."""
        places = map(self._table.index.place, hashes)
        return [
            block_hash
            for block_hash, place in zip(hashes, places, strict=True)
            if place is not None and place.segment == segment.number
        ]

    async def _copy(
        self, victim: Segment, target: Segment, chosen: Sequence[BlockHash]
    ) -> OSError | None:
        """Copy these blocks of `victim` into the open segment."""
        step = self.sizes.write_records
        with self.wanting(chosen) as wanted:
            for start in range(0, len(chosen), step):
                records = await self._load(victim, chosen[start : start + step])
                if not records:
                    continue
                num_done, error = await self._append(target, records, wanted)
                self._books.num_carried_records += num_done
                self._books.carried_bytes += num_done * self.sizes.slot_bytes
                if error is not None:
                    return error
        return None

    async def _load(self, victim: Segment, hashes: Sequence[BlockHash]) -> list[BlockRecord]:
        """Those of a victim's blocks that read as they were written."""
        found = [(self._table.index.place(block_hash), block_hash) for block_hash in hashes]
        here = sorted(
            (place, block_hash)
            for place, block_hash in found
            if place is not None and place.segment == victim.number
        )
        if not here:
            return []
        places = [place for place, _ in here]
        targets = [self._target(block_hash) for _, block_hash in here]
        handle = self._table.hold(victim.number)
        try:
            reads = await self._threads.run(partial(self._io.read_run, handle.fd, targets, places))
        finally:
            self._table.release(handle)
        return [
            BlockRecord(
                block_hash=target.block_hash,
                payload=target.payload,
                leaves=target.leaves,
                tag=place.tag,
                link=place.link,
            )
            for target, place, read in zip(targets, places, reads, strict=True)
            if read.outcome is ReadOutcome.OK
        ]

    def _target(self, block_hash: BlockHash) -> BlockTarget:
        return BlockTarget(
            block_hash=block_hash,
            payload=np.empty(self._io.format.payload_bytes, np.uint8),
            leaves=np.empty(self._io.format.num_leaves, np.uint64),
        )

    async def _remove_foreign(self, segment: ForeignSegment) -> None:
        try:
            await self._threads.run(partial(self._directory.remove_foreign, segment))
        except FileNotFoundError:
            pass
        except OSError as error:
            self._log.warning("store.disk_segment_not_removed", problem=explain(error))
            return
        self.foreign_bytes -= segment.num_bytes

    def _unlink(self, name: str) -> OSError | None:
        try:
            self._io.files.unlink(name)
        except FileNotFoundError:
            return None
        except OSError as error:
            return error
        return None

    def _on_unlinked(self, name: str, error: OSError | None) -> None:
        if error is None:
            self.foreign_bytes -= self._unreadable.pop(name, 0)
        else:
            self._books.num_write_errors += 1
            self._log.warning("store.disk_segment_not_removed", problem=explain(error))

    async def _start_sync(self, number: int) -> None:
        """Send the segment's bytes to the medium; waits for the sync before this one."""
        if self._sync is not None:
            await asyncio.wait([self._sync])
        self._unsynced_bytes = 0
        handle = self._table.hold(number)

        def on_synced(error: OSError | None) -> None:
            self._table.release(handle)
            if error is not None:
                self._books.num_sync_errors += 1
                self._paused(f"the SSD directory keeps no writes: {explain(error)}")

        self._sync = self._threads.start(partial(self._io.sync, handle.fd), on_synced)

    def _refused(self, error: OSError) -> str:
        self._books.num_write_errors += 1
        return self._paused(f"the SSD directory takes no writes: {explain(error)}")

    def _paused(self, problem: str) -> str:
        self._pause.fail(self._clock.now(), problem)
        self._log.warning("store.disk_writes_paused", problem=problem)
        return problem
