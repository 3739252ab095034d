"""Journey: what happened to one request, out of its trace and what its client saw.

Moments are milliseconds from the start of its prefill. Workers stamp with their own wall clocks: on
one machine they are one clock.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from moonpool.inference.generation import GenerationDone
from moonpool.telemetry import names
from moonpool.wire.spans import Span

#: In the order in which they happen; a part that a router adds later comes after these.
TTFT_PARTS = {
    "tokenize": "template and tokenizer, on the router",
    "queue": "waiting in the router",
    "worker_queue": "waiting for the worker's step",
    "prefill": "computing the prompt's KV and token 1",
    "deliver": "token 1 to the router and the client",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerArrival:
    """One layer's KV in the decode worker's own blocks."""

    layer: int
    num_bytes: float
    #: Its first read began; its last one was verified.
    started_ms: float
    verified_ms: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Handoff:
    """The prompt's KV from the prefill worker to the decode worker."""

    source: str
    transport: str
    num_bytes: int
    num_reads: int
    num_bad_leaves: int
    #: The last layer was computed; token 1 was drawn; the request could take part in decode steps.
    prefill_ended_ms: float
    first_token_ms: float
    admitted_ms: float
    layers: tuple[LayerArrival, ...]

    @property
    def exposed_ms(self) -> float:
        """What the handoff adds after token 1: from its draw to the admission on the decode worker."""
        return self.admitted_ms - self.first_token_ms

    @property
    def share_before_end(self) -> float:
        """Share of the bytes that lay verified when the last layer's computation ended."""
        total = sum(layer.num_bytes for layer in self.layers)
        early = sum(
            layer.num_bytes for layer in self.layers if layer.verified_ms <= self.prefill_ended_ms
        )
        return early / total if total else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class GapSummary:
    """Time between tokens at the client, all gaps pooled."""

    num_gaps: int
    first_ms: float
    p50_ms: float
    p99_ms: float
    max_ms: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Journey:
    """Everything worth telling about one answered request."""

    request_id: str
    prefill_worker: str
    decode_worker: str
    reason: str
    num_attempts: int
    finish_reason: str
    num_prompt_tokens: int
    num_cached_tokens: int
    num_completion_tokens: int
    num_chunks: int
    ttft_ms: float
    ttft_parts_ms: Mapping[str, float]
    client_ttft_ms: float
    prefill_ms: float
    gaps: GapSummary | None
    #: None if it was prefilled where it was decoded.
    handoff: Handoff | None


def make_journey(
    done: GenerationDone, spans: Sequence[Span], *, token_times_s: Sequence[float]
) -> Journey:
    """Put together what the router reported, what workers traced and what the client measured."""
    last = _last_attempt(spans)
    prefill = next((span for span in last if span.name == names.SPAN_PREFILL), None)
    transfer = next((span for span in last if span.name == names.SPAN_KV_TRANSFER), None)
    return Journey(
        request_id=done.request_id,
        prefill_worker=done.placement.prefill_worker or done.placement.decode_worker,
        decode_worker=done.placement.decode_worker,
        reason=done.placement.reason,
        num_attempts=done.placement.num_attempts,
        finish_reason=done.finish_reason.value,
        num_prompt_tokens=done.usage.num_prompt_tokens,
        num_cached_tokens=done.usage.num_cached_tokens,
        num_completion_tokens=done.usage.num_completion_tokens,
        num_chunks=_integer(prefill, "moonpool.num_chunks") if prefill is not None else 0,
        ttft_ms=done.timing.ttft_ms,
        ttft_parts_ms=done.timing.ttft_parts_ms,
        client_ttft_ms=token_times_s[0] * 1_000 if token_times_s else 0.0,
        prefill_ms=prefill.duration_ms if prefill is not None else 0.0,
        gaps=summarize_gaps([(b - a) * 1_000 for a, b in pairwise(token_times_s)]),
        handoff=_handoff(transfer, prefill) if transfer is not None else None,
    )


def summarize_gaps(gaps_ms: Sequence[float]) -> GapSummary | None:
    """None if there are none. Percentiles by nearest rank."""
    if not gaps_ms:
        return None
    ordered = sorted(gaps_ms)
    return GapSummary(
        num_gaps=len(ordered),
        first_ms=gaps_ms[0],
        p50_ms=_percentile(ordered, 0.50),
        p99_ms=_percentile(ordered, 0.99),
        max_ms=ordered[-1],
    )


def group_layers(layers: Sequence[LayerArrival], *, max_rows: int) -> list[list[LayerArrival]]:
    """Consecutive layers in at most `max_rows` groups of equal size, the last one shorter."""
    size = max(1, math.ceil(len(layers) / max_rows))
    return [list(layers[start : start + size]) for start in range(0, len(layers), size)]


def _handoff(transfer: Span, prefill: Span | None) -> Handoff:
    source_last = _integer(transfer, "moonpool.source_last_layer_unix_ns")
    source_token = _integer(transfer, "moonpool.source_first_token_unix_ns")
    start_ns = prefill.start_unix_ns if prefill is not None else transfer.start_unix_ns
    ended_ns = source_last
    if prefill is not None:
        ended_ns = _integer(prefill, "moonpool.forward_ended_unix_ns") or source_last
    admitted_ns = _integer(transfer, "moonpool.admitted_unix_ns") or transfer.end_unix_ns

    def since_start_ms(unix_ns: int) -> float:
        return (unix_ns - start_ns) / 1e6 if unix_ns else 0.0

    return Handoff(
        source=str(transfer.attributes.get("moonpool.source", "")),
        transport=str(transfer.attributes.get(names.ATTR_BACKEND, "")),
        num_bytes=_integer(transfer, names.ATTR_BYTES),
        num_reads=_integer(transfer, "moonpool.num_reads"),
        num_bad_leaves=_integer(transfer, "moonpool.num_bad_leaves"),
        prefill_ended_ms=since_start_ms(ended_ns),
        first_token_ms=since_start_ms(source_token),
        admitted_ms=since_start_ms(admitted_ns),
        layers=_layers(transfer, start_ns),
    )


def _layers(transfer: Span, start_ns: int) -> tuple[LayerArrival, ...]:
    """A layer lies there when the last read that covers it is verified."""
    arrivals: dict[int, LayerArrival] = {}
    for event in transfer.events:
        if event.name != names.EVENT_LAYERS_VERIFIED:
            continue
        attributes = event.attributes
        layers = range(int(attributes["first_layer"]), int(attributes["end_layer"]))
        started_ms = (int(attributes["started_unix_ns"]) - start_ns) / 1e6
        verified_ms = (event.unix_ns - start_ns) / 1e6
        num_bytes = int(attributes["num_bytes"]) / max(len(layers), 1)
        for layer in layers:
            before = arrivals.get(layer)
            arrivals[layer] = LayerArrival(
                layer=layer,
                num_bytes=num_bytes + (before.num_bytes if before else 0.0),
                started_ms=min(started_ms, before.started_ms) if before else started_ms,
                verified_ms=max(verified_ms, before.verified_ms) if before else verified_ms,
            )
    return tuple(arrivals[layer] for layer in sorted(arrivals))


def _last_attempt(spans: Iterable[Span]) -> list[Span]:
    """The spans of workers that belong to the attempt which answered."""
    own = [span for span in spans if names.ATTR_ATTEMPT in span.attributes]
    last = max((_integer(span, names.ATTR_ATTEMPT) for span in own), default=0)
    return [span for span in own if _integer(span, names.ATTR_ATTEMPT) == last]


def _percentile(ordered: Sequence[float], share: float) -> float:
    return ordered[max(math.ceil(share * len(ordered)) - 1, 0)]


def _integer(span: Span, key: str) -> int:
    value = span.attributes.get(key, 0)
    return int(value) if isinstance(value, int | float) else 0
