"""SegmentTable: the segments of a log with their open files. Who reads or writes one holds it.

Life of a segment
1. `create`, or `adopt` after the scan.
2. It is the open one while it is written (`open_number`), sealed from then on.
3. Records in it are buried one by one as they are dropped.
4. `retire`: its blocks are gone at once and its name too; its descriptor is closed, and its room comes
   back, when nobody holds it any more. A read that runs is not disturbed.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial

from moonpool.ids import BlockHash
from moonpool.store.disk_errors import explain
from moonpool.store.io_threads import IoThreads
from moonpool.store.log_books import LogBooks
from moonpool.store.rare_log import RareLog
from moonpool.store.record_io import RecordIo
from moonpool.store.segment_files import segment_name
from moonpool.store.segment_format import ALIGNMENT
from moonpool.store.segment_index import Place, SegmentIndex
from moonpool.store.segment_scan import ScannedSegment


@dataclass(slots=True, kw_only=True, eq=False)
class Handle:
    """An open file."""

    number: int
    fd: int
    num_holders: int = 0
    is_retired: bool = False


class SegmentTable:
    """Used on one event loop.

    Attributes:
        index: What lies where. Segments come and go through this class only.
        open_number: The segment that is written, or None.
    """

    def __init__(
        self, io: RecordIo, threads: IoThreads, books: LogBooks, rare_log: RareLog
    ) -> None:
        self.index = SegmentIndex()
        self.open_number: int | None = None
        self._io = io
        self._threads = threads
        self._books = books
        self._log = rare_log
        self._handles: dict[int, Handle] = {}

    def adopt(self, segments: Iterable[ScannedSegment]) -> None:
        """Take over what a scan has found, before anything else is done here."""
        for scanned in sorted(segments, key=lambda segment: segment.number):
            number = scanned.number
            self._handles[number] = Handle(number=number, fd=scanned.fd)
            self.index.add_segment(number, scanned.num_slots)
            for found in scanned.records:
                record = found.record
                place = Place(number, found.slot, record.tag, record.link)
                self.index.put(record.block_hash, place)
            self._books.num_corrupt_footers += scanned.num_corrupt
            self._books.num_torn_records += scanned.num_torn

    async def create(self, number: int) -> None:
        """A new segment, which becomes the open one.

        Raises:
            OSError: It cannot be.
        """
        made: list[int] = []
        name = segment_name(number)
        try:
            await self._threads.run(lambda: made.append(self._io.files.create(name)))
        except asyncio.CancelledError:
            if made:
                handle = Handle(number=number, fd=made[0])
                self._threads.start(partial(self._remove, handle, is_last=True), _ignore)
            raise
        self._handles[number] = Handle(number=number, fd=made[0])
        self.index.add_segment(number)
        self.open_number = number

    def hold(self, number: int) -> Handle:
        """Keep the file open until `release`."""
        handle = self._handles[number]
        handle.num_holders += 1
        return handle

    def release(self, handle: Handle) -> None:
        """End a `hold`; a retired file is closed with the last."""
        handle.num_holders -= 1
        assert handle.num_holders >= 0, handle
        if handle.is_retired and not handle.num_holders:
            self._threads.start(partial(self._close, handle), _ignore)

    def retire(self, number: int) -> tuple[list[BlockHash], asyncio.Future[OSError | None]]:
        """Give a segment up; the blocks that are gone with it, and when its name is."""
        assert number != self.open_number, number
        gone = self.index.remove_segment(number)
        handle = self._handles.pop(number)
        handle.is_retired = True
        is_last = not handle.num_holders
        removal = self._threads.start(partial(self._remove, handle, is_last), self._on_removed)
        return gone, removal

    def retire_if_empty(self, number: int) -> list[asyncio.Future[OSError | None]]:
        """Give a sealed segment up if nothing in it is live; when its name is gone."""
        segment = self.index.segment(number)
        if segment is None or segment.num_live or number == self.open_number:
            return []
        return [self.retire(number)[1]]

    def bury(self, places: Iterable[Place]) -> list[asyncio.Future[OSError | None]]:
        """See to it that dropped records are not found by a scan; when that is done.

        Their blocks are not in the index any more.
        """
        slots_by_segment: defaultdict[int, list[int]] = defaultdict(list)
        for place in places:
            slots_by_segment[place.segment].append(place.slot)
        running: list[asyncio.Future[OSError | None]] = []
        for number, slots in slots_by_segment.items():
            running += self.retire_if_empty(number)
            if self.index.segment(number) is not None:
                running.append(self._bury(self.hold(number), slots))
        return running

    async def close(self) -> None:
        """Close all files; nobody holds any."""
        handles = list(self._handles.values())
        assert not any(handle.num_holders for handle in handles), handles
        self._handles.clear()
        await self._threads.run_all([partial(self._close, handle) for handle in handles])

    def validate(self) -> None:
        """Raise AssertionError if an invariant is broken."""
        self.index.validate()
        numbers = {segment.number for segment in self.index.segments()}
        assert numbers == set(self._handles), (numbers, set(self._handles))
        assert self.open_number is None or self.open_number in numbers, self.open_number
        for segment in self.index.segments():
            assert segment.num_live or segment.number == self.open_number, segment.number

    def _bury(self, handle: Handle, slots: list[int]) -> asyncio.Future[OSError | None]:
        def on_done(error: OSError | None) -> None:
            self.release(handle)
            self._books.written_bytes += ALIGNMENT * len(slots)
            if error is not None:
                self._books.num_write_errors += 1
                self._log.warning("store.disk_drop_not_marked", problem=explain(error))

        return self._threads.start(partial(self._io.bury, handle.fd, slots), on_done)

    def _remove(self, handle: Handle, is_last: bool) -> OSError | None:
        problem: OSError | None = None
        try:
            self._io.files.unlink(segment_name(handle.number))
        except FileNotFoundError:
            pass
        except OSError as error:
            problem = error
        if is_last:
            self._close(handle)
        return problem

    def _on_removed(self, error: OSError | None) -> None:
        if error is not None:
            self._books.num_write_errors += 1
            self._log.warning("store.disk_segment_not_removed", problem=explain(error))

    def _close(self, handle: Handle) -> None:
        # Whatever close() says, the descriptor is gone, and what was not written a read will notice.
        with suppress(OSError):
            self._io.files.close(handle.fd)


def _ignore(_result: OSError | None) -> None:
    """For calls whose outcome changes nothing."""
