"""StoreBooks: a store's metrics, brought up to what its core and its disk have counted."""

from __future__ import annotations

from moonpool.telemetry import names
from moonpool.telemetry.metrics import Metrics
from moonpool.telemetry.names import Metric
from moonpool.tiering.breaker import BreakerState
from moonpool.wire.store import StoreReport

#: What every node counts; those of engines and of the requests that they run are not among them.
_NODE_METRICS: tuple[Metric, ...] = (
    names.BUILD_INFO,
    names.EVENT_LOOP_LAG,
    names.NATS_CONNECTED,
    names.BUS_LOST,
    names.KV_BLOCKS,
    names.KV_PUBLISHED_BLOCKS,
    names.KV_EVENT_BATCHES,
    names.KV_TRANSFER,
    names.KV_TRANSFER_BYTES,
    names.KV_CHECKSUM_MISMATCH,
    names.KV_FETCHES,
    names.KV_FETCH,
    names.KV_FETCH_BLOCKS,
    names.KV_FETCH_BYTES,
    names.KV_PREFIX_LOCKS,
    names.WORKER_REQUESTS,
    names.QUEUED_TOKENS,
    names.HANDOFFS,
    names.HANDOFF_STREAMS,
    names.REFUSED_ATTEMPTS,
)
STORE_METRICS: tuple[Metric, ...] = (
    *_NODE_METRICS,
    names.STORE_BLOCKS,
    names.STORE_BYTES,
    names.STORE_CAPACITY,
    names.STORE_PINNED_BLOCKS,
    names.STORE_UNWRITTEN_BLOCKS,
    names.STORE_PUTS,
    names.STORE_EXPIRED_PUTS,
    names.STORE_PUT_BLOCKS,
    names.STORE_LEAVING_BLOCKS,
    names.STORE_GETS,
    names.STORE_HIT_BLOCKS,
    names.STORE_EVICTED_BLOCKS,
    names.STORE_LOADED_BLOCKS,
    names.STORE_WRITTEN_BLOCKS,
    names.STORE_DISK_BYTES,
    names.STORE_WRITE_BUDGET,
    names.STORE_BREAKER,
    names.STORE_DIRECTORY_FAILURES,
    names.STORE_DISK_UP,
)

#: By name and label values: what a counter has reached.
_Counts = dict[tuple[Metric, tuple[tuple[str, str], ...]], int]
_BREAKER_NUMBERS = {BreakerState.CLOSED: 0, BreakerState.HALF_OPEN: 1, BreakerState.OPEN: 2}


class StoreBooks:
    """Owned by the service."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics
        self._told: _Counts = {}

    def update(self, report: StoreReport) -> None:
        """Bring gauges and counters up to the report, which is later than the last one."""
        self._set_gauges(report)
        counts = _counts(report)
        for (metric, labels), count in counts.items():
            grown = count - self._told.get((metric, labels), 0)
            if grown > 0:
                self._metrics.count(metric, grown, **dict(labels))
        self._told = counts

    def directory(self, *, num_failed_calls: int, num_bad_records: int) -> None:
        """What went wrong with the directory since the start."""
        metric = names.STORE_DIRECTORY_FAILURES
        self._metrics.count_to(metric, num_failed_calls, kind="call")
        self._metrics.count_to(metric, num_bad_records, kind="record")

    def ring_left(self, *, num_handed_blocks: int, num_left_blocks: int) -> None:
        """This node has left its ring."""
        metric = names.STORE_LEAVING_BLOCKS
        self._metrics.count(metric, num_handed_blocks, outcome="handed_over")
        self._metrics.count(metric, num_left_blocks, outcome="left")

    def _set_gauges(self, report: StoreReport) -> None:
        metrics, stats, disk = self._metrics, report.stats, report.disk
        block_bytes = report.block_bytes
        metrics.set(names.STORE_BLOCKS, stats.num_host_blocks, tier="host")
        metrics.set(names.STORE_BYTES, stats.num_host_blocks * block_bytes, tier="host")
        metrics.set(names.STORE_CAPACITY, report.num_total_blocks * block_bytes, tier="host")
        metrics.set(names.STORE_PINNED_BLOCKS, stats.num_pinned_blocks)
        metrics.set(names.STORE_DISK_UP, disk is not None and not report.problem)
        if disk is None:
            return
        metrics.set(names.STORE_BLOCKS, stats.num_disk_blocks, tier="disk")
        metrics.set(names.STORE_BYTES, disk.file_bytes, tier="disk")
        metrics.set(names.STORE_CAPACITY, disk.capacity_bytes, tier="disk")
        metrics.set(names.STORE_UNWRITTEN_BLOCKS, stats.num_unwritten_blocks)
        metrics.set(names.STORE_BREAKER, _BREAKER_NUMBERS[stats.disk_reads], access="reads")
        metrics.set(names.STORE_BREAKER, _BREAKER_NUMBERS[stats.disk_writes], access="writes")
        if stats.write_budget_bytes is not None:
            metrics.set(names.STORE_WRITE_BUDGET, stats.write_budget_bytes)


def _counts(report: StoreReport) -> _Counts:
    stats, disk = report.stats, report.disk
    num_refused = sum(num_puts for _, num_puts in stats.num_refused_puts)
    counts: _Counts = {
        (names.STORE_EXPIRED_PUTS, ()): stats.num_expired_puts,
        (names.STORE_PUT_BLOCKS, ()): stats.num_put_blocks,
    }

    def add(metric: Metric, label: str, **values: int) -> None:
        for value, count in values.items():
            counts[metric, ((label, value),)] = count

    add(
        names.STORE_PUTS,
        "outcome",
        taken=stats.num_puts - stats.num_known_puts - num_refused,
        known=stats.num_known_puts,
        **{reason.value: num_puts for reason, num_puts in stats.num_refused_puts},
    )
    add(
        names.STORE_GETS,
        "outcome",
        found=stats.num_gets - stats.num_short_gets - stats.num_missed_gets,
        short=stats.num_short_gets,
        missed=stats.num_missed_gets,
    )
    add(
        names.STORE_HIT_BLOCKS,
        "tier",
        host=stats.num_hit_host_blocks,
        disk=stats.num_hit_disk_blocks,
    )
    add(
        names.STORE_EVICTED_BLOCKS,
        "kind",
        demoted=stats.num_demoted_blocks,
        lost=stats.num_evicted_blocks - stats.num_demoted_blocks,
        reclaimed=stats.num_reclaimed_blocks,
    )
    add(
        names.STORE_LOADED_BLOCKS,
        "outcome",
        ok=stats.num_loaded_blocks,
        failed=stats.num_failed_load_blocks,
        bad=stats.num_bad_blocks,
    )
    add(
        names.STORE_WRITTEN_BLOCKS,
        "outcome",
        ok=stats.num_written_blocks,
        failed=stats.num_failed_write_blocks,
        unadmitted=stats.num_unadmitted_blocks,
    )
    if disk is not None:
        add(
            names.STORE_DISK_BYTES,
            "direction",
            written=disk.written_bytes,
            read=disk.read_bytes,
        )
    return counts
