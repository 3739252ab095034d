"""A placement in a flat form, for the log and for spans. `moonpool explain` has all of it."""

from __future__ import annotations

import msgspec
import numpy as np
import numpy.typing as npt

from moonpool.dispatch.effects import Placement
from moonpool.routing.selection import FILTERS, Selection

#: Candidates whose scores are told in the log, the best first.
_MAX_SCORES = 8
#: Candidates of which a span has every term, the best first, beside the chosen one: with ids of usual
#: lengths 4 KiB, however large the fleet.
MAX_CANDIDATES = 16
#: Of what a span has of its candidates.
_NUM_DIGITS = 6
#: How the names of terms begin that are whole numbers.
_WHOLE = ("num_", "has_", "block_")

Fact = str | int | float | bool


def placement_facts(placement: Placement) -> dict[str, Fact]:
    """What was decided and the terms of who was chosen; facts that do not apply are left out."""
    record, decision, plan = placement.record, placement.decision, placement.plan
    assert record.decode.key is not None, placement
    facts: dict[str, Fact] = {
        "attempt": placement.attempt,
        "policy": record.policy.value,
        "is_measured": record.is_measured,
        "num_tokens": record.num_tokens,
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
        "predicted_tpot_ms": _ms(record.decode.term(record.decode.key, "tpot_s")),
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


def candidates_json(selection: Selection) -> str:
    """The chosen worker, then the best by score, in columns: every term of each, and what else decided.

        {"num_left_out": 1, "inputs": {"slack": 0.05}, "workers": ["d2@7f", "d1@09"],
         "filters": [null, "no_room"], "scores": [0.213, null], "terms": {"tpot_s": [0.013, 0.02]}}

    Null: not possible. Six digits are told.
    """
    rows = _by_score(selection)
    if selection.key is not None:
        chosen = selection.keys.index(selection.key)
        rows = [chosen, *(row for row in rows if row != chosen)]
    num_left_out = max(len(rows) - 1 - MAX_CANDIDATES, 0)
    rows = rows[: len(rows) - num_left_out]
    filters = selection.filters[rows]
    told = selection.values[:, rows]
    told[0, filters != 0] = np.inf
    scores, *terms = _rounded(told).tolist()
    return msgspec.json.encode(
        {
            "num_left_out": num_left_out,
            "inputs": dict(selection.inputs),
            "workers": [str(selection.keys[row]) for row in rows],
            "filters": [FILTERS[number] for number in filters.tolist()],
            "scores": scores,
            "terms": {
                name: list(map(int, column)) if name.startswith(_WHOLE) else column
                for name, column in zip(selection.term_names, terms, strict=True)
            },
        }
    ).decode()


def _rounded(values: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """To so many digits, whole numbers and the infinite as they are."""
    size = np.where(np.isfinite(values), np.abs(values), 1.0)
    num_places = _NUM_DIGITS - 1 - np.floor(np.log10(np.maximum(size, 1e-12)))
    scale = 10.0 ** np.maximum(num_places, 0.0)
    rounded: npt.NDArray[np.float64] = np.round(values * scale) / scale
    return rounded


def _scores(selection: Selection) -> str:
    """`decode-0=0.21 decode-1=no_room`: each candidate's score, or why it has none."""
    ordered = _by_score(selection)
    words = []
    for row in ordered[:_MAX_SCORES]:
        reason = FILTERS[selection.filters[row]]
        score = f"{selection.values[0, row]:.4g}" if reason is None else reason.value
        words.append(f"{selection.keys[row].worker_id}={score}")
    if len(ordered) > _MAX_SCORES:
        words.append(f"and {len(ordered) - _MAX_SCORES} more")
    return " ".join(words)


def _by_score(selection: Selection) -> list[int]:
    """Rows, the lowest score first, those that are filtered last."""
    rows: list[int] = np.lexsort((selection.values[0], selection.filters != 0)).tolist()
    return rows


def _ms(seconds: float) -> float:
    return round(seconds * 1_000, 3)
