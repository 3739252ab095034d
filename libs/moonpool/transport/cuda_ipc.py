"""The CUDA IPC transport: blocks out of a peer's pool in the memory of the GPU that both compute on.

This process has no CUDA: its engine maps the peer's memory and copies (device_link). What is read lies in our
engine's pool then, and in our pool in host memory, where its digests were compared.

Life of a peer
1. connect: its pool in host memory is mapped as well, as shm does; the engine opens its memory by the
   handle in its region. A handle of an incarnation that is gone opens nothing.
2. A read: one message to the engine, one back. Blocks that do not match are read from host memory, with the
   whole read: a holder's device may lack what has just arrived there, until its next step takes it in.
   What does not match there either is bad.
3. A copy that fails has lost the peer. close: our engine unmaps it, after the reads that are under way.

A read cannot be recalled: one that is cancelled or too late ends when the engine has copied it.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import replace
from types import TracebackType

import structlog

from moonpool.errors import TransferError
from moonpool.kv.layout import KvGroup, KvLayout
from moonpool.kv.region import KvRegion
from moonpool.transport.base import (
    BlockCopy,
    KvPeer,
    KvRead,
    ReadResult,
    peer_lost,
    read_timed_out,
)
from moonpool.transport.device_link import DeviceLink, bad_leaves_of
from moonpool.transport.shm import ShmTransport
from moonpool.wire.device_frames import DeviceRead

log = structlog.get_logger("moonpool.transport")


class CudaIpcTransport:
    """Reads from peers on this worker's GPU.

    Args:
        link: To our engine; entered and left with the transport.
        layout: Of our pool.
        host: Into our pool in host memory; entered and left with the transport.
    """

    name = "cuda_ipc"

    def __init__(self, *, link: DeviceLink, layout: KvLayout, host: ShmTransport) -> None:
        self._link = link
        self._layout = layout
        self._host = host

    async def __aenter__(self) -> CudaIpcTransport:
        await self._host.__aenter__()
        await self._link.__aenter__()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        try:
            await self._link.__aexit__(kind, error, traceback)
        finally:
            await self._host.__aexit__(kind, error, traceback)

    @property
    def unusable(self) -> str | None:
        """None also while the engine has not said yet."""
        return self._link.why_not if self._link.is_known else None

    def announce(self, region: KvRegion) -> KvRegion:
        return replace(region, device=self._link.access)

    def why_not(self, region: KvRegion) -> str | None:
        access, ours = region.device, self._link.access
        if ours is None:
            return self._link.why_not
        if access is None:
            return f"{region.worker} offers no device memory"
        reason = self._host.why_not(region)
        if reason is None and access.gpu != ours.gpu:
            reason = f"{region.worker} computes on another GPU ({access.gpu}, here {ours.gpu})"
        if reason is None and not _has_equal_blocks(region.layout, self._layout):
            reason = f"blocks of {region.worker} are of another kind than ours"
        return reason

    async def connect(self, region: KvRegion, *, timeout_s: float) -> KvPeer:
        deadline = time.monotonic() + timeout_s
        reason = self.why_not(region)
        if reason is not None or region.device is None:
            raise TransferError(reason or "", code="kv_transport_unusable")
        host = await self._host.connect(region, timeout_s=timeout_s)
        try:
            number = await self._link.open(
                region.device,
                region.layout.num_blocks,
                timeout_s=max(0.0, deadline - time.monotonic()),
            )
        except BaseException:
            await host.close()
            raise
        return CudaIpcPeer(region, host, self._link, number, num_blocks=self._layout.num_blocks)


class CudaIpcPeer:
    """One peer's pool, open in our engine."""

    def __init__(
        self, region: KvRegion, host: KvPeer, link: DeviceLink, number: int, *, num_blocks: int
    ) -> None:
        self._region = region
        self._host = host
        self._link = link
        self._number = number
        self._num_blocks = num_blocks
        #: Why it cannot be read any more.
        self._lost: str | None = None
        self._reads: set[asyncio.Future[DeviceRead]] = set()

    @property
    def region(self) -> KvRegion:
        return self._region

    @property
    def is_lost(self) -> bool:
        return self._lost is not None

    async def read(self, read: KvRead, *, timeout_s: float) -> ReadResult:
        started = time.monotonic()
        if self._lost is not None:
            raise peer_lost(self._lost)
        copy = read.block_copy
        if copy is None:
            return await self._host.read(read, timeout_s=timeout_s)
        self._check_bounds(copy)
        ended = self._link.read(self._number, copy)
        self._reads.add(ended)
        try:
            done, _ = await asyncio.wait((ended,), timeout=timeout_s)
        finally:
            await _settle(ended)
            self._reads.discard(ended)
        if self._lost is not None:
            raise peer_lost(self._lost)
        if not done:
            raise read_timed_out(self._region.worker, timeout_s)
        try:
            bad = bad_leaves_of(ended.result())
        except TransferError as error:
            self._lost = f"{self._region.worker}: {error.message}"
            raise
        if bad:
            log.info(
                "kv.read_from_host", source=str(self._region.worker), num_leaves_not_there=len(bad)
            )
            left_s = max(0.0, started + timeout_s - time.monotonic())
            result = await self._host.read(read, timeout_s=left_s)
            bad = result.bad_leaves
        return ReadResult(
            num_bytes=read.num_bytes, bad_leaves=bad, elapsed_s=time.monotonic() - started
        )

    async def close(self) -> None:
        self._lost = f"{self._region.worker} was closed"
        try:
            for ended in list(self._reads):
                await _settle(ended)
            await self._host.close()
        finally:
            await self._link.close(self._number)

    def _check_bounds(self, copy: BlockCopy) -> None:
        for ids, num_blocks in (
            (copy.sources, self._region.layout.num_blocks),
            (copy.targets, self._num_blocks),
        ):
            if len(ids) and not 0 <= ids.min() <= ids.max() < num_blocks:
                raise TransferError(
                    f"a read of {self._region.worker} is out of bounds", code="kv_out_of_bounds"
                )


async def _settle(ended: asyncio.Future[DeviceRead]) -> None:
    """Wait for the answer, however often cancelled; a cancellation is raised then."""
    cancelled: asyncio.CancelledError | None = None
    while not ended.done():
        try:
            await asyncio.wait((ended,))
        except asyncio.CancelledError as error:
            cancelled = error
    if cancelled is not None:
        raise cancelled


def _has_equal_blocks(theirs: KvLayout, ours: KvLayout) -> bool:
    """A block's KV is the same bytes in both engines' pools, whatever the pools in host memory are like."""
    return theirs.block_size == ours.block_size and _kinds(theirs) == _kinds(ours)


def _kinds(layout: KvLayout) -> list[KvGroup]:
    return [
        replace(group, block_stride_bytes=1, layer_stride_bytes=1, plane_stride_bytes=1)
        for group in layout.groups
    ]
