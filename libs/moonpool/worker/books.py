"""WorkerBooks: a worker's metrics, in one place, each told once what happened."""

from __future__ import annotations

from collections.abc import Mapping

from moonpool.core.protocol import CoreFrame, HandBackReason, RefuseReason
from moonpool.handoff.effects import FetchOutcome, RecordFetch
from moonpool.ids import WorkerId
from moonpool.latency.step_shape import StepShape
from moonpool.telemetry import names
from moonpool.telemetry.metrics import Metrics
from moonpool.telemetry.names import Metric
from moonpool.tiering.breaker import BreakerState
from moonpool.tiering.offloader import PutOutcome
from moonpool.transport.base import ReadResult
from moonpool.wire.worker import LedgerReport

#: What a worker counts; the metrics of routers are not among them.
WORKER_METRICS: tuple[Metric, ...] = (
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
    names.KV_OFFLOADS,
    names.KV_OFFLOAD_BLOCKS,
    names.KV_OFFLOAD_CHAINS,
    names.KV_OFFLOAD_BREAKER,
    names.STEP,
    names.STEP_OVERHEAD,
    names.STEP_TOKENS,
    names.WORKER_REQUESTS,
    names.QUEUED_TOKENS,
    names.HANDOFFS,
    names.HANDOFF_STREAMS,
    names.PREEMPTIONS,
    names.REFUSED_ATTEMPTS,
    names.HANDED_BACK,
)


class WorkerBooks:
    """Counts for one worker.

    Args:
        tier: Where its blocks lie.
    """

    def __init__(self, metrics: Metrics, *, tier: str = "device") -> None:
        self._metrics = metrics
        self._tier = tier
        #: Whose gauges were set.
        self._stores: set[WorkerId] = set()

    @property
    def metrics(self) -> Metrics:
        return self._metrics

    def frame(self, frame: CoreFrame) -> None:
        """One step of the engine."""
        metrics = self._metrics
        if frame.num_step_tokens:
            metrics.count(names.STEP_TOKENS, frame.num_step_tokens)
            metrics.observe(names.STEP, frame.forward_s, part="forward")
            metrics.observe(names.STEP, frame.logits_s, part="logits")
            metrics.observe(names.STEP, frame.sample_s, part="sample")
            metrics.observe(names.STEP, frame.other_s, part="other")
        if frame.num_preemptions:
            metrics.count(names.PREEMPTIONS, frame.num_preemptions)

    def step_overhead(self, overhead_s: float, shape: StepShape) -> None:
        """What a step took beside the model and the sampler."""
        self._metrics.observe(names.STEP_OVERHEAD, overhead_s, batch=_batch_label(shape))

    def read(self, result: ReadResult, *, backend: str, num_bad_blocks: int) -> None:
        """One read of KV from a peer ended, some blocks of it perhaps not as their digests say."""
        self._metrics.observe(names.KV_TRANSFER, result.elapsed_s, backend=backend)
        self._metrics.count(names.KV_TRANSFER_BYTES, result.num_bytes, backend=backend)
        if num_bad_blocks:
            self._metrics.count(names.KV_CHECKSUM_MISMATCH, num_bad_blocks, backend=backend)

    def fetch(self, fetch: RecordFetch, *, block_bytes: int) -> None:
        """A prefix that a peer was believed to hold has been read, or has not."""
        metrics = self._metrics
        metrics.count(names.KV_FETCHES, outcome=fetch.outcome.value)
        if fetch.outcome is not FetchOutcome.RECOMPUTE:
            metrics.observe(names.KV_FETCH, fetch.elapsed_s)
        if fetch.num_blocks:
            metrics.count(names.KV_FETCH_BLOCKS, fetch.num_blocks)
            metrics.count(names.KV_FETCH_BYTES, fetch.num_blocks * block_bytes)

    def offloaded(self, outcome: PutOutcome, *, num_wanted_blocks: int) -> None:
        """A chain was offered to a store, which is going to read so many blocks of it."""
        self._metrics.count(names.KV_OFFLOADS, outcome=outcome.value)
        self._metrics.count(names.KV_OFFLOAD_BLOCKS, num_wanted_blocks, outcome="taken")

    def offload_missed(self, num_blocks: int) -> None:
        """Blocks left the cache before a store was known to hold them."""
        self._metrics.count(names.KV_OFFLOAD_BLOCKS, num_blocks, outcome="missed")

    def offload(
        self, *, num_waiting: int, num_puts: int, breakers: Mapping[WorkerId, BreakerState]
    ) -> None:
        """Set the gauges; of a store that has gone nothing is told any more."""
        metrics = self._metrics
        metrics.set(names.KV_OFFLOAD_CHAINS, num_waiting, state="waiting")
        metrics.set(names.KV_OFFLOAD_CHAINS, num_puts, state="put")
        for store in self._stores - breakers.keys():
            metrics.forget(names.KV_OFFLOAD_BREAKER, store=store)
        self._stores = set(breakers)
        for store, state in breakers.items():
            is_open = state is not BreakerState.CLOSED
            metrics.set(names.KV_OFFLOAD_BREAKER, is_open, store=store)

    def refused(self, reason: RefuseReason) -> None:
        self._metrics.count(names.REFUSED_ATTEMPTS, reason=reason.value)

    def handed_back(self, reason: HandBackReason) -> None:
        self._metrics.count(names.HANDED_BACK, reason=reason.value)

    def kv_events(self, *, is_sent: bool) -> None:
        """A change of the published blocks has left, or was dropped."""
        self._metrics.count(names.KV_EVENT_BATCHES, outcome="sent" if is_sent else "unsent")

    def kv_published(self, num_blocks: int) -> None:
        self._metrics.set(names.KV_PUBLISHED_BLOCKS, num_blocks)

    def loop_lag(self, lag_s: float) -> None:
        self._metrics.observe(names.EVENT_LOOP_LAG, lag_s)

    def bus_connection(self, is_connected: bool) -> None:
        self._metrics.set(names.NATS_CONNECTED, is_connected)

    def bus_losses(self, *, num_unsent: int, num_dropped: int) -> None:
        """What the bus has lost since the start."""
        self._metrics.count_to(names.BUS_LOST, num_unsent, reason="unsent")
        self._metrics.count_to(names.BUS_LOST, num_dropped, reason="dropped")

    def announcement_unreadable(self) -> None:
        """An announcement came over the bus that cannot be read."""
        self._metrics.count(names.BUS_LOST, reason="unreadable")

    def gauges(self, report: LedgerReport, *, num_queued_tokens: int) -> None:
        """What the worker holds, as of now."""
        metrics, ledger = self._metrics, report.ledger
        for state, number in (
            ("free", ledger.num_free),
            ("cached", ledger.num_cached),
            ("active", ledger.num_referenced),
        ):
            metrics.set(names.KV_BLOCKS, number, tier=self._tier, state=state)
        for state, number in (
            ("running", ledger.num_running),
            ("waiting", ledger.num_waiting),
            ("reserved", ledger.num_reserved),
            ("prefill", ledger.num_prefills),
            ("quarantined", ledger.num_quarantined),
        ):
            metrics.set(names.WORKER_REQUESTS, number, state=state)
        metrics.set(names.QUEUED_TOKENS, num_queued_tokens)
        metrics.set(names.HANDOFFS, report.num_handoffs)
        metrics.set(names.HANDOFF_STREAMS, report.num_open_streams)
        metrics.set(names.KV_PREFIX_LOCKS, ledger.num_prefix_locks)


def _batch_label(shape: StepShape) -> str:
    if shape.num_prefill_tokens:
        return "chunks"
    if shape.num_decodes <= 8:
        return "1-8"
    return "9-64" if shape.num_decodes <= 64 else "65-"
