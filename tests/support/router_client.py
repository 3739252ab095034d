"""A router reduced to its stream: sends what a test says, and collects what a worker reports."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from types import TracebackType
from typing import Any, Self

import grpc

from moonpool.api.v1 import worker_pb2_grpc
from moonpool.core.protocol import HandedBack, Refused, TokensReady
from moonpool.handoff.messages import (
    AbortRequest,
    DecodeRequest,
    PeerPrefix,
    PrefillRequest,
    RouterMessage,
    SourceRef,
)
from moonpool.ids import AttemptId, WorkerKey
from moonpool.inference.request import InferenceRequest
from moonpool.kv.block_hash import ModelNamespace
from moonpool.rpc.channel import make_channel
from moonpool.rpc.metadata import call_metadata
from moonpool.wire.session import (
    Ping,
    WorkerFrame,
    WorkerReport,
    router_message_to_pb,
    worker_message_from_pb,
)
from moonpool.wire.spans import Span
from moonpool.wire.worker import LoadReport, RouterHello, WorkerHello

_PING_S = 1.0


class RouterClient:
    """One session with one worker. Enter it; `hello` is there on entry."""

    def __init__(
        self,
        address: str,
        *,
        rpc_key: str,
        secret_fingerprint: str,
        router_id: str = "router-test",
        namespace: ModelNamespace | None = None,
    ) -> None:
        self._metadata = call_metadata(key=rpc_key)
        self._channel = make_channel(address)
        self._hello = RouterHello(
            router_id=router_id, namespace=namespace, secret_fingerprint=secret_fingerprint
        )
        self._outgoing: asyncio.Queue[Any] = asyncio.Queue()
        self._stack = contextlib.AsyncExitStack()
        self._changed = asyncio.Event()
        self.hello: WorkerHello | None = None
        self.reports: list[WorkerReport] = []
        self.spans: list[Span] = []
        self.loads: list[LoadReport] = []
        self.num_frames = 0
        #: The error that ended the stream, if one did.
        self.failure: Exception | None = None

    @property
    def key(self) -> WorkerKey:
        assert self.hello is not None
        return self.hello.worker

    @property
    def source(self) -> SourceRef:
        """This worker as the source of a handoff."""
        assert self.hello is not None
        return SourceRef(key=self.hello.worker, address=self.hello.grpc_address)

    async def __aenter__(self) -> Self:
        stub = worker_pb2_grpc.WorkerStub(self._channel)  # type: ignore[no-untyped-call]
        call = stub.Session(self._messages(), metadata=self._metadata)
        first = worker_message_from_pb(await call.read())
        assert isinstance(first, WorkerHello), first
        self.hello = first
        self._stack.push_async_callback(self._channel.close)
        group = await self._stack.enter_async_context(asyncio.TaskGroup())
        reader = group.create_task(self._read(call))
        self._stack.callback(reader.cancel)
        self._stack.callback(call.cancel)
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self._stack.aclose()

    def send(self, message: RouterMessage) -> None:
        self._outgoing.put_nowait(message)

    def peer(self, num_tokens: int) -> PeerPrefix:
        """This worker as one that holds so many tokens of a prompt."""
        assert self.hello is not None
        return PeerPrefix(
            key=self.hello.worker, address=self.hello.grpc_address, num_tokens=num_tokens
        )

    def prefill(
        self,
        request: InferenceRequest,
        attempt: int = 1,
        *,
        peer: PeerPrefix | None = None,
        deadline_s: float = 60.0,
    ) -> None:
        self.send(
            PrefillRequest(request=request, attempt=attempt, peer=peer, deadline_s=deadline_s)
        )

    def decode(
        self,
        request: InferenceRequest,
        attempt: int = 1,
        *,
        source: SourceRef | None = None,
        peer: PeerPrefix | None = None,
        deadline_s: float = 60.0,
    ) -> None:
        self.send(
            DecodeRequest(
                request=request, attempt=attempt, source=source, peer=peer, deadline_s=deadline_s
            )
        )

    def abort(self, request: InferenceRequest, attempt: int = 1) -> None:
        self.send(AbortRequest(attempt_id=AttemptId(request.request_id, attempt)))

    def tokens(self, request: InferenceRequest, attempt: int = 1) -> list[int]:
        """The attempt's tokens so far; fails on a gap or a token that came twice."""
        tokens: list[int] = []
        first = len(request.emitted_token_ids)
        for report in self.reports:
            message = report.message
            if isinstance(message, TokensReady) and message.attempt_id == (
                request.request_id,
                attempt,
            ):
                assert message.run.first_position == first + len(tokens), (message, tokens)
                tokens += message.run.token_ids
        return tokens

    async def until(
        self, request: InferenceRequest, *kinds: type, attempt: int = 1, timeout_s: float = 20.0
    ) -> TokensReady | Refused | HandedBack:
        """Wait for a report of these kinds about the attempt."""
        async with asyncio.timeout(timeout_s):
            while True:
                for report in self.reports:
                    message = report.message
                    if message.attempt_id != (request.request_id, attempt):
                        continue
                    if isinstance(message, kinds):
                        return message
                    assert isinstance(message, TokensReady), message
                await self._wait()

    async def answer(
        self, request: InferenceRequest, attempt: int = 1, *, timeout_s: float = 30.0
    ) -> list[int]:
        """All tokens of an attempt, which must end well."""
        async with asyncio.timeout(timeout_s):
            while True:
                for report in self.reports:
                    message = report.message
                    if message.attempt_id != (request.request_id, attempt):
                        continue
                    assert isinstance(message, TokensReady), message
                    if message.run.finish_reason is not None:
                        return self.tokens(request, attempt)
                await self._wait()

    async def until_closed(self, *, timeout_s: float = 10.0) -> Exception | None:
        async with asyncio.timeout(timeout_s):
            while self.failure is None:
                await self._wait()
        return self.failure

    async def _wait(self) -> None:
        self._changed.clear()
        await self._changed.wait()

    async def _messages(self) -> AsyncIterator[Any]:
        yield router_message_to_pb(self._hello)
        while True:
            try:
                async with asyncio.timeout(_PING_S):
                    message = await self._outgoing.get()
            except TimeoutError:
                message = Ping()
            yield router_message_to_pb(message)

    async def _read(self, call: Any) -> None:
        try:
            while (item := await call.read()) is not grpc.aio.EOF:
                frame = worker_message_from_pb(item)
                assert isinstance(frame, WorkerFrame), frame
                self.num_frames += 1
                self.reports += frame.reports
                self.spans += frame.spans
                self.loads.append(frame.load)
                self._changed.set()
            self.failure = EOFError("the worker ended the stream")
        except Exception as error:  # noqa: BLE001 - kept for the test
            self.failure = error
        self._changed.set()
