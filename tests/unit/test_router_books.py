"""The router's metrics: no label outlives whom it names."""

from __future__ import annotations

from moonpool.telemetry import names
from moonpool.telemetry.metrics import Metrics
from moonpool_router.books import ROUTER_METRICS, FleetCounts, RouterBooks


def test_a_worker_that_is_not_followed_any_more_has_no_gauge() -> None:
    metrics = Metrics(ROUTER_METRICS)
    books = RouterBooks(metrics, model="m")
    books.index({"d0": 3, "d1": 4})
    books.index({"d1": 5})
    assert metrics.value(names.INDEX_BLOCKS, worker="d1") == 5
    assert b'worker="d0"' not in metrics.render()
    books.index({"d0": 1})
    assert metrics.value(names.INDEX_BLOCKS, worker="d0") == 1


def test_what_the_bus_lost_is_counted_up_to_its_own_count() -> None:
    metrics = Metrics(ROUTER_METRICS)
    books = RouterBooks(metrics, model="m")
    for num_unsent, num_dropped in ((3, 0), (3, 0), (5, 2)):
        books.fleet(
            FleetCounts(
                num_queued=0,
                num_running=0,
                is_bus_connected=True,
                num_unsent=num_unsent,
                num_dropped=num_dropped,
                num_workers={},
            )
        )
        assert metrics.value(names.BUS_LOST, reason="unsent") == num_unsent
        assert metrics.value(names.BUS_LOST, reason="dropped") == num_dropped
