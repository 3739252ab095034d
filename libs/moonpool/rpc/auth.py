"""Keys on calls: a bearer token that every process of the cluster derives, or those of a door's clients.

Without one a server does not bind anything but loopback. Keys are compared in constant time and never
logged. Health checks need none.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import grpc

from moonpool.config.api_keys import ApiKeys
from moonpool.errors import UnauthenticatedError
from moonpool.rpc.interceptor import abort
from moonpool.rpc.metadata import bearer_key

_OPEN_PREFIX = "/grpc.health.v1.Health/"


class KeyInterceptor(grpc.aio.ServerInterceptor):  # type: ignore[misc]  # grpc has no types
    """Answers UNAUTHENTICATED to a call without a key that is one of `keys`."""

    def __init__(self, keys: ApiKeys) -> None:
        self._keys = keys

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler | None]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler | None:
        is_open = handler_call_details.method.startswith(_OPEN_PREFIX)
        given = bearer_key(handler_call_details.invocation_metadata)
        if is_open or self._keys.tenant_of(given) is not None:
            return await continuation(handler_call_details)
        # Of all kinds this one does not wait for a first message, and fits every caller.
        return grpc.stream_stream_rpc_method_handler(_refuse)


async def _refuse(_requests: object, context: grpc.aio.ServicerContext) -> None:
    await abort(context, UnauthenticatedError("The key is missing or is not this cluster's."))
