"""The time to the first token, cut into parts that sum to it.

Moments of two clocks (the router's, and the workers' that lie in their spans) need not agree: each
is moved into the interval left by the ones before and after it, so no part is negative and the sum
is exact.
"""

from __future__ import annotations

from dataclasses import dataclass

from moonpool.inference.generation import Timing


@dataclass(frozen=True, slots=True, kw_only=True)
class FirstTokenMoments:
    """Wall-clock seconds; None for what nobody reported."""

    arrived: float
    #: The prompt was tokens.
    tokenized: float
    #: The attempt that drew the first token was sent to its workers.
    placed: float
    #: Its prefill began and ended on a worker.
    prefill_started: float | None
    prefill_ended: float | None
    #: The router had the first token.
    first_token: float


def split_ttft(moments: FirstTokenMoments) -> Timing:
    """Parts: tokenize, queue (in the router), worker_queue, prefill, deliver.

    Without a report of the prefill, `prefill` is all from placement to token.
    """
    end = max(moments.first_token, moments.arrived)
    edges: list[tuple[str, float]] = [
        ("tokenize", moments.tokenized),
        ("queue", moments.placed),
    ]
    if moments.prefill_started is not None and moments.prefill_ended is not None:
        edges += [
            ("worker_queue", moments.prefill_started),
            ("prefill", moments.prefill_ended),
            ("deliver", end),
        ]
    else:
        edges.append(("prefill", end))
    parts_ms: dict[str, float] = {}
    last = moments.arrived
    for name, moment in edges:
        edge = min(max(moment, last), end)
        parts_ms[name] = (edge - last) * 1_000
        last = edge
    return Timing(ttft_ms=sum(parts_ms.values()), ttft_parts_ms=parts_ms)
