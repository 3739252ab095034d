"""Offers to stores and what stores say of themselves come back as they were; bad ones are named."""

from __future__ import annotations

from dataclasses import fields
from typing import TypeVar

import pytest
from google.protobuf.message import Message
from hypothesis import given
from hypothesis import strategies as st

from moonpool.api.v1 import store_pb2 as pb
from moonpool.handoff.messages import SourceRef
from moonpool.ids import BlockHash, Incarnation, WorkerId, WorkerKey
from moonpool.tiering.breaker import BreakerState
from moonpool.tiering.protocol import PinKind, PutRefusal, StoreStats, TenantUse
from moonpool.wire.fields import InvalidMessageError
from moonpool.wire.store import (
    DiskReport,
    PinAnswer,
    PinChain,
    PutAnswer,
    PutOffer,
    StoreReport,
    UnpinChain,
    pin_answer_from_pb,
    pin_answer_to_pb,
    pin_chain_from_pb,
    pin_chain_to_pb,
    put_answer_from_pb,
    put_answer_to_pb,
    put_offer_from_pb,
    put_offer_to_pb,
    store_report_from_pb,
    store_report_to_pb,
    unpin_chain_from_pb,
    unpin_chain_to_pb,
)
from support.addresses import addresses

MessageT = TypeVar("MessageT", bound=Message)

names = st.from_regex(r"[A-Za-z0-9][A-Za-z0-9._:/@-]{0,20}", fullmatch=True)
keys = st.builds(WorkerKey, worker_id=names.map(WorkerId), incarnation=names.map(Incarnation))
chains = st.lists(st.binary(min_size=32, max_size=32), min_size=1, max_size=6).map(
    lambda values: tuple(map(BlockHash, values))
)
offers = st.builds(
    PutOffer,
    store=keys,
    tenant=names,
    hashes=chains,
    source=st.builds(SourceRef, key=keys, address=addresses),
    deadline_s=st.integers(1, 600_000).map(lambda ms: ms / 1_000),
)
answers = st.builds(PutAnswer, num_wanted_blocks=st.integers(0, 2**20)) | st.builds(
    PutAnswer, num_wanted_blocks=st.just(0), refusal=st.sampled_from(PutRefusal)
)
counts = st.integers(0, 2**63)
budgets = st.none() | counts
tenants = st.builds(
    TenantUse,
    tenant=names | st.just(""),
    num_blocks=counts,
    floor_blocks=counts,
    max_blocks=budgets,
)
_OF_DISK = {
    field.name
    for field in fields(StoreStats)
    if field.name.startswith(("disk_", "write_budget"))
    or field.name
    in (
        "num_disk_blocks",
        "num_unwritten_blocks",
        "num_loading_blocks",
        "num_hit_disk_blocks",
        "num_written_blocks",
        "num_failed_write_blocks",
        "num_loaded_blocks",
        "num_failed_load_blocks",
        "num_bad_blocks",
        "num_reclaimed_blocks",
        "num_unadmitted_blocks",
    )
}


@st.composite
def reports(draw: st.DrawFn) -> StoreReport:
    has_disk = draw(st.booleans())
    special = {
        "num_refused_puts": st.lists(
            st.tuples(st.sampled_from(PutRefusal), counts),
            max_size=4,
            unique_by=lambda pair: pair[0],
        ).map(tuple),
        "write_budget_bytes": budgets,
        "write_budget_max_bytes": budgets,
        "disk_reads": st.sampled_from(BreakerState),
        "disk_writes": st.sampled_from(BreakerState),
        "tenants": st.lists(tenants, max_size=3).map(tuple),
    }
    values = {
        field.name: draw(special.get(field.name, counts))
        for field in fields(StoreStats)
        if has_disk or field.name not in _OF_DISK
    }
    return StoreReport(
        store=draw(keys),
        block_bytes=draw(counts),
        num_total_blocks=draw(counts),
        stats=StoreStats(**values),
        disk=draw(
            st.builds(
                DiskReport,
                capacity_bytes=counts,
                file_bytes=counts,
                written_bytes=counts,
                read_bytes=counts,
            )
        )
        if has_disk
        else None,
        problem=draw(st.text(max_size=20)),
    )


def over_the_wire(message: MessageT) -> MessageT:
    return type(message).FromString(message.SerializeToString())


@given(offers)
def test_an_offer_comes_back(offer: PutOffer) -> None:
    assert put_offer_from_pb(over_the_wire(put_offer_to_pb(offer))) == offer


@given(answers)
def test_an_answer_comes_back(answer: PutAnswer) -> None:
    assert put_answer_from_pb(over_the_wire(put_answer_to_pb(answer))) == answer


@given(
    st.builds(
        PinChain,
        store=keys,
        kind=st.sampled_from(PinKind),
        hashes=chains,
        ttl_s=st.integers(1, 86_400_000).map(lambda ms: ms / 1_000),
    ),
    st.builds(PinAnswer, pin_id=counts, num_blocks=st.integers(0, 2**20)),
    st.builds(UnpinChain, store=keys, pin_id=counts),
)
def test_a_pin_comes_back(pin: PinChain, answer: PinAnswer, unpin: UnpinChain) -> None:
    assert pin_chain_from_pb(over_the_wire(pin_chain_to_pb(pin))) == pin
    assert pin_answer_from_pb(over_the_wire(pin_answer_to_pb(answer))) == answer
    assert unpin_chain_from_pb(over_the_wire(unpin_chain_to_pb(unpin))) == unpin


@pytest.mark.parametrize(
    ("field", "value"),
    [("kind", "firm"), ("ttl_ms", 0), ("ttl_ms", 86_400_001), ("hashes", [b"x"]), ("hashes", [])],
)
def test_a_bad_pin_is_named(field: str, value: object) -> None:
    values = {"hashes": [bytes(32)], "kind": "hard", "ttl_ms": 1_000} | {field: value}
    message = pb.PinRequest(store=offer_pb().store, **values)
    with pytest.raises(InvalidMessageError, match=field):
        pin_chain_from_pb(message)


@given(reports())
def test_a_report_comes_back(report: StoreReport) -> None:
    assert store_report_from_pb(over_the_wire(store_report_to_pb(report))) == report


def offer_pb() -> pb.PutRequest:
    key = WorkerKey(WorkerId("w"), Incarnation("1"))
    return put_offer_to_pb(
        PutOffer(
            store=key,
            tenant="default",
            hashes=(BlockHash(bytes(32)),),
            source=SourceRef(key=key, address="h:1"),
            deadline_s=1.0,
        )
    )


def test_a_bad_offer_is_named() -> None:
    def check(param: str, **changes: object) -> None:
        message = offer_pb()
        for name in changes:
            message.ClearField(name)
        message.MergeFrom(pb.PutRequest(**changes))  # type: ignore[arg-type]
        with pytest.raises(InvalidMessageError) as caught:
            put_offer_from_pb(message)
        assert caught.value.param == param

    check("hashes", hashes=[])
    check("hashes", hashes=[bytes(31)])
    check("tenant", tenant="")
    check("source_address", source_address="a b")
    check("deadline_ms", deadline_ms=0)
    check("deadline_ms", deadline_ms=600_001)
    message = offer_pb()
    message.ClearField("store")
    with pytest.raises(InvalidMessageError, match="store"):
        put_offer_from_pb(message)


def test_a_bad_answer_is_named() -> None:
    with pytest.raises(InvalidMessageError, match="refusal is 'never'"):
        put_answer_from_pb(pb.PutReply(refusal="never"))
    with pytest.raises(InvalidMessageError, match="num_wanted_blocks is 3 beside a refusal"):
        put_answer_from_pb(pb.PutReply(num_wanted_blocks=3, refusal="no_room"))


def test_a_bad_report_is_named() -> None:
    message = pb.StoreStatsReply(disk=pb.DiskTier(reads="ajar", writes="closed"))
    message.store.worker_id, message.store.incarnation = "s", "1"
    with pytest.raises(InvalidMessageError, match=r"disk\.reads is 'ajar'"):
        store_report_from_pb(message)
    message.disk.reads = "open"
    message.refused_puts.add(reason="no_reason")
    with pytest.raises(InvalidMessageError, match=r"refused_puts\[0\]\.reason"):
        store_report_from_pb(message)
