"""The NIXL transport: one-sided READs by RDMA, or by UCX over shared memory or TCP where there is no NIC.

Life of a peer
1. connect: the metadata in its region goes to our agent, and a few bytes are read, so that it is known to
   answer. It has to poll for that: nixl_source.
2. A read: spans that are neighbours on both sides become one descriptor; one READ of all of them; then the
   leaves are checked on our copy. nixl_driver does both in its thread.
3. A READ that fails has lost the peer: every pending read fails at once, a new connect is a new connection.

A READ cannot be recalled. A read that is cancelled or too late ends when its READ has, at the latest
nixl_driver.FENCE_S later; see there what that costs.
"""

from __future__ import annotations

import asyncio
import dataclasses
import sys
import time
from collections.abc import Callable, Mapping
from functools import partial
from types import TracebackType

import numpy as np

from moonpool.errors import TransferError
from moonpool.kv.region import KvRegion, NixlAccess
from moonpool.native import Kernels
from moonpool.transport.base import (
    Int64Array,
    KvPeer,
    KvRead,
    LocalPool,
    ReadResult,
    peer_lost,
    read_timed_out,
)
from moonpool.transport.nixl_agent import (
    Descriptors,
    NixlAgent,
    NixlError,
    NixlUnusableError,
    address_of,
    nixl_facts,
)
from moonpool.transport.nixl_job import NixlConnection, NixlJob
from moonpool.transport.nixl_link import NixlLink
from moonpool.transport.nixl_source import NixlSource


class NixlTransport:
    """Reads from peers, and lets them read.

    Args:
        pool: The reader's own memory, which peers read.
        agent: Of the source agent: str(WorkerKey), which readers check.
        pool_fd: The pool's memfd, not sealed yet; None if nobody is to read it.
        ucx: Settings of UCX; see NixlAgent.
        agent_type: Of the reading agent: NixlAgent, or what stands in for it.
    """

    name = "nixl"

    def __init__(
        self,
        *,
        pool: LocalPool,
        agent: str,
        kernels: Kernels,
        pool_fd: int | None = None,
        ucx: Mapping[str, str] | None = None,
        agent_type: Callable[..., NixlAgent] = NixlAgent,
    ) -> None:
        self._pool = pool
        self._agent = agent
        self._kernels = kernels
        self._pool_fd = pool_fd
        self._ucx = ucx
        self._agent_type = agent_type
        self._tasks = asyncio.TaskGroup()
        self._source: NixlSource | None = None
        self._link: NixlLink | None = None
        self._access: NixlAccess | None = None
        self._unusable: str | None = None
        self._peers: set[NixlPeer] = set()

    async def __aenter__(self) -> NixlTransport:
        """Where NIXL cannot be used this is no error: `unusable` says why."""
        await self._tasks.__aenter__()
        self._link = NixlLink(
            name=f"{self._agent}/reader",
            pool=self._pool.bytes,
            ucx=self._ucx,
            agent_type=self._agent_type,
        )
        try:
            await self._start(self._link)
        except (NixlError, NixlUnusableError) as error:
            self._unusable = str(error)
        except BaseException:
            await self.__aexit__(*sys.exc_info())
            raise
        return self

    async def __aexit__(
        self,
        _kind: type[BaseException] | None,
        _error: BaseException | None,
        _traceback: TracebackType | None,
    ) -> None:
        try:
            await self._close()
        finally:
            # It ends by itself now. What the caller has raised is not this group's.
            await self._tasks.__aexit__(None, None, None)

    @property
    def unusable(self) -> str | None:
        return self._unusable

    def announce(self, region: KvRegion) -> KvRegion:
        return dataclasses.replace(region, nixl=self._access)

    def why_not(self, region: KvRegion) -> str | None:
        if self._unusable is not None:
            return self._unusable
        if region.nixl is None:
            return f"{region.worker} does not offer NIXL"
        return None

    async def connect(self, region: KvRegion, *, timeout_s: float) -> KvPeer:
        assert self._link is not None, "not entered"
        reason = self.why_not(region)
        if reason is not None or region.nixl is None:
            raise TransferError(reason or "", code="kv_transport_unusable")
        connection = await self._link.connect(region.nixl, agent_name(region), timeout_s=timeout_s)
        peer = NixlPeer(
            region,
            region.nixl.base_address,
            connection,
            self._link,
            self._pool,
            self._kernels,
            self._peers.discard,
        )
        self._peers.add(peer)
        return peer

    async def _start(self, link: NixlLink) -> None:
        nixl_facts()
        if self._pool_fd is not None:
            self._source = NixlSource(name=self._agent, pool_fd=self._pool_fd, ucx=self._ucx)
            self._access = await self._source.start()
            self._tasks.create_task(self._source.watch())
        await link.start()

    async def _close(self) -> None:
        assert self._link is not None
        try:
            for peer in list(self._peers):
                await peer.close()
        finally:
            try:
                await self._link.stop()
            finally:
                if self._source is not None:
                    await self._source.stop()


def agent_name(region: KvRegion) -> str:
    """What the agent of this incarnation is called."""
    return str(region.worker)


class NixlPeer:
    """One peer's agent, connected."""

    def __init__(
        self,
        region: KvRegion,
        base_address: int,
        connection: NixlConnection,
        link: NixlLink,
        pool: LocalPool,
        kernels: Kernels,
        on_closed: Callable[[NixlPeer], None],
    ) -> None:
        self._region = region
        self._base_address = base_address
        self._connection = connection
        self._link = link
        self._pool = pool
        self._own_address = address_of(pool.bytes)
        self._kernels = kernels
        self._on_closed = on_closed
        self._is_closed = False
        self._jobs: set[NixlJob] = set()

    @property
    def region(self) -> KvRegion:
        return self._region

    @property
    def is_lost(self) -> bool:
        return self._is_closed or self._connection.lost is not None

    async def read(self, read: KvRead, *, timeout_s: float) -> ReadResult:
        started = time.monotonic()
        if self.is_lost:
            raise self._lost()
        self._check_bounds(read.spans)
        spans = coalesce(read.spans)
        job = self._link.read(
            self._connection,
            descriptors(self._base_address, spans[:, 0], spans[:, 2]),
            descriptors(self._own_address, spans[:, 1], spans[:, 2]),
            partial(
                self._kernels.verify_leaves, self._pool.bytes, self._pool.geometry, read.checks
            ),
        )
        self._jobs.add(job)
        try:
            done, _ = await asyncio.wait((job.ended,), timeout=timeout_s)
        finally:
            # Nothing remains to be done if it has ended.
            job.drop()
            await job.settle()
            self._jobs.discard(job)
        if not done:
            raise read_timed_out(self._region.worker, timeout_s)
        if job.error is not None:
            raise job.error
        return ReadResult(
            num_bytes=read.num_bytes,
            bad_leaves=read.bad_leaves(job.is_bad),
            elapsed_s=time.monotonic() - started,
        )

    async def close(self) -> None:
        self._is_closed = True
        jobs = list(self._jobs)
        for job in jobs:
            job.drop()
        for job in jobs:
            await job.settle()
        self._link.close(self._connection)
        self._on_closed(self)

    def _check_bounds(self, spans: Int64Array) -> None:
        if not len(spans):
            return
        source, target, length = spans.T
        if (
            spans.min() < 0
            or (source + length).max() > self._region.pool_bytes
            or (target + length).max() > self._pool.bytes.size
        ):
            raise TransferError(
                f"a read of {self._region.worker} is out of bounds", code="kv_out_of_bounds"
            )

    def _lost(self) -> TransferError:
        return peer_lost(self._connection.lost or f"{self._region.worker} was closed")


def coalesce(spans: Int64Array) -> Int64Array:
    """The same bytes in as few spans as their order allows; none is empty.

    Args:
        spans: int64[n, 3] of (source offset, target offset, length).
    """
    source, target, length = spans.T
    if len(spans) and not length.all():
        return coalesce(spans[length > 0])
    joins = (source[1:] == source[:-1] + length[:-1]) & (target[1:] == target[:-1] + length[:-1])
    if not joins.any():
        return spans
    first = np.concatenate(([0], np.flatnonzero(~joins) + 1))
    merged: Int64Array = spans[first]
    merged[:, 2] = np.add.reduceat(length, first)
    return merged


def descriptors(base: int, offsets: Int64Array, lengths: Int64Array) -> Descriptors:
    """Of runs at `offsets` of a memory that begins at `base`, for NIXL."""
    table = np.zeros((len(offsets), 3), np.uint64)
    table[:, 0] = np.uint64(base) + offsets.astype(np.uint64)
    table[:, 1] = lengths
    return table
