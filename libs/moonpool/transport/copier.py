"""Copier: awaitable verified copies. The copy thread is native and tells the loop by an eventfd.

Rules
1. No copy runs on the event loop, and none needs the interpreter lock while it runs.
2. Jobs finish in order of submission.
3. A job is over only when it was told as finished: until then its target may be written. `settle`
   waits for that however often its caller is cancelled.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable

from moonpool.native import (
    CopyCancelledError,
    CopyQueue,
    CopyRoute,
    CopyStream,
    CopyTicket,
    Kernels,
    LeafCheckArray,
)
from moonpool.native.geometry import BoolArray
from moonpool.transport.base import ByteArray, Int64Array, LocalPool


class CopyJob:
    """One submitted copy."""

    __slots__ = ("_loop", "_on_finished", "_ticket", "_waiters", "is_finished")

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        ticket: CopyTicket,
        on_finished: Callable[[CopyJob], None] | None,
    ) -> None:
        self._loop = loop
        self._ticket = ticket
        self._on_finished = on_finished
        self._waiters: list[asyncio.Future[None]] = []
        #: No byte of it will be written any more.
        self.is_finished = False

    def result(self) -> BoolArray | None:
        """bool[number of checks]: True where the copy is bad; None if none is.

        Raises:
            RangeError: A span or leaf is out of bounds; nothing was written.
            CopyCancelledError: It was dropped before it ran.
        """
        assert self.is_finished
        return self._ticket.result()

    def drop(self) -> None:
        """Do not run it if it has not begun."""
        self._ticket.cancel()

    async def wait(self) -> BoolArray | None:
        """The result. If cancelled: drops the job or waits for its end, then raises."""
        try:
            await self._finished()
        except asyncio.CancelledError:
            self.drop()
            await self.settle()
            raise
        return self.result()

    async def settle(self) -> None:
        """Wait for its end, for at most as long as one copy takes; a cancellation is raised then."""
        cancelled: asyncio.CancelledError | None = None
        while not self.is_finished:
            try:
                await self._finished()
            except asyncio.CancelledError as error:
                cancelled = error
        if cancelled is not None:
            raise cancelled

    async def _finished(self) -> None:
        if not self.is_finished:
            waiter = self._loop.create_future()
            self._waiters.append(waiter)
            await waiter

    def _finish(self) -> None:
        self.is_finished = True
        for waiter in self._waiters:
            if not waiter.done():
                waiter.set_result(None)
        if self._on_finished is not None:
            self._on_finished(self)


class Copier:
    """Owns a copy queue. Made and used on one event loop; closed by whoever made it."""

    def __init__(self, kernels: Kernels) -> None:
        self._loop = asyncio.get_running_loop()
        self._queue: CopyQueue = kernels.copy_queue()
        self._jobs: deque[CopyJob] = deque()
        self._on_ready_by_stream: dict[CopyStream, Callable[[], None]] = {}
        self._is_closed = False
        self._loop.add_reader(self._queue.fileno(), self._on_ready)

    @property
    def num_jobs(self) -> int:
        """Copies that were submitted and are not over."""
        return len(self._jobs)

    def route(self, source: ByteArray, target: LocalPool) -> CopyRoute:
        """From a peer's map into our pool, for any copier; keeps both alive."""
        return self._queue.route(source, target.bytes, target.geometry)

    def submit(
        self,
        route: CopyRoute,
        spans: Int64Array,
        checks: LeafCheckArray,
        on_finished: Callable[[CopyJob], None] | None = None,
    ) -> CopyJob:
        """Queue a copy.

        Args:
            spans: int64[n, 3]; `checks` are in order of `after_span`.
            on_finished: Called on the loop when the job is over.
        """
        return self._job(self._queue.submit(route, spans, checks), on_finished)

    def stream(self, target: LocalPool, on_ready: Callable[[], None]) -> CopyStream:
        """A stream of reads into our pool.

        Args:
            on_ready: Called on the loop whenever something about it may have changed.
        """
        stream = self._queue.stream(target.bytes, target.geometry)
        self._on_ready_by_stream[stream] = on_ready
        return stream

    def forget(self, stream: CopyStream) -> None:
        """Nothing about the stream is told any more."""
        self._on_ready_by_stream.pop(stream, None)

    def _job(self, ticket: CopyTicket, on_finished: Callable[[CopyJob], None] | None) -> CopyJob:
        job = CopyJob(self._loop, ticket, on_finished)
        self._jobs.append(job)
        return job

    def close(self) -> None:
        """Drop what is queued, wait for what runs (one copy), end the thread. May be called twice."""
        if self._is_closed:
            return
        self._is_closed = True
        self._loop.remove_reader(self._queue.fileno())
        self._tell(len(self._queue.close()))

    def _on_ready(self) -> None:
        self._tell(len(self._queue.finished()))

    def _tell(self, num_finished: int) -> None:
        for _ in range(num_finished):
            self._jobs.popleft()._finish()
        for on_ready in list(self._on_ready_by_stream.values()):
            on_ready()


__all__ = ["Copier", "CopyCancelledError", "CopyJob"]
