"""Checks on a peer's fields: each returns the value or raises InvalidMessageError with the field's path."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from typing import TypeVar

from google.protobuf.message import DecodeError, Message

from moonpool.errors import InvalidRequestError

#: Longest id or name in a message: fits worker ids, request ids, model names, addresses.
MAX_NAME_LENGTH = 256

#: Longest free text (a reason, a W3C header, a JSON of attributes is bounded elsewhere).
MAX_TEXT_LENGTH = 4_096

#: Most tokens in one request or run, whatever the model: 4 MiB of ids.
MAX_TOKENS = 1 << 20

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:/@-]*")
_ADDRESS = re.compile(r"(?:\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9][A-Za-z0-9._-]*):[0-9]{1,5}")

MessageT = TypeVar("MessageT", bound=Message)
T = TypeVar("T")


class InvalidMessageError(InvalidRequestError):
    """A peer's message cannot be what its sender meant. `param` is the field's path."""

    default_code = "invalid_message"


def invalid(path: str, problem: str) -> InvalidMessageError:
    """The error to raise: `path` in words of the schema (`request.sampling.top_p`)."""
    return InvalidMessageError(f"{path} {problem}", param=path)


def decode(message_type: type[MessageT], data: bytes, *, max_bytes: int) -> MessageT:
    """Parse bytes that did not come through gRPC (NATS payloads).

    Raises:
        InvalidMessageError: longer than `max_bytes`, or not this message.
    """
    name = message_type.DESCRIPTOR.name
    if len(data) > max_bytes:
        raise invalid(name, f"has {len(data)} bytes; at most {max_bytes} are allowed")
    try:
        return message_type.FromString(data)
    except DecodeError as error:
        raise invalid(name, "cannot be decoded") from error


def whole_milliseconds(seconds: float) -> int:
    """Rounded up, but for what floating point added: 4.001 s are 4,001 ms."""
    return math.ceil(round(seconds * 1_000, 3))


def name(value: str, path: str, *, max_length: int = MAX_NAME_LENGTH) -> str:
    """A non-empty printable token without spaces: ids, model names."""
    if not value:
        raise invalid(path, "is missing")
    if len(value) > max_length:
        raise invalid(path, f"has {len(value)} characters; at most {max_length} are allowed")
    if not _NAME.fullmatch(value):
        raise invalid(path, f"has a character that a name cannot have: {_shown(value)}")
    return value


def address(value: str, path: str) -> str:
    """host:port as it is dialled: an IPv6 address is in brackets."""
    if len(value) > MAX_NAME_LENGTH:
        raise invalid(path, f"has {len(value)} characters; at most {MAX_NAME_LENGTH} are allowed")
    if not _ADDRESS.fullmatch(value):
        raise invalid(
            path, f"is {_shown(value)}; allowed is host:port, like 10.0.0.1:80 or [::1]:80"
        )
    return value


def text(value: str, path: str, *, max_length: int = MAX_TEXT_LENGTH) -> str:
    """Text that may be empty."""
    if len(value) > max_length:
        raise invalid(path, f"has {len(value)} characters; at most {max_length} are allowed")
    return value


def between(value: int, path: str, *, low: int, high: int) -> int:
    """An integer in [low, high]."""
    if not low <= value <= high:
        raise invalid(path, f"is {value}; allowed is {low} to {high}")
    return value


def finite(value: float, path: str, *, low: float, high: float) -> float:
    """A finite float in [low, high]."""
    if not math.isfinite(value) or not low <= value <= high:
        raise invalid(path, f"is {value}; allowed is {low} to {high}")
    return value


def known(table: Mapping[str, T], value: str, path: str) -> T:
    """The value that a word stands for."""
    if value not in table:
        raise invalid(path, f"is {_shown(value)}; allowed are {', '.join(table)}")
    return table[value]


def tokens(values: Sequence[int], path: str, *, is_required: bool = False) -> tuple[int, ...]:
    """Token ids. Whether they are in the vocabulary is the engine's to know."""
    if is_required and not values:
        raise invalid(path, "is empty")
    if len(values) > MAX_TOKENS:
        raise invalid(path, f"has {len(values)} tokens; at most {MAX_TOKENS} are allowed")
    result = tuple(values)
    if result and max(result) > 0x7FFF_FFFF:
        raise invalid(path, f"has token id {max(result)}; at most {0x7FFF_FFFF} is allowed")
    return result


def _shown(value: str) -> str:
    return repr(value if len(value) <= 64 else value[:64] + "...")
