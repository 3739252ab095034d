"""A worker's small HTTP side, on loopback: `/metrics` for Prometheus and `/livez` for a supervisor."""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from moonpool.service.http_protocol import AsgiApp, Receive, Scope, Send
from moonpool.telemetry.metrics import CONTENT_TYPE


def metrics_app(render: Callable[[], bytes]) -> AsgiApp:
    """An ASGI application.

    Args:
        render: The text that Prometheus scrapes.
    """

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["method"] not in ("GET", "HEAD"):
            await _respond(send, 405, _json("Only GET is allowed here."))
        elif scope["path"] == "/metrics":
            await _respond(send, 200, render(), content_type=CONTENT_TYPE)
        elif scope["path"] == "/livez":
            await _respond(send, 200, msgspec.json.encode({"status": "alive"}))
        else:
            await _respond(send, 404, _json("There are only /metrics and /livez."))

    return app


def _json(message: str) -> bytes:
    return msgspec.json.encode({"error": {"message": message}})


async def _respond(
    send: Send, status: int, body: bytes, *, content_type: str = "application/json"
) -> None:
    headers = [
        (b"content-type", content_type.encode()),
        (b"content-length", str(len(body)).encode()),
    ]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
