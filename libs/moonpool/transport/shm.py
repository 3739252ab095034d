"""The shm transport: copies out of a peer's pool, which is mapped here read-only.

Only for a peer in the same pid and network namespaces of the same boot (memory/host.py). The peer takes
no part in a read: it may be busy, stopped or dead. A dead peer's memory stays readable as long as it is
mapped, and what it held verifies or does not; that it is dead is the handoff stream's news.
"""

from __future__ import annotations

import time
from types import TracebackType

from moonpool.errors import TransferError
from moonpool.kv.region import KvRegion
from moonpool.memory.fd_server import fetch_region
from moonpool.memory.region import ReadOnlyRegion
from moonpool.memory.worker_memory import POOL_NAME
from moonpool.native import CopyRoute, Kernels, RangeError
from moonpool.transport.base import KvPeer, KvRead, LocalPool, ReadResult, peer_lost
from moonpool.transport.copier import Copier, CopyCancelledError, CopyJob


class ShmTransport:
    """Reads from peers on this host.

    Args:
        pool: The reader's own memory.
        host_id: memory.host.host_id() of this process.
    """

    name = "shm"

    def __init__(self, *, pool: LocalPool, host_id: str, kernels: Kernels) -> None:
        self._pool = pool
        self._host_id = host_id
        self._kernels = kernels
        self._copier: Copier | None = None

    async def __aenter__(self) -> ShmTransport:
        self._copier = Copier(self._kernels)
        return self

    async def __aexit__(
        self,
        _kind: type[BaseException] | None,
        _error: BaseException | None,
        _traceback: TracebackType | None,
    ) -> None:
        if self._copier is not None:
            self._copier.close()

    @property
    def unusable(self) -> str | None:
        return None

    def announce(self, region: KvRegion) -> KvRegion:
        return region

    def why_not(self, region: KvRegion) -> str | None:
        if not region.fd_socket:
            return f"{region.worker} offers no host memory"
        if region.host_id != self._host_id:
            return f"{region.worker} is on another host or in another namespace"
        return None

    async def connect(self, region: KvRegion, *, timeout_s: float) -> KvPeer:
        assert self._copier is not None, "not entered"
        reason = self.why_not(region)
        if reason is not None:
            raise TransferError(reason, code="kv_transport_unusable")
        mapped = await fetch_region(
            region.fd_socket, POOL_NAME, region.pool_bytes, timeout_s=timeout_s
        )
        return ShmPeer(region, mapped, self._pool, self._copier)


class ShmPeer:
    """One peer's pool, mapped."""

    def __init__(
        self, region: KvRegion, mapped: ReadOnlyRegion, pool: LocalPool, copier: Copier
    ) -> None:
        self._region = region
        self._mapped = mapped
        #: None once closed: the route keeps the peer's memory mapped.
        self._route: CopyRoute | None = copier.route(mapped.bytes, pool)
        self._copier = copier
        self._jobs: set[CopyJob] = set()

    @property
    def region(self) -> KvRegion:
        return self._region

    @property
    def is_lost(self) -> bool:
        return self._route is None

    async def read(self, read: KvRead, *, timeout_s: float) -> ReadResult:
        """See KvPeer. Nothing here waits for the peer, so `timeout_s` has nothing to bound."""
        if self._route is None:
            raise peer_lost(f"{self._region.worker} is closed")
        started = time.monotonic()
        job = self._copier.submit(self._route, read.spans, read.checks)
        self._jobs.add(job)
        try:
            is_bad = await job.wait()
        except RangeError as error:
            raise TransferError(
                f"a read of {self._region.worker} is out of bounds: {error}",
                code="kv_out_of_bounds",
            ) from error
        except CopyCancelledError:
            raise peer_lost(f"{self._region.worker} was closed") from None
        finally:
            self._jobs.discard(job)
        return ReadResult(
            num_bytes=read.num_bytes,
            bad_leaves=read.bad_leaves(is_bad),
            elapsed_s=time.monotonic() - started,
        )

    async def close(self) -> None:
        self._route = None
        jobs = list(self._jobs)
        for job in jobs:
            job.drop()
        for job in jobs:
            await job.settle()
        self._mapped.close()
