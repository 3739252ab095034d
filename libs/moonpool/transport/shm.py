"""The shm transport: copies out of a peer's pool, which is mapped here read-only.

Only for a peer in the same pid and network namespaces of the same boot (memory/host.py). The peer takes
no part in a read: it may be busy, stopped or dead. A dead peer's memory stays readable as long as it is
mapped, and what it held verifies or does not; that it is dead is the handoff stream's news.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from types import TracebackType

from moonpool.errors import TransferError
from moonpool.kv.region import KvRegion
from moonpool.memory.fd_server import fetch_region
from moonpool.memory.region import ReadOnlyRegion
from moonpool.memory.worker_memory import POOL_NAME
from moonpool.native import CopyRoute, Kernels, RangeError
from moonpool.transport.base import KvPeer, KvRead, LocalPool, ReadResult, peer_lost
from moonpool.transport.copier import Copier, CopyCancelledError, CopyJob

#: Copies that run at once: one core does not copy and check as fast as memory delivers.
NUM_THREADS = 2


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
        self._copiers: list[Copier] = []

    async def __aenter__(self) -> ShmTransport:
        self._copiers = [Copier(self._kernels) for _ in range(NUM_THREADS)]
        return self

    async def __aexit__(
        self,
        _kind: type[BaseException] | None,
        _error: BaseException | None,
        _traceback: TracebackType | None,
    ) -> None:
        for copier in self._copiers:
            copier.close()

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
        assert self._copiers, "not entered"
        reason = self.why_not(region)
        if reason is not None:
            raise TransferError(reason, code="kv_transport_unusable")
        mapped = await fetch_region(
            region.fd_socket, POOL_NAME, region.pool_bytes, timeout_s=timeout_s
        )
        return ShmPeer(region, mapped, self._pool, self._copiers)


class ShmPeer:
    """One peer's pool, mapped. Each read is copied by the thread that has the fewest to do."""

    def __init__(
        self,
        region: KvRegion,
        mapped: ReadOnlyRegion,
        pool: LocalPool,
        copiers: Sequence[Copier],
    ) -> None:
        self._region = region
        self._mapped = mapped
        #: None once closed: the route keeps the peer's memory mapped.
        self._route: CopyRoute | None = copiers[0].route(mapped.bytes, pool)
        self._copiers = copiers
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
        copier = min(self._copiers, key=lambda copier: copier.num_jobs)
        job = copier.submit(self._route, read.spans, read.checks)
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
