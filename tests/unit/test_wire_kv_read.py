"""ReadRequest bytes: what is encoded comes back, and what no reader means is refused."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moonpool.api.v1 import kv_pb2 as pb
from moonpool.ids import Incarnation, WorkerId, WorkerKey
from moonpool.wire import kv_read
from moonpool.wire.fields import InvalidMessageError

WORKER = WorkerKey(WorkerId("prefill-0"), Incarnation("0123456789abcdef"))


def test_open_and_credit_come_back() -> None:
    for message in (
        kv_read.OpenRead(source=WORKER, credit_bytes=1 << 25),
        kv_read.GrantCredit(credit_bytes=7),
    ):
        assert kv_read.decode(kv_read.encode(message)) == message


@given(st.lists(st.tuples(st.integers(0, 1 << 45), st.integers(0, 1 << 20)), max_size=20))
@settings(max_examples=50)
def test_spans_come_back_in_order_without_the_empty_ones(rows: list[tuple[int, int]]) -> None:
    spans = np.array([(offset, 5, length) for offset, length in rows], np.int64).reshape(-1, 3)
    decoded = [kv_read.decode(kv_read.encode(part)) for part in kv_read.requests_for(spans)]
    received = [
        tuple(row)
        for part in decoded
        if isinstance(part, kv_read.ReadSpans)
        for row in part.spans.tolist()
    ]
    assert received == [row for row in rows if row[1]]


def test_a_span_may_be_as_long_as_a_pool() -> None:
    (request,) = kv_read.requests_for(np.array([[1 << 45, 0, 5 << 40]], np.int64))
    decoded = kv_read.decode(kv_read.encode(request))
    assert isinstance(decoded, kv_read.ReadSpans)
    assert decoded.spans.tolist() == [[1 << 45, 5 << 40]]


def test_many_spans_are_sent_in_several_messages() -> None:
    spans = np.ones((kv_read.MAX_SPANS + 1, 3), np.int64)
    assert [len(part.spans) for part in kv_read.requests_for(spans)] == [kv_read.MAX_SPANS, 1]


@pytest.mark.parametrize(
    "message",
    [
        pb.ReadRequest(),
        pb.ReadRequest(credit_bytes=0),
        pb.ReadRequest(credit_bytes=1 << 50),
        pb.ReadRequest(open=pb.ReadOpen(credit_bytes=1)),
        pb.ReadRequest(spans=pb.ReadSpans()),
        pb.ReadRequest(spans=pb.ReadSpans(pairs=bytes(17))),
    ],
    ids=str,
)
def test_what_no_reader_means_is_refused(message: pb.ReadRequest) -> None:
    with pytest.raises(InvalidMessageError):
        kv_read.decode(message.SerializeToString())


@given(st.binary(max_size=60))
@settings(max_examples=100)
def test_any_bytes_are_decoded_or_refused(data: bytes) -> None:
    try:
        kv_read.decode(data)
    except InvalidMessageError:
        return
