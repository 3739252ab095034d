"""Where chains lie: the same for everybody who knows the same stores, and little moves when one comes."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise

import pytest

from moonpool.ids import BlockHash, WorkerId
from moonpool.tiering.homes import HOME_BLOCKS, MIN_WEIGHT, home_key, home_of, ramp_weight
from support.kv import make_chain

KEYS: list[BlockHash] = [make_chain([number])[0] for number in range(2_000)]


def weights(*names: str, weight: float = 1.0) -> dict[WorkerId, float]:
    return {WorkerId(name): weight for name in names}


def test_chains_with_a_long_beginning_in_common_lie_together() -> None:
    common = list(range(HOME_BLOCKS))
    first, second = make_chain([*common, 1, 2]), make_chain([*common, 3])
    assert home_key(first) == home_key(second) == first[HOME_BLOCKS - 1]
    # A shorter one lies where its last block says.
    assert home_key(first[:10]) == first[9]
    assert home_key(first[:1]) == first[0]


def test_the_order_of_the_stores_does_not_matter() -> None:
    forwards, backwards = weights("a", "b", "c"), weights("c", "b", "a")
    assert [home_of(forwards, key) for key in KEYS] == [home_of(backwards, key) for key in KEYS]
    assert home_of({}, KEYS[0]) is None


def test_every_store_has_its_share() -> None:
    counts = Counter(home_of(weights("a", "b", "c", "d"), key) for key in KEYS)
    assert all(400 < count < 600 for count in counts.values()), counts


def test_shares_follow_the_weights() -> None:
    counts = Counter(home_of({WorkerId("a"): 3.0, WorkerId("b"): 1.0}, key) for key in KEYS)
    assert counts["b"] == pytest.approx(500, abs=75)


def test_a_store_that_comes_or_goes_moves_only_its_own_keys() -> None:
    few, many = weights("a", "b"), weights("a", "b", "c")
    for key in KEYS:
        before, after = home_of(few, key), home_of(many, key)
        assert after in (before, "c")


def test_a_share_grows_without_moving_anything_between_the_others() -> None:
    homes = [
        [home_of({**weights("a", "b"), WorkerId("c"): weight}, key) for key in KEYS]
        for weight in (0.1, 0.4, 1.0)
    ]
    for early, late in pairwise(homes):
        assert all(after in (before, "c") for before, after in zip(early, late, strict=True))
        assert early.count(WorkerId("c")) < late.count(WorkerId("c"))


def test_a_store_that_has_joined_is_taken_in_by_and_by() -> None:
    assert ramp_weight(0.0, 60.0) == MIN_WEIGHT
    assert ramp_weight(30.0, 60.0) == 0.5
    assert ramp_weight(60.0, 60.0) == ramp_weight(1e9, 60.0) == 1.0
