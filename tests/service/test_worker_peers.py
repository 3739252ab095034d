"""Connections to sources and the streams on them: what happens to whoever uses them when they end."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

import grpc
import pytest

from moonpool.api.v1 import worker_pb2 as pb
from moonpool.api.v1 import worker_pb2_grpc
from moonpool.errors import TransferError
from moonpool.handoff.effects import OpenStream
from moonpool.handoff.events import HandoffEvent, StreamBroken
from moonpool.handoff.messages import Open, SourceRef
from moonpool.ids import AttemptId, Incarnation, RequestId, WorkerId, WorkerKey
from moonpool.kv.layout import KvLayout, plan
from moonpool.kv.region import KvRegion
from moonpool.rpc.channel import make_channel
from moonpool.rpc.server import RpcServer
from moonpool.rpc.store import store_stub
from moonpool.transport.base import KvPeer, KvRead, ReadResult
from moonpool.worker.attempt_book import AttemptBook
from moonpool.worker.peers import Peer, PeerDirectory
from moonpool.worker.reader_leases import ReaderLeases
from moonpool.worker.source_streams import SourceStreams
from support.eventually import eventually

KEY = WorkerKey(WorkerId("p0"), Incarnation("0" * 16))
ATTEMPT = AttemptId(RequestId("r1"), 1)
LAYOUT = KvLayout.block_major(
    num_blocks=4, num_layers=2, num_kv_heads=1, head_dim=8, dtype="float32"
)


class NoKv:
    """A KvPeer that nobody reads from."""

    region: KvRegion
    is_lost = False

    async def read(self, read: KvRead, *, timeout_s: float) -> ReadResult:
        raise AssertionError("nothing is read here")

    async def close(self) -> None:
        return


class StuckKv(NoKv):
    """Its last copies do not end."""

    def __init__(self) -> None:
        self.is_closing = asyncio.Event()

    async def close(self) -> None:
        self.is_closing.set()
        await asyncio.Event().wait()


class BrokenKv(NoKv):
    """Cannot let go of the peer's memory."""

    async def close(self) -> None:
        raise OSError("it is still mapped")


class SilentSource(worker_pb2_grpc.WorkerServicer):
    """Takes handoff streams and says nothing on them."""

    def __init__(self) -> None:
        self.num_streams = 0

    async def Handoff(  # noqa: N802 - the method's name in the schema
        self, request_iterator: AsyncIterator[pb.FromDecode], context: grpc.aio.ServicerContext
    ) -> AsyncIterator[pb.FromPrefill]:
        self.num_streams += 1
        async for _ in request_iterator:
            pass
        return
        yield


@contextlib.asynccontextmanager
async def running(peers: PeerDirectory) -> AsyncIterator[asyncio.TaskGroup]:
    """The directory, run beside the test's own tasks."""
    async with asyncio.TaskGroup() as tasks:
        task = tasks.create_task(peers.run())
        await asyncio.sleep(0)
        yield tasks
        task.cancel()


def make_peer(address: str, *, key: WorkerKey = KEY, kv: KvPeer | None = None) -> Peer:
    channel = make_channel(address)
    stub = worker_pb2_grpc.WorkerStub(channel)  # type: ignore[no-untyped-call]  # generated
    return Peer(
        key=key,
        channel=channel,
        stub=stub,
        store_stub=store_stub(channel),
        prefixes=ReaderLeases(stub.ReadPrefixes, peer="h"),
        kv=kv or NoKv(),
        plan=plan(LAYOUT, LAYOUT),
        transport="none",
    )


@contextlib.asynccontextmanager
async def served(source: SilentSource) -> AsyncIterator[str]:
    """The source's address."""
    server = RpcServer()
    server.add(worker_pb2_grpc.add_WorkerServicer_to_server, source, "moonpool.api.v1.Worker")
    await server.start()
    try:
        yield server.address
    finally:
        await server.stop(grace_s=0)


async def test_the_streams_of_a_dropped_peer_are_broken() -> None:
    source = SilentSource()

    async def connect(reference: SourceRef) -> Peer:
        return make_peer(reference.address)

    peers = PeerDirectory(connect)
    events: list[HandoffEvent] = []
    streams = SourceStreams(
        peers=peers, book=AttemptBook("d0"), rpc_key="key", handle=events.append
    )
    async with served(source) as address, running(peers) as tasks:
        reference = SourceRef(key=KEY, address=address)
        opened = Open(attempt_id=ATTEMPT, reader=KEY, source=KEY, namespace="n")
        streams.open(OpenStream(attempt_id=ATTEMPT, source=reference, open=opened), tasks)
        await eventually(lambda: source.num_streams == 1, timeout_s=5.0, what="a stream")
        peers.drop(await peers.get(reference))
        await eventually(lambda: bool(events), timeout_s=5.0, what="the stream's end")
        assert events == [StreamBroken(attempt_id=ATTEMPT)]
        assert len(streams) == 0


async def test_who_waits_for_a_peer_shares_the_attempts_end() -> None:
    num_attempts = 0
    may_fail = asyncio.Event()

    async def connect(_source: SourceRef) -> Peer:
        nonlocal num_attempts
        num_attempts += 1
        await may_fail.wait()
        raise TransferError("nobody there", code="kv_peer_lost")

    peers = PeerDirectory(connect)
    reference = SourceRef(key=KEY, address="127.0.0.1:1")
    async with running(peers) as tasks:
        waiting = [tasks.create_task(failure_of(peers, reference)) for _ in range(3)]
        given_up = tasks.create_task(failure_of(peers, reference))
        await eventually(lambda: num_attempts == 1, timeout_s=5.0, what="an attempt")
        given_up.cancel()
        may_fail.set()
        assert [await task for task in waiting] == ["nobody there"] * 3
        assert num_attempts == 1
        # The next to ask tries anew.
        assert await failure_of(peers, reference) == "nobody there"
        assert num_attempts == 2


async def test_the_first_to_ask_may_leave() -> None:
    num_attempts = 0
    may_connect = asyncio.Event()

    async def connect(_source: SourceRef) -> Peer:
        nonlocal num_attempts
        num_attempts += 1
        await may_connect.wait()
        return make_peer("127.0.0.1:1")

    peers = PeerDirectory(connect)
    reference = SourceRef(key=KEY, address="127.0.0.1:1")
    async with running(peers) as tasks:
        first = tasks.create_task(peers.get(reference))
        await eventually(lambda: num_attempts == 1, timeout_s=5.0, what="an attempt")
        second = tasks.create_task(peers.get(reference))
        first.cancel()
        may_connect.set()
        assert (await second) is peers.connected(KEY)
        assert num_attempts == 1


async def test_a_directory_that_does_not_run_connects_to_nobody() -> None:
    async def connect(_source: SourceRef) -> Peer:
        raise AssertionError("nobody may be connected to")

    with pytest.raises(TransferError, match="stops"):
        await PeerDirectory(connect).get(SourceRef(key=KEY, address="127.0.0.1:1"))


async def test_a_peer_whose_closing_is_given_up_is_let_go_all_the_same() -> None:
    kv = StuckKv()
    peer = make_peer("127.0.0.1:1", kv=kv)

    async def connect(_source: SourceRef) -> Peer:
        return peer

    peers = PeerDirectory(connect)
    async with asyncio.timeout(5.0), running(peers):
        peers.drop(await peers.get(SourceRef(key=KEY, address="127.0.0.1:1")))
        await kv.is_closing.wait()
    assert is_closed(peer)


async def test_a_peer_that_cannot_be_closed_does_not_keep_the_others() -> None:
    made: list[Peer] = []

    async def connect(source: SourceRef) -> Peer:
        # Whoever is closed first is one that fails.
        kv = NoKv() if len(made) == 1 else BrokenKv()
        made.append(make_peer(source.address, key=source.key, kv=kv))
        return made[-1]

    peers = PeerDirectory(connect)
    task = asyncio.ensure_future(peers.run())
    await asyncio.sleep(0)
    for number in range(3):
        key = WorkerKey(WorkerId(f"p{number}"), Incarnation("0" * 16))
        await peers.get(SourceRef(key=key, address="127.0.0.1:1"))
    task.cancel()
    with pytest.raises(OSError, match="still mapped"):
        await task
    assert [is_closed(peer) for peer in made] == [True] * 3


def is_closed(peer: Peer) -> bool:
    return peer.channel.get_state() is grpc.ChannelConnectivity.SHUTDOWN


async def failure_of(peers: PeerDirectory, source: SourceRef) -> str:
    try:
        await peers.get(source)
    except TransferError as error:
        return error.message
    raise AssertionError("it was connected")
