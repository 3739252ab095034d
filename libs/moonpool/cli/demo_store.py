"""The store of `moonpool demo prefix`: joins for a part of each round, and is what is left of a document.

It is away while a document is computed, read from a peer and found in own pools, so that it answers none of
that. Then it joins empty, and takes what the workers hold into its memory and onto its disk. Before each
question to it workers forget what they hold, so that no worker's pool answers.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from moonpool.cli.demo_cluster import DemoScreen
from moonpool.cli.terminal import format_bytes
from moonpool.cluster.local_cluster import LocalCluster
from moonpool.errors import UnavailableError

STORE = "store-0"

_TAKE_S = 120.0
_JOIN_S = 60.0
_TOLD_S = 10.0
_POLL_S = 0.02
_PROGRESS_S = 1.0


class DemoStore:
    """The one store of a cluster that has been entered without it.

    Args:
        ssd_dir: The store's `ssd_dir`.
        num_blocks: Of a document.
    """

    def __init__(self, cluster: LocalCluster, *, ssd_dir: Path, num_blocks: int) -> None:
        self._cluster = cluster
        self._ssd_dir = ssd_dir
        self._num_blocks = num_blocks

    @asynccontextmanager
    async def joined(self, screen: DemoScreen) -> AsyncIterator[None]:
        """Inside, it is there, and holds in memory and on disk all that the workers hold.

        Raises:
            UnavailableError: It does not come, or not to that.
        """
        self._cluster.start_store(STORE)
        await self._cluster.wait_ready(timeout_s=_JOIN_S)
        screen.note_processes(self._cluster)
        started = time.monotonic()
        await self._take(screen)
        stats = (report := await self._cluster.store_report(STORE)).stats
        screen.say(
            f"  {STORE} has joined, and taken {stats.num_host_blocks:,} blocks "
            f"({format_bytes(stats.num_host_blocks * report.block_bytes)}) into memory and onto disk in "
            f"{time.monotonic() - started:.1f} s",
            style="dim",
        )
        yield
        await self._cluster.remove_store(STORE)
        await asyncio.to_thread(shutil.rmtree, self._ssd_dir / STORE)

    async def empty_workers(self) -> None:
        """Workers forget what they hold, and the router knows."""
        for worker_id in self._cluster.worker_ids:
            await self._cluster.clear_worker(worker_id)

    async def restart(self, screen: DemoScreen, name: str) -> None:
        """Kill a worker or the store, and wait until it is back, with what lies on its disk."""
        part = self._cluster.part(name)
        num_starts, started = part.num_starts, time.monotonic()
        await self._cluster.kill(name)
        await part.wait_starts(num_starts + 1, timeout_s=_JOIN_S)
        await self._cluster.wait_ready(timeout_s=_JOIN_S)
        screen.note_processes(self._cluster)
        if name == STORE:
            await self._followed()
            await asyncio.to_thread(_forget_pages, self._ssd_dir)
        screen.say(
            f"  {name} was killed, and is back after {time.monotonic() - started:.1f} s",
            style="dim",
        )

    async def num_disk_blocks(self) -> int:
        """Blocks that it has lent off its disk since it was started."""
        return (await self._cluster.store_report(STORE)).stats.num_hit_disk_blocks

    async def _take(self, screen: DemoScreen) -> None:
        deadline = time.monotonic() + _TAKE_S
        told_at = time.monotonic()
        while True:
            stats = (await self._cluster.store_report(STORE)).stats
            num_blocks = min(stats.num_host_blocks, stats.num_disk_blocks)
            if num_blocks >= self._num_blocks and not stats.num_unwritten_blocks:
                break
            now = time.monotonic()
            state = f"{STORE} has {num_blocks:,} of {self._num_blocks:,} blocks on disk"
            if now >= deadline:
                raise UnavailableError(f"After {_TAKE_S:g} s {state}.")
            if now >= told_at + _PROGRESS_S:
                screen.say(f"  {state}", style="dim")
                told_at = now
            await asyncio.sleep(_POLL_S)
        await self._cluster.wait_quiet()
        await self._followed()

    async def _followed(self) -> None:
        """Until the router believes that the store has a document at least."""
        deadline = time.monotonic() + _TOLD_S
        while True:
            stats = await self._cluster.cache_stats()
            counts = {one.worker_id: one.num_published_blocks for one in stats.workers}
            if counts.get(STORE, 0) >= self._num_blocks:
                return
            if time.monotonic() >= deadline:
                raise UnavailableError(f"The router believes that blocks are held so: {counts}.")
            await asyncio.sleep(_POLL_S)


def _forget_pages(directory: Path) -> None:
    """Have the system drop what it keeps of these files in memory: the disk is to be asked."""
    for path in sorted(directory.rglob("*")):
        if path.is_file():
            descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            try:
                # What is not on the disk yet would stay.
                os.fsync(descriptor)
                os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            finally:
                os.close(descriptor)
