"""Numbers of a run, from its records. Pure.

Latencies are those of requests that were answered in full; every share is out of all that arrived, so a
server that refuses does not look fast. Definitions:

    TTFT     t_1 - scheduled arrival (how late it was sent is the send lag, apart)
    ITL      all gaps of all answers, pooled
    TPOT     (t_n - t_1) / (n - 1) of one answer
    max gap  the longest gap of one answer; TBT10 the mean of its longest tenth
    E2E      t_n - scheduled arrival; NTPOT the same over n
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from moonpool_loadtest.bench.records import Outcome, RequestRecord

#: A client above these measures itself.
MAX_SEND_LAG_P99_MS = 1.0
MAX_CLIENT_CPU_SHARE = 0.5
#: Below, a 99th percentile is a few requests.
MIN_REQUESTS_FOR_P99 = 1_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Distribution:
    """Percentiles interpolate linearly between the two nearest values."""

    count: int
    mean: float
    p50: float
    p90: float
    p95: float
    p99: float
    max: float

    @staticmethod
    def of_ms(seconds: Iterable[float | None]) -> Distribution | None:
        """In milliseconds, of the values that exist; None if none does."""
        values = np.array([value for value in seconds if value is not None]) * 1_000
        if not len(values):
            return None
        p50, p90, p95, p99 = np.percentile(values, (50, 90, 95, 99))
        return Distribution(
            count=len(values),
            mean=float(values.mean()),
            p50=float(p50),
            p90=float(p90),
            p95=float(p95),
            p99=float(p99),
            max=float(values.max()),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Slo:
    """What a good answer is. None: no limit."""

    ttft_ms: float | None = None
    #: Every gap, so the longest.
    gap_ms: float | None = None
    #: The mean gap; hides stalls, kept for comparison with others' figures.
    tpot_ms: float | None = None

    @property
    def is_set(self) -> bool:
        return (self.ttft_ms, self.gap_ms, self.tpot_ms) != (None, None, None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Attained:
    """How many requests met an SLO."""

    num_good: int
    #: Out of all that arrived.
    share: float
    #: Goodput: the share of the offered rate; of the completed one if all arrived at once.
    rps: float


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchMetrics:
    num_arrived: int
    num_by_outcome: Mapping[Outcome, int]
    #: Of those that were not answered, the most frequent first.
    num_by_error: Mapping[str, int]
    #: From the first scheduled arrival to the last end.
    wall_s: float
    #: None if all arrived at once.
    offered_rps: float | None
    completed_rps: float
    num_prompt_tokens: int
    num_cached_tokens: int
    num_output_tokens: int
    output_tokens_per_s: float
    #: Answers whose gaps are between messages, because the server bundles tokens.
    num_bundled: int
    ttft_ms: Distribution | None
    itl_ms: Distribution | None
    tpot_ms: Distribution | None
    max_gap_ms: Distribution | None
    tbt10_ms: Distribution | None
    e2e_ms: Distribution | None
    ntpot_ms: Distribution | None
    #: As the server counts it, from its own arrival of the request.
    server_ttft_ms: Distribution | None
    send_lag_ms: Distribution | None
    #: TTFT and every gap within the SLO; None without a limit for gaps.
    goodput_gap: Attained | None
    #: TTFT and TPOT within the SLO; None without a limit for TPOT.
    goodput_tpot: Attained | None
    #: TTFT alone; None without a limit for it.
    goodput_ttft: Attained | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Gate:
    """A condition on the client; a run that misses one says little about the server."""

    name: str
    value: float
    limit: float

    @property
    def is_met(self) -> bool:
        return self.value <= self.limit


def compute_metrics(records: Sequence[RequestRecord], slo: Slo) -> BenchMetrics:
    """All numbers of one run."""
    answered = [record for record in records if record.outcome is Outcome.OK]
    first_s = min((record.scheduled_s for record in records), default=0.0)
    last_s = max((record.ended_s for record in records), default=0.0)
    wall_s = last_s - first_s
    offered_rps = _offered_rps(records)
    usages = [record.told.usage for record in answered if record.told.usage is not None]
    num_output_tokens = sum(record.num_tokens for record in answered)

    def attained(*, gap_ms: float | None = None, tpot_ms: float | None = None) -> Attained:
        num_good = sum(_is_good(record, slo.ttft_ms, gap_ms, tpot_ms) for record in answered)
        share = num_good / len(records) if records else 0.0
        rps = share * offered_rps if offered_rps is not None else _per_s(num_good, wall_s)
        return Attained(num_good=num_good, share=share, rps=rps)

    return BenchMetrics(
        num_arrived=len(records),
        num_by_outcome={
            outcome: sum(record.outcome is outcome for record in records) for outcome in Outcome
        },
        num_by_error=dict(
            Counter(record.error_code for record in records if record.error_code).most_common()
        ),
        wall_s=wall_s,
        offered_rps=offered_rps,
        completed_rps=_per_s(len(answered), wall_s),
        num_prompt_tokens=sum(usage.num_prompt_tokens for usage in usages),
        num_cached_tokens=sum(usage.num_cached_tokens for usage in usages),
        num_output_tokens=num_output_tokens,
        output_tokens_per_s=_per_s(num_output_tokens, wall_s),
        num_bundled=sum(record.has_bundled_tokens for record in answered),
        ttft_ms=Distribution.of_ms(record.ttft_s for record in answered),
        itl_ms=Distribution.of_ms(gap for record in answered for gap in record.gaps_s),
        tpot_ms=Distribution.of_ms(record.tpot_s for record in answered),
        max_gap_ms=Distribution.of_ms(max(record.gaps_s, default=None) for record in answered),
        tbt10_ms=Distribution.of_ms(_tbt10_s(record.gaps_s) for record in answered),
        e2e_ms=Distribution.of_ms(record.e2e_s for record in answered),
        ntpot_ms=Distribution.of_ms(
            record.e2e_s / record.num_tokens
            for record in answered
            if record.e2e_s is not None and record.num_tokens
        ),
        server_ttft_ms=Distribution.of_ms(
            None if record.told.ttft_ms is None else record.told.ttft_ms / 1_000
            for record in answered
        ),
        send_lag_ms=Distribution.of_ms(record.send_lag_s for record in records),
        goodput_gap=None if slo.gap_ms is None else attained(gap_ms=slo.gap_ms),
        goodput_tpot=None if slo.tpot_ms is None else attained(tpot_ms=slo.tpot_ms),
        goodput_ttft=None if slo.ttft_ms is None else attained(),
    )


def client_gates(metrics: BenchMetrics, *, cpu_share: float) -> tuple[Gate, ...]:
    """Whether the client kept up.

    Args:
        cpu_share: CPU time of the client's process over the run's wall time, 1 being one core.
    """
    lag_ms = metrics.send_lag_ms.p99 if metrics.send_lag_ms is not None else 0.0
    return (
        Gate(name="send_lag_p99_ms", value=lag_ms, limit=MAX_SEND_LAG_P99_MS),
        Gate(name="client_cpu_share", value=cpu_share, limit=MAX_CLIENT_CPU_SHARE),
    )


def caveats(metrics: BenchMetrics, gates: Sequence[Gate]) -> tuple[str, ...]:
    """What a reader of the numbers must know."""
    found = [
        f"{gate.name} is {gate.value:.3g}, above {gate.limit:g}: the client measures itself too"
        for gate in gates
        if not gate.is_met
    ]
    num_answered = metrics.num_by_outcome[Outcome.OK]
    if num_answered < MIN_REQUESTS_FOR_P99:
        found.append(
            f"{num_answered} answers: a 99th percentile of fewer than {MIN_REQUESTS_FOR_P99} is "
            "a few requests"
        )
    if metrics.num_bundled:
        found.append(
            f"{metrics.num_bundled} answers came with several tokens in one message: their gaps "
            "are between messages"
        )
    if num_unanswered := metrics.num_arrived - num_answered:
        found.append(f"{num_unanswered} requests have no latency: they were not answered in full")
    return tuple(found)


def _is_good(
    record: RequestRecord, ttft_ms: float | None, gap_ms: float | None, tpot_ms: float | None
) -> bool:
    return (
        record.ttft_s is not None
        and _is_within(record.ttft_s, ttft_ms)
        and _is_within(max(record.gaps_s, default=0.0), gap_ms)
        and _is_within(record.tpot_s or 0.0, tpot_ms)
    )


def _is_within(seconds: float, limit_ms: float | None) -> bool:
    return limit_ms is None or seconds * 1_000 <= limit_ms


def _tbt10_s(gaps_s: Sequence[float]) -> float | None:
    """Mean of the longest tenth of the gaps, at least one (Mooncake, FAST'25)."""
    if not gaps_s:
        return None
    longest = sorted(gaps_s)[-math.ceil(len(gaps_s) / 10) :]
    return math.fsum(longest) / len(longest)


def _offered_rps(records: Sequence[RequestRecord]) -> float | None:
    times = [record.scheduled_s for record in records]
    span_s = max(times, default=0.0) - min(times, default=0.0)
    return (len(times) - 1) / span_s if span_s > 0 else None


def _per_s(count: int, wall_s: float) -> float:
    return count / wall_s if wall_s > 0 else 0.0
