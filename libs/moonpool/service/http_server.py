"""HttpServer: an ASGI application over uvicorn's HTTP/1.1 protocol, in the life of our process.

    server = HttpServer(app, host="127.0.0.1", port=0)
    await server.start()               # listens; server.port is the real one
    await server.stop(grace_s=1.0)     # accepts nothing, waits for responses, cuts the rest

uvicorn's own server owns signals, polls ten times a second and ends the process when it cannot bind;
only its protocol is used here.
"""

from __future__ import annotations

import asyncio
import functools
import ipaddress
import socket

from uvicorn.config import Config
from uvicorn.server import ServerState

from moonpool.config.values import host_port
from moonpool.errors import UnavailableError
from moonpool.service.http_protocol import (
    IDLE_S,
    MAX_HEAD_BYTES,
    AsgiApp,
    BoundedHttpProtocol,
)

_BACKLOG = 1_024


class HttpServer:
    """Start, stop. Not restartable.

    Args:
        host: Address to bind.
        port: 0 takes a free one; read `port` after `start`.
    """

    def __init__(self, app: AsgiApp, *, host: str = "127.0.0.1", port: int = 0) -> None:
        self._host = host.strip("[]")
        self._requested_port = port
        self._port: int | None = None
        self._state = ServerState()
        self._server: asyncio.Server | None = None
        self._lost = asyncio.Event()
        self._config = Config(
            # Given the application itself, uvicorn calls it to find out whether it is a factory.
            lambda: app,
            factory=True,
            http=BoundedHttpProtocol,
            ws="none",
            lifespan="off",
            interface="asgi3",
            log_config=None,
            # Applications log their own failures; a client's mistake is no news.
            log_level="critical",
            access_log=False,
            proxy_headers=False,
            server_header=False,
            timeout_keep_alive=int(IDLE_S),
            h11_max_incomplete_event_size=MAX_HEAD_BYTES,
        )
        self._config.load()

    @property
    def port(self) -> int:
        """The bound port. Only after `start`."""
        assert self._port is not None, "start() has not returned"
        return self._port

    @property
    def url(self) -> str:
        """`http://host:port`. Only after `start`."""
        return f"http://{host_port(self._host, self.port)}"

    async def start(self) -> int:
        """Bind and listen. Returns the real port.

        Raises:
            UnavailableError: The address cannot be bound.
        """
        loop = asyncio.get_running_loop()
        make_protocol = functools.partial(
            BoundedHttpProtocol,
            config=self._config,
            server_state=self._state,
            app_state={},
            _loop=loop,
            on_lost=self._lost.set,
        )
        try:
            listener = socket.create_server(
                (self._host, self._requested_port), family=_family(self._host), backlog=_BACKLOG
            )
        except OSError as error:
            raise UnavailableError(
                f"Cannot listen on {host_port(self._host, self._requested_port)}: {error.strerror}.",
                code="address_in_use",
            ) from error
        self._port = listener.getsockname()[1]
        self._server = await loop.create_server(make_protocol, sock=listener, backlog=_BACKLOG)
        return self.port

    async def stop(self, *, grace_s: float) -> None:
        """Accept nothing, close idle connections, give running responses `grace_s`. Idempotent."""
        if self._server is None:
            return
        self._server.close()
        for connection in tuple(self._state.connections):
            connection.shutdown()
        try:
            async with asyncio.timeout(grace_s):
                while self._state.connections:
                    self._lost.clear()
                    await self._lost.wait()
        except TimeoutError:
            self._cut()
        tasks = tuple(self._state.tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _cut(self) -> None:
        for connection in tuple(self._state.connections):
            assert isinstance(connection, BoundedHttpProtocol), connection
            connection.transport.abort()


def _family(host: str) -> socket.AddressFamily:
    try:
        is_v6 = ipaddress.ip_address(host).version == 6
    except ValueError:
        is_v6 = False
    return socket.AF_INET6 if is_v6 else socket.AF_INET
