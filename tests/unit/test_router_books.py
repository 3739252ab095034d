"""The router's metrics: no label outlives whom it names."""

from __future__ import annotations

from moonpool.telemetry import names
from moonpool.telemetry.metrics import Metrics
from moonpool_router.books import ROUTER_METRICS, RouterBooks


def test_a_worker_that_is_not_followed_any_more_has_no_gauge() -> None:
    metrics = Metrics(ROUTER_METRICS)
    books = RouterBooks(metrics, model="m")
    books.index({"d0": 3, "d1": 4})
    books.index({"d1": 5})
    assert metrics.value(names.INDEX_BLOCKS, worker="d1") == 5
    assert b'worker="d0"' not in metrics.render()
    books.index({"d0": 1})
    assert metrics.value(names.INDEX_BLOCKS, worker="d0") == 1
