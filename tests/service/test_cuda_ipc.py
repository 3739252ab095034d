"""The CUDA IPC transport between two nodes: engines' threads over a stand-in for CUDA, shm beside it."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass

import numpy as np
import pytest

from moonpool import native
from moonpool.errors import TransferError
from moonpool.kv.layout import KvLayout
from moonpool.kv.region import KvRegion
from moonpool.memory.host import host_id
from moonpool.transport.base import BlockCopy, KvPeer, KvRead, LocalPool
from moonpool.transport.cuda_ipc import CudaIpcTransport
from moonpool.transport.device_link import DeviceLink
from moonpool.transport.select import TransportSelector
from moonpool.transport.shm import ShmTransport
from moonpool.worker.device_server import refuse_device
from support.device_node import DeviceNode, DeviceThread, GatedReads
from support.eventually import eventually
from support.kv_source import SMALL, KvSource, block_read, leaf_bytes, serve_kv

LAYERS = SMALL.num_layers


@dataclass(kw_only=True)
class Pair:
    """A source with a pool on the GPU, and a reader."""

    source: KvSource
    theirs: DeviceNode
    ours: DeviceNode
    pool: LocalPool
    leaves: np.ndarray
    transport: CudaIpcTransport
    gate: GatedReads
    thread: DeviceThread
    region: KvRegion

    async def connect(self) -> KvPeer:
        return await self.transport.connect(self.region, timeout_s=5)

    def read(self, sources: Sequence[int], targets: Sequence[int], layers: range) -> KvRead:
        digests = self.source.memory.leaf_digests
        read = block_read(SMALL, digests, sources, targets, list(layers))
        return dataclasses.replace(
            read,
            block_copy=BlockCopy(
                sources=np.array(sources),
                targets=np.array(targets),
                first_layer=layers.start,
                expected=digests[list(sources), layers.start : layers.stop],
            ),
        )

    def check_arrived(self, source: int, target: int, layer: int) -> None:
        begin, end = leaf_bytes(SMALL, source, layer)
        expected = self.source.pool[begin:end].tobytes()
        begin, end = leaf_bytes(SMALL, target, layer)
        assert self.pool.bytes[begin:end].tobytes() == expected
        assert self.ours.pool.layer(layer)[target].contiguous().numpy().tobytes() == expected


@asynccontextmanager
async def pair(*, gpu: str = "GPU-0", is_gated: bool = False) -> AsyncIterator[Pair]:
    pool = LocalPool.of(np.zeros(SMALL.pool_bytes, np.uint8), SMALL)
    leaves = np.zeros((SMALL.num_blocks, LAYERS), np.uint64)
    async with serve_kv() as source:
        theirs = DeviceNode(SMALL, source.pool, source.memory.leaf_digests)
        theirs.bring_in()
        ours = DeviceNode(SMALL, pool.bytes, leaves, gpu=gpu)
        gate = GatedReads(ours.make_reads())
        if not is_gated:
            gate.may_go.set()
        link = DeviceLink()
        thread = ours.serve(link.engine_end.fileno(), gate)
        try:
            async with CudaIpcTransport(link=link, layout=SMALL, host=shm(pool)) as transport:
                link.release()
                await link.offered()
                yield Pair(
                    source=source,
                    theirs=theirs,
                    ours=ours,
                    pool=pool,
                    leaves=leaves,
                    transport=transport,
                    gate=gate,
                    thread=thread,
                    region=dataclasses.replace(source.region, device=theirs.make_reads().offer()),
                )
        finally:
            gate.may_go.set()
        thread.join()
        assert ours.runtime.num_open == 0


def shm(pool: LocalPool) -> ShmTransport:
    return ShmTransport(pool=pool, host_id=host_id(), kernels=native.kernels())


async def begun(gate: GatedReads) -> None:
    await eventually(gate.has_begun.is_set, timeout_s=5, what="a read has begun")


async def test_blocks_arrive_in_both_pools_and_are_verified() -> None:
    rng = np.random.default_rng(7)
    async with pair() as nodes:
        assert nodes.transport.unusable is None
        peer = await nodes.connect()
        for _ in range(10):
            count = int(rng.integers(1, 20))
            sources, targets = (rng.permutation(24)[:count].tolist() for _ in range(2))
            middle = int(rng.integers(1, LAYERS))
            results = await asyncio.gather(
                *(
                    peer.read(nodes.read(sources, targets, layers), timeout_s=5)
                    for layers in (range(middle), range(middle, LAYERS))
                )
            )
            assert [result.bad_leaves for result in results] == [(), ()]
            nodes.leaves[targets] = nodes.source.memory.leaf_digests[sources]
            for source, target in zip(sources, targets, strict=True):
                for layer in range(LAYERS):
                    nodes.check_arrived(source, target, layer)
            # No step has to copy them in.
            assert not len(nodes.ours.held.lacking(np.array(targets, np.int32)))
        assert sum(result.num_bytes for result in results) == count * SMALL.block_bytes
        assert nodes.ours.runtime.num_open == 1
        await peer.close()
        assert nodes.ours.runtime.num_open == 0
        assert peer.is_lost


async def test_what_the_holders_device_lacks_is_read_from_its_host_memory() -> None:
    """It arrived there, its holder announced it, and no step has taken it in yet."""
    async with pair() as nodes:
        peer = await nodes.connect()
        nodes.theirs.pool.layer(1)[5] = 0
        result = await peer.read(nodes.read([4, 5, 6], [1, 2, 3], range(LAYERS)), timeout_s=5)
        assert result.bad_leaves == ()
        begin, end = leaf_bytes(SMALL, 2, 1)
        theirs = slice(*leaf_bytes(SMALL, 5, 1))
        assert np.array_equal(nodes.pool.bytes[begin:end], nodes.source.pool[theirs])
        nodes.leaves[[1, 2, 3]] = nodes.source.memory.leaf_digests[[4, 5, 6]]
        assert nodes.ours.held.lacking(np.array([1, 2, 3], np.int32)).tolist() == [2]
        await peer.close()


async def test_what_matches_nowhere_is_a_bad_leaf_by_its_number() -> None:
    async with pair() as nodes:
        peer = await nodes.connect()
        nodes.theirs.pool.layer(2)[9] = 0
        nodes.source.pool[leaf_bytes(SMALL, 9, 2)[0]] ^= 1
        result = await peer.read(nodes.read([4, 9], [1, 2], range(1, LAYERS)), timeout_s=5)
        assert result.bad_leaves == (1 * 2 + 1,)
        assert not peer.is_lost
        await peer.close()


async def test_a_read_that_is_not_told_in_blocks_comes_from_host_memory() -> None:
    async with pair() as nodes:
        peer = await nodes.connect()
        read = dataclasses.replace(nodes.read([4], [1], range(LAYERS)), block_copy=None)
        assert (await peer.read(read, timeout_s=5)).bad_leaves == ()
        assert not nodes.gate.has_begun.is_set()
        await peer.close()


def _other_layout(region: KvRegion) -> KvRegion:
    layout = KvLayout.block_major(
        num_blocks=24, num_layers=3, num_kv_heads=2, head_dim=8, dtype="bfloat16"
    )
    return dataclasses.replace(region, layout=layout)


def _layer_major(region: KvRegion) -> KvRegion:
    layout = KvLayout.layer_major(
        num_blocks=24, num_layers=3, num_kv_heads=2, head_dim=8, dtype="float32"
    )
    return dataclasses.replace(region, layout=layout)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda region: dataclasses.replace(region, device=None), "offers no device memory"),
        (lambda region: dataclasses.replace(region, host_id="elsewhere"), "another host"),
        (lambda region: dataclasses.replace(region, fd_socket=""), "offers no host memory"),
        (
            lambda region: dataclasses.replace(
                region, device=dataclasses.replace(region.device, gpu="GPU-7")
            ),
            r"another GPU \(GPU-7, here GPU-0\)",
        ),
        (_other_layout, "of another kind"),
        (_layer_major, None),
    ],
)
async def test_a_peer_that_is_not_on_this_gpu_is_told_in_words(
    change: Callable[[KvRegion], KvRegion], words: str | None
) -> None:
    async with pair() as nodes:
        reason = nodes.transport.why_not(change(nodes.region))
        if words is None:
            # Engines' pools on GPUs are alike, whatever those in host memory are.
            assert reason is None
        else:
            assert reason is not None
            with pytest.raises(TransferError, match=words):
                await nodes.transport.connect(change(nodes.region), timeout_s=5)


async def test_another_gpu_falls_to_the_next_transport_and_says_so() -> None:
    async with pair(gpu="GPU-1") as nodes, shm(nodes.pool) as other:
        selector = TransportSelector([nodes.transport, other])
        connection = await selector.connect(nodes.region, timeout_s=5)
        assert connection.choice.taken == "shm"
        assert connection.choice.is_fallback
        assert "another GPU (GPU-0, here GPU-1)" in connection.choice.reason
        await connection.peer.close()


async def test_an_incarnation_that_is_gone_is_not_opened() -> None:
    """Its handle names memory of a process that has ended."""
    async with pair() as nodes, shm(nodes.pool) as other:
        nodes.theirs.runtime.end()
        with pytest.raises(TransferError, match="invalid resource handle"):
            await nodes.connect()
        connection = await TransportSelector([nodes.transport, other]).connect(
            nodes.region, timeout_s=5
        )
        assert connection.choice.taken == "shm"
        await connection.peer.close()


async def test_memory_of_another_size_is_not_opened() -> None:
    async with pair() as nodes:
        assert nodes.region.device is not None
        lying = dataclasses.replace(
            nodes.region, device=dataclasses.replace(nodes.region.device, num_bytes=4096)
        )
        with pytest.raises(TransferError, match="not 4096"):
            await nodes.transport.connect(lying, timeout_s=5)


async def test_a_copy_that_fails_loses_the_peer_and_a_new_connection_reads() -> None:
    async with pair() as nodes:
        peer = await nodes.connect()
        nodes.gate.error = RuntimeError("CUDA error: unspecified launch failure")
        with pytest.raises(TransferError, match="launch failure") as caught:
            await peer.read(nodes.read([4], [1], range(LAYERS)), timeout_s=5)
        assert caught.value.code == "kv_peer_lost"
        assert peer.is_lost
        with pytest.raises(TransferError):
            await peer.read(nodes.read([4], [1], range(LAYERS)), timeout_s=5)
        await peer.close()
        again = await nodes.connect()
        assert (await again.read(nodes.read([4], [1], range(LAYERS)), timeout_s=5)).bad_leaves == ()
        await again.close()


async def test_a_peer_that_is_closed_while_it_is_read_is_unmapped_after_the_copies() -> None:
    async with pair(is_gated=True) as nodes:
        peer = await nodes.connect()
        async with asyncio.TaskGroup() as tasks:
            reads = [
                tasks.create_task(
                    _outcome(peer.read(nodes.read([4], [block], range(LAYERS)), timeout_s=5))
                )
                for block in (1, 2)
            ]
            await begun(nodes.gate)
            closing = tasks.create_task(peer.close())
            await asyncio.sleep(0)
            assert not closing.done()
            assert nodes.ours.runtime.num_open == 1
            nodes.gate.may_go.set()
        assert [read.result() for read in reads] == ["kv_peer_lost"] * 2
        assert nodes.gate.log == ["opened 1", "read 1", "read 1", "closed 1"]
        assert nodes.ours.runtime.num_open == 0


async def test_a_read_that_is_cancelled_ends_when_nothing_is_written_any_more() -> None:
    async with pair(is_gated=True) as nodes:
        peer = await nodes.connect()
        async with asyncio.TaskGroup() as tasks:
            read = tasks.create_task(
                peer.read(nodes.read([4], [1], range(LAYERS)), timeout_s=5), name="read"
            )
            await begun(nodes.gate)
            for _ in range(3):
                read.cancel()
                await asyncio.sleep(0)
                assert not read.done()
            assert nodes.gate.log == ["opened 1"]
            nodes.gate.may_go.set()
        assert read.cancelled()
        assert nodes.gate.log == ["opened 1", "read 1"]
        await peer.close()


async def test_a_read_that_is_too_slow_is_told_when_it_is_over() -> None:
    async with pair(is_gated=True) as nodes:
        peer = await nodes.connect()
        async with asyncio.TaskGroup() as tasks:
            read = tasks.create_task(
                _outcome(peer.read(nodes.read([4], [1], range(LAYERS)), timeout_s=0.01))
            )
            await begun(nodes.gate)
            opening = tasks.create_task(
                _outcome(nodes.transport.connect(nodes.region, timeout_s=0.01))
            )
            assert await opening == "kv_read_timeout"
            assert not read.done()
            nodes.gate.may_go.set()
        assert read.result() == "kv_read_timeout"
        await peer.close()
        # What was opened too late is closed.
        assert nodes.gate.log == [
            "opened 1",
            "read 1",
            "opened 3",
            "closed 3",
            "closed 1",
        ]


async def test_the_engines_end_ends_all_that_is_asked() -> None:
    async with pair(is_gated=True) as nodes:
        peer = await nodes.connect()
        nodes.gate.error = _EngineEndsError("the engine is killed")
        async with asyncio.TaskGroup() as tasks:
            reads = [
                tasks.create_task(
                    _outcome(peer.read(nodes.read([4], [1], range(LAYERS)), timeout_s=5))
                )
                for _ in range(2)
            ]
            await begun(nodes.gate)
            nodes.gate.may_go.set()
        assert [read.result() for read in reads] == ["kv_peer_lost"] * 2
        assert "does not read device memory any more" in (nodes.transport.unusable or "")
        assert nodes.transport.announce(nodes.region).device is None
        assert await _outcome(nodes.connect()) == "kv_transport_unusable"
        await peer.close()
        with pytest.raises(_EngineEndsError):
            nodes.thread.join()


async def test_an_engine_that_shares_nothing_says_why() -> None:
    pool = LocalPool.of(np.zeros(SMALL.pool_bytes, np.uint8), SMALL)
    link = DeviceLink()
    thread = DeviceThread(
        lambda sock: refuse_device(sock, "it is a MIG instance"), link.engine_end.fileno()
    )
    async with (
        serve_kv() as source,
        CudaIpcTransport(link=link, layout=SMALL, host=shm(pool)) as transport,
    ):
        link.release()
        await link.offered()
        assert transport.unusable == "it is a MIG instance"
        assert transport.announce(source.region).device is None
        assert transport.why_not(source.region) == "it is a MIG instance"
    thread.join()


async def test_an_engine_whose_memory_cannot_be_exported_says_why() -> None:
    leaves = np.zeros((SMALL.num_blocks, LAYERS), np.uint64)
    node = DeviceNode(SMALL, np.zeros(SMALL.pool_bytes, np.uint8), leaves)
    node.runtime.errors["cudaIpcGetMemHandle"] = 1
    link = DeviceLink()
    thread = node.serve(link.engine_end.fileno())
    async with link:
        link.release()
        await link.offered()
        assert link.why_not == "cudaIpcGetMemHandle: invalid argument (1)"
    thread.join()


class _EngineEndsError(Exception):
    """No error of a device: a bug, which ends the thread."""


async def _outcome(work: Awaitable[object]) -> str:
    try:
        await work
    except TransferError as error:
        return error.code
    return "ok"
