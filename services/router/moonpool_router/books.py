"""RouterBooks: the router's metrics, in one place, each told once what happened."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from moonpool.dispatch.effects import Placement
from moonpool.dispatch.reuse_books import ReuseCounts
from moonpool.errors import MoonpoolError
from moonpool.inference.generation import GenerationDone
from moonpool.telemetry import names
from moonpool.telemetry.metrics import Metrics
from moonpool.telemetry.names import Metric
from moonpool.wire.status import to_http

#: What a router counts; the metrics of workers are not among them.
ROUTER_METRICS: tuple[Metric, ...] = (
    names.BUILD_INFO,
    names.EVENT_LOOP_LAG,
    names.NATS_CONNECTED,
    names.BUS_LOST,
    names.REQUESTS,
    names.QUEUE_REQUESTS,
    names.INFLIGHT_REQUESTS,
    names.TTFT,
    names.ITL,
    names.E2E,
    names.STAGE,
    names.PROMPT_TOKENS,
    names.GENERATION_TOKENS,
    names.CACHED_TOKENS,
    names.PREDICTED_HIT_TOKENS,
    names.CEILING_HIT_TOKENS,
    names.MISSED_TOKENS,
    names.RECOMPUTED_HELD_TOKENS,
    names.ROUTE_DECISIONS,
    names.MIGRATIONS,
    names.RETRIES,
    names.CANCELLED,
    names.REJECTED,
    names.WORKER_STATE,
    names.INDEX_BATCHES,
    names.INDEX_GAPS,
    names.INDEX_MISMATCHES,
    names.INDEX_SNAPSHOTS,
    names.INDEX_BLOCKS,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetCounts:
    """Gauges as of now, and what is counted elsewhere."""

    num_queued: int
    num_running: int
    is_bus_connected: bool
    #: Messages of the bus that were lost here, since the start.
    num_unsent: int
    num_dropped: int
    #: By (role, state).
    num_workers: dict[tuple[str, str], int]


class RouterBooks:
    """Counts for one router and its one model."""

    def __init__(self, metrics: Metrics, *, model: str) -> None:
        self._metrics = metrics
        self._model = model
        # Bound once: these two are used per token.
        self._generation_tokens = metrics.counter(names.GENERATION_TOKENS, model=model)
        self._itl = metrics.histogram(names.ITL, model=model)
        self._worker_states: set[tuple[str, str]] = set()
        self._indexed_workers: set[str] = set()

    @property
    def metrics(self) -> Metrics:
        return self._metrics

    def placed(self, placement: Placement, *, num_emitted: int) -> None:
        """An attempt was sent to its workers."""
        self._metrics.count(names.ROUTE_DECISIONS, reason=placement.decision.reason.value)
        reason = placement.previous_end
        if reason is not None:
            self._metrics.count(names.RETRIES, reason=reason.value)
            if num_emitted:
                self._metrics.count(names.MIGRATIONS, kind=reason.value)

    def tokens(self, num_tokens: int, *, gap_s: float | None) -> None:
        """Tokens of one request came, `gap_s` after those before; None for the first."""
        self._generation_tokens.inc(num_tokens)
        if gap_s is not None:
            for _ in range(num_tokens):
                self._itl.observe(gap_s / num_tokens)

    def done(self, done: GenerationDone, *, endpoint: str, duration_s: float) -> None:
        """A request ended well."""
        model, metrics = self._model, self._metrics
        metrics.count(names.REQUESTS, model=model, endpoint=endpoint, status="200", error_code="")
        metrics.observe(names.E2E, duration_s, model=model)
        metrics.observe(names.TTFT, done.timing.ttft_ms / 1_000, model=model)
        for stage, part_ms in done.timing.ttft_parts_ms.items():
            metrics.observe(names.STAGE, part_ms / 1_000, stage=stage)

    def reuse(self, counts: ReuseCounts) -> None:
        """A request that drew a token is over, whatever its end: what was reused of its prompt."""
        model, metrics = self._model, self._metrics
        metrics.count(names.PROMPT_TOKENS, counts.num_prompt_tokens, model=model)
        metrics.count(names.CACHED_TOKENS, counts.num_device_tokens, model=model, source="device")
        metrics.count(names.CACHED_TOKENS, counts.num_peer_tokens, model=model, source="peer")
        metrics.count(names.CACHED_TOKENS, counts.num_store_tokens, model=model, source="store")
        metrics.count(names.PREDICTED_HIT_TOKENS, counts.num_predicted_tokens, model=model)
        metrics.count(names.CEILING_HIT_TOKENS, counts.num_ceiling_tokens, model=model)
        for reason, num_tokens in counts.num_missed_tokens.items():
            metrics.count(names.MISSED_TOKENS, num_tokens, model=model, reason=reason.value)
            if reason.is_held:
                metrics.count(
                    names.RECOMPUTED_HELD_TOKENS, num_tokens, model=model, reason=reason.value
                )

    def failed(self, error: MoonpoolError, *, endpoint: str, is_rejected: bool) -> None:
        """A request failed; `is_rejected` if it was never given to a worker."""
        self._metrics.count(
            names.REQUESTS,
            model=self._model,
            endpoint=endpoint,
            status=str(to_http(error).status),
            error_code=error.code,
        )
        if is_rejected:
            self._metrics.count(names.REJECTED, reason=error.code)

    def cancelled(self, *, endpoint: str, phase: str) -> None:
        """The client went away in this phase: `tokenize`, `wait` (no token yet) or `stream`."""
        self._metrics.count(
            names.REQUESTS,
            model=self._model,
            endpoint=endpoint,
            status="499",
            error_code="cancelled",
        )
        self._metrics.count(names.CANCELLED, phase=phase)

    def loop_lag(self, lag_s: float) -> None:
        self._metrics.observe(names.EVENT_LOOP_LAG, lag_s)

    def announcement_unreadable(self) -> None:
        """An announcement came over the bus that cannot be read."""
        self._metrics.count(names.BUS_LOST, reason="unreadable")

    def index_batch(self, *, is_readable: bool) -> None:
        """A change of a worker's blocks came over the bus."""
        self._metrics.count(names.INDEX_BATCHES, outcome="read" if is_readable else "unreadable")

    def index_gap(self) -> None:
        self._metrics.count(names.INDEX_GAPS)

    def index_mismatch(self) -> None:
        self._metrics.count(names.INDEX_MISMATCHES)

    def index_snapshot(self, *, is_loaded: bool) -> None:
        """A worker was asked for its published blocks."""
        self._metrics.count(names.INDEX_SNAPSHOTS, outcome="loaded" if is_loaded else "failed")

    def index(self, num_blocks: Mapping[str, int]) -> None:
        """Set the gauges, by worker; one that is not followed any more has none."""
        for worker in self._indexed_workers - num_blocks.keys():
            self._metrics.forget(names.INDEX_BLOCKS, worker=worker)
        for worker, number in num_blocks.items():
            self._metrics.set(names.INDEX_BLOCKS, number, worker=worker)
        self._indexed_workers = set(num_blocks)

    def fleet(self, counts: FleetCounts) -> None:
        """Set the gauges; a worker state that nobody is in any more becomes 0."""
        metrics = self._metrics
        metrics.set(names.QUEUE_REQUESTS, counts.num_queued, priority="0")
        metrics.set(names.INFLIGHT_REQUESTS, counts.num_running)
        metrics.set(names.NATS_CONNECTED, int(counts.is_bus_connected))
        metrics.count_to(names.BUS_LOST, counts.num_unsent, reason="unsent")
        metrics.count_to(names.BUS_LOST, counts.num_dropped, reason="dropped")
        self._worker_states |= counts.num_workers.keys()
        for role, state in self._worker_states:
            metrics.set(
                names.WORKER_STATE,
                counts.num_workers.get((role, state), 0),
                role=role,
                state=state,
            )
