"""A placement in a flat form, for the log and for spans. `moonpool explain` has every term."""

from __future__ import annotations

import numpy as np

from moonpool.dispatch.effects import Placement
from moonpool.routing.selection import FILTERS, Selection

#: Candidates whose scores are told, the best first.
_MAX_SCORES = 8

Fact = str | int | float | bool


def placement_facts(placement: Placement) -> dict[str, Fact]:
    """What was decided and the terms of who was chosen; facts that do not apply are left out."""
    record, decision, plan = placement.record, placement.decision, placement.plan
    facts: dict[str, Fact] = {
        "attempt": placement.attempt,
        "policy": record.policy.value,
        "is_measured": record.is_measured,
        "decode_worker": str(record.decode.key),
        "decode_scores": _scores(record.decode),
        "reason": decision.reason.value,
        "num_uncached_tokens": decision.num_uncached_tokens,
        "threshold_tokens": decision.threshold_tokens,
        "num_prefill_workers": decision.num_prefill_workers,
        "plan": plan.kind.value,
        "num_cached_tokens": plan.num_cached_tokens,
        "num_read_tokens": plan.num_read_tokens,
        "num_computed_tokens": plan.num_computed_tokens,
        "predicted_queue_ms": _ms(plan.queue_s),
        "predicted_load_ms": _ms(plan.load_s),
        "predicted_compute_ms": _ms(plan.compute_s),
        "predicted_exposed_ms": _ms(plan.exposed_s),
        "predicted_ttft_ms": _ms(plan.ttft_s),
    }
    if record.prefill is not None:
        facts["prefill_worker"] = str(record.prefill.key)
        facts["prefill_scores"] = _scores(record.prefill)
    if decision.least_queued_tokens is not None:
        facts["least_queued_tokens"] = decision.least_queued_tokens
    if decision.prediction is not None:
        facts["predicted_local_ms"] = _ms(decision.prediction.local_s)
        facts["predicted_remote_ms"] = _ms(decision.prediction.remote_s)
    if plan.peer is not None:
        facts["peer"] = str(plan.peer.key)
        facts["num_peer_tokens"] = plan.peer.num_tokens
        facts["is_peer_store"] = plan.peer.is_store
    if placement.previous_outcome:
        facts["after"] = placement.previous_outcome
    return facts


def _scores(selection: Selection) -> str:
    """`decode-0=0.21 decode-1=no_room`: each candidate's score, or why it has none."""
    ordered = np.lexsort((selection.values[0], selection.filters != 0)).tolist()
    words = []
    for row in ordered[:_MAX_SCORES]:
        reason = FILTERS[selection.filters[row]]
        score = f"{selection.values[0, row]:.4g}" if reason is None else reason.value
        words.append(f"{selection.keys[row].worker_id}={score}")
    if len(ordered) > _MAX_SCORES:
        words.append(f"and {len(ordered) - _MAX_SCORES} more")
    return " ".join(words)


def _ms(seconds: float) -> float:
    return round(seconds * 1_000, 3)
