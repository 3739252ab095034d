"""Client: the blocking SDK. One client serves any number of threads.

A Generation belongs to the thread that reads it; `close` may come from any. The request is sent by
`generate`, so the answer is being computed while the caller does something else.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Iterator
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
from moonpool.clock import Clock, SystemClock
from moonpool.errors import MoonpoolError
from moonpool.ids import RequestId
from moonpool.inference.generation import GenerationChunk
from moonpool.rpc.errors import errors_from
from moonpool.rpc.metadata import call_metadata
from moonpool.rpc.options import PUBLIC_MESSAGE_BYTES, channel_options

#: Of a call that names none; as the `openai` package.
DEFAULT_TIMEOUT_S = 600.0


class Client:
    """A connection to a router's gRPC door; connects when first used, and again when it is lost.

    Args:
        address: `host:port`.
        api_key: The door's key, if it has one.
        timeout_s: Deadline of calls that name none, retries included; None leaves it to the server.
        retry: When a call that failed before its first token is made again.
    """

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
        self._channel = grpc.insecure_channel(
            address, options=channel_options(PUBLIC_MESSAGE_BYTES)
        )
        self._stub = inference_pb2_grpc.InferenceStub(self._channel)  # type: ignore[no-untyped-call]  # generated

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Cancel what runs and close the connection. Idempotent."""
        self._channel.close()

    def generate(
        self,
        prompt: str | None = None,
        *,
        timeout_s: float | None = None,
        retry: RetryPolicy | None = None,
        **options: Unpack[GenerateOptions],
    ) -> Generation:
        """Ask, and get the answer as it is drawn.

        Args:
            prompt: Text to continue; or give `messages` or `token_ids`.
            timeout_s, retry: This call's own, instead of the client's.
            options: See GenerateOptions.

        Raises:
            InvalidRequestError: The request cannot be sent. Everything else raises when it is read.
        """
        request = make_request(prompt, **options)
        message = request_to_message(request)
        metadata = call_metadata(key=self._api_key, traceparent=request.traceparent)

        def start(remaining_s: float | None) -> Any:  # Any: grpc's call objects are untyped
            return self._stub.Generate(message, timeout=remaining_s, metadata=metadata)

        return Generation(
            start,
            attempts=self._attempts(timeout_s, retry),
            peer=self._address,
            clock=self._clock,
            draw=self._random.random,
        )

    def complete(
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
        with self.generate(prompt, timeout_s=timeout_s, retry=retry, **options) as generation:
            return generation.result()

    def list_models(self, *, timeout_s: float | None = None) -> tuple[Model, ...]:
        """What the server offers.

        Raises:
            MoonpoolError: As `complete`.
        """
        attempts = self._attempts(timeout_s, None)
        metadata = call_metadata(key=self._api_key)
        while True:
            try:
                with errors_from(self._address):
                    reply = self._stub.ListModels(
                        pb.ListModelsRequest(),
                        timeout=attempts.remaining_s(self._clock.now()),
                        metadata=metadata,
                    )
                return models_from_message(reply)
            except MoonpoolError as error:
                pause_s = attempts.pause_s(error, now=self._clock.now(), draw=self._random.random())
                if pause_s is None:
                    raise
                time.sleep(pause_s)

    def _attempts(self, timeout_s: float | None, retry: RetryPolicy | None) -> CallAttempts:
        timeout_s = self._timeout_s if timeout_s is None else timeout_s
        deadline = None if timeout_s is None else self._clock.now() + timeout_s
        return CallAttempts(retry or self._retry, deadline=deadline)


class Generation(Iterator[GenerationChunk]):
    """One answer: iterate over its chunks, or ask for its `result()`.

    Not read to its end and closed (or dropped), it is cancelled on the server.
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
        self._closed = threading.Event()
        self._call = start(attempts.remaining_s(clock.now()))

    @property
    def request_id(self) -> RequestId | None:
        """The router's name for it; None before the first chunk."""
        return self._answer.request_id

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def __del__(self) -> None:
        if hasattr(self, "_call"):
            self.close()

    def close(self) -> None:
        """Cancel what is left of it. Idempotent; a thread that reads gets CancelledByClientError."""
        self._closed.set()
        self._call.cancel()

    def __next__(self) -> GenerationChunk:
        """The next piece of text and tokens; waits for it.

        Raises:
            MoonpoolError: What the server raised, or what the transport saw; again on every call.
            StopIteration: The answer is complete.
        """
        while True:
            if self._error is not None:
                raise self._error
            if self._answer.result is not None:
                raise StopIteration
            try:
                chunk = self._read()
            except MoonpoolError as error:
                self._call.cancel()
                if not self._tries_again(error):
                    self._error = error
                continue
            if chunk is not None:
                return chunk

    def result(self) -> GenerationResult:
        """Read to the end, and the whole answer (what was iterated over before included).

        Raises:
            MoonpoolError: As iteration.
        """
        for _ in self:
            pass
        assert self._answer.result is not None
        return self._answer.result

    def _read(self) -> GenerationChunk | None:
        if self._closed.is_set():
            raise closed_early()
        with errors_from(self._peer):
            message = next(self._call, None)
        if message is None:
            raise self._answer.cut_off()
        return self._answer.add(message)

    def _tries_again(self, error: MoonpoolError) -> bool:
        """Wait and ask again, if that is of use."""
        if self._answer.has_begun:
            return False
        pause_s = self._attempts.pause_s(error, now=self._clock.now(), draw=self._draw())
        if pause_s is None or self._closed.wait(pause_s):
            return False
        self._call = self._start(self._attempts.remaining_s(self._clock.now()))
        # A close in between has cancelled the call before this one; the next read says so.
        return True
