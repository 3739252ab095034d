"""A raw HTTP/1.1 client: bytes out as a test wants them, responses in through h11."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from typing import Any, Self

import h11
import msgspec

_WAIT_S = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class RawResponse:
    status: int
    headers: Mapping[str, str]
    body: bytes
    #: Interim responses (1xx) that came first.
    interim: tuple[int, ...] = ()

    def json(self) -> Any:
        return msgspec.json.decode(self.body)

    @property
    def error(self) -> Any:
        """OpenAI's error object, whose four keys are all there."""
        error = self.json()["error"]
        assert set(error) == {"message", "type", "param", "code"}, error
        assert error["message"], error
        return error


class RawHttp:
    """One connection. Use `raw_http(...)`."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer
        self._connection = h11.Connection(h11.CLIENT)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_error: object) -> None:
        self.writer.transport.abort()

    async def send(self, data: bytes) -> None:
        self.writer.write(data)
        async with asyncio.timeout(_WAIT_S):
            await self.writer.drain()

    def half_close(self) -> None:
        self.writer.write_eof()

    async def response(self, method: str = "POST") -> RawResponse:
        """Read the next response, whole."""
        self._connection = h11.Connection(h11.CLIENT)
        request = h11.Request(method=method, target="/", headers=[("host", "x")])
        self._connection.send(request)
        self._connection.send(h11.EndOfMessage())
        interim: list[int] = []
        head: h11.Response | None = None
        body = bytearray()
        async with asyncio.timeout(_WAIT_S):
            while True:
                event = self._connection.next_event()
                match event:
                    case h11.NEED_DATA:
                        self._connection.receive_data(await self.reader.read(65_536))
                    case h11.InformationalResponse():
                        interim.append(event.status_code)
                    case h11.Response():
                        head = event
                    case h11.Data():
                        body += event.data
                    case h11.EndOfMessage():
                        assert head is not None
                        return RawResponse(
                            status=head.status_code,
                            headers={k.decode(): v.decode() for k, v in head.headers},
                            body=bytes(body),
                            interim=tuple(interim),
                        )
                    case _:
                        raise AssertionError(event)

    async def is_closed(self) -> bool:
        """Wait for the server to close the connection."""
        async with asyncio.timeout(_WAIT_S):
            return await self.reader.read() == b""

    async def until_cut(self) -> None:
        """Take what the server has sent; return when it has cut the connection off."""
        with suppress(ConnectionResetError):
            async with asyncio.timeout(_WAIT_S):
                while await self.reader.read(65_536):
                    pass


@asynccontextmanager
async def raw_http(port: int, *, limit: int = 65_536) -> AsyncIterator[RawHttp]:
    reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=limit)
    async with RawHttp(reader, writer) as raw:
        yield raw


def post(path: str, body: bytes, *headers: str, content_type: str = "application/json") -> bytes:
    """A whole request."""
    lines = [
        f"POST {path} HTTP/1.1",
        "host: x",
        f"content-type: {content_type}",
        f"content-length: {len(body)}",
        *headers,
    ]
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + body
