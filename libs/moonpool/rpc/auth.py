"""The cluster key on internal calls: a bearer token that every process of the cluster derives.

Without it a server does not bind anything but loopback. It is compared in constant time and never
logged. Health checks need no key.
"""

from __future__ import annotations

import hmac
from collections.abc import Awaitable, Callable

import grpc

from moonpool.errors import UnauthenticatedError
from moonpool.rpc.interceptor import abort
from moonpool.rpc.metadata import AUTHORIZATION

_OPEN_PREFIX = "/grpc.health.v1.Health/"


class KeyInterceptor(grpc.aio.ServerInterceptor):  # type: ignore[misc]  # grpc has no types
    """Answers UNAUTHENTICATED to a call without the key."""

    def __init__(self, key: str) -> None:
        self._expected = f"Bearer {key}".encode()

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler | None]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler | None:
        if handler_call_details.method.startswith(_OPEN_PREFIX):
            return await continuation(handler_call_details)
        given = b""
        for key, value in handler_call_details.invocation_metadata:
            if key == AUTHORIZATION:
                given = value.encode() if isinstance(value, str) else value
        if hmac.compare_digest(given, self._expected):
            return await continuation(handler_call_details)
        # Of all kinds this one does not wait for a first message, and fits every caller.
        return grpc.stream_stream_rpc_method_handler(_refuse)


async def _refuse(_requests: object, context: grpc.aio.ServicerContext) -> None:
    await abort(context, UnauthenticatedError("The key is missing or is not this cluster's."))
