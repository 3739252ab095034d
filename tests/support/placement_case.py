"""Fleets, requests and configurations of every kind, each all of one seed (many small draws would be slow)."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass

from moonpool.latency.costs import DecodeCost, PrefillCost, TransferCost
from moonpool.routing.config import (
    DynamoLinearConfig,
    MinTtftConfig,
    PolicyName,
    PrefixAffinityConfig,
    RoutingConfig,
)
from moonpool.routing.disagg_decider import DisaggConfig
from moonpool.routing.query import PlacementQuery
from moonpool.routing.worker_view import WorkerFits, WorkerRole, WorkerView
from support.fleet import make_key, make_query, make_view

NAMES = tuple("abcdefghijkl")
BLOCK = 16


@dataclass(frozen=True, kw_only=True)
class PlacementCase:
    """A fleet, a request and a configuration."""

    fleet: list[WorkerView]
    query: PlacementQuery
    config: RoutingConfig
    rng: random.Random


def make_case(seed: int) -> PlacementCase:
    """The same for the same seed."""
    rng = random.Random(seed)
    names = rng.sample(NAMES, rng.randint(0, 8))
    return PlacementCase(
        fleet=[_view(rng, name) for name in names],
        query=_query(rng),
        config=_config(rng),
        rng=rng,
    )


def _log_uniform(rng: random.Random, low: float, high: float) -> float:
    return math.exp(rng.uniform(math.log(low), math.log(high)))


def _fits(rng: random.Random) -> WorkerFits:
    prefill = PrefillCost(
        base_s=rng.choice((0.0, _log_uniform(rng, 1e-4, 1e-2))),
        per_token_s=rng.choice((0.0, _log_uniform(rng, 1e-6, 1e-3))),
        per_work_s=rng.choice((0.0, _log_uniform(rng, 1e-10, 1e-7))),
        max_step_tokens=rng.choice((1, 16, 512, 4_096)),
    )
    decode = DecodeCost(
        base_s=rng.choice((0.0, _log_uniform(rng, 1e-4, 1e-1))),
        per_context_token_s=rng.choice((0.0, _log_uniform(rng, 1e-9, 1e-6))),
        per_request_s=rng.choice((0.0, _log_uniform(rng, 1e-5, 1e-2))),
    )
    return WorkerFits(
        prefill=rng.choice((None, prefill)),
        decode=rng.choice((None, decode)),
        transfers=tuple(
            (
                make_key(name),
                TransferCost(
                    latency_s=rng.choice((0.0, _log_uniform(rng, 1e-4, 3.0))),
                    bytes_per_s=_log_uniform(rng, 1e6, 1e11),
                ),
            )
            for name in sorted(rng.sample(NAMES, rng.randint(0, 4)))
        ),
    )


def _view(rng: random.Random, name: str) -> WorkerView:
    total = rng.choice((0, rng.randint(1, 200), 1_000))
    available = rng.randint(0, total)
    return make_view(
        name,
        rng.choice(tuple(WorkerRole)),
        total=total,
        available=available,
        free=rng.randint(0, available),
        num_requests=rng.choice((0, rng.randint(0, 40))),
        num_prefills=rng.randint(0, 40),
        queued=rng.choice((0, rng.randint(0, 20_000))),
        is_draining=rng.random() < 0.1,
        is_inhibited=rng.random() < 0.15,
        is_full=rng.random() < 0.15,
        churn=rng.choice((0.0, _log_uniform(rng, 1e-3, 1e6))),
        fits=_fits(rng),
    )


def _query(rng: random.Random) -> PlacementQuery:
    return make_query(
        rng.choice((1, rng.randint(1, 100), rng.randint(1, 2_000))),
        cached={name: rng.randint(1, 130) * BLOCK for name in rng.sample(NAMES, rng.randint(0, 6))},
        expected=rng.randint(1, 500),
        unfit=tuple(rng.sample(NAMES, rng.choice((0, 0, 2)))),
        lost=tuple(rng.sample(NAMES, rng.choice((0, 0, 2)))),
        request_id=f"r{rng.randint(0, 99)}",
        attempt=rng.randint(1, 3),
        sequence=rng.randint(0, 100),
    )


def _config(rng: random.Random) -> RoutingConfig:
    threshold_tokens = rng.randint(0, 500)
    return RoutingConfig(
        policy=rng.choice(tuple(PolicyName)),
        seed=rng.randint(0, 3),
        reads_from_peers=rng.random() < 0.7,
        disagg=DisaggConfig(
            threshold_tokens=threshold_tokens,
            busy_threshold_tokens=threshold_tokens + rng.randint(0, 500),
            only_thresholds=rng.random() < 0.3,
        ),
        min_ttft=MinTtftConfig(
            slo_tpot_s=rng.choice((None, _log_uniform(rng, 1e-4, 1.0))),
            slack=rng.choice((0.0, 0.05, 1.0)),
            eviction_weight=rng.choice((0.0, 0.3, 1.0)),
        ),
        prefix_affinity=PrefixAffinityConfig(
            cache_threshold=rng.random(),
            balance_abs_threshold=rng.choice((5, 32, 100)),
            balance_rel_threshold=rng.choice((1.1, 3.0)),
        ),
        dynamo_linear=DynamoLinearConfig(
            overlap_score_weight=rng.choice((0.0, 1.0, 3.0)),
            prefill_load_scale=rng.choice((1.0, 0.5)),
            router_temperature=rng.choice((0.0, 0.5)),
        ),
    )
