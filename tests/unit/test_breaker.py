"""Breaker: closed, open, half-open."""

from __future__ import annotations

from moonpool.tiering.breaker import Breaker, BreakerConfig, BreakerState

_CONFIG = BreakerConfig(num_failures=3, within_s=1.0, open_s=2.0, max_open_s=5.0)


def _opened(now: float = 0.0) -> Breaker:
    breaker = Breaker(_CONFIG)
    for _ in range(3):
        breaker.failed(now)
    breaker.validate()
    return breaker


def test_it_opens_at_the_third_failure_in_a_row_within_a_second() -> None:
    breaker = Breaker(_CONFIG)
    breaker.failed(0.0)
    breaker.failed(0.5)
    assert breaker.state(0.5) is BreakerState.CLOSED
    breaker.failed(1.0)
    assert breaker.state(1.0) is BreakerState.OPEN
    assert not breaker.is_allowed(1.0)
    assert breaker.next_due() == 3.0


def test_failures_far_apart_or_not_in_a_row_do_not_open_it() -> None:
    breaker = Breaker(_CONFIG)
    for now in (0.0, 0.6, 1.2, 1.8):
        breaker.failed(now)
    assert breaker.state(1.8) is BreakerState.CLOSED
    breaker.failed(2.4)
    breaker.succeeded(2.4)
    breaker.failed(2.5)
    breaker.failed(2.5)
    assert breaker.state(2.5) is BreakerState.CLOSED
    breaker.validate()


def test_one_probe_is_allowed_and_its_success_closes_it() -> None:
    breaker = _opened()
    assert breaker.state(2.0) is BreakerState.HALF_OPEN
    assert breaker.is_allowed(2.0)
    breaker.begin(2.0)
    assert not breaker.is_allowed(2.0)
    assert breaker.next_due() is None
    breaker.validate()
    breaker.succeeded(2.1)
    assert breaker.state(2.1) is BreakerState.CLOSED
    assert breaker.is_allowed(2.1)
    breaker.validate()


def test_a_failed_probe_opens_it_for_longer_up_to_a_limit() -> None:
    breaker = _opened()
    now = 0.0
    for open_s in (2.0, 4.0, 5.0, 5.0):
        assert breaker.next_due() == now + open_s
        now += open_s
        breaker.begin(now)
        breaker.failed(now)
        breaker.validate()
    now += 5.0
    breaker.begin(now)
    breaker.succeeded(now)
    for _ in range(3):
        breaker.failed(now)
    assert breaker.next_due() == now + 2.0


def test_what_earlier_tries_report_while_it_is_open_changes_nothing() -> None:
    breaker = _opened()
    breaker.succeeded(1.0)
    breaker.failed(1.0)
    assert breaker.state(1.9) is BreakerState.OPEN
    assert breaker.next_due() == 2.0


def test_a_probe_that_tells_nothing_makes_room_for_another() -> None:
    breaker = _opened()
    breaker.begin(2.0)
    breaker.gave_up()
    assert breaker.is_allowed(2.0)
