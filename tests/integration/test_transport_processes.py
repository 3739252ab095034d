"""Transports between real processes: a source that is stopped, killed, and what it leaves behind."""

from __future__ import annotations

import asyncio
import gc
import json
import os
import signal
import sys
import time
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator, Awaitable
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

from moonpool.api.v1 import kv_pb2
from moonpool.errors import TransferError
from moonpool.kv.region import KvRegion
from moonpool.transport.base import KvRead
from moonpool.transport.nixl import agent_name
from moonpool.transport.nixl_driver import FENCE_S
from moonpool.transport.nixl_link import NixlLink
from moonpool.wire.layout import region_from_pb
from support.kv_source import (
    ALL_TRANSPORTS,
    UCX_BY_NAME,
    block_read,
    make_transport,
    reader_pool,
)

MAIN = Path(__file__).resolve().parents[1] / "support" / "kv_source_main.py"
each = pytest.mark.parametrize("name", ALL_TRANSPORTS)


@dataclass(kw_only=True)
class Source:
    process: Process
    region: KvRegion
    digests: npt.NDArray[np.uint64]

    def read_everything(self) -> KvRead:
        layout = self.region.layout
        blocks = range(layout.num_blocks)
        return block_read(layout, self.digests, blocks, blocks, range(layout.num_layers))


@asynccontextmanager
async def source_process(*, num_blocks: int = 256, by: str = "") -> AsyncIterator[Source]:
    process = await asyncio.create_subprocess_exec(
        sys.executable, MAIN, "1", str(num_blocks), by, stdin=PIPE, stdout=PIPE, limit=1 << 24
    )
    try:
        assert process.stdout is not None
        async with asyncio.timeout(30):
            line = json.loads(await process.stdout.readline())
        region = region_from_pb(kv_pb2.KvRegion.FromString(bytes.fromhex(line["region"])))
        digests = np.frombuffer(bytes.fromhex(line["digests"]), np.uint64)
        shape = (region.layout.num_blocks, region.layout.num_layers)
        yield Source(process=process, region=region, digests=digests.reshape(shape))
    finally:
        if process.returncode is None:
            process.send_signal(signal.SIGCONT)
            process.kill()
        await process.wait()


@each
async def test_another_processs_pool_arrives_verified(name: str) -> None:
    async with source_process(by=name) as source:
        pool = reader_pool(source.region.layout)
        async with make_transport(name, pool) as transport:
            peer = await transport.connect(source.region, timeout_s=5)
            read = source.read_everything()
            result = await peer.read(read, timeout_s=20)
            assert (result.num_bytes, result.bad_leaves) == (pool.bytes.size, ())


async def test_a_source_that_is_killed_ends_every_pending_read_at_once() -> None:
    async with source_process() as source:
        pool = reader_pool(source.region.layout)
        async with make_transport("grpc", pool, window_bytes=2 << 20) as transport:
            peer = await transport.connect(source.region, timeout_s=5)
            os.kill(source.process.pid, signal.SIGSTOP)
            async with asyncio.TaskGroup() as group:
                reads = [
                    group.create_task(
                        _error_code(peer.read(source.read_everything(), timeout_s=60))
                    )
                    for _ in range(5)
                ]
                await asyncio.sleep(0)
                source.process.kill()
                async with asyncio.timeout(5):
                    codes = [await read for read in reads]
            assert codes == ["kv_peer_lost"] * 5
            assert peer.is_lost
            before = pool.bytes.copy()
            with pytest.raises(TransferError):
                await peer.read(source.read_everything(), timeout_s=5)
            assert np.array_equal(pool.bytes, before)


async def test_a_source_killed_in_the_middle_of_a_read_ends_it() -> None:
    async with source_process(num_blocks=512) as source:
        pool = reader_pool(source.region.layout)
        async with make_transport("grpc", pool, window_bytes=2 << 20) as transport:
            peer = await transport.connect(source.region, timeout_s=5)
            async with asyncio.TaskGroup() as group:
                read = group.create_task(
                    _error_code(peer.read(source.read_everything(), timeout_s=60))
                )
                async with asyncio.timeout(20):
                    while not pool.bytes[:: 1 << 16].any():  # noqa: ASYNC110 - memory has no event
                        await asyncio.sleep(0)
                source.process.kill()
                async with asyncio.timeout(5):
                    assert await read == "kv_peer_lost"


# -- NIXL --


@pytest.mark.parametrize("name", UCX_BY_NAME)
async def test_a_nixl_source_that_is_killed_ends_its_reads_and_is_forgotten(name: str) -> None:
    """Over TCP they pend, since the source takes part; else the next READ finds nobody."""
    async with source_process(by=name) as source, source_process(by=name) as other:
        pool = reader_pool(source.region.layout)
        async with make_transport(name, pool) as transport:
            peer = await transport.connect(source.region, timeout_s=5)
            another = await transport.connect(other.region, timeout_s=5)
            os.kill(source.process.pid, signal.SIGSTOP)
            async with asyncio.TaskGroup() as group:
                pending = [
                    group.create_task(
                        _error_code(peer.read(source.read_everything(), timeout_s=60))
                    )
                    for _ in range(3 if name == "nixl-tcp" else 0)
                ]
                await asyncio.sleep(0)
                source.process.kill()
                await source.process.wait()
                async with asyncio.timeout(5):
                    codes = [await read for read in pending]
                    codes.append(
                        await _error_code(peer.read(source.read_everything(), timeout_s=60))
                    )
            assert set(codes) == {"kv_peer_lost"}
            assert peer.is_lost
            before = pool.bytes.copy()
            with pytest.raises(TransferError) as caught:
                await transport.connect(source.region, timeout_s=1)
            assert caught.value.code in ("kv_peer_lost", "kv_read_timeout")
            assert np.array_equal(pool.bytes, before)
            # Nobody else is touched.
            assert not another.is_lost
            result = await another.read(other.read_everything(), timeout_s=20)
            assert result.bad_leaves == ()


@pytest.mark.parametrize("way", ["too late", "cancelled"])
async def test_a_nixl_read_of_a_source_that_stands_still_is_fenced(way: str) -> None:
    """It cannot be recalled: the agent goes, and what the source sends later is written nowhere."""
    async with source_process(by="nixl-tcp") as source, source_process(by="nixl-tcp") as other:
        pool = reader_pool(source.region.layout)
        async with make_transport("nixl-tcp", pool) as transport:
            peer = await transport.connect(source.region, timeout_s=5)
            another = await transport.connect(other.region, timeout_s=5)
            os.kill(source.process.pid, signal.SIGSTOP)
            started = time.monotonic()
            if way == "too late":
                code = await _error_code(peer.read(source.read_everything(), timeout_s=0.1))
                assert code == "kv_read_timeout"
            else:
                with pytest.raises(TimeoutError):
                    async with asyncio.timeout(0.1):
                        await peer.read(source.read_everything(), timeout_s=60)
            assert time.monotonic() - started < 0.1 + FENCE_S + 2
            pool.bytes[:] = 0
            os.kill(source.process.pid, signal.SIGCONT)
            # The agent was shared: who was connected by it has to connect again.
            for lost in (peer, another):
                assert lost.is_lost
                await lost.close()
            again = await transport.connect(other.region, timeout_s=5)
            # What the source sends, now that it goes on, comes nowhere. (It may crash, in UCX.)
            assert not pool.bytes.any()
            result = await again.read(other.read_everything(), timeout_s=20)
            assert result.bad_leaves == ()


async def test_a_nixl_source_that_stands_still_is_asked_once_however_often_it_is_needed() -> None:
    async with source_process(by="nixl-tcp") as source:
        access = source.region.nixl
        assert access is not None
        pool = reader_pool(source.region.layout)
        link = NixlLink(name="reader", pool=pool.bytes, ucx=UCX_BY_NAME["nixl-tcp"])
        try:
            await link.start()
            os.kill(source.process.pid, signal.SIGSTOP)
            for _ in range(3):
                connecting = link.connect(access, agent_name(source.region), timeout_s=0.05)
                assert await _error_code(connecting) == "kv_read_timeout"
            assert link.num_reads == 1
            os.kill(source.process.pid, signal.SIGCONT)
            connection = await link.connect(access, agent_name(source.region), timeout_s=5)
            assert connection.lost is None
            assert link.num_reads == 0
        finally:
            await link.stop()


async def test_a_nixl_read_that_cannot_be_posted_ends_no_other_that_may_still_be_written() -> None:
    async with source_process(by="nixl-tcp") as source:
        pool = reader_pool(source.region.layout)
        async with make_transport("nixl-tcp", pool) as transport:
            peer = await transport.connect(source.region, timeout_s=5)
            # What lies beyond the pool is not the agent's: NIXL refuses to post it.
            believed = replace(source.region, pool_bytes=2 * source.region.pool_bytes)
            misled = await transport.connect(believed, timeout_s=5)
            beyond = KvRead.of(
                np.array([[source.region.pool_bytes, 0, 64]]),
                blocks=[],
                layers=[],
                expected=[],
                after_span=[],
            )
            os.kill(source.process.pid, signal.SIGSTOP)
            async with asyncio.TaskGroup() as group:
                pending = group.create_task(peer.read(source.read_everything(), timeout_s=60))
                await asyncio.sleep(0)
                async with asyncio.timeout(5):
                    assert await _error_code(misled.read(beyond, timeout_s=60)) == "kv_peer_lost"
                assert peer.is_lost
                assert not pending.done()
                os.kill(source.process.pid, signal.SIGCONT)
            assert pending.result().bad_leaves == ()
            again = await transport.connect(source.region, timeout_s=5)
            assert (await again.read(source.read_everything(), timeout_s=20)).bad_leaves == ()


async def test_memory_of_a_killed_source_stays_readable_and_is_then_gone() -> None:
    gc.collect()
    num_maps_before = _num_moonpool_maps()
    async with source_process() as source:
        pool = reader_pool(source.region.layout)
        async with make_transport("shm", pool) as transport:
            peer = await transport.connect(source.region, timeout_s=5)
            assert _num_moonpool_maps() == num_maps_before + 1
            source.process.kill()
            await source.process.wait()
            result = await peer.read(source.read_everything(), timeout_s=5)
            assert result.bad_leaves == ()
            with pytest.raises(TransferError) as caught:
                await transport.connect(source.region, timeout_s=5)
            assert caught.value.code == "kv_peer_lost"
            await peer.close()
            assert _num_moonpool_maps() == num_maps_before
        assert not [file for file in os.listdir("/dev/shm") if "moonpool" in file]


def _num_moonpool_maps() -> int:
    maps = Path("/proc/self/maps").read_text().splitlines()
    return sum("moonpool" in line and "memfd" in line for line in maps)


async def _error_code(read: Awaitable[object]) -> str:
    try:
        await read
    except TransferError as error:
        return error.code
    return ""
