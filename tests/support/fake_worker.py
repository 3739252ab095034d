"""A worker that a test plays by hand: real gRPC and bus towards the router, no engine behind."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from moonpool.api.v1 import worker_pb2_grpc
from moonpool.bus.protocol import Bus
from moonpool.bus.subjects import Subjects
from moonpool.config.secret import ClusterSecret
from moonpool.core.protocol import (
    BlockLedger,
    HandBackReason,
    HandedBack,
    Refused,
    RefuseReason,
    TokensReady,
)
from moonpool.errors import MoonpoolError
from moonpool.handoff.messages import DecodeRequest, PrefillRequest, RouterMessage
from moonpool.ids import AttemptId, Incarnation, WorkerId, WorkerKey
from moonpool.inference.output import FinishReason, TokenRun
from moonpool.kv.block_hash import ModelNamespace
from moonpool.kv.layout import KvLayout
from moonpool.kv.published_set import PublishedSet
from moonpool.kv.region import KvRegion
from moonpool.routing.worker_view import WorkerRole
from moonpool.rpc.server import RpcServer
from moonpool.wire.control import Announce, encode_announce
from moonpool.wire.kv_events import snapshot_to_pb
from moonpool.wire.session import (
    Ping,
    WorkerReport,
    frame_message_to_pb,
    hello_message_to_pb,
    router_message_from_pb,
)
from moonpool.wire.spans import Span
from moonpool.wire.worker import LoadReport, RouterHello, WorkerHello

_WAIT_S = 10.0
MessageT = TypeVar("MessageT", bound=RouterMessage)


@dataclass(frozen=True, slots=True, kw_only=True)
class FakeCluster:
    """What a router's cluster has in common."""

    secret: ClusterSecret
    fingerprint: str
    name: str = "local"


class FakeSession:
    """One router's stream."""

    def __init__(self, hello: RouterHello) -> None:
        self.hello = hello
        self.outgoing: asyncio.Queue[Any] = asyncio.Queue()
        self.messages: asyncio.Queue[RouterMessage] = asyncio.Queue()
        self.closed = asyncio.Event()


class FakeWorker(worker_pb2_grpc.WorkerServicer):
    """Use `fake_worker(...)`. What the router sends waits in `next`; the test answers."""

    def __init__(self, hello: WorkerHello, bus: Bus, subjects: Subjects) -> None:
        self.hello = hello
        self._bus = bus
        self._subjects = subjects
        self._sequence = 0
        self._server: RpcServer | None = None
        self.session: FakeSession | None = None
        #: Set to end every router's stream with it.
        self.refusal: MoonpoolError | None = None
        self._joined = asyncio.Event()
        #: What it says that its cache holds.
        self.published = PublishedSet()
        self.load = LoadReport(
            ledger=BlockLedger(num_total=1000, num_free=1000, num_cached=0, num_referenced=0)
        )

    @property
    def key(self) -> WorkerKey:
        return self.hello.worker

    # -- what a test does --

    async def announce(self, *, is_leaving: bool = False) -> None:
        self._sequence += 1
        await self._bus.publish(
            self._subjects.announce(self.key.worker_id),
            encode_announce(
                Announce(
                    worker=self.key,
                    role=self.hello.role,
                    grpc_address=self.hello.grpc_address,
                    model=self.hello.model,
                    sequence=self._sequence,
                    load=self.load,
                    valid_for_s=3.0,
                    is_leaving=is_leaving,
                    kv_head=self.published.head,
                )
            ),
        )

    async def joined(self) -> FakeSession:
        """The router's stream stands (again)."""
        async with asyncio.timeout(_WAIT_S):
            await self._joined.wait()
        assert self.session is not None
        return self.session

    async def next(self, message_type: type[MessageT]) -> MessageT:
        """The next message of the router, which must be of this type."""
        session = await self.joined()
        async with asyncio.timeout(_WAIT_S):
            message = await session.messages.get()
        assert isinstance(message, message_type), message
        return message

    def send(self, *reports: WorkerReport, spans: Sequence[Span] = ()) -> None:
        """One frame."""
        assert self.session is not None
        self.session.outgoing.put_nowait(frame_message_to_pb(reports, self.load, spans))

    def tokens(
        self,
        command: DecodeRequest | PrefillRequest,
        first_position: int,
        token_ids: Sequence[int],
        *,
        finish: FinishReason | None = None,
        num_cached_tokens: int = 0,
        num_peer_tokens: int = 0,
        num_peer_held_tokens: int | None = None,
        spans: Sequence[Span] = (),
    ) -> None:
        """A frame with tokens of one request."""
        message = TokensReady(
            attempt_id=command.attempt_id,
            run=TokenRun(
                first_position=first_position, token_ids=tuple(token_ids), finish_reason=finish
            ),
            num_cached_tokens=num_cached_tokens,
            num_peer_tokens=num_peer_tokens,
            num_peer_held_tokens=num_peer_held_tokens,
        )
        is_prefill = isinstance(command, PrefillRequest)
        self.send(WorkerReport(message=message, is_prefill_side=is_prefill), spans=spans)

    def refuse(self, attempt_id: AttemptId, reason: RefuseReason) -> None:
        message = Refused(attempt_id=attempt_id, reason=reason)
        self.send(WorkerReport(message=message, is_prefill_side=False))

    def hand_back(self, attempt_id: AttemptId, reason: HandBackReason) -> None:
        message = HandedBack(attempt_id=attempt_id, reason=reason)
        self.send(WorkerReport(message=message, is_prefill_side=False))

    def cut(self) -> None:
        """End the router's stream, as a crash would."""
        assert self.session is not None
        self.session.outgoing.put_nowait(None)

    async def stop(self) -> None:
        """Die: the stream is cut and nobody listens any more."""
        assert self._server is not None
        await self._server.stop(grace_s=0)

    # -- gRPC --

    async def start(self, key: str) -> None:
        self._server = RpcServer(key=key)
        self._server.add(
            worker_pb2_grpc.add_WorkerServicer_to_server, self, "moonpool.api.v1.Worker"
        )
        await self._server.start()
        address = self._server.address
        self.hello = replace(
            self.hello,
            grpc_address=address,
            regions=tuple(replace(region, grpc_address=address) for region in self.hello.regions),
        )

    async def Session(self, requests: Any, context: Any) -> AsyncIterator[Any]:  # noqa: N802
        hello = router_message_from_pb(await anext(requests))
        assert isinstance(hello, RouterHello)
        if self.refusal is not None:
            raise self.refusal
        session = self.session = FakeSession(hello)
        yield hello_message_to_pb(self.hello)
        # With the first frame the router has the load; a message can then come at any time.
        yield frame_message_to_pb((), self.load)
        self._joined.set()
        async with asyncio.TaskGroup() as tasks:
            reader = tasks.create_task(self._read(session, requests))
            try:
                while (message := await session.outgoing.get()) is not None:
                    yield message
            finally:
                reader.cancel()
                session.closed.set()
                self._joined.clear()

    async def Snapshot(self, request: Any, context: Any) -> AsyncIterator[Any]:  # noqa: N802
        for part in snapshot_to_pb(self.published.snapshot()):
            yield part

    async def _read(self, session: FakeSession, requests: Any) -> None:
        async for raw in requests:
            match router_message_from_pb(raw):
                case Ping():
                    # It lives, however long a test takes.
                    session.outgoing.put_nowait(frame_message_to_pb((), self.load))
                case RouterHello():
                    pass
                case message:
                    session.messages.put_nowait(message)
        session.outgoing.put_nowait(None)


def make_hello(
    key: WorkerKey,
    *,
    role: WorkerRole = WorkerRole.DECODE,
    secret_fingerprint: str = "0" * 16,
    fingerprint: str = "f" * 64,
    block_size: int = 16,
    max_model_len: int = 512,
) -> WorkerHello:
    """What a worker with a small pool says of itself."""
    layout = KvLayout.block_major(
        num_blocks=16,
        num_layers=2,
        num_kv_heads=1,
        head_dim=8,
        dtype="float32",
        block_size=block_size,
    )
    return WorkerHello(
        worker=key,
        role=role,
        model="tiny",
        namespace=ModelNamespace(
            model_fingerprint=fingerprint,
            compute_dtype="float32",
            kv_dtype="float32",
            block_size=block_size,
        ),
        secret_fingerprint=secret_fingerprint,
        regions=(
            KvRegion(
                worker=key,
                layout=layout,
                pool_bytes=layout.pool_bytes,
                digest_kind="xxh3-64",
                host_id="host",
                fd_socket="",
                grpc_address="127.0.0.1:1",
            ),
        ),
        max_model_len=max_model_len,
        max_num_seqs=8,
        max_num_batched_tokens=512,
        grpc_address="127.0.0.1:1",
        version="0",
    )


@asynccontextmanager
async def fake_worker(
    cluster: FakeCluster,
    bus: Bus,
    worker_id: str = "decode-0",
    *,
    role: WorkerRole = WorkerRole.DECODE,
    incarnation: str = "a" * 16,
    secret_fingerprint: str | None = None,
    fingerprint: str | None = None,
    block_size: int = 16,
) -> AsyncIterator[FakeWorker]:
    """A listening worker that has announced itself once."""
    hello = make_hello(
        WorkerKey(WorkerId(worker_id), Incarnation(incarnation)),
        role=role,
        secret_fingerprint=secret_fingerprint or cluster.secret.fingerprint,
        fingerprint=fingerprint or cluster.fingerprint,
        block_size=block_size,
    )
    worker = FakeWorker(hello, bus, Subjects(cluster.name))
    await worker.start(cluster.secret.rpc_key)
    try:
        await worker.announce()
        yield worker
    finally:
        await worker.stop()
