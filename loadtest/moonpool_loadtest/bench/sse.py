"""HTTP/1.1 with a streamed answer, and server-sent events: just enough to time any server's tokens.

A connection per request, over asyncio's streams. It costs tens of microseconds of client time per
message, where a general client costs hundreds, and adds no dependency.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from urllib.parse import urlsplit

from moonpool.errors import ConfigError, InternalError, MoonpoolError, UnavailableError

_MAX_LINE_BYTES = 1 << 20
_MAX_HEADERS = 100
_READ_BYTES = 1 << 16


@dataclass(frozen=True, slots=True, kw_only=True)
class HttpUrl:
    """Where to connect, and the path below which everything lies."""

    host: str
    port: int
    is_tls: bool
    path: str

    @staticmethod
    def parse(text: str) -> HttpUrl:
        """`http://host:port/v1` or https. Raises ConfigError for anything else."""
        parts = urlsplit(text)
        try:
            port = parts.port
        except ValueError:
            port = 0
        if parts.scheme not in ("http", "https") or not parts.hostname or port == 0 or parts.query:
            raise ConfigError(f"{text}: must be a URL like http://127.0.0.1:8000/v1")
        is_tls = parts.scheme == "https"
        return HttpUrl(
            host=parts.hostname,
            port=port or (443 if is_tls else 80),
            is_tls=is_tls,
            path=parts.path.rstrip("/"),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class HttpAnswer:
    """Status, headers by lower-case name, and the body as it arrives."""

    status: int
    headers: Mapping[str, str]
    body: AsyncGenerator[bytes, None]

    async def read(self, max_bytes: int = 1 << 20) -> bytes:
        """The body's beginning, up to `max_bytes`."""
        content = b""
        async for piece in self.body:
            content += piece
            if len(content) >= max_bytes:
                break
        return content[:max_bytes]


@asynccontextmanager
async def send(
    url: HttpUrl, method: str, path: str, *, headers: Mapping[str, str], body: bytes = b""
) -> AsyncIterator[HttpAnswer]:
    """One request on a connection of its own; leaving closes it, which cancels.

    Raises:
        UnavailableError: The connection failed or broke off.
        InternalError: The peer does not speak HTTP/1.1.
    """
    try:
        reader, writer = await asyncio.open_connection(
            url.host,
            url.port,
            ssl=ssl.create_default_context() if url.is_tls else None,
            limit=_MAX_LINE_BYTES,
        )
    except OSError as error:
        raise UnavailableError(f"{url.host}:{url.port}: {error}") from error
    try:
        lines = [
            f"{method} {url.path}{path} HTTP/1.1",
            f"host: {url.host}:{url.port}",
            "connection: close",
            f"content-length: {len(body)}",
            *(f"{name}: {value}" for name, value in headers.items()),
        ]
        writer.write("\r\n".join(lines).encode("latin-1") + b"\r\n\r\n" + body)
        try:
            await writer.drain()
            status, answer_headers = await _read_head(reader)
        except (OSError, EOFError, ValueError) as error:
            raise _broken(url, error) from error
        yield HttpAnswer(
            status=status, headers=answer_headers, body=_read_body(url, reader, answer_headers)
        )
    finally:
        writer.close()


class SseParser:
    """Bytes in, the data of whole events out."""

    def __init__(self) -> None:
        self._buffer = b""
        self._data: list[bytes] = []

    def feed(self, piece: bytes) -> list[bytes]:
        """The events that this piece completes."""
        *lines, self._buffer = (self._buffer + piece).split(b"\n")
        events = []
        for line in lines:
            line = line.removesuffix(b"\r")
            if line.startswith(b"data:"):
                self._data.append(line[5:].removeprefix(b" "))
            elif not line and self._data:
                events.append(b"\n".join(self._data))
                self._data.clear()
        return events


async def _read_head(reader: asyncio.StreamReader) -> tuple[int, dict[str, str]]:
    version, _, rest = (await _read_line(reader)).partition(" ")
    if not version.startswith("HTTP/1."):
        raise ValueError("the answer is not HTTP/1.1")
    status = int(rest[:3])
    headers: dict[str, str] = {}
    while line := await _read_line(reader):
        name, _, value = line.partition(":")
        headers[name.strip().lower()] = value.strip()
        if len(headers) > _MAX_HEADERS:
            raise ValueError("too many headers")
    return status, headers


async def _read_body(
    url: HttpUrl, reader: asyncio.StreamReader, headers: Mapping[str, str]
) -> AsyncGenerator[bytes, None]:
    try:
        if headers.get("transfer-encoding", "").lower() == "chunked":
            while size := int((await _read_line(reader)).partition(";")[0], 16):
                if size < 0:
                    raise ValueError("a chunk of negative size")
                yield (await reader.readexactly(size + 2))[:-2]
            return
        remaining = int(headers["content-length"]) if "content-length" in headers else None
        while remaining is None or remaining > 0:
            piece = await reader.read(_READ_BYTES if remaining is None else remaining)
            if not piece:
                if remaining is not None:
                    raise EOFError("the body ended early")
                return
            remaining = None if remaining is None else remaining - len(piece)
            yield piece
    except (OSError, EOFError, ValueError) as error:
        raise _broken(url, error) from error


async def _read_line(reader: asyncio.StreamReader) -> str:
    line = await reader.readline()
    if not line.endswith(b"\n"):
        raise EOFError("the connection ended")
    return line.decode("latin-1").rstrip("\r\n")


def _broken(url: HttpUrl, error: Exception) -> MoonpoolError:
    kind = InternalError if isinstance(error, ValueError) else UnavailableError
    return kind(f"{url.host}:{url.port}: {error or type(error).__name__}", code="connection_broken")
