"""What the operator says about placement, as the domain takes it."""

from __future__ import annotations

from moonpool.config.schema import PlacementSettings
from moonpool.routing.config import (
    DynamoLinearConfig,
    MinTtftConfig,
    PolicyName,
    PrefixAffinityConfig,
    RoutingConfig,
)
from moonpool.routing.disagg_decider import DisaggConfig


def routing_config(settings: PlacementSettings, *, local_prefill_tokens: int) -> RoutingConfig:
    """The settings, which are valid, and the threshold of the whole cluster."""
    busy_tokens = DisaggConfig().busy_threshold_tokens
    return RoutingConfig(
        policy=PolicyName(settings.mode),
        seed=settings.seed,
        reads_from_peers=settings.reads_from_peers,
        expected_output_tokens=settings.expected_output_tokens,
        disagg=DisaggConfig(
            threshold_tokens=local_prefill_tokens,
            busy_threshold_tokens=max(busy_tokens, local_prefill_tokens),
            only_thresholds=settings.disagg == "threshold",
        ),
        min_ttft=MinTtftConfig(
            slo_tpot_s=settings.slo_tpot_ms / 1_000 if settings.slo_tpot_ms else None,
            slack=settings.ttft_slack,
        ),
        prefix_affinity=PrefixAffinityConfig(
            cache_threshold=settings.cache_threshold,
            balance_abs_threshold=settings.balance_abs_threshold,
            balance_rel_threshold=settings.balance_rel_threshold,
        ),
        dynamo_linear=DynamoLinearConfig(
            overlap_score_weight=settings.kv_overlap_score_weight,
            router_temperature=settings.router_temperature,
        ),
    )
