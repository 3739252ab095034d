"""Errors of handlers: `ErrorInterceptor` wraps every handler of a server.

A MoonpoolError becomes its status with details; any other exception is logged once and becomes
INTERNAL with a constant text; cancellation passes. The caller's half is errors.py.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import grpc
import structlog

from moonpool.errors import MoonpoolError
from moonpool.rpc.errors import STATUS_DETAILS
from moonpool.wire import status as wire_status

_STATUS_CODE_BY_NUMBER = {code.value[0]: code for code in grpc.StatusCode}

log = structlog.get_logger("moonpool.rpc")


async def abort(context: grpc.aio.ServicerContext, error: MoonpoolError) -> None:
    """End the call with the error's status and details. Never returns normally."""
    status = wire_status.to_rpc_status(error)
    await context.abort(
        _STATUS_CODE_BY_NUMBER[status.code],
        status.message,
        ((STATUS_DETAILS, status.SerializeToString()),),
    )


class ErrorInterceptor(grpc.aio.ServerInterceptor):  # type: ignore[misc]  # grpc has no types
    """Maps what handlers raise. Wraps all four kinds of handlers."""

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler | None]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler | None:
        handler = await continuation(handler_call_details)
        if handler is None:
            return None
        method = handler_call_details.method
        codecs = {
            "request_deserializer": handler.request_deserializer,
            "response_serializer": handler.response_serializer,
        }
        if handler.unary_unary:
            return grpc.unary_unary_rpc_method_handler(
                _unary(handler.unary_unary, method), **codecs
            )
        if handler.stream_unary:
            return grpc.stream_unary_rpc_method_handler(
                _unary(handler.stream_unary, method), **codecs
            )
        if handler.unary_stream:
            return grpc.unary_stream_rpc_method_handler(
                _stream(handler.unary_stream, method), **codecs
            )
        return grpc.stream_stream_rpc_method_handler(
            _stream(handler.stream_stream, method), **codecs
        )


def _unary(behaviour: Any, method: str) -> Any:  # Any: handlers are untyped in grpc
    async def call(request: Any, context: grpc.aio.ServicerContext) -> Any:
        async with _mapped(method, context):
            return await behaviour(request, context)

    return call


def _stream(behaviour: Any, method: str) -> Any:  # Any: handlers are untyped in grpc
    if not inspect.isasyncgenfunction(behaviour):
        # A coroutine that writes to its context itself (the health service's Watch).
        return _unary(behaviour, method)

    async def call(request: Any, context: grpc.aio.ServicerContext) -> AsyncIterator[Any]:
        async with (
            _mapped(method, context),
            contextlib.aclosing(behaviour(request, context)) as replies,
        ):
            async for reply in replies:
                yield reply

    return call


@contextlib.asynccontextmanager
async def _mapped(method: str, context: grpc.aio.ServicerContext) -> AsyncIterator[None]:
    try:
        yield
    except MoonpoolError as error:
        await abort(context, error)
    except (grpc.aio.AbortError, grpc.aio.UsageError, grpc.aio.BaseError):
        raise
    except Exception:
        log.exception("rpc.handler_failed", method=method)
        await abort(context, wire_status.hidden())
