"""What a service may refuse without asking its core."""

from __future__ import annotations

from dataclasses import replace

import pytest

from moonpool.core.protocol import BlockLedger
from moonpool.handoff.room_check import RoomCheck
from moonpool.kv.block_key import KeyArray
from moonpool.kv.namespace_seeds import NamespaceSeeds
from support.kv import SECRET, make_model_namespace
from support.requests import make_request

#: 4 of 20 blocks could be had.
FULL = BlockLedger(num_total=20, num_free=1, num_cached=3, num_referenced=16)
#: 6 blocks.
REQUEST = make_request(prompt=90, max_tokens=16)


def make_check(num_held: int = 0) -> RoomCheck:
    def look_up(keys: KeyArray) -> int:
        assert len(keys) == REQUEST.num_tokens // 16
        return num_held

    return RoomCheck(
        namespace_seed=NamespaceSeeds(make_model_namespace(), SECRET),
        num_held=look_up,
        block_size=16,
        max_model_len=320,
    )


@pytest.mark.parametrize(("num_held", "is_hopeless"), [(0, True), (1, True), (2, False)])
def test_what_is_held_need_not_be_had(num_held: int, is_hopeless: bool) -> None:
    assert make_check(num_held).is_hopeless(REQUEST, FULL) is is_hopeless


def test_what_fits_is_not_even_looked_up() -> None:
    # make_check's look-up would fail for another number of blocks than REQUEST has.
    assert not make_check().is_hopeless(make_request(prompt=64), FULL)


def test_who_may_revoke_others_is_the_cores_to_answer() -> None:
    assert not make_check().is_hopeless(REQUEST, replace(FULL, num_reserved=1))
    assert not make_check().is_hopeless(REQUEST, replace(FULL, num_quarantined=1))


def test_what_never_fits_is_the_cores_to_answer() -> None:
    too_long = make_request(prompt=90, max_tokens=1_000)
    assert make_check().is_hopeless(too_long, FULL)
    assert not make_check().is_hopeless(too_long, replace(FULL, num_total=19, num_referenced=15))
    assert not make_check().is_hopeless(make_request(prompt=320, max_tokens=9), FULL)
