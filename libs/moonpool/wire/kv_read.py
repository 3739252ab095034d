"""What the reader says on KvPlane.Read: open, spans, credit. The answers are raw bytes, not messages.

The server answers with the bytes of all spans in order; where one read ends and the next begins is only
the reader's business, so spans that wait to be sent are merged into one message.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from google.protobuf.message import DecodeError

from moonpool.api.v1 import kv_pb2 as pb
from moonpool.ids import WorkerKey
from moonpool.wire.fields import between, invalid
from moonpool.wire.request import worker_key_from_pb, worker_key_to_pb

Int64Array = npt.NDArray[np.int64]

SERVICE = "moonpool.api.v1.KvPlane"
METHOD = f"/{SERVICE}/Read"

#: Most spans of one message; more are sent in several.
MAX_SPANS = 1 << 17
_MAX_CREDIT_BYTES = 1 << 40
_PAIR_BYTES = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenRead:
    """First on the stream: whom the reader means, and how many bytes it takes before more credit."""

    source: WorkerKey
    credit_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ReadSpans:
    """int64[n, 2] of (offset, length) in the source's pool; 1 to MAX_SPANS of them, none empty.

    As it was decoded it holds any numbers.
    """

    spans: Int64Array


@dataclass(frozen=True, slots=True, kw_only=True)
class GrantCredit:
    """The reader has consumed this many bytes more."""

    credit_bytes: int


ReadMessage = OpenRead | ReadSpans | GrantCredit


def encode(message: ReadMessage) -> bytes:
    """The bytes of a ReadRequest."""
    match message:
        case OpenRead():
            opened = pb.ReadOpen(
                source=worker_key_to_pb(message.source), credit_bytes=message.credit_bytes
            )
            return pb.ReadRequest(open=opened).SerializeToString()
        case ReadSpans():
            spans = pb.ReadSpans(pairs=message.spans.astype("<i8", copy=False).tobytes())
            return pb.ReadRequest(spans=spans).SerializeToString()
        case GrantCredit():
            return pb.ReadRequest(credit_bytes=message.credit_bytes).SerializeToString()


def requests_for(spans: Int64Array) -> list[ReadSpans]:
    """The messages that ask for int64[n, 3] of (offset, anything, length); empty spans are left out."""
    wanted = spans[:, ::2]
    if not wanted[:, 1].all():
        wanted = wanted[wanted[:, 1] > 0]
    return [ReadSpans(spans=wanted[at : at + MAX_SPANS]) for at in range(0, len(wanted), MAX_SPANS)]


def decode(data: bytes) -> ReadMessage:
    """Parse a ReadRequest. Spans may still be anything: that is the pool's owner's to check.

    Raises:
        InvalidMessageError: Not a ReadRequest, or a field that no reader means.
    """
    try:
        message = pb.ReadRequest.FromString(data)
    except DecodeError as error:
        raise invalid("ReadRequest", "cannot be decoded") from error
    match message.WhichOneof("kind"):
        case "open":
            return OpenRead(
                source=worker_key_from_pb(message.open.source, "open.source"),
                credit_bytes=_credit(message.open.credit_bytes, "open.credit_bytes"),
            )
        case "spans":
            pairs = message.spans.pairs
            if len(pairs) % _PAIR_BYTES:
                raise invalid("spans.pairs", f"has {len(pairs)} bytes, not whole pairs")
            between(len(pairs) // _PAIR_BYTES, "spans.pairs", low=1, high=MAX_SPANS)
            return ReadSpans(spans=np.frombuffer(pairs, "<i8").reshape(-1, 2))
        case "credit_bytes":
            return GrantCredit(credit_bytes=_credit(message.credit_bytes, "credit_bytes"))
        case _:
            raise invalid("ReadRequest", "says nothing")


def _credit(value: int, path: str) -> int:
    return between(value, path, low=1, high=_MAX_CREDIT_BYTES)
