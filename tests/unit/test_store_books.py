"""A store's metrics follow what it has counted, however often they are brought up to date."""

from __future__ import annotations

from dataclasses import replace

from moonpool.ids import Incarnation, WorkerId, WorkerKey
from moonpool.telemetry import names
from moonpool.telemetry.metrics import Metrics
from moonpool.tiering.breaker import BreakerState
from moonpool.tiering.protocol import PutRefusal, StoreStats
from moonpool.wire.store import DiskReport, StoreReport
from moonpool_kvstore.books import STORE_METRICS, StoreBooks

REPORT = StoreReport(
    store=WorkerKey(WorkerId("store-0"), Incarnation("1")),
    block_bytes=1_000,
    num_total_blocks=64,
    stats=StoreStats(
        num_host_blocks=7,
        num_puts=10,
        num_known_puts=3,
        num_refused_puts=((PutRefusal.NO_ROOM, 2), (PutRefusal.DRAINING, 0)),
        num_gets=6,
        num_short_gets=1,
        num_missed_gets=2,
        num_evicted_blocks=9,
        num_demoted_blocks=4,
    ),
)


def test_counters_grow_by_what_is_new() -> None:
    metrics = Metrics(STORE_METRICS)
    books = StoreBooks(metrics)
    for _ in range(2):
        books.update(REPORT)

    def puts(outcome: str) -> float:
        return metrics.value(names.STORE_PUTS, outcome=outcome)

    assert (puts("taken"), puts("known"), puts("no_room"), puts("draining")) == (5, 3, 2, 0)
    gets = {
        outcome: metrics.value(names.STORE_GETS, outcome=outcome)
        for outcome in ("found", "short", "missed")
    }
    assert gets == {"found": 3, "short": 1, "missed": 2}
    kinds = [metrics.value(names.STORE_EVICTED_BLOCKS, kind=kind) for kind in ("demoted", "lost")]
    assert kinds == [4, 5]
    books.update(replace(REPORT, stats=replace(REPORT.stats, num_puts=14, num_known_puts=4)))
    assert (puts("taken"), puts("known")) == (8, 4)


def test_gauges_say_what_there_is() -> None:
    metrics = Metrics(STORE_METRICS)
    books = StoreBooks(metrics)
    books.update(replace(REPORT, problem="no such directory"))
    assert metrics.value(names.STORE_DISK_UP) == 0
    assert metrics.value(names.STORE_BYTES, tier="host") == 7_000
    assert metrics.value(names.STORE_CAPACITY, tier="host") == 64_000
    disk = DiskReport(capacity_bytes=5_000, file_bytes=4_000, written_bytes=3_000, read_bytes=0)
    stats = replace(
        REPORT.stats,
        num_disk_blocks=4,
        write_budget_bytes=123,
        disk_reads=BreakerState.HALF_OPEN,
        disk_writes=BreakerState.OPEN,
    )
    books.update(replace(REPORT, stats=stats, disk=disk))
    assert metrics.value(names.STORE_DISK_UP) == 1
    assert metrics.value(names.STORE_BYTES, tier="disk") == 4_000
    assert metrics.value(names.STORE_WRITE_BUDGET) == 123
    assert metrics.value(names.STORE_BREAKER, access="reads") == 1
    assert metrics.value(names.STORE_BREAKER, access="writes") == 2
    assert metrics.value(names.STORE_DISK_BYTES, direction="written") == 3_000


def test_what_became_of_a_leaving_nodes_blocks_is_counted() -> None:
    metrics = Metrics(STORE_METRICS)
    StoreBooks(metrics).ring_left(num_handed_blocks=5, num_left_blocks=2)
    outcomes = [
        metrics.value(names.STORE_LEAVING_BLOCKS, outcome=outcome)
        for outcome in ("handed_over", "left")
    ]
    assert outcomes == [5, 2]


def test_what_went_wrong_with_the_directory_is_counted() -> None:
    metrics = Metrics(STORE_METRICS)
    books = StoreBooks(metrics)
    for num_failed_calls, num_bad_records in ((2, 0), (2, 1)):
        books.directory(num_failed_calls=num_failed_calls, num_bad_records=num_bad_records)
        metric = names.STORE_DIRECTORY_FAILURES
        assert metrics.value(metric, kind="call") == num_failed_calls
        assert metrics.value(metric, kind="record") == num_bad_records
