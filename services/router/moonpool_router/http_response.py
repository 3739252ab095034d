"""ASGI messages of responses: JSON documents, and the beginning of a stream."""

from __future__ import annotations

from collections.abc import Mapping

from moonpool.errors import MoonpoolError
from moonpool.service.http_protocol import Message, Send
from moonpool.wire.openai_response import error_body
from moonpool.wire.status import to_http


def json_start(
    status: int,
    body: bytes,
    *,
    headers: Mapping[str, str] | None = None,
    content_type: str = "application/json",
) -> Message:
    """The head of a response that is complete with `body`."""
    return _start(
        status,
        {"content-type": content_type, "content-length": str(len(body)), **(headers or {})},
    )


def stream_start(*, headers: Mapping[str, str]) -> Message:
    """The head of a stream of server-sent events."""
    return _start(
        200,
        {
            "content-type": "text/event-stream; charset=utf-8",
            "cache-control": "no-cache",
            # Proxies would collect events otherwise.
            "x-accel-buffering": "no",
            **headers,
        },
    )


async def send_json(send: Send, start: Message, body: bytes) -> None:
    await send(start)
    await send({"type": "http.response.body", "body": body, "more_body": False})


async def send_error(
    send: Send, error: MoonpoolError, *, headers: Mapping[str, str] | None = None
) -> None:
    """OpenAI's error body with the error's status."""
    answer, body = to_http(error), error_body(error)
    start = json_start(answer.status, body, headers={**answer.headers, **(headers or {})})
    await send_json(send, start, body)


def _start(status: int, headers: Mapping[str, str]) -> Message:
    return {
        "type": "http.response.start",
        "status": status,
        "headers": [(name.encode(), value.encode("latin-1")) for name, value in headers.items()],
    }
