"""Raw HTTP/2 frames (RFC 9113): gRPC calls of a client that does what a library would not."""

from __future__ import annotations

import struct

_DATA, _HEADERS, _SETTINGS = 0, 1, 4
_END_STREAM, _END_HEADERS = 1, 4
_INITIAL_WINDOW_SIZE = 4


def greeting_without_window() -> bytes:
    """The client's preface; the server may send no answer's message before a window is opened."""
    settings = struct.pack(">HI", _INITIAL_WINDOW_SIZE, 0)
    return b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + _frame(_SETTINGS, 0, 0, settings)


def call_headers(method: str, *, stream: int) -> bytes:
    """The beginning of a call without a key.

    Args:
        stream: Odd, and higher than any before on the connection.
    """
    headers = (
        (":method", "POST"),
        (":scheme", "http"),
        (":path", method),
        (":authority", "localhost"),
        ("content-type", "application/grpc"),
        ("te", "trailers"),
    )
    block = b"".join(b"\x00" + _text(name) + _text(value) for name, value in headers)
    return _frame(_HEADERS, _END_HEADERS, stream, block)


def empty_message(*, stream: int) -> bytes:
    """A call's only message, without a field."""
    return _frame(_DATA, _END_STREAM, stream, struct.pack(">BI", 0, 0))


def _text(value: str) -> bytes:
    """HPACK, not compressed (RFC 7541, 5.2)."""
    assert len(value) < 127, value
    return bytes([len(value)]) + value.encode()


def _frame(kind: int, flags: int, stream: int, payload: bytes) -> bytes:
    length = struct.pack(">I", len(payload))[1:]
    return length + bytes([kind, flags]) + struct.pack(">I", stream) + payload
