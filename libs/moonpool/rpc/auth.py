"""Keys on calls: a bearer token that every process of the cluster derives, or those of a door's clients.

Without one a server does not bind anything but loopback. Keys are compared in constant time and never
logged. Health checks need none.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection

import grpc

from moonpool.config.api_keys import ApiKeys
from moonpool.errors import PermissionDeniedError, UnauthenticatedError
from moonpool.rpc.interceptor import abort
from moonpool.rpc.metadata import bearer_key

_OPEN_PREFIX = "/grpc.health.v1.Health/"


class KeyInterceptor(grpc.aio.ServerInterceptor):  # type: ignore[misc]  # grpc has no types
    """Answers UNAUTHENTICATED to a call without a key that is one of `keys`.

    Args:
        operator_services: Services that only an operator's key opens.
    """

    def __init__(self, keys: ApiKeys, *, operator_services: Collection[str] = ()) -> None:
        self._keys = keys
        self._operator_prefixes = tuple(f"/{name}/" for name in operator_services)

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler | None]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler | None:
        method: str = handler_call_details.method
        given = bearer_key(handler_call_details.invocation_metadata)
        # Of all kinds a stream does not wait for a first message, and fits every caller.
        if not method.startswith(_OPEN_PREFIX) and self._keys.tenant_of(given) is None:
            return grpc.stream_stream_rpc_method_handler(_refuse)
        if method.startswith(self._operator_prefixes) and not self._keys.is_operator(given):
            return grpc.stream_stream_rpc_method_handler(_refuse_tenant)
        return await continuation(handler_call_details)


async def _refuse(_requests: object, context: grpc.aio.ServicerContext) -> None:
    await abort(context, UnauthenticatedError("The key is missing or is not this cluster's."))


async def _refuse_tenant(_requests: object, context: grpc.aio.ServicerContext) -> None:
    message = "This is for whoever runs the cluster; a tenant's key does not open it."
    await abort(context, PermissionDeniedError(message))
