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
#: Longer spans are cut; the bytes and their order do not change.
_MAX_SPAN_BYTES = 1 << 30
_MAX_CREDIT_BYTES = 1 << 40
_MAX_OFFSET = 1 << 62


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenRead:
    """First on the stream: whom the reader means, and how many bytes it takes before more credit."""

    source: WorkerKey
    credit_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ReadSpans:
    """int64[n, 2] of (offset, length) in the source's pool; 1 to MAX_SPANS of them, none empty."""

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
            offsets, lengths = message.spans.T.tolist()
            columns = pb.ReadSpans(offsets=offsets, lengths=lengths)
            return pb.ReadRequest(spans=columns).SerializeToString()
        case GrantCredit():
            return pb.ReadRequest(credit_bytes=message.credit_bytes).SerializeToString()


def requests_for(spans: Int64Array) -> list[ReadSpans]:
    """The messages that ask for int64[n, 3] of (offset, anything, length); empty spans are left out."""
    wanted = _cut(spans[spans[:, 2] > 0][:, ::2])
    return [ReadSpans(spans=wanted[at : at + MAX_SPANS]) for at in range(0, len(wanted), MAX_SPANS)]


def decode(data: bytes) -> ReadMessage:
    """Parse a ReadRequest. Spans may still lie outside of the pool: that is its owner's to check.

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
            offsets, lengths = message.spans.offsets, message.spans.lengths
            if len(offsets) != len(lengths):
                raise invalid("spans.lengths", f"has {len(lengths)} values, not {len(offsets)}")
            between(len(offsets), "spans.offsets", low=1, high=MAX_SPANS)
            between(max(offsets), "spans.offsets", low=0, high=_MAX_OFFSET)
            between(min(lengths), "spans.lengths", low=1, high=_MAX_SPAN_BYTES)
            return ReadSpans(spans=np.array([offsets, lengths], np.int64).T)
        case "credit_bytes":
            return GrantCredit(credit_bytes=_credit(message.credit_bytes, "credit_bytes"))
        case _:
            raise invalid("ReadRequest", "says nothing")


def _credit(value: int, path: str) -> int:
    return between(value, path, low=1, high=_MAX_CREDIT_BYTES)


def _cut(spans: Int64Array) -> Int64Array:
    if not len(spans) or int(spans[:, 1].max()) <= _MAX_SPAN_BYTES:
        return spans
    pieces = [
        (offset + at, min(_MAX_SPAN_BYTES, length - at))
        for offset, length in spans.tolist()
        for at in range(0, length, _MAX_SPAN_BYTES)
    ]
    return np.array(pieces, np.int64)
