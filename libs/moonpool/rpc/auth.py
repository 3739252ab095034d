"""Keys on calls: a bearer token that every process of the cluster derives, or those of a door's clients.

Without one a server does not bind anything but loopback. Keys are compared in constant time and never
logged. Asking for health once needs none; watching it does, since that holds a call for as long as one likes.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Collection

import grpc

from moonpool.config.api_keys import ApiKeys
from moonpool.errors import InvalidRequestError, PermissionDeniedError, UnauthenticatedError
from moonpool.rpc.interceptor import abort
from moonpool.rpc.metadata import bearer_key

_OPEN_METHOD = "/grpc.health.v1.Health/Check"
#: See KeyInterceptor.
STRANGER_TIMEOUT_S = 5.0


class KeyInterceptor(grpc.aio.ServerInterceptor):  # type: ignore[misc]  # grpc has no types
    """Answers UNAUTHENTICATED to a call without a key that is one of `keys`.

    Args:
        operator_services: Services that only an operator's key opens.
        stranger_timeout_s: How long the message of a call without a key may take to come.
    """

    def __init__(
        self,
        keys: ApiKeys,
        *,
        operator_services: Collection[str] = (),
        stranger_timeout_s: float = STRANGER_TIMEOUT_S,
    ) -> None:
        self._keys = keys
        self._stranger_timeout_s = stranger_timeout_s
        self._operator_prefixes = tuple(f"/{name}/" for name in operator_services)

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler | None]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler | None:
        method: str = handler_call_details.method
        given = bearer_key(handler_call_details.invocation_metadata)
        # Of all kinds a stream does not wait for a first message, and fits every caller.
        if self._keys.tenant_of(given) is None:
            if method != _OPEN_METHOD:
                return grpc.stream_stream_rpc_method_handler(_refuse)
            return _in_time(await continuation(handler_call_details), self._stranger_timeout_s)
        if method.startswith(self._operator_prefixes) and not self._keys.is_operator(given):
            return grpc.stream_stream_rpc_method_handler(_refuse_tenant)
        return await continuation(handler_call_details)


def _in_time(handler: grpc.RpcMethodHandler | None, timeout_s: float) -> grpc.RpcMethodHandler:
    """The same for a stranger, whose message has so long to come: until then it takes the place of a call."""
    assert handler is not None, "every server has a health service"

    async def answer(
        requests: AsyncIterator[object], context: grpc.aio.ServicerContext
    ) -> AsyncIterator[object]:
        try:
            async with asyncio.timeout(timeout_s):
                request = await anext(requests)
        except (TimeoutError, StopAsyncIteration):
            error = InvalidRequestError("The request did not come in time.", code="request_timeout")
            await abort(context, error)
            return
        yield await handler.unary_unary(request, context)

    return grpc.stream_stream_rpc_method_handler(
        answer,
        request_deserializer=handler.request_deserializer,
        response_serializer=handler.response_serializer,
    )


async def _refuse(_requests: object, context: grpc.aio.ServicerContext) -> None:
    await abort(context, UnauthenticatedError("The key is missing or is not this cluster's."))


async def _refuse_tenant(_requests: object, context: grpc.aio.ServicerContext) -> None:
    message = "This is for whoever runs the cluster; a tenant's key does not open it."
    await abort(context, PermissionDeniedError(message))
