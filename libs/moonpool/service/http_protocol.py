"""BoundedHttpProtocol: uvicorn's HTTP/1.1 connection with bounds, and with half-close told from leaving.

Rules
- A request's head has HEAD_TIMEOUT_S to come and MAX_HEAD_BYTES to be in; a bad one is answered in
  OpenAI's error shape.
- A client that ends its sending side in the middle of a request (`nc -N`, shutdown(SHUT_WR)) may still
  read: it gets its answer. On the wire this looks like a client that is gone. So until the response has
  begun, interim 102 responses are sent, which every HTTP/1.1 client must skip (RFC 9110 15.2): a host
  whose client is gone answers them with a reset, and the connection is lost. After the response has
  begun its own writes tell; the application is told to write soon.
- A client that takes nothing for STALL_S is cut, also when the response is already complete.
- The application reaches its connection through `scope["extensions"]["moonpool.connection"]`.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

import h11
from uvicorn.config import Config
from uvicorn.protocols.http.h11_impl import H11Protocol
from uvicorn.server import ServerState

from moonpool.errors import InvalidRequestError
from moonpool.wire.openai_response import error_body
from moonpool.wire.status import to_http

EXTENSION = "moonpool.connection"

MAX_CONNECTIONS = 4_096
MAX_HEAD_BYTES = 16 * 1_024
MAX_HEADERS = 64
HEAD_TIMEOUT_S = 30.0
#: An idle kept-alive connection is closed after this long.
IDLE_S = 30.0
#: A client that takes nothing for this long is gone.
STALL_S = 30.0

#: Pauses between interim responses to a client that may be gone; the last one repeats.
_PROBE_PAUSES_S = (0.1, 1.0)

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
AsgiApp = Callable[[Scope, Receive, Send], Awaitable[None]]


class Connection:
    """One client's connection, as an application sees it."""

    def __init__(self, transport: asyncio.Transport) -> None:
        self._transport = transport
        #: The client has ended its sending side: it may be gone, which only a write can tell.
        self.is_half_closed = False
        #: Called when `is_half_closed` becomes true while a response is under way.
        self.on_half_closed: Callable[[], None] = lambda: None

    @property
    def num_unsent_bytes(self) -> int:
        """Bytes that wait for the client to take them."""
        return self._transport.get_write_buffer_size()

    def abort(self) -> None:
        """Cut it; what was not sent is dropped."""
        self._transport.abort()


class BoundedHttpProtocol(H11Protocol):
    """See the file's head. Made by HttpServer."""

    def __init__(
        self,
        config: Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
        *,
        on_lost: Callable[[], None] = lambda: None,
    ) -> None:
        super().__init__(config, server_state, app_state, _loop)
        self._on_lost = on_lost
        self._connection: Connection | None = None
        self._head_timer: asyncio.TimerHandle | None = None
        self._probe_timer: asyncio.TimerHandle | None = None
        self._stall_timer: asyncio.TimerHandle | None = None

    # -- asyncio.Protocol --

    def connection_made(  # type: ignore[override]  # as uvicorn has it: the transport is a stream's
        self, transport: asyncio.Transport
    ) -> None:
        super().connection_made(transport)
        if len(self.connections) > MAX_CONNECTIONS:
            transport.abort()
            return
        self._connection = Connection(transport)
        self.app = _with_connection(self.app, self._connection)
        self._watch_head()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._watch_head()

    def eof_received(self) -> bool | None:  # type: ignore[override]  # asyncio's own signature
        cycle, connection = self.cycle, self._connection
        is_idle = cycle is None or cycle.response_complete or cycle.more_body
        if connection is None or is_idle or cycle.scope["http_version"] == "1.0":
            return None
        connection.is_half_closed = True
        cycle.keep_alive = False
        if cycle.response_started:
            connection.on_half_closed()
        else:
            self._probe(0)
        return True

    def connection_lost(self, exc: Exception | None) -> None:
        for timer in (self._head_timer, self._probe_timer, self._stall_timer):
            if timer is not None:
                timer.cancel()
        super().connection_lost(exc)
        self._on_lost()

    # -- uvicorn's hooks --

    def send_400_response(self, msg: str) -> None:
        """Answer what is not HTTP, or too large to be read as such. Called while the error is handled."""
        status = getattr(sys.exc_info()[1], "error_status_hint", 400)
        code = "request_header_too_large" if status == 431 else "invalid_http"
        if self.conn.our_state not in (h11.IDLE, h11.SEND_RESPONSE):
            self.transport.close()
            return
        error = to_http(InvalidRequestError(msg, code=code))
        body = error_body(InvalidRequestError(msg, code=code))
        events = (
            h11.Response(
                status_code=error.status,
                headers=[
                    ("content-type", "application/json"),
                    ("content-length", str(len(body))),
                    ("connection", "close"),
                ],
            ),
            h11.Data(data=body),
            h11.EndOfMessage(),
        )
        for event in events:
            self.transport.write(self.conn.send(event) or b"")
        self.transport.close()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self._stall_timer is None:
            self._watch_unsent(self.transport.get_write_buffer_size())

    # -- parts --

    def _watch_head(self) -> None:
        """Between requests a timer runs as soon as there is a connection or a part of a head."""
        cycle = self.cycle
        if cycle is not None and not cycle.response_complete:
            if self._head_timer is not None:
                self._head_timer.cancel()
                self._head_timer = None
        elif self._head_timer is None:
            self._head_timer = self.loop.call_later(HEAD_TIMEOUT_S, self.transport.abort)

    def _probe(self, index: int) -> None:
        if self.transport.is_closing() or self.cycle.response_started:
            return
        interim = h11.InformationalResponse(status_code=102, headers=[], reason=b"Processing")
        self.transport.write(self.conn.send(interim) or b"")
        pause_s = _PROBE_PAUSES_S[min(index, len(_PROBE_PAUSES_S) - 1)]
        self._probe_timer = self.loop.call_later(pause_s, self._probe, index + 1)

    def _watch_unsent(self, num_bytes: int) -> None:
        """A complete response is still being taken, or was not taken at all."""
        self._stall_timer = None
        if num_bytes:
            self._stall_timer = self.loop.call_later(STALL_S, self._on_stall, num_bytes)

    def _on_stall(self, num_bytes: int) -> None:
        left = self.transport.get_write_buffer_size()
        if left >= num_bytes:
            self.transport.abort()
        else:
            self._watch_unsent(left)


def _with_connection(app: AsgiApp, connection: Connection) -> AsgiApp:
    async def call(scope: Scope, receive: Receive, send: Send) -> None:
        scope.setdefault("extensions", {})[EXTENSION] = connection
        await app(scope, receive, send)

    return call
