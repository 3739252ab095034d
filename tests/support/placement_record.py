"""Placement decided again from its record alone: what somebody can do who has `moonpool explain --json`.

Each rule is the policy's as its file's head states it, candidate by candidate and in plain Python.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

Terms = Mapping[str, float]

#: See MinTtft: of the lowest TPOT, if nobody meets the SLO.
NEAR_LOWEST = 1.25


@dataclass(frozen=True, kw_only=True)
class Leg:
    """One leg of `moonpool explain --json`; those that are filtered are left out, null is infinite."""

    name: str
    policy: str
    num_tokens: int
    chosen: str
    inputs: Terms
    scores: dict[str, float]
    terms: dict[str, Terms]


@dataclass(frozen=True, kw_only=True)
class Rebuilt:
    chosen: str
    scores: dict[str, float]


def legs_of(placement: Mapping[str, Any]) -> list[Leg]:
    """Of one of the command's placements."""
    return [
        Leg(
            name=name,
            policy=placement["policy"],
            num_tokens=placement["num_tokens"],
            chosen=leg["chosen"],
            inputs=leg["inputs"],
            scores={c["worker"]: _number(c["score"]) for c in leg["candidates"] if _is_open(c)},
            terms={
                c["worker"]: {name: _number(value) for name, value in c["terms"].items()}
                for c in leg["candidates"]
                if _is_open(c)
            },
        )
        for name in ("decode", "prefill")
        if (leg := placement[name]) is not None
    ]


def rebuild(leg: Leg) -> Rebuilt:
    """Whom the policy must have chosen, and by what scores."""
    match leg.policy:
        case "min_ttft":
            return _min_ttft_decode(leg) if leg.name == "decode" else _min_ttft_prefill(leg)
        case "random":
            workers = list(leg.terms)
            chosen = workers[int(leg.inputs["drawn"] * len(workers))]
            return Rebuilt(chosen=chosen, scores={w: float(w != chosen) for w in workers})
        case "round_robin":
            earlier, num_open = leg.inputs["num_earlier_placements"], len(leg.terms)
            return _lowest({w: (place - earlier) % num_open for place, w in enumerate(leg.terms)})
        case "least_loaded" if leg.name == "decode":
            return _lowest({w: t["num_requests"] + t["used_fraction"] for w, t in _items(leg)})
        case "least_loaded":
            return _lowest({w: t["num_queued_tokens"] for w, t in _items(leg)})
        case "prefix_affinity":
            return _lowest(_prefix_affinity(leg))
        case "dynamo_linear":
            return _dynamo_linear(leg)
    raise AssertionError(leg.policy)


# -- the policies --


def _min_ttft_decode(leg: Leg) -> Rebuilt:
    inputs = leg.inputs
    slo_s = inputs.get("slo_tpot_s", math.inf)
    any_way, within_slo = {}, {}
    for worker, t in _items(leg):
        here_s, elsewhere_s = _cost_s(t), t["ttft_elsewhere_s"]
        if "threshold_tokens" in inputs:
            num_uncached_tokens = leg.num_tokens - t["num_cached_tokens"]
            if num_uncached_tokens <= inputs["threshold_tokens"] or math.isinf(elsewhere_s):
                elsewhere_s = math.inf
            else:
                here_s = math.inf
        evicted_s = inputs["eviction_weight"] * t["evicted_s"]
        here_s, elsewhere_s = here_s + evicted_s, elsewhere_s + evicted_s
        any_way[worker] = min(here_s, elsewhere_s)
        within_slo[worker] = min(
            here_s if t["tpot_with_chunks_s"] <= slo_s else math.inf,
            elsewhere_s if t["tpot_s"] <= slo_s else math.inf,
        )
    has_room = [w for w, t in _items(leg) if t["has_growth_room"]]
    workers, scores = has_room or list(leg.terms), within_slo
    tpot_s = {w: t["tpot_s"] for w, t in _items(leg)}
    if all(math.isinf(scores[w]) for w in workers):
        scores, lowest_s = any_way, min(tpot_s[w] for w in workers)
        workers = [w for w in workers if tpot_s[w] <= lowest_s * NEAR_LOWEST]
    workers = _near(workers, scores, inputs["slack"])
    workers = _near(workers, tpot_s, inputs["slack"])
    return Rebuilt(chosen=_least_filled(leg, workers), scores=scores)


def _min_ttft_prefill(leg: Leg) -> Rebuilt:
    scores = {
        w: _cost_s(t) + t["exposed_s"] + leg.inputs["eviction_weight"] * t["evicted_s"]
        for w, t in _items(leg)
    }
    workers = _near(list(scores), scores, leg.inputs["slack"])
    return Rebuilt(chosen=_least_filled(leg, workers), scores=scores)


def _cost_s(t: Terms) -> float:
    return max(t["queue_s"], t["load_s"]) + t["compute_s"] + t["interference_s"]


def _near(workers: list[str], values: Mapping[str, float], slack: float) -> list[str]:
    best = min(values[w] for w in workers)
    return [w for w in workers if values[w] <= best * (1.0 + slack)]


def _least_filled(leg: Leg, workers: list[str]) -> str:
    def key(worker: str) -> tuple[float, float]:
        t = leg.terms[worker]
        return t["churn"], t["num_requests"] + t["used_fraction"]

    return min(workers, key=key)


def _prefix_affinity(leg: Leg) -> dict[str, float]:
    inputs = leg.inputs
    load = {w: t["num_requests"] + t["num_prefills"] for w, t in _items(leg)}
    largest, smallest = max(load.values()), min(load.values())
    if inputs.get("has_prefill_pool") or (
        largest - smallest > inputs["balance_abs_threshold"]
        and largest > inputs["balance_rel_threshold"] * smallest
    ):
        return load
    match_rate = {w: t["num_cached_tokens"] / leg.num_tokens for w, t in _items(leg)}
    if max(match_rate.values()) > inputs["cache_threshold"]:
        return {w: -rate for w, rate in match_rate.items()}
    return {w: t["num_filled_blocks"] for w, t in _items(leg)}


def _dynamo_linear(leg: Leg) -> Rebuilt:
    inputs, costs = leg.inputs, {}
    for worker, t in _items(leg):
        block_size = t["block_size"]
        incoming = -(-leg.num_tokens // block_size)
        overlap, in_use = t["num_cached_tokens"] / block_size, t["num_used_blocks"]
        if inputs.get("has_prefill_pool"):
            costs[worker] = max(in_use + incoming - overlap, 0.0) + t["num_requests"]
            continue
        queued = t["num_queued_tokens"] / block_size
        prefill = max(queued + incoming - inputs["overlap_score_weight"] * overlap, 0.0)
        costs[worker] = inputs["prefill_load_scale"] * prefill + in_use + incoming
    values, temperature = np.array(list(costs.values())), inputs["router_temperature"]
    weights = (values == values.min()).astype(np.float64)
    if temperature:
        spread = float(values.max() - values.min()) or 1.0
        weights = np.exp((values.min() - values) / spread / temperature)
    steps = np.cumsum(weights)
    row = int(np.searchsorted(steps, inputs["drawn"] * steps[-1], side="right"))
    return Rebuilt(chosen=list(costs)[min(row, len(costs) - 1)], scores=costs)


# -- parts --


def _lowest(scores: Mapping[str, float]) -> Rebuilt:
    """Ties go to the first: candidates are in the order of their keys."""
    return Rebuilt(chosen=min(scores, key=lambda worker: scores[worker]), scores=dict(scores))


def _items(leg: Leg) -> list[tuple[str, Terms]]:
    return list(leg.terms.items())


def _is_open(candidate: Mapping[str, Any]) -> bool:  # Any: JSON
    return candidate["filtered"] is None


def _number(value: float | None) -> float:
    return math.inf if value is None else value
