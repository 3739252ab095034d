"""What is said about prefixes that peers hold comes back as it was; what a bad peer sends is named."""

from __future__ import annotations

from dataclasses import replace
from typing import TypeVar

import pytest
from google.protobuf.message import Message
from hypothesis import given
from hypothesis import strategies as st

from moonpool.api.v1 import worker_pb2 as pb
from moonpool.core.protocol import BlockLedger, TokensReady
from moonpool.handoff.messages import (
    Commit,
    DecodeRequest,
    HolderMessage,
    PeerPrefix,
    PrefillRequest,
    PrefixFailed,
    PrefixOpen,
    PrefixOpened,
    PrefixRefusal,
    PrefixStaging,
)
from moonpool.ids import (
    AttemptId,
    BlockHash,
    BlockId,
    Incarnation,
    RequestId,
    WorkerId,
    WorkerKey,
)
from moonpool.inference.output import TokenRun
from moonpool.wire.fields import InvalidMessageError
from moonpool.wire.handoff import source_message_from_pb, source_message_to_pb
from moonpool.wire.prefix_read import (
    LeaseClosed,
    LeaseEnded,
    LeaseNumber,
    holder_message_from_pb,
    holder_message_to_pb,
    reader_message_from_pb,
    reader_message_to_pb,
)
from moonpool.wire.session import (
    WorkerReport,
    frame_message_to_pb,
    router_message_from_pb,
    router_message_to_pb,
    worker_message_from_pb,
)
from moonpool.wire.worker import LoadReport
from support.addresses import addresses
from support.requests import make_request

MessageT = TypeVar("MessageT", bound=Message)

A = AttemptId(RequestId("a"), 1)


def over_the_wire(message: MessageT) -> MessageT:
    return type(message).FromString(message.SerializeToString())


names = st.from_regex(r"[A-Za-z0-9][A-Za-z0-9._:/@-]{0,20}", fullmatch=True)
keys = st.builds(WorkerKey, worker_id=names.map(WorkerId), incarnation=names.map(Incarnation))
peers = st.builds(
    PeerPrefix,
    key=keys,
    address=addresses,
    num_tokens=st.integers(1, 2**20),
    is_store=st.booleans(),
)
hashes = st.lists(st.binary(min_size=32, max_size=32), min_size=1, max_size=6).map(
    lambda values: tuple(map(BlockHash, values))
)


@st.composite
def opens(draw: st.DrawFn) -> PrefixOpen:
    chain = draw(hashes)
    return PrefixOpen(
        attempt_id=A,
        reader=draw(keys),
        holder=draw(keys),
        namespace=draw(names),
        secret_fingerprint=draw(names),
        hashes=chain,
        first=draw(st.integers(0, len(chain))),
    )


@st.composite
def opened(draw: st.DrawFn) -> PrefixOpened:
    blocks = draw(st.lists(st.integers(0, 2**31 - 1), max_size=5, unique=True))
    num_leaves = draw(st.integers(1, 4)) * len(blocks)
    return PrefixOpened(
        attempt_id=A,
        block_ids=tuple(map(BlockId, blocks)),
        digests=draw(st.binary(min_size=8 * num_leaves, max_size=8 * num_leaves)),
    )


@st.composite
def stagings(draw: st.DrawFn) -> PrefixStaging:
    num_blocks = draw(st.integers(1, 2**20))
    num_ready = draw(st.integers(0, num_blocks - 1))
    return PrefixStaging(attempt_id=A, num_ready_blocks=num_ready, num_blocks=num_blocks)


@given(peers)
def test_a_peer_travels_with_a_request(peer: PeerPrefix) -> None:
    for message in (
        PrefillRequest(request=make_request(), attempt=1, deadline_s=1.0, peer=peer),
        DecodeRequest(request=make_request(), attempt=1, source=None, deadline_s=1.0, peer=peer),
    ):
        assert router_message_from_pb(over_the_wire(router_message_to_pb(message))) == message


@given(opens())
def test_opens(message: PrefixOpen) -> None:
    told = reader_message_to_pb(LeaseNumber(3), message)
    assert reader_message_from_pb(over_the_wire(told)) == (3, message)


def test_a_lease_is_given_back() -> None:
    told = reader_message_to_pb(LeaseNumber(2**64 - 1), LeaseClosed())
    assert reader_message_from_pb(over_the_wire(told)) == (2**64 - 1, LeaseClosed())


@given(
    opened()
    | stagings()
    | st.builds(
        PrefixFailed,
        attempt_id=st.just(A),
        reason=st.sampled_from(PrefixRefusal),
        message=st.text(max_size=40),
    )
    | st.just(LeaseEnded())
)
def test_what_a_holder_says(message: HolderMessage | LeaseEnded) -> None:
    told = over_the_wire(holder_message_to_pb(LeaseNumber(7), message))
    assert told.lease == 7
    assert holder_message_from_pb(told, A) == message


def test_tokens_by_source() -> None:
    tokens = TokensReady(
        attempt_id=A,
        run=TokenRun(first_position=0, token_ids=(1,)),
        num_cached_tokens=48,
        num_peer_tokens=32,
        num_peer_held_tokens=64,
    )
    report = WorkerReport(message=tokens, is_prefill_side=False)
    ledger = BlockLedger(num_total=1, num_free=1, num_cached=0, num_referenced=0)
    load = LoadReport(ledger=ledger)
    frame = worker_message_from_pb(over_the_wire(frame_message_to_pb([report], load)))
    assert frame.reports == (report,)
    commit = Commit(
        attempt_id=A,
        first_token=1,
        position=0,
        finish_reason=None,
        num_cached_tokens=48,
        num_peer_tokens=32,
    )
    assert source_message_from_pb(over_the_wire(source_message_to_pb(commit)), A) == commit


ONE = LeaseNumber(1)
GOOD = PrefixOpen(
    attempt_id=A,
    reader=WorkerKey(WorkerId("r"), Incarnation("1")),
    holder=WorkerKey(WorkerId("h"), Incarnation("1")),
    namespace="n",
    secret_fingerprint="s",
    hashes=(BlockHash(bytes(32)),),
    first=0,
)


@pytest.mark.parametrize(
    ("message", "param"),
    [
        (pb.FromReader(), "kind"),
        (reader_message_to_pb(ONE, replace(GOOD, hashes=())), "open.hashes"),
        (reader_message_to_pb(ONE, replace(GOOD, hashes=(BlockHash(bytes(31)),))), "open.hashes"),
        (reader_message_to_pb(ONE, replace(GOOD, first=2)), "open.first"),
        (reader_message_to_pb(ONE, replace(GOOD, namespace="")), "open.namespace_fingerprint"),
    ],
)
def test_a_bad_open_is_named(message: pb.FromReader, param: str) -> None:
    with pytest.raises(InvalidMessageError) as caught:
        reader_message_from_pb(message)
    assert caught.value.param == param


@pytest.mark.parametrize(
    ("message", "param"),
    [
        (pb.FromHolder(), "kind"),
        (pb.FromHolder(failed=pb.PrefixFailed(reason="mood")), "failed.reason"),
        (pb.FromHolder(staging=pb.PrefixStaging()), "staging.num_blocks"),
        (
            pb.FromHolder(staging=pb.PrefixStaging(num_ready_blocks=3, num_blocks=3)),
            "staging.num_ready_blocks",
        ),
        (pb.FromHolder(opened=pb.PrefixOpened(block_ids=[1, 1])), "opened.block_ids"),
        (pb.FromHolder(opened=pb.PrefixOpened(block_ids=[1], leaves=b"123")), "opened.leaves"),
        (pb.FromHolder(opened=pb.PrefixOpened(leaves=bytes(8))), "opened.leaves"),
    ],
)
def test_a_bad_holder_is_named(message: pb.FromHolder, param: str) -> None:
    with pytest.raises(InvalidMessageError) as caught:
        holder_message_from_pb(message, A)
    assert caught.value.param == param
