"""Keys on calls: a bearer token that every process of the cluster derives, or those of a door's clients.

Without one a server does not bind anything but loopback. Keys are compared in constant time and never
logged. Asking for health once needs none; watching it does, since that holds a call for as long as one likes.
Where a server bounds its calls, a tenant has its part of them, taken before its message has come: a call that
sends nothing holds a place, too. So does one that does not take its answer, for as long as its connection stands:
gRPC cannot end it. Strangers have few places between them, wherever there is a key; a prober that must never find
them taken sends one.
"""

from __future__ import annotations

import asyncio
import inspect
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Collection
from contextlib import aclosing

import grpc

from moonpool.config.api_keys import ApiKeys
from moonpool.errors import (
    InvalidRequestError,
    OverloadedError,
    PermissionDeniedError,
    TenantLimitError,
    UnauthenticatedError,
)
from moonpool.rpc.interceptor import abort
from moonpool.rpc.metadata import bearer_key

_OPEN_METHOD = "/grpc.health.v1.Health/Check"
_RETRY_AFTER_S = 2.0
#: See KeyInterceptor.
MAX_STRANGERS = 64
STRANGER_TIMEOUT_S = 5.0


class KeyInterceptor(grpc.aio.ServerInterceptor):  # type: ignore[misc]  # grpc has no types
    """Answers UNAUTHENTICATED to a call without a key that is one of `keys`.

    Args:
        operator_services: Services that only an operator's key opens.
        max_calls_per_tenant: Calls at once with the keys of one tenant; None: no bound.
        max_strangers: Calls at once without a key.
        stranger_timeout_s: How long the message of a call without a key may take to come.
    """

    def __init__(
        self,
        keys: ApiKeys,
        *,
        operator_services: Collection[str] = (),
        max_calls_per_tenant: int | None = None,
        max_strangers: int = MAX_STRANGERS,
        stranger_timeout_s: float = STRANGER_TIMEOUT_S,
    ) -> None:
        self._keys = keys
        self._max_calls_per_tenant = max_calls_per_tenant
        #: By tenant, strangers under None; who has none is not there.
        self._num_calls: Counter[str | None] = Counter()
        self._max_strangers = max_strangers
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
        tenant = self._keys.tenant_of(given)
        if tenant is None:
            if method != _OPEN_METHOD:
                return grpc.stream_stream_rpc_method_handler(_refuse)
            handler = await continuation(handler_call_details)
            return self._counted(
                _in_time(handler, self._stranger_timeout_s), None, self._max_strangers
            )
        if method.startswith(self._operator_prefixes) and not self._keys.is_operator(given):
            return grpc.stream_stream_rpc_method_handler(_refuse_tenant)
        handler = await continuation(handler_call_details)
        if handler is None or self._max_calls_per_tenant is None:
            return handler
        return self._counted(handler, tenant, self._max_calls_per_tenant)

    def _counted(
        self, handler: grpc.RpcMethodHandler, tenant: str | None, max_calls: int
    ) -> grpc.RpcMethodHandler:
        """The same, among the tenant's calls, or the strangers', from its beginning to its end."""

        async def answer(
            requests: AsyncIterator[object], context: grpc.aio.ServicerContext
        ) -> AsyncIterator[object]:
            if self._num_calls[tenant] >= max_calls:
                await abort(context, _too_many_calls(tenant))
                return
            self._num_calls[tenant] += 1
            try:
                async with aclosing(_answers(handler, requests, context)) as replies:
                    async for reply in replies:
                        yield reply
            finally:
                self._num_calls[tenant] -= 1
                if not self._num_calls[tenant]:
                    del self._num_calls[tenant]

        return _as_stream(handler, answer)


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

    return _as_stream(handler, answer)


async def _answers(
    handler: grpc.RpcMethodHandler,
    requests: AsyncIterator[object],
    context: grpc.aio.ServicerContext,
) -> AsyncGenerator[object, None]:
    """What a handler of any kind answers to what comes on a stream."""
    behaviour = (
        handler.unary_unary or handler.unary_stream or handler.stream_unary or handler.stream_stream
    )
    given = requests if handler.request_streaming else await anext(requests, None)
    if given is None:
        # The caller has ended without a word.
        return
    answer = behaviour(given, context)
    if inspect.isawaitable(answer):
        reply = await answer
        # None: it wrote its answers itself.
        if reply is not None:
            yield reply
        return
    async with aclosing(answer) as replies:
        async for reply in replies:
            yield reply


def _as_stream(
    handler: grpc.RpcMethodHandler,
    answer: Callable[[AsyncIterator[object], grpc.aio.ServicerContext], AsyncIterator[object]],
) -> grpc.RpcMethodHandler:
    return grpc.stream_stream_rpc_method_handler(
        answer,
        request_deserializer=handler.request_deserializer,
        response_serializer=handler.response_serializer,
    )


def _too_many_calls(tenant: str | None) -> OverloadedError:
    if tenant is None:
        words = "As many calls without a key are open here as may."
        return OverloadedError(words, retry_after_s=_RETRY_AFTER_S)
    words = "As many calls of yours are open here as may."
    return TenantLimitError(words, retry_after_s=_RETRY_AFTER_S)


async def _refuse(_requests: object, context: grpc.aio.ServicerContext) -> None:
    await abort(context, UnauthenticatedError("The key is missing or is not this cluster's."))


async def _refuse_tenant(_requests: object, context: grpc.aio.ServicerContext) -> None:
    message = "This is for whoever runs the cluster; a tenant's key does not open it."
    await abort(context, PermissionDeniedError(message))
