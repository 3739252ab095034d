"""Fleet: how fast caches are filled, as far as it decides between equals."""

from __future__ import annotations

from moonpool.dispatch.config import DispatchConfig
from moonpool.dispatch.fleet import Fleet, RoomNews
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


def test_a_store_is_no_room_and_no_cache_that_requests_fill() -> None:
    with_store, without = make_fleet(), make_fleet()
    key = make_key("store")
    with_store.join(WorkerInfo(key=key, role=WorkerRole.STORE, address="x:1"))
    load = WorkerLoad(num_total_blocks=9_999, num_available_blocks=5_000)
    assert with_store.report(key, load) is RoomNews.NONE
    # Whatever becomes free there makes no room for anybody.
    more = WorkerLoad(num_total_blocks=9_999, num_available_blocks=9_999)
    assert with_store.report(key, more) is RoomNews.NONE
    for fleet in (with_store, without):
        fleet.fill(A, 50)
        fleet.fill(B, 50)
    assert churns(with_store)[:2] == churns(without)
    table = with_store.table()
    assert table.is_store.tolist() == [False, False, True]
    assert not (table.can_decode | table.can_prefill)[2]
