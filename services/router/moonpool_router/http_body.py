"""Reading what an HTTP client sends: its body within bounds, and the headers that mean something."""

from __future__ import annotations

import asyncio

from starlette.datastructures import Headers

from moonpool.errors import InvalidRequestError
from moonpool.rpc.metadata import clean_label
from moonpool.service.http_protocol import Receive, Scope
from moonpool.wire.openai_request import HttpContext
from moonpool_router.http_exchange import ClientGoneError

#: A body may pause so long, and take so long in all.
BODY_STALL_S = 30.0
BODY_TIMEOUT_S = 300.0

#: A day: longer than any deadline the router gives.
MAX_TIMEOUT_MS = 86_400_000
_MAX_TIMEOUT_DIGITS = len(str(MAX_TIMEOUT_MS))
TIMEOUT_HEADER = "x-request-timeout-ms"
LABEL_HEADER = "x-request-id"


def call_context(headers: Headers, *, tenant: str, is_strict: bool) -> HttpContext:
    """What the headers say about a generation of this tenant's.

    Raises:
        InvalidRequestError: A timeout that is none.
    """
    return HttpContext(
        # What is not a traceparent begins a new trace.
        traceparent=headers.get("traceparent", ""),
        request_label=clean_label(headers.get(LABEL_HEADER, "")),
        deadline_s=_timeout_s(headers.get(TIMEOUT_HEADER)),
        tenant=tenant,
        is_strict=is_strict,
    )


async def read_json(scope: Scope, receive: Receive, *, max_bytes: int) -> bytes:
    """The body of a JSON request. Refuses before reading what can be refused then.

    What is refused is still drained by the server, unread, so that the client sees the answer.

    Raises:
        InvalidRequestError: Its code says which status: 413, 415, 408.
        ClientGoneError: The client left before it was complete.
    """
    headers = Headers(scope=scope)
    _check_type(headers)
    length = headers.get("content-length", "")
    if length.isdecimal() and int(length) > max_bytes:
        raise _too_large(max_bytes)
    body = bytearray()
    try:
        async with asyncio.timeout(BODY_TIMEOUT_S):
            while True:
                async with asyncio.timeout(BODY_STALL_S):
                    message = await receive()
                if message["type"] == "http.disconnect":
                    raise ClientGoneError("The client left before its request was complete.")
                body += message.get("body", b"")
                if len(body) > max_bytes:
                    raise _too_large(max_bytes)
                if not message.get("more_body", False):
                    return bytes(body)
    except TimeoutError:
        raise InvalidRequestError(
            "The body did not come in time.", code="request_timeout"
        ) from None


def _check_type(headers: Headers) -> None:
    encoding = headers.get("content-encoding", "identity").strip().lower()
    if encoding != "identity":
        raise InvalidRequestError(
            f"Content-Encoding {encoding[:64]!r} is not accepted: send the body as it is.",
            code="unsupported_content_encoding",
        )
    # A browser asks before it sends this type to another origin, so no page can post here unasked.
    kind, _, parameters = headers.get("content-type", "").partition(";")
    charset = parameters.replace(" ", "").replace('"', "").lower()
    is_utf8 = "charset=" not in charset or "charset=utf-8" in charset
    if kind.strip().lower() != "application/json" or not is_utf8:
        raise InvalidRequestError(
            "Content-Type must be application/json (in UTF-8).", code="unsupported_media_type"
        )


def _timeout_s(value: str | None) -> float | None:
    if value is None:
        return None
    # Python refuses to read very long numbers in its own way.
    is_number = len(value) <= _MAX_TIMEOUT_DIGITS and value.isascii() and value.isdecimal()
    if not is_number or not 1 <= int(value) <= MAX_TIMEOUT_MS:
        raise InvalidRequestError(
            f"{TIMEOUT_HEADER} must be a whole number of milliseconds from 1 to "
            f"{MAX_TIMEOUT_MS}, got {value[:64]!r}.",
            param=TIMEOUT_HEADER,
        )
    return int(value) / 1_000


def _too_large(max_bytes: int) -> InvalidRequestError:
    return InvalidRequestError(
        f"The body is larger than {max_bytes} bytes.", code="request_too_large"
    )
