"""SegmentLog: the BlockLog over append-only segment files. See base.py for what it promises.

Life of a log
1. `open` locks the directory, scans the footers of all segments, and knows what is there. Records that
   a crash cut and damaged footers are left out and counted; so is a segment that gives an error, which
   stays where it is: the disk may be well at the next start. What is no file is removed.
2. Writes take turns and append to one open segment (segment_writer); reads run beside them, as many at
   a time as there are threads.
3. A record that does not read as it was written is dropped, marked on disk, told and counted.
4. `close` waits for what runs, syncs, and unlocks. A process that dies instead loses no record that
   `write` has told of.

What it does not do: choose which blocks deserve the disk or how many bytes a day it may take (the
caller sees `written_bytes`), keep blocks in memory, or retry a read. What was read lately the kernel's
page cache may still have: that is free memory, and goes when somebody needs it.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

from moonpool.clock import Clock
from moonpool.ids import BlockHash
from moonpool.native import Kernels
from moonpool.store.base import (
    PART_BLOCKS,
    BlockRecord,
    BlockTarget,
    DropReason,
    KeepHot,
    LogHealth,
    LogStats,
    OnDropped,
    ReadOutcome,
    StoredRecord,
    WriteResult,
)
from moonpool.store.disk_errors import explain, lacks_descriptor
from moonpool.store.io_threads import IoThreads
from moonpool.store.log_books import LogBooks
from moonpool.store.log_directory import LogDirectory, unusable
from moonpool.store.log_identity import LogIdentity
from moonpool.store.log_sizes import LogSizes
from moonpool.store.rare_log import RareLog
from moonpool.store.record_io import RecordIo, RecordRead
from moonpool.store.segment_files import SegmentFiles, segment_number
from moonpool.store.segment_format import RecordFormat
from moonpool.store.segment_index import Place, adjacent_runs
from moonpool.store.segment_scan import ScannedSegment, scan_segment
from moonpool.store.segment_table import SegmentTable
from moonpool.store.segment_writer import SegmentWriter

_LOST = "they were dropped while they were written, or are more than the capacity"
#: Neighbours that one thread reads. Threads that take turns in one file spoil the kernel's read-ahead,
#: and a single one may not use a fast disk up.
_MAX_RUN = 96
_DROP_REASONS = {
    ReadOutcome.CORRUPT: DropReason.CORRUPT,
    ReadOutcome.FAILED: DropReason.FAILED,
}


class SegmentLog:
    """Made by `open`. One loop; reads, writes and drops may overlap."""

    def __init__(
        self,
        *,
        directory: LogDirectory,
        threads: IoThreads,
        io: RecordIo,
        table: SegmentTable,
        writer: SegmentWriter,
        books: LogBooks,
        rare_log: RareLog,
        clock: Clock,
        on_dropped: OnDropped,
    ) -> None:
        self._directory = directory
        self._threads = threads
        self._io = io
        self._table = table
        self._writer = writer
        self._books = books
        self._log = rare_log
        self._clock = clock
        self._on_dropped = on_dropped
        self._turn = asyncio.Lock()
        self._is_closed = False

    @classmethod
    async def open(
        cls,
        path: Path,
        *,
        identity: LogIdentity,
        capacity_bytes: int,
        kernels: Kernels,
        clock: Clock,
        on_dropped: OnDropped,
        keep_hot: KeepHot | None = None,
        segment_bytes: int | None = None,
        num_threads: int = 4,
        wrap_files: Callable[[SegmentFiles], SegmentFiles] | None = None,
    ) -> SegmentLog:
        """Open the log of a directory, which is made if it is missing, and find what is in it.

        Args:
            path: For this node alone; its parent exists.
            capacity_bytes: All files in it together stay below.
            keep_hot: Without one, a reclaimed segment's blocks are all dropped.
            segment_bytes: What is reclaimed at a time; a 64th of the capacity if None.
            num_threads: IO that may run at a time.
            wrap_files: Puts something between the log and the file system, such as faults.

        Raises:
            ConfigError: The directory, or no segment in it, can be used (code `ssd_unusable`), or the
                capacity is below four segments (`ssd_too_small`). The message says what to do.
        """
        slot_bytes = RecordFormat.of(identity).slot_bytes
        sizes = LogSizes.of(capacity_bytes, slot_bytes, segment_bytes)
        threads = IoThreads(num_threads)
        opened: list[LogDirectory] = []
        scanned: list[ScannedSegment] = []
        try:
            await threads.run(lambda: opened.append(LogDirectory.open(path, identity)))
            directory = opened[0]
            files = directory.files if wrap_files is None else wrap_files(directory.files)
            io = RecordIo(files, identity, kernels, threads.assist)
            books, rare_log = LogBooks(), RareLog(clock, "moonpool.store")
            try:
                names = await threads.run(files.names)
                foreign = await threads.run(directory.foreign_segments)
                scan = partial(_scan, files, io.format, sizes, scanned)
                results = await threads.run_all([partial(scan, name) for name in names])
            except OSError as error:
                raise unusable(path, explain(error)) from error
            table = SegmentTable(io, threads, books, rare_log)
            failures = [failure for failure in results if failure is not None]
            for failure in failures:
                books.num_read_errors += 1
                problem = explain(failure.error)
                rare_log.warning("store.disk_segment_unreadable", problem=problem)
            left = [failure for failure in failures if failure.is_left]
            if left and not scanned:
                raise unusable(path, f"none of its segments can be read: {explain(left[0].error)}")
            # In a thread: it is long for many blocks, and nobody else has the table yet.
            await threads.run(partial(table.adopt, scanned))
            scanned.clear()
            for found in table.index.segments():
                table.retire_if_empty(found.number)
            writer = SegmentWriter(
                sizes=sizes,
                table=table,
                io=io,
                threads=threads,
                directory=directory,
                foreign=foreign,
                unreadable={failure.name: failure.num_bytes for failure in left},
                next_number=max(map(segment_number, names), default=0) + 1,
                books=books,
                rare_log=rare_log,
                clock=clock,
                on_dropped=on_dropped,
                keep_hot=keep_hot,
            )
        except BaseException:
            for segment in scanned:
                with suppress(OSError):
                    files.close(segment.fd)
            for directory in opened:
                directory.close()
            threads.close()
            raise
        log = cls(
            directory=directory,
            threads=threads,
            io=io,
            table=table,
            writer=writer,
            books=books,
            rare_log=rare_log,
            clock=clock,
            on_dropped=on_dropped,
        )
        try:
            await writer.fit()
        except BaseException:
            await log.close()
            raise
        return log

    @property
    def record_bytes(self) -> int:
        return self._io.format.slot_bytes

    def contents(self) -> Iterator[tuple[StoredRecord, ...]]:
        for part in self._table.index.contents(PART_BLOCKS):
            yield tuple(
                StoredRecord(block_hash=block_hash, tag=place.tag, link=place.link)
                for block_hash, place in part
            )

    def has(self, block_hash: BlockHash) -> bool:
        return self._table.index.place(block_hash) is not None

    async def write(self, records: Sequence[BlockRecord]) -> WriteResult:
        assert not self._is_closed
        for record in records:
            self._io.format.check_arrays(record.payload, record.leaves)
        hashes = [record.block_hash for record in records]
        distinct = list({record.block_hash: record for record in records}.values())
        with self._writer.wanting(hashes) as wanted:
            async with self._turn:
                problem = await self._writer.write(distinct, wanted)
        kept = tuple(block_hash for block_hash in hashes if self.has(block_hash))
        if len(kept) < len(hashes):
            return WriteResult(kept=kept, problem=problem or _LOST)
        return WriteResult(kept=kept)

    async def read(self, targets: Sequence[BlockTarget]) -> tuple[ReadOutcome, ...]:
        assert not self._is_closed
        for target in targets:
            self._io.format.check_arrays(target.payload, target.leaves)
        places = [self._table.index.place(target.block_hash) for target in targets]
        here = [
            (target, place)
            for target, place in zip(targets, places, strict=True)
            if place is not None
        ]
        outcomes = iter(await self._read_here(here))
        return tuple(ReadOutcome.ABSENT if place is None else next(outcomes) for place in places)

    async def drop(self, hashes: Sequence[BlockHash]) -> int:
        assert not self._is_closed
        self._writer.forget(hashes)
        removed = [self._table.index.remove(block_hash) for block_hash in hashes]
        places = [place for place in removed if place is not None]
        running = self._table.bury(places)
        if running:
            await asyncio.wait(running)
        return len(places)

    async def clear(self) -> int:
        assert not self._is_closed
        self._writer.forget(None)
        num_blocks = self._table.index.remove_all()
        async with self._turn:
            running = self._writer.clear()
        if running:
            await asyncio.wait(running)
        return num_blocks

    def health(self) -> LogHealth:
        return self._writer.pause.health(self._clock.now())

    def stats(self) -> LogStats:
        index, sizes = self._table.index, self._writer.sizes
        return LogStats(
            num_records=len(index),
            num_segments=index.num_segments,
            live_bytes=len(index) * sizes.slot_bytes,
            file_bytes=index.num_slots * sizes.slot_bytes,
            foreign_bytes=self._writer.foreign_bytes,
            capacity_bytes=sizes.capacity_bytes,
            **asdict(self._books),
        )

    async def settle(self) -> None:
        """Wait for what runs in the background: marks of drops, removals of files, syncs."""
        await self._threads.settle()

    async def close(self) -> None:
        self._is_closed = True
        async with self._turn:
            await self._writer.seal()
        await self._threads.settle()
        await self._table.close()
        self._threads.close()
        self._directory.close()

    def validate(self) -> None:
        """Raise AssertionError if an invariant is broken; while no call runs."""
        self._table.validate()
        stats = self.stats()
        assert stats.live_bytes <= stats.file_bytes, stats
        assert stats.file_bytes + stats.foreign_bytes <= stats.capacity_bytes, stats

    async def _read_here(self, here: Sequence[tuple[BlockTarget, Place]]) -> list[ReadOutcome]:
        """Read records, each run of neighbours in one thread; outcomes in the order given."""
        runs = adjacent_runs([place for _, place in here], _MAX_RUN)
        handles = [self._table.hold(here[run[0]][1].segment) for run in runs]
        stop = threading.Event()
        try:
            read_runs = await self._threads.run_all(
                [
                    partial(
                        self._io.read_run,
                        handle.fd,
                        [here[position][0] for position in run],
                        [here[position][1] for position in run],
                        stop,
                    )
                    for run, handle in zip(runs, handles, strict=True)
                ],
                stop=stop,
            )
        finally:
            for handle in handles:
                self._table.release(handle)
        self._books.num_reads += len(here)
        self._books.read_bytes += len(here) * self.record_bytes
        outcomes = [ReadOutcome.ABSENT] * len(here)
        for run, reads in zip(runs, read_runs, strict=True):
            for position, read in zip(run, reads, strict=True):
                outcomes[position] = read.outcome
                if read.outcome is not ReadOutcome.OK:
                    self._on_bad_read(read, here[position][1])
        return outcomes

    def _on_bad_read(self, read: RecordRead, place: Place) -> None:
        """Drop what did not read as it was written, unless somebody was faster."""
        if read.outcome is ReadOutcome.CORRUPT:
            self._books.num_corrupt_records += 1
        else:
            self._books.num_read_errors += 1
        if self._table.index.place(read.block_hash) != place:
            return
        self._writer.forget([read.block_hash])
        self._table.index.remove(read.block_hash)
        self._table.bury([place])
        problem = "its digests do not match" if read.error is None else explain(read.error)
        self._log.warning("store.disk_record_dropped", outcome=read.outcome.value, problem=problem)
        self._on_dropped([read.block_hash], _DROP_REASONS[read.outcome])


@dataclass(frozen=True, slots=True, kw_only=True)
class _ScanFailure:
    """A segment that could not be read."""

    name: str
    error: OSError
    #: What it takes of the capacity.
    num_bytes: int
    #: It is a file, whose blocks the next start may find.
    is_left: bool


def _scan(
    files: SegmentFiles,
    record_format: RecordFormat,
    sizes: LogSizes,
    scanned: list[ScannedSegment],
    name: str,
) -> _ScanFailure | None:
    """Scan one segment into `scanned`. One that cannot be read is left; what is no file is removed.

    Raises:
        OSError: This process may open no more files.
    """
    try:
        scanned.append(scan_segment(files, name, segment_number(name), record_format))
    except OSError as error:
        if lacks_descriptor(error):
            raise
        try:
            num_bytes = files.file_bytes(name)
        except OSError:
            num_bytes = sizes.segment_bytes
        if num_bytes is not None:
            return _ScanFailure(name=name, error=error, num_bytes=num_bytes, is_left=True)
        with suppress(OSError):
            files.unlink(name)
        return _ScanFailure(name=name, error=error, num_bytes=0, is_left=False)
    return None
