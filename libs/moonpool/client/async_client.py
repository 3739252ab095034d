"""AsyncClient: the SDK on an event loop. The same calls as Client, with `async for` and `await`."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Callable
from types import TracebackType
from typing import Any, Self, Unpack

import grpc

from moonpool.api.v1 import inference_pb2 as pb
from moonpool.api.v1 import inference_pb2_grpc
from moonpool.client.request import GenerateOptions, make_request, request_to_message
from moonpool.client.result import (
    AnswerAssembly,
    GenerationResult,
    Model,
    closed_early,
    models_from_message,
)
from moonpool.client.retry import CallAttempts, RetryPolicy
from moonpool.client.sync_client import DEFAULT_TIMEOUT_S
from moonpool.clock import Clock, SystemClock
from moonpool.errors import MoonpoolError
from moonpool.ids import RequestId
from moonpool.inference.generation import GenerationChunk
from moonpool.rpc.channel import make_channel
from moonpool.rpc.errors import errors_from
from moonpool.rpc.metadata import call_metadata
from moonpool.rpc.options import PUBLIC_MESSAGE_BYTES


class AsyncClient:
    """A connection to a router's gRPC door, for one event loop. Arguments as Client's."""

    def __init__(
        self,
        address: str,
        *,
        api_key: str | None = None,
        timeout_s: float | None = DEFAULT_TIMEOUT_S,
        retry: RetryPolicy | None = None,
        clock: Clock | None = None,
    ) -> None:
        self._address = address
        self._api_key = api_key or ""
        self._timeout_s = timeout_s
        self._retry = retry or RetryPolicy()
        self._clock = clock or SystemClock()
        self._random = random.Random()
        # A channel belongs to a loop, and a client may be made before there is one.
        self._channel: grpc.aio.Channel | None = None
        self._is_closed = False

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """Cancel what runs and close the connection. Idempotent."""
        self._is_closed = True
        if self._channel is not None:
            await self._channel.close()

    def generate(
        self,
        prompt: str | None = None,
        *,
        timeout_s: float | None = None,
        retry: RetryPolicy | None = None,
        **options: Unpack[GenerateOptions],
    ) -> AsyncGeneration:
        """Ask, and get the answer as it is drawn; see Client.generate. The request is sent at once."""
        request = make_request(prompt, **options)
        message = request_to_message(request)
        metadata = call_metadata(key=self._api_key, traceparent=request.traceparent)
        stub = self._stub()

        def start(remaining_s: float | None) -> Any:  # Any: grpc's call objects are untyped
            return stub.Generate(message, timeout=remaining_s, metadata=metadata)

        return AsyncGeneration(
            start,
            attempts=self._attempts(timeout_s, retry),
            peer=self._address,
            clock=self._clock,
            draw=self._random.random,
        )

    async def complete(
        self,
        prompt: str | None = None,
        *,
        timeout_s: float | None = None,
        retry: RetryPolicy | None = None,
        **options: Unpack[GenerateOptions],
    ) -> GenerationResult:
        """As `generate`, but waits for the whole answer.

        Raises:
            MoonpoolError: What the server raised, or what the transport saw.
        """
        async with self.generate(prompt, timeout_s=timeout_s, retry=retry, **options) as answer:
            return await answer.result()

    async def list_models(self, *, timeout_s: float | None = None) -> tuple[Model, ...]:
        """What the server offers.

        Raises:
            MoonpoolError: As `complete`.
        """
        attempts = self._attempts(timeout_s, None)
        metadata = call_metadata(key=self._api_key)
        stub = self._stub()
        while True:
            try:
                with errors_from(self._address):
                    reply = await stub.ListModels(
                        pb.ListModelsRequest(),
                        timeout=attempts.remaining_s(self._clock.now()),
                        metadata=metadata,
                    )
                return models_from_message(reply)
            except MoonpoolError as error:
                pause_s = attempts.pause_s(error, now=self._clock.now(), draw=self._random.random())
                if pause_s is None:
                    raise
            await asyncio.sleep(pause_s)

    def _stub(self) -> Any:  # Any: generated stubs are untyped
        if self._is_closed:
            raise ValueError("the client is closed")
        if self._channel is None:
            self._channel = make_channel(self._address, max_message_bytes=PUBLIC_MESSAGE_BYTES)
        return inference_pb2_grpc.InferenceStub(self._channel)  # type: ignore[no-untyped-call]  # generated

    def _attempts(self, timeout_s: float | None, retry: RetryPolicy | None) -> CallAttempts:
        timeout_s = self._timeout_s if timeout_s is None else timeout_s
        deadline = None if timeout_s is None else self._clock.now() + timeout_s
        return CallAttempts(retry or self._retry, deadline=deadline)


class AsyncGeneration(AsyncIterator[GenerationChunk]):
    """One answer: iterate over its chunks, or await its `result()`.

    Not read to its end and closed (or dropped), it is cancelled on the server. One task reads it; a
    reader that is cancelled closes it.
    """

    def __init__(
        self,
        start: Callable[[float | None], Any],
        *,
        attempts: CallAttempts,
        peer: str,
        clock: Clock,
        draw: Callable[[], float],
    ) -> None:
        self._start = start
        self._attempts = attempts
        self._peer = peer
        self._clock = clock
        self._draw = draw
        self._answer = AnswerAssembly()
        self._error: MoonpoolError | None = None
        self._closed = asyncio.Event()
        self._call = start(attempts.remaining_s(clock.now()))

    @property
    def request_id(self) -> RequestId | None:
        """The router's name for it; None before the first chunk."""
        return self._answer.request_id

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def __del__(self) -> None:
        # grpc's own clean-up waits for a garbage collection: a call and its tasks are a cycle.
        if hasattr(self, "_call") and not self._call.done():
            self._call.cancel()

    def close(self) -> None:
        """Cancel what is left of it. Idempotent; a task that reads gets CancelledByClientError."""
        self._closed.set()
        self._call.cancel()

    async def aclose(self) -> None:
        """As `close`: for `contextlib.aclosing`."""
        self.close()

    async def __anext__(self) -> GenerationChunk:
        """The next piece of text and tokens; waits for it.

        Raises:
            MoonpoolError: What the server raised, or what the transport saw; again on every call.
            StopAsyncIteration: The answer is complete.
        """
        while True:
            if self._error is not None:
                raise self._error
            if self._answer.result is not None:
                raise StopAsyncIteration
            try:
                chunk = await self._read()
            except MoonpoolError as error:
                self._call.cancel()
                if not await self._tries_again(error):
                    self._error = error
                continue
            if chunk is not None:
                return chunk

    async def result(self) -> GenerationResult:
        """Read to the end, and the whole answer (what was iterated over before included).

        Raises:
            MoonpoolError: As iteration.
        """
        async for _ in self:
            pass
        assert self._answer.result is not None
        return self._answer.result

    async def _read(self) -> GenerationChunk | None:
        if self._closed.is_set():
            raise closed_early()
        try:
            with errors_from(self._peer):
                message = await self._call.read()
        except asyncio.CancelledError:
            self.close()
            task = asyncio.current_task()
            if task is not None and task.cancelling() > 0:
                raise
            # grpc raises the same when the call or its channel is closed under a reader.
            raise closed_early() from None
        if message is grpc.aio.EOF:
            raise self._answer.cut_off()
        return self._answer.add(message)

    async def _tries_again(self, error: MoonpoolError) -> bool:
        """Wait and ask again, if that is of use."""
        if self._answer.has_begun:
            return False
        pause_s = self._attempts.pause_s(error, now=self._clock.now(), draw=self._draw())
        if pause_s is None:
            return False
        try:
            async with asyncio.timeout(pause_s):
                await self._closed.wait()
            return False
        except TimeoutError:
            self._call = self._start(self._attempts.remaining_s(self._clock.now()))
            return True
