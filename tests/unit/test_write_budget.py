"""WriteBudget and FrequencySketch: what may be written, and what is worth it."""

from __future__ import annotations

import hashlib

import pytest

from moonpool.ids import BlockHash
from moonpool.tiering.frequency import FrequencySketch
from moonpool.tiering.write_budget import BudgetLeft, WriteBudget

_DAY_S = 86_400.0
_UNIT = 1_000


def _hashes(first: int, end: int) -> list[BlockHash]:
    return [BlockHash(hashlib.sha256(str(i).encode()).digest()) for i in range(first, end)]


def _write_all(budget: WriteBudget, now: float) -> int:
    """As much as may be written now; how many units."""
    num_units = budget.num_affordable(_UNIT, now)
    assert num_units is not None
    budget.take(num_units * _UNIT, now)
    return num_units


@pytest.mark.parametrize("step_s", [60.0, 3_600.0, 20_000.0])
def test_no_24_hours_see_more_than_the_budget(step_s: float) -> None:
    budget = WriteBudget(1_200 * _UNIT)
    times = [step * step_s for step in range(int(3 * _DAY_S / step_s))]
    written = [(now, _write_all(budget, now)) for now in times]
    for begin in times:
        assert sum(n for now, n in written if begin <= now < begin + _DAY_S) <= 1_200
    # And whoever writes all the time may write nearly all of it.
    assert sum(n for _, n in written) >= 3 * 1_200 * 0.9 or step_s > _DAY_S / 12


def test_a_burst_is_a_twelfth_of_the_day() -> None:
    budget = WriteBudget(1_200 * _UNIT)
    assert (budget.max_bytes, budget.left_bytes(0.0)) == (100 * _UNIT, 100 * _UNIT)
    assert _write_all(budget, 5.0) == 100
    assert budget.level(5.0) == 0.0
    assert budget.level(5.0 + _DAY_S) == 1.0


@pytest.mark.parametrize("restart_s", [60.0, 7_200.0])
def test_a_restart_fills_nothing_up(restart_s: float) -> None:
    budget = WriteBudget(1_200 * _UNIT)
    num_written = 0
    for life in range(int(_DAY_S / restart_s)):
        now = life * restart_s
        num_written += _write_all(budget, now)
        left_bytes = budget.left_bytes(now)
        assert left_bytes is not None
        # The next life has a clock of its own.
        left = BudgetLeft(num_bytes=left_bytes, age_s=restart_s)
        budget = WriteBudget(1_200 * _UNIT, left)
    assert 1_000 <= num_written <= 1_200


def test_what_was_left_is_never_more_than_a_burst() -> None:
    for num_bytes, age_s, left_bytes in ((0, 0.0, 0), (10**9, 0.0, 100_000), (0, 1e9, 100_000)):
        budget = WriteBudget(1_200 * _UNIT, BudgetLeft(num_bytes=num_bytes, age_s=age_s))
        assert budget.left_bytes(7.0) == left_bytes


def test_without_a_budget_there_is_no_limit() -> None:
    budget = WriteBudget(None)
    budget.take(10**15, 0.0)
    assert (budget.max_bytes, budget.left_bytes(0.0)) == (None, None)
    assert budget.num_affordable(_UNIT, 0.0) is None
    assert budget.level(0.0) == 1.0


def test_a_budget_of_nothing_writes_nothing() -> None:
    budget = WriteBudget(0)
    assert budget.num_affordable(_UNIT, _DAY_S) == 0
    assert budget.level(_DAY_S) == 0.0


def test_a_sketch_counts_what_it_has_seen_and_seldom_more() -> None:
    sketch = FrequencySketch(1_000)
    often, once = _hashes(0, 100), _hashes(100, 1_000)
    for _ in range(5):
        sketch.see(often)
    sketch.see(once)
    assert (sketch.counts(often) >= 5).all()
    assert (sketch.counts(once) >= 1).all()
    assert (sketch.counts(once) > 1).mean() < 0.05
    assert (sketch.counts(_hashes(2_000, 3_000)) > 0).mean() < 0.2
    assert len(sketch.counts([])) == 0


def test_a_sketch_forgets_by_and_by_and_counts_up_to_a_limit() -> None:
    sketch = FrequencySketch(64)
    (block,) = _hashes(0, 1)
    for _ in range(40):
        sketch.see([block])
    assert sketch.counts([block])[0] == 15
    for start in range(0, 6_400, 64):
        sketch.see(_hashes(1_000 + start, 1_064 + start))
    assert sketch.counts([block])[0] < 15
