"""Calls with a deadline. A unary call is one await; a stream is opened here and read by its caller."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from typing import Any, TypeVar

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from moonpool.rpc.errors import errors_from
from moonpool.rpc.metadata import Metadata

ReplyT = TypeVar("ReplyT")


async def call(
    method: Any,  # Any: generated stubs are untyped
    request: object,
    reply_type: type[ReplyT],
    *,
    peer: str,
    deadline_s: float,
    metadata: Metadata = (),
    wait_for_ready: bool = False,
) -> ReplyT:
    """One unary call.

    Args:
        method: A stub's method (`stub.Describe`).
        reply_type: What it returns; only for the type checker and an assertion.
        peer: Named in errors.
        deadline_s: Time until DEADLINE_EXCEEDED; the peer sees what remains of it.
        wait_for_ready: Wait for the connection within the deadline instead of failing at once.

    Raises:
        MoonpoolError: What the peer raised, or what the transport saw, with its class and code.
    """
    with errors_from(peer):
        reply = await method(
            request, timeout=deadline_s, metadata=metadata, wait_for_ready=wait_for_ready
        )
    assert isinstance(reply, reply_type), (type(reply), reply_type)
    return reply


async def replies(
    stream: Any,  # Any: grpc's call objects are untyped
    reply_type: type[ReplyT],
    *,
    peer: str,
) -> AsyncGenerator[ReplyT, None]:
    """The messages of a response stream; cancels the call when the reader stops early.

    Raises:
        MoonpoolError: As `call`.
    """
    try:
        with errors_from(peer):
            while (reply := await stream.read()) is not grpc.aio.EOF:
                assert isinstance(reply, reply_type), (type(reply), reply_type)
                yield reply
    finally:
        stream.cancel()


async def is_serving(
    channel: grpc.aio.Channel, *, peer: str, deadline_s: float, service_name: str = ""
) -> bool:
    """Ask the standard health service once.

    Raises:
        MoonpoolError: The peer did not answer.
    """
    reply = await call(
        health_pb2_grpc.HealthStub(channel).Check,
        health_pb2.HealthCheckRequest(service=service_name),
        health_pb2.HealthCheckResponse,
        peer=peer,
        deadline_s=deadline_s,
    )
    return bool(reply.status == health_pb2.HealthCheckResponse.SERVING)
