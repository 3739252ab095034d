"""Copies of hot chains: what the formula asks for, no wavering, bounded memory."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moonpool.ids import BlockHash
from moonpool.tiering.replicas import HotChain, ReplicaConfig, ReplicaPlanner, copies_needed

CONFIG = ReplicaConfig(
    bytes_per_s_of_a_copy=100.0, max_copies=4, slack=0.3, half_life_s=10.0, max_chains=8
)


def block(number: int) -> BlockHash:
    return BlockHash(number.to_bytes(32, "little"))


def num_copies(planner: ReplicaPlanner, home: BlockHash, now: float, elsewhere: float) -> int:
    planner.validate()
    found = [hot for hot in planner.plan(now, {home: elsewhere}) if hot.home_hash == home]
    return found[0].num_copies if found else 1


@given(rates=st.lists(st.floats(0.0, 1e4), max_size=30))
def test_copies_are_what_the_formula_asks_for_or_a_little_more(rates: list[float]) -> None:
    planner, home = ReplicaPlanner(CONFIG), block(1)
    planner.note_read(home, (home,), 0, 0.0)
    for rate in rates:
        copies = num_copies(planner, home, 0.0, rate)
        assert copies_needed(rate, CONFIG) <= copies <= copies_needed(rate / 0.7, CONFIG)


@given(data=st.data(), highest=st.floats(1.0, 1e4))
def test_a_rate_that_wavers_less_than_the_slack_never_gives_a_copy_up(
    data: st.DataObject, highest: float
) -> None:
    planner, home = ReplicaPlanner(CONFIG), block(1)
    planner.note_read(home, (home,), 0, 0.0)
    rates = data.draw(st.lists(st.floats(highest * 0.701, highest), min_size=1, max_size=30))
    copies = [num_copies(planner, home, 0.0, rate) for rate in rates]
    assert copies == sorted(copies)


@given(rates=st.lists(st.floats(0.0, 1e4), max_size=20))
def test_the_formula_is_clamped_and_grows_with_the_rate(rates: list[float]) -> None:
    copies = [copies_needed(rate, CONFIG) for rate in sorted(rates)]
    assert copies == sorted(copies)
    assert all(1 <= number <= CONFIG.max_copies for number in copies)


@given(
    reads=st.lists(
        st.tuples(st.integers(0, 20), st.integers(0, 10_000), st.floats(0.0, 5.0)), max_size=60
    )
)
def test_rates_are_those_of_a_naive_sum_and_memory_is_bounded(
    reads: list[tuple[int, int, float]],
) -> None:
    planner = ReplicaPlanner(CONFIG)
    now = 0.0
    history: list[tuple[int, int, float]] = []
    for number, num_bytes, pause_s in reads:
        now += pause_s
        planner.note_read(block(number), (block(number),), num_bytes, now)
        history.append((number, num_bytes, now))
        planner.validate()
    rates = [
        sum(
            num_bytes * math.log(2) / 10.0 * 0.5 ** ((now - at) / 10.0)
            for number, num_bytes, at in history
            if number == n
        )
        for n in range(21)
    ]
    told = {chain.home_hash: chain.bytes_per_s for chain in planner.reads(now, CONFIG.max_chains)}
    assert list(told.values()) == sorted(told.values(), reverse=True)
    for n, rate in enumerate(rates):
        assert told.get(block(n), 0.0) <= rate * (1 + 1e-9)
        if len({number for number, _, _ in history}) <= CONFIG.max_chains and rate > 1.001:
            assert told[block(n)] == pytest.approx(rate)


def test_the_hottest_chains_survive_many_others() -> None:
    planner = ReplicaPlanner(CONFIG)
    for number in range(100):
        for hot in (1, 2):
            planner.note_read(block(hot), (block(hot),), 10_000, 0.0)
        planner.note_read(block(1_000 + number), (block(1_000 + number),), 1, 0.0)
    planner.validate()
    assert [chain.home_hash for chain in planner.reads(0.0, 2)] == [block(1), block(2)]


def test_long_chains_are_bounded_by_their_blocks() -> None:
    planner = ReplicaPlanner(replace(CONFIG, max_blocks=20))
    for number in range(10):
        long = tuple(block(100 * number + index) for index in range(6))
        planner.note_read(long[0], long, 1_000 * (number + 1), 0.0)
        planner.validate()
    # The newest and the hottest ones.
    kept = [chain.home_hash for chain in planner.reads(0.0, 10)]
    assert kept[:2] == [block(900), block(800)]
    assert len(kept) <= 3
    planner.note_read(block(1), tuple(block(1 + index) for index in range(30)), 1, 0.0)
    planner.validate()


def test_what_all_readers_share_is_copied_and_silence_ends_it() -> None:
    planner = ReplicaPlanner(CONFIG)
    shared = (block(1), block(2), block(3))
    planner.note_read(block(2), (*shared, block(4)), 2_000, 0.0)
    planner.note_read(block(2), (*shared, block(5), block(6)), 2_000, 0.0)
    bytes_per_s = 4_000 * math.log(2) / 10.0
    (hot,) = planner.plan(0.0, {})
    assert hot == HotChain(
        home_hash=block(2), hashes=shared, num_copies=3, bytes_per_s=hot.bytes_per_s
    )
    assert hot.bytes_per_s == pytest.approx(bytes_per_s)
    # A half-life later it is half as hot: two copies serve that with 30 % to spare.
    assert planner.plan(10.0, {})[0].num_copies == 2
    assert planner.plan(100.0, {}) == ()


def test_reads_elsewhere_count_and_the_hottest_come_first() -> None:
    planner = ReplicaPlanner(CONFIG)
    for number in (1, 2, 3):
        planner.note_read(block(number), (block(number),), 0, 0.0)
    hot = planner.plan(0.0, {block(1): 150.0, block(2): 350.0, block(9): 1e9})
    assert [(chain.home_hash, chain.num_copies) for chain in hot] == [(block(2), 4), (block(1), 2)]
