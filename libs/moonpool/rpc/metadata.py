"""Call metadata: trace context, request label and the cluster key.

Streams between router and workers are multiplexed, so a request's trace context is a field of its
message; metadata carries it where one call is one request or one handoff. Deadlines need no metadata:
gRPC sends the remaining time of the call itself.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

from moonpool.inference.generation import MAX_CLIENT_REQUEST_ID_LENGTH

TRACEPARENT = "traceparent"
REQUEST_ID = "x-request-id"
AUTHORIZATION = "authorization"

_TRACEPARENT = re.compile(r"[0-9a-f]{2}-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2}")
_UNPRINTABLE = re.compile(r"[^\x20-\x7e]")

Metadata = tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class CallContext:
    """What a call brought along. Wrong values are dropped: they are labels, not input."""

    #: W3C trace context; empty if there was none.
    traceparent: str = ""
    #: The client's own name for its request; empty if it gave none.
    request_label: str = ""


def call_metadata(*, key: str = "", traceparent: str = "", request_label: str = "") -> Metadata:
    """Metadata for an outgoing call. `key` is the cluster key (or an API key at the door)."""
    pairs = (
        (AUTHORIZATION, f"Bearer {key}" if key else ""),
        (TRACEPARENT, traceparent),
        (REQUEST_ID, request_label),
    )
    return tuple((key, value) for key, value in pairs if value)


def read_metadata(metadata: Iterable[tuple[str, str | bytes]] | None) -> CallContext:
    """What `context.invocation_metadata()` holds."""
    values = {key: value for key, value in metadata or () if isinstance(value, str)}
    traceparent = values.get(TRACEPARENT, "")
    return CallContext(
        traceparent=traceparent if _TRACEPARENT.fullmatch(traceparent) else "",
        request_label=clean_label(values.get(REQUEST_ID, "")),
    )


def bearer_key(metadata: Iterable[tuple[str, str | bytes]] | None) -> bytes | None:
    """The key that a call brought along; None if it brought none."""
    given = b""
    for name, value in metadata or ():
        if name == AUTHORIZATION:
            given = value.encode() if isinstance(value, str) else value
    scheme, _, key = given.partition(b" ")
    return key if scheme == b"Bearer" else None


def clean_label(value: str) -> str:
    """A client's name for its request, fit for a log line."""
    return _UNPRINTABLE.sub("", value[:MAX_CLIENT_REQUEST_ID_LENGTH])
