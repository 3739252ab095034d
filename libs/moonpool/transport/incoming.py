"""IncomingRead: one read whose bytes arrive as messages, scattered into the pool as they come.

    read's bytes      |---- span 0 ----|-- span 1 --|------- span 2 -------|
    messages          |....... 1 MiB .......|....... 1 MiB .......|........|

Each message becomes one copy job: the parts of spans that it holds, and the checks of the leaves whose
last byte it brings. The read has ended when every byte came and every job is over, or when it was
abandoned and its jobs are over; the bytes that still come then are counted and thrown away.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import numpy as np

from moonpool.errors import TransferError
from moonpool.native import RangeError
from moonpool.transport.base import ByteArray, Int64Array, KvRead, LocalPool
from moonpool.transport.copier import Copier, CopyCancelledError, CopyJob


class IncomingRead:
    """Belongs to one event loop.

    Args:
        on_consumed: Called with the size of each message once its bytes are no longer held.
    """

    def __init__(
        self, read: KvRead, pool: LocalPool, copier: Copier, on_consumed: Callable[[int], None]
    ) -> None:
        self._pool = pool
        self._copier = copier
        self._on_consumed = on_consumed
        self._targets = read.spans[:, 1:]
        self._ends = np.cumsum(read.spans[:, 2])
        self._starts = self._ends - read.spans[:, 2]
        self._checks, self._order, self._done_at = _in_order_of_arrival(read, pool, self._starts)
        self.num_bytes = read.num_bytes
        self._num_received = 0
        self._num_checked = 0
        self._jobs: set[CopyJob] = set()
        self._bad: list[int] = []
        self._is_abandoned = False
        #: Set when all bytes are copied and checked, or to the reason why they never will be.
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    @property
    def num_missing(self) -> int:
        """Bytes that have not come yet."""
        return self.num_bytes - self._num_received

    @property
    def bad_checks(self) -> Int64Array:
        """Positions in the KvRead's checks whose copy does not match."""
        return self._order[np.array(sorted(self._bad), np.int64)]

    def accept(self, message: ByteArray) -> None:
        """The next bytes, uint8[at most num_missing]; kept until they are copied."""
        size = len(message)
        begin, end = self._num_received, self._num_received + size
        self._num_received = end
        if self._is_abandoned:
            self._on_consumed(size)
            return
        first, last = (
            int(np.searchsorted(self._ends, begin, "right")),
            int(np.searchsorted(self._starts, end, "left")),
        )
        spans = np.empty((last - first, 3), np.int64)
        spans[:, 0] = self._starts[first:last] - begin
        spans[:, 1:] = self._targets[first:last]
        if last > first:
            before = -int(spans[0, 0])
            if before > 0:
                spans[0] += (before, before, -before)
            beyond = int(self._ends[last - 1]) - end
            if beyond > 0:
                spans[-1, 2] -= beyond
        next_check = int(np.searchsorted(self._done_at, end, "right"))
        checks = self._checks[self._num_checked : next_check].copy()
        after = np.minimum(checks["after_span"] - first, last - first - 1)
        checks["after_span"] = np.maximum(after, -1)
        first_check, self._num_checked = self._num_checked, next_check

        def finish(job: CopyJob) -> None:
            self._jobs.discard(job)
            self._on_consumed(size)
            self._note(job, first_check)

        try:
            route = self._copier.route(message, self._pool)
            self._jobs.add(self._copier.submit(route, spans, checks, finish))
        except BaseException:
            self._on_consumed(size)
            raise

    def fail(self, error: TransferError) -> None:
        """No more bytes will come."""
        if not self.done.done():
            self.done.set_exception(error)

    async def settle(self) -> None:
        """Throw away what still comes, and wait until no byte will be written any more."""
        self._is_abandoned = True
        if not self.done.cancel() and not self.done.cancelled():
            # Whoever waited for it may have been cancelled in the same moment.
            self.done.exception()
        jobs = list(self._jobs)
        for job in jobs:
            job.drop()
        for job in jobs:
            await job.settle()

    def _note(self, job: CopyJob, first_check: int) -> None:
        if self.done.done():
            return
        try:
            is_bad = job.result()
        except RangeError as error:
            self.done.set_exception(
                TransferError(f"the target is out of bounds: {error}", code="kv_out_of_bounds")
            )
            return
        except CopyCancelledError:
            self.done.set_exception(TransferError("the reader was closed", code="kv_peer_lost"))
            return
        if is_bad is not None:
            self._bad += (first_check + np.flatnonzero(is_bad)).tolist()
        if not self.num_missing and not self._jobs:
            self.done.set_result(None)


def _in_order_of_arrival(
    read: KvRead, pool: LocalPool, starts: Int64Array
) -> tuple[np.ndarray[tuple[int], np.dtype[np.void]], Int64Array, Int64Array]:
    """The checks sorted by the byte of the read that completes each; their positions; that byte."""
    after = read.checks["after_span"]
    if not len(after) or not len(starts):
        return read.checks, np.arange(len(after)), np.zeros(len(after), np.int64)
    leaf_ends = pool.geometry.leaf_ends(read.checks["block"], read.checks["layer"])
    spans = read.spans[after]
    within = np.maximum(np.minimum(leaf_ends - spans[:, 1], spans[:, 2]), 0)
    done_at = np.where(after < 0, 0, starts[after] + within)
    order = np.lexsort((done_at, after))
    return read.checks[order], order, done_at[order]
