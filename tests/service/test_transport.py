"""Every transport against one source: exact bytes, verified leaves, and every way it can go wrong."""

from __future__ import annotations

import asyncio
import dataclasses
import os
import signal
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import grpc
import numpy as np
import pytest

from moonpool import native
from moonpool.errors import FailedPreconditionError, TransferError
from moonpool.ids import Incarnation
from moonpool.kv.digest import canonical_bytes, leaf_digest
from moonpool.kv.layout import KvLayout, plan
from moonpool.kv.region import KvRegion, NixlAccess
from moonpool.memory.worker_memory import WorkerMemory
from moonpool.native.fallback import FallbackKernels
from moonpool.rpc.channel import make_channel
from moonpool.transport.base import KvRead
from moonpool.transport.grpc_reader import GrpcTransport
from moonpool.transport.grpc_server import MAX_WAITING_SPANS, MESSAGE_BYTES
from moonpool.transport.nixl import NixlTransport
from moonpool.transport.nixl_agent import NixlUnusableError
from moonpool.transport.nixl_source import NixlSource
from moonpool.transport.select import TransportSelector
from moonpool.transport.shm import ShmTransport
from moonpool.wire import kv_read
from support.kv_source import (
    ALL_TRANSPORTS,
    SMALL,
    UCX_BY_NAME,
    block_read,
    leaf_bytes,
    make_transport,
    reader_pool,
    serve_kv,
)

each = pytest.mark.parametrize("name", ALL_TRANSPORTS)
ALL_LAYERS = range(SMALL.num_layers)


@each
async def test_scattered_blocks_arrive_exactly_and_verified(name: str) -> None:
    rng = np.random.default_rng(7)
    pool = reader_pool()
    async with serve_kv(by=name) as source, make_transport(name, pool) as transport:
        peer = await transport.connect(source.region, timeout_s=5)
        for _ in range(20):
            count = int(rng.integers(1, 20))
            sources, targets = rng.permutation(24)[:count], rng.permutation(24)[:count]
            layers = sorted(rng.permutation(3)[: rng.integers(1, 4)].tolist())
            pool.bytes[:] = 0
            expected = pool.bytes.copy()
            for source_block, target_block in zip(sources, targets, strict=True):
                for layer in layers:
                    begin, end = leaf_bytes(SMALL, int(source_block), layer)
                    to, _ = leaf_bytes(SMALL, int(target_block), layer)
                    expected[to : to + end - begin] = source.pool[begin:end]
            read = block_read(SMALL, source.memory.leaf_digests, sources, targets, layers)
            result = await peer.read(read, timeout_s=5)
            assert result.bad_leaves == ()
            assert result.num_bytes == read.num_bytes
            assert np.array_equal(pool.bytes, expected)
        await peer.close()


@each
async def test_each_flipped_byte_is_told_by_the_number_of_its_leaf(name: str) -> None:
    async with serve_kv(by=name) as source, make_transport(name, reader_pool()) as transport:
        peer = await transport.connect(source.region, timeout_s=5)
        for block, layer in ((4, 0), (9, 2)):
            source.pool[leaf_bytes(SMALL, block, layer)[1] - 1] ^= 0x10
        read = block_read(
            SMALL, source.memory.leaf_digests, [9, 1, 4], [20, 3, 11], list(ALL_LAYERS)
        )
        result = await peer.read(read, timeout_s=5)
        assert result.bad_leaves == (0 * 3 + 2, 2 * 3 + 0)


@each
async def test_long_spans_that_cross_messages_are_verified_leaf_by_leaf(name: str) -> None:
    layout = KvLayout.block_major(
        num_blocks=40, num_layers=5, num_kv_heads=4, head_dim=64, dtype="float32"
    )
    assert layout.pool_bytes > 5 << 20
    pool = reader_pool(layout)
    async with (
        serve_kv(layout, by=name) as source,
        make_transport(name, pool) as transport,
    ):
        peer = await transport.connect(source.region, timeout_s=5)
        flipped = leaf_bytes(layout, 6, 4)[0]
        source.pool[flipped] ^= 1
        blocks, layers = np.divmod(np.arange(40 * 5), 5)
        read = KvRead.of(
            np.array([[0, 0, layout.pool_bytes]]),
            blocks=blocks,
            layers=layers,
            expected=source.memory.leaf_digests[blocks, layers],
            after_span=0,
        )
        result = await peer.read(read, timeout_s=10)
        assert result.bad_leaves == (6 * 5 + 4,)
        assert np.array_equal(pool.bytes, source.pool)


@each
async def test_a_leaf_split_over_spans_and_empty_spans_is_checked_when_it_is_complete(
    name: str,
) -> None:
    pool = reader_pool()
    async with serve_kv(by=name) as source, make_transport(name, pool) as transport:
        peer = await transport.connect(source.region, timeout_s=5)
        begin, end = leaf_bytes(SMALL, 5, 1)
        middle = begin + 100
        read = KvRead.of(
            np.array([[begin, begin, 0], [middle, middle, end - middle], [begin, begin, 100]]),
            blocks=[5],
            layers=[1],
            expected=source.memory.leaf_digests[[5], [1]],
            after_span=[2],
        )
        assert (await peer.read(read, timeout_s=5)).bad_leaves == ()
        check_only = KvRead.of(
            np.empty((0, 3), np.int64),
            blocks=[5, 6],
            layers=[1, 1],
            expected=source.memory.leaf_digests[[5, 6], [1, 1]],
            after_span=-1,
        )
        assert (await peer.read(check_only, timeout_s=5)).bad_leaves == (1,)


@each
@pytest.mark.parametrize("orders", ["layer to block", "block to layer"])
async def test_blocks_are_converted_on_the_way_to_another_layout(name: str, orders: str) -> None:
    by_block, by_layer = (
        make(num_blocks=10, num_layers=4, num_kv_heads=2, head_dim=8, dtype="bfloat16")
        for make in (KvLayout.block_major, KvLayout.layer_major)
    )
    theirs, ours = (by_layer, by_block) if orders == "layer to block" else (by_block, by_layer)
    sources, targets = np.array([3, 9, 0, 4]), np.array([8, 7, 1, 0])
    pool = reader_pool(ours)
    async with serve_kv(theirs, by=name) as source, make_transport(name, pool) as transport:
        assert int(source.memory.leaf_digests[9, 2]) == leaf_digest(source.pool, theirs, 9, 2)
        peer = await transport.connect(source.region, timeout_s=5)
        copies = plan(theirs, ours).copies(sources, targets, 1, 4)
        read = KvRead.of(
            copies.spans,
            blocks=np.repeat(targets, 3),
            layers=np.tile(np.arange(1, 4), 4),
            expected=source.memory.leaf_digests[sources, 1:4].reshape(-1),
            after_span=copies.last_spans.reshape(-1),
        )
        assert (await peer.read(read, timeout_s=5)).bad_leaves == ()
        for source_block, target_block in zip(sources, targets, strict=True):
            for layer in range(1, 4):
                assert canonical_bytes(pool.bytes, ours, target_block, layer) == canonical_bytes(
                    source.pool, theirs, source_block, layer
                )


@each
async def test_many_reads_at_once(name: str) -> None:
    pool = reader_pool()
    async with serve_kv(by=name) as source, make_transport(name, pool) as transport:
        peer = await transport.connect(source.region, timeout_s=5)
        reads = [
            block_read(SMALL, source.memory.leaf_digests, [block], [block], [layer])
            for layer in ALL_LAYERS
            for block in range(24)
        ]
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(peer.read(read, timeout_s=10)) for read in reads]
        assert all(task.result().bad_leaves == () for task in tasks)
        assert np.array_equal(pool.bytes, source.pool)


@each
async def test_another_incarnation_is_refused(name: str) -> None:
    async with serve_kv(by=name) as source, make_transport(name, reader_pool()) as transport:
        other = source.region.worker._replace(incarnation=Incarnation("0" * 16))
        region = dataclasses.replace(
            source.region, worker=other, fd_socket=source.region.fd_socket[:-16] + "0" * 16
        )
        with pytest.raises(TransferError) as caught:
            await transport.connect(region, timeout_s=5)
        assert caught.value.code in ("kv_wrong_incarnation", "kv_peer_lost")
        if name == "grpc":
            assert caught.value.code == "kv_wrong_incarnation"


@each
@pytest.mark.parametrize("side", ["source", "target"])
async def test_out_of_bounds_is_refused(name: str, side: str) -> None:
    pool = reader_pool()
    async with serve_kv(by=name) as source, make_transport(name, pool) as transport:
        peer = await transport.connect(source.region, timeout_s=5)
        span = [0, 0, 64]
        span[0 if side == "source" else 1] = SMALL.pool_bytes - 63
        nothing = np.array([], np.uint64)
        read = KvRead.of(
            np.array([[0, 0, 64], span]), blocks=[], layers=[], expected=nothing, after_span=[]
        )
        with pytest.raises(TransferError) as caught:
            await peer.read(read, timeout_s=5)
        assert caught.value.code == "kv_out_of_bounds"
        if name != "grpc":
            assert not pool.bytes.any()


@each
async def test_a_closed_peer_refuses_and_may_be_closed_twice(name: str) -> None:
    async with serve_kv(by=name) as source, make_transport(name, reader_pool()) as transport:
        peer = await transport.connect(source.region, timeout_s=5)
        assert not peer.is_lost
        await peer.close()
        await peer.close()
        assert peer.is_lost
        read = block_read(SMALL, source.memory.leaf_digests, [1], [1], [0])
        with pytest.raises(TransferError) as caught:
            await peer.read(read, timeout_s=5)
        assert caught.value.code == "kv_peer_lost"


@each
async def test_cancelled_reads_write_nothing_after_they_have_ended(name: str) -> None:
    layout = KvLayout.block_major(
        num_blocks=16, num_layers=4, num_kv_heads=4, head_dim=64, dtype="float32"
    )
    pool = reader_pool(layout)
    blocks = range(16)
    async with (
        serve_kv(layout, by=name) as source,
        make_transport(name, pool) as transport,
    ):
        peer = await transport.connect(source.region, timeout_s=5)
        read = block_read(layout, source.memory.leaf_digests, blocks, blocks, range(4))
        for turns in (0, 1, 2, 3, 5, 8, 13, 40):
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(peer.read(read, timeout_s=10)) for _ in range(3)]
                for _ in range(turns):
                    await asyncio.sleep(0)
                for task in tasks[:2]:
                    task.cancel()
            assert not tasks[2].cancelled()
            assert tasks[2].result().bad_leaves == ()
            pool.bytes[:] = 0
            after = block_read(layout, source.memory.leaf_digests, [3], [7], [2])
            assert (await peer.read(after, timeout_s=10)).bad_leaves == ()
            begin, end = leaf_bytes(layout, 7, 2)
            pool.bytes[begin:end] = 0
            assert not pool.bytes.any()


async def test_every_read_is_over_when_the_transport_is_left() -> None:
    for name in ALL_TRANSPORTS:
        async with serve_kv(by=name) as source, asyncio.TaskGroup() as group:
            async with make_transport(name, reader_pool()) as transport:
                peer = await transport.connect(source.region, timeout_s=5)
                read = block_read(SMALL, source.memory.leaf_digests, [1], [1], [0])
                task = group.create_task(_outcome(peer.read(read, timeout_s=5)))
                await asyncio.sleep(0)
            assert await task in ("ok", "kv_peer_lost")


async def _outcome(read: Awaitable[object]) -> str:
    try:
        await read
    except TransferError as error:
        return error.code
    return "ok"


async def test_without_the_c_library_both_transports_work() -> None:
    async with serve_kv() as source:
        for transport in (
            ShmTransport(
                pool=reader_pool(), host_id=source.region.host_id, kernels=FallbackKernels()
            ),
            GrpcTransport(pool=reader_pool(), kernels=FallbackKernels(), make_channel=make_channel),
        ):
            source.pool[leaf_bytes(SMALL, 2, 1)[0]] ^= 1
            async with transport:
                peer = await transport.connect(source.region, timeout_s=5)
                blocks = range(24)
                read = block_read(
                    SMALL, source.memory.leaf_digests, blocks, blocks, list(ALL_LAYERS)
                )
                expected = () if transport.name == "grpc" else (2 * 3 + 1,)
                assert (await peer.read(read, timeout_s=5)).bad_leaves == expected


# -- gRPC only: a peer that stalls, dies, or says nonsense --


async def test_a_read_that_is_too_late_ends_and_the_stream_goes_on() -> None:
    async with stalling_server() as (region, go_on):
        pool = reader_pool()
        async with make_transport("grpc", pool) as transport:
            peer = await transport.connect(region, timeout_s=5)
            read = block_read(SMALL, np.zeros((24, 3), np.uint64), [0], [0], [0])
            with pytest.raises(TransferError) as caught:
                await peer.read(read, timeout_s=0.02)
            assert caught.value.code == "kv_read_timeout"
            go_on.set()
            result = await peer.read(read, timeout_s=5)
            assert result.num_bytes == read.num_bytes
            assert not peer.is_lost


@pytest.mark.parametrize("nonsense", ["too much", "unasked", "end", "nothing"])
async def test_a_peer_that_talks_nonsense_is_lost(nonsense: str) -> None:
    async def read_method(
        requests: AsyncIterator[bytes], context: grpc.aio.ServicerContext
    ) -> AsyncIterator[bytes]:
        await anext(requests)
        yield b"x" if nonsense == "nothing" else b""
        if nonsense == "unasked":
            yield b"x"
        request = kv_read.decode(await anext(requests))
        assert isinstance(request, kv_read.ReadSpans)
        if nonsense == "too much":
            yield bytes(int(request.spans[:, 1].sum()) + 1)

    async def connect_and_read() -> None:
        peer = await transport.connect(region, timeout_s=5)
        await peer.read(read, timeout_s=5)

    read = block_read(SMALL, np.zeros((24, 3), np.uint64), [0], [0], [0])
    async with (
        bare_server(read_method) as region,
        make_transport("grpc", reader_pool()) as transport,
    ):
        with pytest.raises(TransferError) as caught:
            await connect_and_read()
        assert caught.value.code == "kv_peer_lost"


async def test_nobody_there_is_an_error_within_the_deadline() -> None:
    async with serve_kv() as source, make_transport("grpc", reader_pool()) as transport:
        region = dataclasses.replace(source.region, grpc_address="127.0.0.1:1")
        with pytest.raises(TransferError):
            await transport.connect(region, timeout_s=2)


async def test_a_server_sends_no_more_than_the_credit() -> None:
    layout = KvLayout.block_major(
        num_blocks=32, num_layers=4, num_kv_heads=4, head_dim=64, dtype="float32"
    )
    async with (
        serve_kv(layout) as source,
        grpc.aio.insecure_channel(source.region.grpc_address) as channel,
    ):
        call = channel.stream_stream(kv_read.METHOD)()
        opened = kv_read.OpenRead(source=source.region.worker, credit_bytes=(2 << 20) + 5)
        await call.write(kv_read.encode(opened))
        assert await call.read() == b""
        spans = np.array([[10, (3 << 20) + 7]])
        await call.write(kv_read.encode(kv_read.ReadSpans(spans=spans)))
        num_bytes = 0
        while num_bytes + MESSAGE_BYTES <= opened.credit_bytes:
            num_bytes += len(await call.read())
        assert num_bytes <= opened.credit_bytes
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.05):
                await call.read()


async def test_a_server_refuses_what_no_reader_sends() -> None:
    async with serve_kv() as source:
        opened = kv_read.encode(kv_read.OpenRead(source=source.region.worker, credit_bytes=1 << 20))
        beyond = np.array([[SMALL.pool_bytes - 1, 2]])
        poor = kv_read.encode(kv_read.OpenRead(source=source.region.worker, credit_bytes=1))
        many = kv_read.encode(kv_read.ReadSpans(spans=np.full((kv_read.MAX_SPANS, 2), 2)))
        num_messages = MAX_WAITING_SPANS // kv_read.MAX_SPANS + 1
        cases = [
            ([b"\xff\xff"], grpc.StatusCode.INVALID_ARGUMENT),
            ([kv_read.encode(kv_read.GrantCredit(credit_bytes=1))], _INVALID),
            ([opened, opened], _INVALID),
            ([opened, b""], _INVALID),
            ([opened, kv_read.encode(kv_read.ReadSpans(spans=beyond))], _OUT_OF_RANGE),
            ([poor, *[many] * num_messages], _INVALID),
        ]
        async with grpc.aio.insecure_channel(source.region.grpc_address) as channel:
            for messages, expected in cases:
                call = channel.stream_stream(kv_read.METHOD)(iter(messages))
                with pytest.raises(grpc.aio.AioRpcError) as caught:
                    async for _ in call:
                        pass
                assert caught.value.code() == expected


_INVALID = grpc.StatusCode.INVALID_ARGUMENT
_OUT_OF_RANGE = grpc.StatusCode.OUT_OF_RANGE


# -- the choice of a transport --


async def test_the_choice_is_announced_with_its_reason() -> None:
    pool = reader_pool()
    async with (
        serve_kv() as source,
        make_transport("shm", pool) as shm,
        make_transport("grpc", pool) as by_grpc,
    ):
        selector = TransportSelector([shm, by_grpc])
        chosen = await selector.connect(source.region, timeout_s=5)
        assert (chosen.choice.taken, chosen.choice.is_fallback, chosen.choice.reason) == (
            "shm",
            False,
            "",
        )
        elsewhere = dataclasses.replace(source.region, host_id="another")
        chosen = await selector.connect(elsewhere, timeout_s=5)
        assert (chosen.choice.wanted, chosen.choice.taken) == ("shm", "grpc")
        assert "another host" in chosen.choice.reason
        broken = dataclasses.replace(source.region, fd_socket="moonpool/nobody/0")
        chosen = await selector.connect(broken, timeout_s=5)
        assert chosen.choice.is_fallback
        assert "does not answer" in chosen.choice.reason
        strict = TransportSelector([shm, by_grpc], is_strict=True)
        for region in (elsewhere, broken):
            with pytest.raises(FailedPreconditionError, match="shm is required"):
                await strict.connect(region, timeout_s=5)
        with pytest.raises(TransferError, match=r"shm: .*; grpc: "):
            await selector.connect(dataclasses.replace(elsewhere, grpc_address=""), timeout_s=5)


async def test_nixl_that_cannot_start_says_why_and_is_passed_over() -> None:
    pool = reader_pool()
    unusable = NixlTransport(
        pool=pool, agent="r@0", kernels=native.kernels(), ucx={"TLS": "nonsense"}
    )
    async with serve_kv() as source, unusable, make_transport("grpc", pool) as by_grpc:
        assert unusable.unusable is not None
        assert "does not start" in unusable.unusable
        assert unusable.announce(source.region).nixl is None
        chosen = await TransportSelector([unusable, by_grpc]).connect(source.region, timeout_s=5)
        assert (chosen.choice.taken, chosen.choice.is_fallback) == ("grpc", True)
        assert "does not start" in chosen.choice.reason
        with pytest.raises(TransferError, match="does not start"):
            await unusable.connect(source.region, timeout_s=5)


async def test_a_peer_that_offers_no_nixl_is_read_otherwise() -> None:
    pool = reader_pool()
    async with (
        serve_kv() as source,
        make_transport("nixl", pool) as nixl,
        make_transport("grpc", pool) as by_grpc,
    ):
        chosen = await TransportSelector([nixl, by_grpc]).connect(source.region, timeout_s=5)
        assert chosen.choice.taken == "grpc"
        assert "does not offer NIXL" in chosen.choice.reason
        lying = dataclasses.replace(
            source.region, nixl=NixlAccess(agent_metadata=b"not an agent", base_address=1 << 40)
        )
        with pytest.raises(TransferError) as caught:
            await nixl.connect(lying, timeout_s=5)
        assert caught.value.code == "kv_peer_lost"


async def test_a_source_that_cannot_start_says_why() -> None:
    memory = WorkerMemory.create(SMALL)
    source = NixlSource(name="s@0", pool_fd=memory.pool.fd, ucx={"TLS": "nonsense"})
    try:
        with pytest.raises(NixlUnusableError, match="does not start"):
            await source.start()
    finally:
        await source.stop()
        memory.close()


async def test_a_source_that_does_not_take_leave_is_killed() -> None:
    memory = WorkerMemory.create(SMALL)
    source = NixlSource(name="s@1", pool_fd=memory.pool.fd, ucx=UCX_BY_NAME["nixl-tcp"], stop_s=0.1)
    try:
        await source.start()
        assert source.pid is not None
        os.kill(source.pid, signal.SIGSTOP)
        await source.stop()
        with pytest.raises(ProcessLookupError):
            os.kill(source.pid, 0)
    finally:
        memory.close()


# -- servers that misbehave --

ReadMethod = Callable[[AsyncIterator[bytes], grpc.aio.ServicerContext], AsyncIterator[bytes]]


@asynccontextmanager
async def bare_server(method: ReadMethod) -> AsyncIterator[KvRegion]:
    async with serve_kv() as source:
        server = grpc.aio.server()
        port = server.add_insecure_port("127.0.0.1:0")
        handler = grpc.stream_stream_rpc_method_handler(method)
        server.add_generic_rpc_handlers(
            (grpc.method_handlers_generic_handler(kv_read.SERVICE, {"Read": handler}),)
        )
        await server.start()
        try:
            yield dataclasses.replace(source.region, grpc_address=f"127.0.0.1:{port}")
        finally:
            await server.stop(0)


@asynccontextmanager
async def stalling_server() -> AsyncIterator[tuple[KvRegion, asyncio.Event]]:
    go_on = asyncio.Event()

    async def read_method(
        requests: AsyncIterator[bytes], context: grpc.aio.ServicerContext
    ) -> AsyncIterator[bytes]:
        await anext(requests)
        yield b""
        async for request in requests:
            spans = kv_read.decode(request)
            assert isinstance(spans, kv_read.ReadSpans)
            await go_on.wait()
            yield bytes(int(spans.spans[:, 1].sum()))

    async with bare_server(read_method) as region:
        yield region, go_on
