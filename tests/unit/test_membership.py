from __future__ import annotations

from collections.abc import Iterator

import pytest

from moonpool.dispatch.events import WorkerJoined, WorkerLost
from moonpool.dispatch.membership import (
    Announcement,
    CloseLink,
    IgnoreAddress,
    LinkState,
    Membership,
    MembershipConfig,
    MembershipEffect,
    OpenLink,
)
from moonpool.ids import Incarnation, WorkerId, WorkerKey
from moonpool.routing.worker_view import WorkerInfo, WorkerRole

A, B = "127.0.0.1:1", "127.0.0.1:2"


def key(incarnation: str = "i1", worker: str = "d0") -> WorkerKey:
    return WorkerKey(WorkerId(worker), Incarnation(incarnation))


def info(
    who: WorkerKey | None = None, *, address: str = A, role: WorkerRole = WorkerRole.DECODE
) -> WorkerInfo:
    return WorkerInfo(key=who or key(), role=role, address=address)


def announcement(
    who: WorkerKey | None = None,
    *,
    sequence: int = 1,
    address: str = A,
    role: WorkerRole = WorkerRole.DECODE,
    is_leaving: bool = False,
) -> Announcement:
    return Announcement(
        key=who or key(),
        role=role,
        address=address,
        sequence=sequence,
        valid_for_s=3.0,
        is_leaving=is_leaving,
    )


@pytest.fixture
def membership() -> Iterator[Membership]:
    machine = Membership(MembershipConfig())
    machine.on_bus_changed(True, 0.0)
    yield machine
    machine.validate()


def joined(membership: Membership, who: WorkerKey, address: str, now: float) -> None:
    membership.on_announced(announcement(who, address=address), now)
    assert WorkerJoined(info=info(who, address=address)) in membership.on_hello(
        address, info(who), "", now
    )


def test_an_announcement_knocks_and_the_hello_joins(membership: Membership) -> None:
    assert membership.on_announced(announcement(), 0.0) == [OpenLink(address=A)]
    assert membership.live == ()
    assert membership.on_hello(A, info(), "", 0.1) == [WorkerJoined(info=info())]
    assert membership.live == (info(),)
    assert membership.on_announced(announcement(sequence=2), 1.0) == []


def test_a_cut_stream_is_a_dead_worker_at_once_and_tried_again(membership: Membership) -> None:
    joined(membership, key(), A, 0.0)
    assert membership.on_closed(A, "cut", 1.0) == [WorkerLost(key=key())]
    assert membership.tick(1.05) == []
    assert membership.next_due() == pytest.approx(1.1)
    assert membership.tick(1.1) == [OpenLink(address=A)]
    # The pause doubles while nobody answers, up to a second.
    now, pauses = 1.1, []
    for _ in range(6):
        membership.on_closed(A, "refused", now)
        due = membership.next_due()
        assert due is not None
        pauses.append(round(due - now, 3))
        now = due
        assert membership.tick(now) == [OpenLink(address=A)]
    assert pauses == [0.2, 0.4, 0.8, 1.0, 1.0, 1.0]


def test_silence_kills_only_when_stream_and_announcements_are_silent(
    membership: Membership,
) -> None:
    joined(membership, key(), A, 0.0)
    membership.on_frame(A, 3.0)
    assert membership.tick(7.9) == []
    membership.on_announced(announcement(sequence=2), 7.9)
    assert membership.tick(12.8) == []
    assert membership.tick(12.9) == [
        CloseLink(address=A, reason="silent for 5 s"),
        WorkerLost(key=key()),
    ]


def test_a_router_that_was_stopped_first_reads_what_came_meanwhile(membership: Membership) -> None:
    joined(membership, key(), A, 0.0)
    assert membership.tick(60.0) == []
    assert membership.next_due() == 61.0
    membership.on_frame(A, 60.1)
    assert membership.tick(61.0) == []
    # Whoever is silent then as well is dead.
    assert membership.tick(65.1) == [
        CloseLink(address=A, reason="silent for 5 s"),
        WorkerLost(key=key()),
    ]


def test_a_router_that_is_always_late_forgives_a_silence_once(membership: Membership) -> None:
    joined(membership, key(), A, 0.0)
    assert membership.tick(5.2) == []
    assert WorkerLost(key=key()) in membership.tick(6.4)


def test_a_later_incarnation_replaces_and_the_replaced_one_never_returns(
    membership: Membership,
) -> None:
    joined(membership, key("i1"), A, 0.0)
    membership.on_announced(announcement(key("i2"), address=B), 1.0)
    assert membership.on_hello(B, info(key("i2")), "", 1.1) == [
        CloseLink(address=A, reason="replaced by d0@i2"),
        WorkerLost(key=key("i1")),
        WorkerJoined(info=info(key("i2"), address=B)),
    ]
    assert membership.on_announced(announcement(key("i1"), sequence=9), 1.2) == []
    # It knocks in another name, but its own address gives it away.
    membership.on_announced(announcement(key("i3"), address=A), 1.3)
    effects = membership.on_hello(A, info(key("i1")), "", 1.4)
    assert [type(effect) for effect in effects] == [CloseLink]
    assert [info.key for info in membership.live] == [key("i2")]


def test_what_does_not_fit_is_refused_in_words_until_it_is_another(
    membership: Membership,
) -> None:
    membership.on_announced(announcement(), 0.0)
    assert membership.on_hello(A, info(), "block_size: 16 here, 32 there", 0.1) == [
        CloseLink(address=A, reason="block_size: 16 here, 32 there")
    ]
    (member,) = membership.members()
    assert (member.state, member.because) == (LinkState.REFUSED, "block_size: 16 here, 32 there")
    assert membership.on_announced(announcement(sequence=2), 1.0) == []
    assert membership.tick(2.0) == []
    assert membership.on_announced(announcement(key("i2")), 3.0) == [OpenLink(address=A)]
    # Or the worker says so itself; it is asked again, since either side may have been mended.
    assert membership.on_refused(A, "another secret", 3.1) == []
    assert [member.because for member in membership.members()] == ["another secret"]
    assert membership.next_due() == pytest.approx(13.1)
    assert membership.tick(13.1) == [OpenLink(address=A)]
    assert membership.on_hello(A, info(key("i2")), "", 13.2) == [WorkerJoined(info=info(key("i2")))]


def test_announcements_that_come_late_are_dropped(membership: Membership) -> None:
    joined(membership, key(), A, 0.0)
    role = WorkerRole.BOTH
    assert membership.on_announced(announcement(sequence=5, role=role), 1.0) == [
        WorkerJoined(info=info(role=role))
    ]
    assert membership.on_announced(announcement(sequence=4), 1.1) == []
    assert membership.live == (info(role=role),)


def test_without_the_bus_nobody_is_forgotten(membership: Membership) -> None:
    joined(membership, key(), A, 0.0)
    membership.on_closed(A, "cut", 1.0)
    membership.on_bus_changed(False, 1.0)
    assert membership.tick(1000.0) == [OpenLink(address=A)]
    membership.on_closed(A, "refused", 1000.0)
    # When it is back, there is time to announce.
    membership.on_bus_changed(True, 1001.0)
    assert membership.tick(1030.0) == [OpenLink(address=A)]
    membership.on_closed(A, "refused", 1031.0)
    assert membership.tick(1031.1) == []
    assert membership.members() == ()


def test_a_seed_is_tried_for_ever() -> None:
    membership = Membership(MembershipConfig(seeds=(A,)))
    membership.on_bus_changed(True, 0.0)
    assert membership.start(0.0) == [OpenLink(address=A)]
    membership.on_closed(A, "refused", 0.0)
    assert membership.tick(10_000.0) == [OpenLink(address=A)]
    assert membership.on_hello(A, info(), "", 10_000.0) == [WorkerJoined(info=info())]


def test_a_leaving_worker_is_not_knocked_at(membership: Membership) -> None:
    assert membership.on_announced(announcement(is_leaving=True), 0.0) == []
    assert membership.members() == ()


def test_one_worker_behind_two_addresses_joins_once() -> None:
    membership = Membership(MembershipConfig(seeds=(B,)))
    joined(membership, key(), A, 0.0)
    membership.start(0.1)
    effects = membership.on_hello(B, info(), "", 0.2)
    assert effects == [CloseLink(address=B, reason=f"d0@i1 is already joined at {A}")]
    # The other address is asked when the worker does not live any more, and not before.
    membership.on_frame(A, 10.2)
    assert membership.tick(10.2) == []
    assert membership.next_due() == pytest.approx(15.2)
    membership.on_closed(A, "cut", 12.0)
    assert OpenLink(address=B) in membership.tick(20.2)
    assert WorkerJoined(info=info(address=B)) in membership.on_hello(B, info(), "", 20.3)
    membership.validate()


def test_only_so_many_addresses_are_tried_at_a_time() -> None:
    membership = Membership(MembershipConfig(seeds=("seed:1",), max_unjoined=2))
    membership.on_bus_changed(True, 0.0)
    membership.start(0.0)

    def announced(number: int, now: float) -> list[MembershipEffect]:
        who = key(worker=f"d{number}")
        return membership.on_announced(announcement(who, address=f"h:{number}"), now)

    assert [announced(number, 0.0) for number in range(5)] == [
        [OpenLink(address="h:0")],
        [OpenLink(address="h:1")],
        [IgnoreAddress(address="h:2", num_unjoined=2)],
        [],
        [],
    ]
    # One that has joined makes room, and so does one that is forgotten.
    membership.on_hello("h:0", info(key(worker="d0")), "", 0.1)
    assert announced(2, 1.0) == [OpenLink(address="h:2")]
    assert announced(3, 1.0) == [IgnoreAddress(address="h:3", num_unjoined=2)]
    membership.on_closed("h:1", "refused", 1.0)
    membership.tick(31.0)
    assert announced(3, 31.0) == [OpenLink(address="h:3")]
    membership.validate()
