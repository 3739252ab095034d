"""Fleet: how fast caches are filled, as far as it decides between equals."""

from __future__ import annotations

from moonpool.dispatch.config import DispatchConfig
from moonpool.dispatch.fleet import Fleet
from moonpool.routing.worker_view import WorkerInfo, WorkerLoad, WorkerRole
from support.fleet import make_key

A, B = make_key("a"), make_key("b")


def make_fleet(num_blocks: int = 100) -> Fleet:
    fleet = Fleet(DispatchConfig())
    for key in (A, B):
        fleet.join(WorkerInfo(key=key, role=WorkerRole.BOTH, address="x:1"))
        fleet.report(key, WorkerLoad(num_total_blocks=num_blocks, num_available_blocks=num_blocks))
    return fleet


def churns(fleet: Fleet) -> list[float]:
    return fleet.table().churn.tolist()


def test_what_fills_a_cache_counts_there() -> None:
    fleet = make_fleet()
    assert churns(fleet) == [0.0, 0.0]
    fleet.fill(B, 10)
    a, b = churns(fleet)
    assert a == 0.0 < b


def test_a_later_block_counts_more_than_an_earlier_one() -> None:
    fleet = make_fleet()
    fleet.fill(A, 100)
    fleet.fill(B, 100)
    a, b = churns(fleet)
    assert a < b
    # After many turnovers the first hundred blocks count for nothing.
    for _ in range(20):
        fleet.fill(B, 200)
    fleet.fill(A, 1)
    a, b = churns(fleet)
    assert 0.0 < a < b / 50


def test_the_order_stays_however_long_it_runs() -> None:
    fleet = make_fleet(num_blocks=10)
    for turn in range(2_000):
        fleet.fill(A if turn % 3 else B, 10)
        fleet.validate({}, {})
    fleet.fill(A, 10)
    a, b = churns(fleet)
    assert a > b


def test_a_worker_that_has_told_no_pool_is_filled_too() -> None:
    fleet = Fleet(DispatchConfig())
    fleet.join(WorkerInfo(key=A, role=WorkerRole.BOTH, address="x:1"))
    fleet.fill(A, 5)
    assert churns(fleet) == [5.0]
