"""What store nodes tell each other: who counts, who takes what, and what is too much."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from moonpool.ids import BlockHash, Incarnation, WorkerId, WorkerKey
from moonpool.tiering.store_record import (
    MAX_COPIES,
    MAX_COPY_BLOCKS,
    MAX_READS,
    MAX_TAKEN,
    ChainCopy,
    ChainReads,
    CopyKind,
    RingView,
    StoreMember,
    StoreRecord,
)


def block(number: int) -> BlockHash:
    return BlockHash(number.to_bytes(32, "little"))


def member(
    store: str,
    *,
    life: str = "1",
    since_unix_s: float = 0.0,
    joined_unix_s: float | None = None,
    is_draining: bool = False,
) -> StoreMember:
    return StoreMember(
        key=WorkerKey(WorkerId(store), Incarnation(life)),
        address=store,
        since_unix_s=since_unix_s,
        joined_unix_s=joined_unix_s,
        is_draining=is_draining,
    )


def copy(number: int, *takers: str, num_blocks: int = 1) -> ChainCopy:
    return ChainCopy(
        kind=CopyKind.REPLICA,
        tenant="",
        hashes=tuple(block(number + index) for index in range(num_blocks)),
        takers=tuple(map(WorkerId, takers)),
    )


def test_of_two_lives_the_later_one_counts() -> None:
    old, new = member("a", life="9", since_unix_s=1.0), member("a", life="1", since_unix_s=2.0)
    other = member("b")
    records = [StoreRecord(member=who) for who in (other, new, old)]
    # It has not just come: the ring goes on as it was.
    joined = replace(new, joined_unix_s=1.0)
    assert RingView.of(records).members == (joined, other)
    assert RingView.of(reversed(records)).members == (joined, other)
    assert joined.age_s(11.0) == 10.0


def test_a_store_is_as_old_as_its_lives_together() -> None:
    first = member("a", life="1", since_unix_s=1.0)
    second = member("a", life="2", since_unix_s=5.0, joined_unix_s=1.0)
    third = member("a", life="3", since_unix_s=9.0)

    def joined_at(*lives: StoreMember) -> float:
        (counts,) = RingView.of(StoreRecord(member=life) for life in lives).members
        assert counts.key == lives[-1].key
        return counts.in_ring_since_unix_s

    assert joined_at(first, second, third) == 1.0
    assert joined_at(second, third) == 1.0
    assert joined_at(second) == 1.0
    assert joined_at(third) == 9.0
    # One that has said that it leaves, and comes back, has come anew.
    assert joined_at(first, replace(second, is_draining=True), third) == 9.0


def test_takers_are_told_from_whom() -> None:
    for_b, for_both = copy(1, "b"), copy(2, "a", "b")
    view = RingView.of(
        [
            StoreRecord(member=member("a"), copies=(for_b, for_both)),
            StoreRecord(member=member("c"), copies=(for_both,)),
        ]
    )
    assert view.copies_for(WorkerId("b")) == (
        (member("a"), for_b),
        (member("a"), for_both),
        (member("c"), for_both),
    )
    # Nobody takes from itself.
    assert view.copies_for(WorkerId("a")) == ((member("c"), for_both),)


def test_reads_of_all_others_add_up() -> None:
    def reads(*pairs: tuple[int, float]) -> tuple[ChainReads, ...]:
        return tuple(ChainReads(home_hash=block(n), bytes_per_s=rate) for n, rate in pairs)

    view = RingView.of(
        [
            StoreRecord(member=member("a"), reads=reads((1, 1.0))),
            StoreRecord(member=member("b"), reads=reads((1, 2.0), (2, 5.0))),
            StoreRecord(member=member("c"), reads=reads((1, 4.0))),
        ]
    )
    assert view.reads_elsewhere(WorkerId("a")) == {block(1): 6.0, block(2): 5.0}


def test_age_is_never_negative() -> None:
    assert member("a", since_unix_s=10.0).age_s(12.5) == 2.5
    assert member("a", since_unix_s=10.0).age_s(9.0) == 0.0


def test_what_is_too_much_or_malformed_is_refused() -> None:
    me = member("a")
    StoreRecord(member=me, copies=(copy(0, num_blocks=MAX_COPY_BLOCKS),))
    with pytest.raises(ValueError, match="copies"):
        StoreRecord(member=me, copies=(copy(0, num_blocks=MAX_COPY_BLOCKS), copy(1)))
    with pytest.raises(ValueError, match="copies"):
        StoreRecord(member=me, copies=tuple(copy(n) for n in range(MAX_COPIES + 1)))
    one_read = ChainReads(home_hash=block(1), bytes_per_s=1.0)
    with pytest.raises(ValueError, match="reads"):
        StoreRecord(member=me, reads=(one_read,) * (MAX_READS + 1))
    StoreRecord(member=me, taken=(block(1),) * MAX_TAKEN, declined=(block(2),) * MAX_TAKEN)
    for too_much in ((block(1),) * (MAX_TAKEN + 1), (BlockHash(b"short"),)):
        with pytest.raises(ValueError, match="taken"):
            StoreRecord(member=me, taken=too_much)
        with pytest.raises(ValueError, match="declined"):
            StoreRecord(member=me, declined=too_much)
    with pytest.raises(ValueError, match="copy"):
        copy(0, num_blocks=0)
    with pytest.raises(ValueError, match="hash"):
        ChainCopy(kind=CopyKind.MOVE, tenant="", hashes=(BlockHash(b"short"),), takers=())
    for bytes_per_s in (math.nan, math.inf, -1.0):
        with pytest.raises(ValueError, match="bytes/s"):
            ChainReads(home_hash=block(1), bytes_per_s=bytes_per_s)
    with pytest.raises(ValueError, match="since_unix_s"):
        member("a", since_unix_s=math.nan)
    with pytest.raises(ValueError, match="joined_unix_s"):
        member("a", joined_unix_s=math.inf)
