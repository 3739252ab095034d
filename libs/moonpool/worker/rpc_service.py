"""WorkerServicer: the worker's gRPC methods. Decodes, checks who calls, and hands over to the shell.

Until the engine is ready, and once the worker has ended, every method answers UNAVAILABLE.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

import grpc
import structlog

from moonpool.api.v1 import worker_pb2 as pb
from moonpool.api.v1 import worker_pb2_grpc
from moonpool.errors import (
    DeadlineExceededError,
    FailedPreconditionError,
    InvalidRequestError,
    UnavailableError,
)
from moonpool.handoff.messages import Commit, Open, PrefixOpen, PrefixOpened, RouterMessage
from moonpool.wire.fields import InvalidMessageError
from moonpool.wire.handoff import open_from_pb, source_message_to_pb
from moonpool.wire.kv_events import snapshot_to_pb
from moonpool.wire.prefix_read import (
    LeaseClosed,
    LeaseNumber,
    holder_message_to_pb,
    reader_message_from_pb,
)
from moonpool.wire.request import worker_key_from_pb
from moonpool.wire.session import (
    Ping,
    WorkerReport,
    frame_message_to_pb,
    hello_message_to_pb,
    refusal_of,
    router_message_from_pb,
)
from moonpool.wire.steps import steps_to_pb
from moonpool.wire.worker import RouterHello, ledger_to_pb, worker_hello_to_pb
from moonpool.worker.compatibility import check_namespace, check_secret
from moonpool.worker.shell import WorkerShell

log = structlog.get_logger("moonpool.worker")

SERVICE_NAME = pb.DESCRIPTOR.services_by_name["Worker"].full_name

#: The first message of a stream comes at once.
_FIRST_MESSAGE_S = 5.0
#: Steps in one answer: encoded in a few milliseconds.
_MAX_STEPS = 2_048


class WorkerServicer(worker_pb2_grpc.WorkerServicer):  # generated, untyped
    """Serves once `open` was called, until `close`."""

    def __init__(self) -> None:
        self._shell: WorkerShell | None = None

    def open(self, shell: WorkerShell) -> None:
        self._shell = shell

    def close(self) -> None:
        self._shell = None

    # Any: requests of generated code, contexts of grpc; neither has types.

    async def Session(  # noqa: N802 - the method's name in the schema
        self, request_iterator: AsyncIterator[Any], context: grpc.aio.ServicerContext
    ) -> AsyncIterator[Any]:
        shell = self._opened()
        hello = router_message_from_pb(await _first(request_iterator, "a router's hello"))
        if not isinstance(hello, RouterHello):
            raise InvalidRequestError("A session begins with a hello.", param="hello")
        peer = f"router {hello.router_id}"
        check_secret(peer, hello.secret_fingerprint, shell.hello.secret_fingerprint)
        if hello.namespace is not None:
            check_namespace(peer, hello.namespace, shell.hello.namespace)
        log.info("worker.session_opened", router=hello.router_id)
        try:
            yield hello_message_to_pb(shell.hello)
            messages = _router_messages(request_iterator)
            async with contextlib.aclosing(
                shell.sessions.serve(hello.router_id, messages, shell.tasks)
            ) as frames:
                async for frame in frames:
                    content = frame.content
                    yield frame_message_to_pb(content.reports, frame.load, content.spans)
        finally:
            log.info("worker.session_ended", router=hello.router_id)

    async def Handoff(  # noqa: N802 - the method's name in the schema
        self, request_iterator: AsyncIterator[Any], context: grpc.aio.ServicerContext
    ) -> AsyncIterator[Any]:
        shell = self._opened()
        opened: Open = open_from_pb(await _first(request_iterator, "an Open"))
        shell.failpoints.hit("prefill.before_open")
        async with contextlib.aclosing(
            shell.streams.serve(
                opened, requests=request_iterator, tasks=shell.tasks, handle=shell.handle
            )
        ) as messages:
            async for message in messages:
                if not isinstance(message, Commit):
                    yield source_message_to_pb(message)
                    continue
                shell.failpoints.hit("prefill.before_commit")
                times = shell.book.commit_times(message.attempt_id)
                try:
                    yield source_message_to_pb(
                        message,
                        last_layer_unix_ns=times.last_layer_unix_ns,
                        first_token_unix_ns=times.first_token_unix_ns,
                    )
                finally:
                    # A reader that has all it needs may cancel before this call goes on.
                    shell.failpoints.hit("prefill.after_commit")

    async def ReadPrefixes(  # noqa: N802 - the method's name in the schema
        self, request_iterator: AsyncIterator[Any], context: grpc.aio.ServicerContext
    ) -> AsyncIterator[Any]:
        shell = self._opened()
        async with contextlib.aclosing(
            shell.holder_leases.serve(
                requests=_reader_messages(request_iterator),
                tasks=shell.tasks,
                handle=shell.handle,
            )
        ) as messages:
            async for lease, message in messages:
                if not isinstance(message, PrefixOpened):
                    yield holder_message_to_pb(lease, message)
                    continue
                try:
                    yield holder_message_to_pb(lease, message)
                finally:
                    # A reader that has all it needs may cancel before this call goes on.
                    shell.failpoints.hit("hold.after_opened")

    async def Describe(self, request: Any, context: grpc.aio.ServicerContext) -> Any:  # noqa: N802
        return worker_hello_to_pb(self._opened().hello)

    async def Ledger(self, request: Any, context: grpc.aio.ServicerContext) -> Any:  # noqa: N802
        return ledger_to_pb(self._opened().ledger_report())

    async def Steps(self, request: Any, context: grpc.aio.ServicerContext) -> Any:  # noqa: N802
        max_steps = min(request.max_steps or _MAX_STEPS, _MAX_STEPS)
        return steps_to_pb(self._opened().steps.after(request.after_step, max_steps=max_steps))

    async def Drain(self, request: Any, context: grpc.aio.ServicerContext) -> Any:  # noqa: N802
        shell = self._opened()
        shell.begin_drain()
        shell.tasks.create_task(_hand_back_later(shell, request.timeout_ms / 1_000))
        return pb.DrainReply()

    async def Snapshot(  # noqa: N802 - the method's name in the schema
        self, request: Any, context: grpc.aio.ServicerContext
    ) -> AsyncIterator[Any]:
        shell = self._opened()
        worker = worker_key_from_pb(request.worker, "worker")
        if worker != shell.hello.worker:
            raise FailedPreconditionError(f"This is {shell.hello.worker}, not {worker}.")
        shell.failpoints.hit("kv.before_snapshot")
        for part in snapshot_to_pb(await shell.kv.snapshot()):
            yield part

    async def ClearCache(self, request: Any, context: grpc.aio.ServicerContext) -> Any:  # noqa: N802
        self._opened().clear_cache()
        return pb.ClearCacheReply()

    def _opened(self) -> WorkerShell:
        if self._shell is None:
            raise UnavailableError("The worker is starting or stopping.", code="worker_not_ready")
        return self._shell


async def _first(requests: AsyncIterator[Any], what: str) -> Any:  # Any: generated messages
    try:
        async with asyncio.timeout(_FIRST_MESSAGE_S):
            return await anext(requests)
    except StopAsyncIteration:
        raise InvalidRequestError(f"The stream ended before {what}.") from None
    except TimeoutError:
        raise DeadlineExceededError(f"No {what} came in {_FIRST_MESSAGE_S:g} s.") from None


async def _reader_messages(
    requests: AsyncIterator[Any],
) -> AsyncIterator[tuple[LeaseNumber, PrefixOpen | LeaseClosed]]:
    async for item in requests:
        yield reader_message_from_pb(item)


async def _router_messages(
    requests: AsyncIterator[Any],
) -> AsyncIterator[RouterMessage | WorkerReport | None]:
    """See RouterSessions.serve. One bad request is refused; the stream is everyone's."""
    async for item in requests:
        try:
            message = router_message_from_pb(item)
        except InvalidMessageError as error:
            refusal = refusal_of(item)
            if refusal is None:
                raise
            attempt = str(refusal.message.attempt_id)
            log.warning("worker.request_unreadable", attempt=attempt, why=error.message)
            yield refusal
            continue
        if isinstance(message, RouterHello):
            raise InvalidRequestError("A second hello on a session.", param="hello")
        yield None if isinstance(message, Ping) else message


async def _hand_back_later(shell: WorkerShell, timeout_s: float) -> None:
    """What has not finished by then is given back."""
    try:
        async with asyncio.timeout(timeout_s):
            await shell.wait_quiet()
    except TimeoutError:
        shell.hand_back()
