"""IoThreads: a few threads in which disk calls block, so that the loop does not."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar

T = TypeVar("T")

_NUM_HELPERS = 2


class IoThreads:
    """Made and used on one event loop; closed by whoever made it."""

    def __init__(self, num_threads: int) -> None:
        assert num_threads > 0, num_threads
        self._executor = ThreadPoolExecutor(num_threads, thread_name_prefix="moonpool-disk")
        #: For `assist`: these wait for nothing, so that whoever waits for them is not waiting for ever.
        self._helpers = ThreadPoolExecutor(_NUM_HELPERS, thread_name_prefix="moonpool-check")
        self._running: set[asyncio.Future[Any]] = set()  # Any: results of all types

    async def run(self, call: Callable[[], T]) -> T:
        """The result of a call, which has ended or never begun when this returns or raises.

        If cancelled: drops the call, or waits for its end, then raises.
        """
        (result,) = await self.run_all([call])
        return result

    async def run_all(
        self, calls: Sequence[Callable[[], T]], *, stop: threading.Event | None = None
    ) -> list[T]:
        """The results of calls made side by side, in their order; otherwise as `run`.

        Args:
            stop: Set if this is cancelled: calls that run may end early then.
        """
        jobs: list[Future[T]] = [self._executor.submit(call) for call in calls]
        futures = [self._track(job) for job in jobs]
        cancelled: asyncio.CancelledError | None = None
        while running := [future for future in futures if not future.done()]:
            try:
                await asyncio.wait(running)
            except asyncio.CancelledError as error:
                cancelled = error
                if stop is not None:
                    stop.set()
                for job in jobs:
                    job.cancel()
        # Each is looked at, so that none counts as an error that nobody has seen.
        errors = [future.exception() for future in futures if not future.cancelled()]
        if cancelled is not None:
            raise cancelled
        for failure in errors:
            if failure is not None:
                raise failure
        return [future.result() for future in futures]

    def start(self, call: Callable[[], T], then: Callable[[T], None]) -> asyncio.Future[T]:
        """Make a call that nobody waits for and that does not raise; then `then`, on the loop."""
        future = self._track(self._executor.submit(call))
        future.add_done_callback(lambda done: then(done.result()))
        return future

    def assist(self, call: Callable[[], T]) -> Future[T]:
        """For a call that runs here: a piece of its work, done beside it, that waits for nothing."""
        return self._helpers.submit(call)

    async def settle(self) -> None:
        """Wait for every call that was made, and for those made meanwhile."""
        while self._running:
            await asyncio.wait(self._running)

    def _track(self, job: Future[T]) -> asyncio.Future[T]:
        future = asyncio.wrap_future(job)
        self._running.add(future)
        future.add_done_callback(self._running.discard)
        return future

    def close(self) -> None:
        """End the threads once their calls have ended; does not wait for that."""
        self._executor.shutdown(wait=False)
        self._helpers.shutdown(wait=False)
