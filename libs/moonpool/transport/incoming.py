"""IncomingRead: one read whose bytes arrive as messages, scattered into the pool as they come.

The read has ended when every byte came and every copy job is over, or when it was abandoned and its
jobs are over; the bytes that still come then are counted and thrown away.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import numpy as np

from moonpool.errors import TransferError
from moonpool.native import LeafCheckArray, RangeError
from moonpool.transport.base import ByteArray, Int64Array, KvRead, LocalPool
from moonpool.transport.copier import Copier, CopyCancelledError, CopyJob


class IncomingRead:
    """Belongs to one event loop.

    Args:
        on_consumed: Called with the size of each part once its bytes are no longer held.
    """

    def __init__(
        self, read: KvRead, pool: LocalPool, copier: Copier, on_consumed: Callable[[int], None]
    ) -> None:
        self._copier = copier
        self._on_consumed = on_consumed
        lengths = read.spans[:, 2]
        ends = np.cumsum(lengths)
        starts = ends - lengths
        checks, self._order, done_at = _in_order_of_arrival(read, starts, pool)
        self._stream = copier.stream(pool, read.spans, starts, checks, done_at)
        self.num_bytes = int(ends[-1]) if len(ends) else 0
        #: Bytes that have not come yet.
        self.num_missing = self.num_bytes
        self._size_by_job: dict[CopyJob, int] = {}
        self._is_abandoned = False
        #: Set when all bytes are copied and checked, or to the reason why they never will be.
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    @property
    def bad_checks(self) -> Int64Array:
        """Positions in the KvRead's checks whose copy does not match. Only when `done`."""
        bad = np.flatnonzero(self._stream.is_bad)
        return bad if self._order is None else self._order[bad]

    def accept(self, part: ByteArray) -> None:
        """The next bytes, uint8[at most num_missing]; kept until they are copied."""
        begin = self.num_bytes - self.num_missing
        self.num_missing -= part.size
        if self._is_abandoned:
            self._on_consumed(part.size)
            return
        job = self._copier.feed(self._stream, begin, part, self._on_copied)
        self._size_by_job[job] = part.size

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
        jobs = list(self._size_by_job)
        for job in jobs:
            job.drop()
        for job in jobs:
            await job.settle()

    def _on_copied(self, job: CopyJob) -> None:
        self._on_consumed(self._size_by_job.pop(job))
        if self.done.done():
            return
        try:
            job.result()
        except RangeError as error:
            self.fail(
                TransferError(f"the target is out of bounds: {error}", code="kv_out_of_bounds")
            )
        except CopyCancelledError:
            self.fail(TransferError("the reader was closed", code="kv_peer_lost"))
        else:
            if not self.num_missing and not self._size_by_job:
                self.done.set_result(None)


def _in_order_of_arrival(
    read: KvRead, starts: Int64Array, pool: LocalPool
) -> tuple[LeafCheckArray, Int64Array | None, Int64Array]:
    """The checks sorted by how much of the stream completes each, and that number.

    Between them: their positions in `read.checks`, or None if they are in that order already.
    """
    after = read.checks["after_span"]
    if not len(after) or not len(starts):
        return read.checks, None, np.zeros(len(after), np.int64)
    spans = read.spans[after]
    leaf_ends = pool.geometry.leaf_ends(read.checks["block"], read.checks["layer"])
    within = np.maximum(np.minimum(leaf_ends - spans[:, 1], spans[:, 2]), 0)
    done_at: Int64Array = starts[after] + within
    if after[0] < 0:
        done_at[after < 0] = 0
    if (done_at[1:] >= done_at[:-1]).all():
        return read.checks, None, done_at
    order = np.argsort(done_at, kind="stable")
    return read.checks[order], order, done_at[order]
