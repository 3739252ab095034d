"""Leases on one stream between a reader and a holder, over real gRPC."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import aclosing, asynccontextmanager
from typing import Any

import grpc
import pytest

from moonpool.api.v1 import worker_pb2 as pb
from moonpool.api.v1 import worker_pb2_grpc
from moonpool.errors import MoonpoolError, UnavailableError
from moonpool.handoff.messages import HolderMessage, PrefixOpen, PrefixOpened
from moonpool.ids import AttemptId, BlockHash, Incarnation, RequestId, WorkerId, WorkerKey
from moonpool.rpc.channel import make_channel
from moonpool.rpc.server import RpcServer
from moonpool.wire.prefix_read import LeaseNumber
from moonpool.worker.reader_leases import ReaderLeases
from support.eventually import eventually
from support.leases import read_lease

KEY = WorkerKey(WorkerId("h"), Incarnation("1"))


def open_of(name: str) -> PrefixOpen:
    return PrefixOpen(
        attempt_id=AttemptId(RequestId(name), 1),
        reader=KEY,
        holder=KEY,
        namespace="n",
        secret_fingerprint="s",
        hashes=(BlockHash(bytes(32)),),
        first=0,
    )


class Holder(worker_pb2_grpc.WorkerServicer):
    """Writes down what readers say, and says what the test wants."""

    def __init__(self) -> None:
        self.num_streams = 0
        self.heard: list[tuple[int, str]] = []
        self.answers: asyncio.Queue[pb.FromHolder | MoonpoolError] = asyncio.Queue()

    async def ReadPrefixes(  # noqa: N802 - the method's name in the schema
        self, request_iterator: AsyncIterator[Any], context: grpc.aio.ServicerContext
    ) -> AsyncIterator[Any]:
        self.num_streams += 1

        async def listen() -> None:
            async for item in request_iterator:
                self.heard.append((item.lease, item.WhichOneof("kind")))

        listening = asyncio.create_task(listen())
        try:
            while True:
                answer = await self.answers.get()
                if isinstance(answer, MoonpoolError):
                    raise answer
                yield answer
        finally:
            listening.cancel()

    async def until_heard(self, *heard: tuple[int, str]) -> None:
        await eventually(lambda: self.heard == list(heard), timeout_s=5, what=f"{heard}")

    def opened(self, lease: int, *blocks: int) -> None:
        """The lease is given, with no leaves if it has no blocks."""
        leaves = bytes(8 * len(blocks))
        opened = pb.PrefixOpened(block_ids=blocks, leaves=leaves)
        self.answers.put_nowait(pb.FromHolder(lease=lease, opened=opened))


class World:
    """A reader's leases at a holder."""

    def __init__(self, holder: Holder, leases: ReaderLeases, tasks: asyncio.TaskGroup) -> None:
        self.holder = holder
        self.leases = leases
        self._tasks = tasks

    def read(self, name: str) -> AsyncGenerator[HolderMessage, None]:
        return read_lease(self.leases, open_of(name), self._tasks)

    def open(self, name: str, on_end: Callable[[MoonpoolError | None], None]) -> LeaseNumber:
        return self.leases.open(
            open_of(name),
            traceparent="",
            tasks=self._tasks,
            on_message=lambda message: None,
            on_end=on_end,
        )


@asynccontextmanager
async def connected() -> AsyncIterator[World]:
    holder, server = Holder(), RpcServer()
    server.add(worker_pb2_grpc.add_WorkerServicer_to_server, holder, "moonpool.api.v1.Worker")
    await server.start()
    channel = make_channel(server.address)
    stub = worker_pb2_grpc.WorkerStub(channel)  # type: ignore[no-untyped-call]  # generated
    leases = ReaderLeases(stub.ReadPrefixes, peer="h")
    try:
        async with asyncio.timeout(20), asyncio.TaskGroup() as tasks:
            yield World(holder, leases, tasks)
            leases.close()
    finally:
        await channel.close()
        await server.stop(grace_s=0)


async def test_leases_share_a_stream_and_are_told_apart() -> None:
    async with connected() as world, aclosing(world.read("a")) as a, aclosing(world.read("b")) as b:
        first, second = asyncio.ensure_future(anext(a)), asyncio.ensure_future(anext(b))
        await world.holder.until_heard((1, "open"), (2, "open"))
        world.holder.opened(2, 7)
        world.holder.opened(1, 8)
        told = [await first, await second]
        assert all(isinstance(message, PrefixOpened) for message in told)
        assert [(m.attempt_id.request_id, m.block_ids) for m in told if isinstance(m, PrefixOpened)] == [
            ("a", (8,)), ("b", (7,)),
        ]  # fmt: skip
        await a.aclose()
        await world.holder.until_heard((1, "open"), (2, "open"), (1, "close"))
        assert world.holder.num_streams == 1


async def test_a_lease_that_the_holder_ends_is_not_given_back() -> None:
    async with connected() as world:
        async with aclosing(world.read("a")) as a:
            first = asyncio.ensure_future(anext(a, None))
            await world.holder.until_heard((1, "open"))
            world.holder.answers.put_nowait(pb.FromHolder(lease=1, ended=pb.PrefixEnded()))
            assert await first is None
        async with aclosing(world.read("b")) as b:
            second = asyncio.ensure_future(anext(b))
            await world.holder.until_heard((1, "open"), (2, "open"))
            # Nobody waits for it any more.
            world.holder.opened(1, 8)
            world.holder.opened(2, 7)
            assert isinstance(await second, PrefixOpened)


async def test_who_stops_waiting_gives_the_lease_back() -> None:
    async with connected() as world:
        first = asyncio.ensure_future(anext(world.read("a")))
        await world.holder.until_heard((1, "open"))
        first.cancel()
        await world.holder.until_heard((1, "open"), (1, "close"))


async def test_a_stream_that_breaks_breaks_its_leases_and_the_next_one_begins_anew() -> None:
    async with connected() as world:
        async with aclosing(world.read("a")) as a, aclosing(world.read("b")) as b:
            waiting = [asyncio.ensure_future(anext(a)), asyncio.ensure_future(anext(b))]
            await world.holder.until_heard((1, "open"), (2, "open"))
            world.holder.answers.put_nowait(UnavailableError("It stops.", code="worker_not_ready"))
            for task in waiting:
                with pytest.raises(MoonpoolError, match="It stops"):
                    await task
        async with aclosing(world.read("c")) as c:
            third = asyncio.ensure_future(anext(c))
            await world.holder.until_heard((1, "open"), (2, "open"), (3, "open"))
            world.holder.opened(3, 7)
            assert isinstance(await third, PrefixOpened)
        assert world.holder.num_streams == 2


async def test_a_lease_that_is_given_back_at_the_end_of_another_is_not_told_its_own() -> None:
    async with connected() as world:
        ended: list[str] = []

        def open_one(name: str, on_end: Callable[[], None]) -> LeaseNumber:
            def end(error: MoonpoolError | None) -> None:
                ended.append(name)
                on_end()

            return world.open(name, end)

        open_one("a", lambda: world.leases.give_back(second))
        second = open_one("b", lambda: None)
        open_one("c", lambda: None)
        await world.holder.until_heard((1, "open"), (2, "open"), (3, "open"))
        world.holder.answers.put_nowait(UnavailableError("It stops.", code="worker_not_ready"))
        await eventually(lambda: len(ended) == 2, timeout_s=5, what="the ends")
        assert ended == ["a", "c"]


async def test_words_that_cannot_be_read_end_their_lease_alone() -> None:
    async with connected() as world, aclosing(world.read("a")) as a, aclosing(world.read("b")) as b:
        first, second = asyncio.ensure_future(anext(a)), asyncio.ensure_future(anext(b))
        await world.holder.until_heard((1, "open"), (2, "open"))
        world.holder.answers.put_nowait(
            pb.FromHolder(lease=1, opened=pb.PrefixOpened(block_ids=(7,), leaves=b"odd"))
        )
        with pytest.raises(MoonpoolError, match="leaves"):
            await first
        await world.holder.until_heard((1, "open"), (2, "open"), (1, "close"))
        world.holder.opened(2, 7)
        assert isinstance(await second, PrefixOpened)


async def test_a_reader_that_closes_breaks_its_leases() -> None:
    async with connected() as world, aclosing(world.read("a")) as a:
        first = asyncio.ensure_future(anext(a))
        await world.holder.until_heard((1, "open"))
        world.leases.close()
        with pytest.raises(MoonpoolError, match="dropped"):
            await first


async def test_streams_that_the_holder_ends_leave_no_task_behind() -> None:
    async with connected() as world:
        num_tasks = len(asyncio.all_tasks())
        for _ in range(3):
            async with aclosing(world.read("a")) as a:
                first = asyncio.ensure_future(anext(a))
                await eventually(lambda: bool(world.holder.heard), timeout_s=5, what="an open")
                world.holder.heard.clear()
                world.holder.answers.put_nowait(
                    UnavailableError("It stops.", code="worker_not_ready")
                )
                with pytest.raises(MoonpoolError, match="It stops"):
                    await first
        await eventually(
            lambda: len(asyncio.all_tasks()) <= num_tasks, timeout_s=5, what="the tasks' end"
        )
