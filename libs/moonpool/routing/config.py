"""RoutingConfig: which policy places requests, and its numbers."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field

from moonpool.routing.disagg_decider import DisaggConfig


class PolicyName(enum.StrEnum):
    """The policies, as an operator names them."""

    #: Lowest predicted time to the first token, under a TPOT and a capacity constraint.
    MIN_TTFT = "min_ttft"
    RANDOM = "random"
    ROUND_ROBIN = "round_robin"
    LEAST_LOADED = "least_loaded"
    #: Longest matching prefix unless the load is out of balance (SGLang's router).
    PREFIX_AFFINITY = "prefix_affinity"
    #: A weighted sum of blocks to prefill and blocks in use (Dynamo's KV router).
    DYNAMO_LINEAR = "dynamo_linear"


@dataclass(frozen=True, slots=True, kw_only=True)
class MinTtftConfig:
    #: Predicted time per token that a decode worker may reach; None: no limit.
    slo_tpot_s: float | None = 0.1
    #: Predictions this close to the best one are equal: the lower TPOT decides.
    slack: float = 0.05
    #: What a token costs that another one pushes out of a cache, in computed tokens: the chance that it
    #: would have been asked for again.
    eviction_weight: float = 0.3

    def __post_init__(self) -> None:
        assert self.slo_tpot_s is None or self.slo_tpot_s > 0.0, self
        assert self.slack >= 0.0, self
        assert 0.0 <= self.eviction_weight <= 1.0, self


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefixAffinityConfig:
    """Defaults of SGLang's router."""

    #: Share of the prompt that must match for the match to decide.
    cache_threshold: float = 0.5
    #: The load is out of balance if the largest exceeds the smallest by more than this number ...
    balance_abs_threshold: int = 32
    #: ... and by more than this factor.
    balance_rel_threshold: float = 1.1


@dataclass(frozen=True, slots=True, kw_only=True)
class DynamoLinearConfig:
    """Defaults of Dynamo's KV router."""

    #: What a cached block counts against a block to prefill.
    overlap_score_weight: float = 1.0
    prefill_load_scale: float = 1.0
    #: 0 takes the best; above, workers are drawn by softmax(-cost / range / temperature).
    router_temperature: float = 0.0

    def __post_init__(self) -> None:
        assert self.router_temperature >= 0.0, self


@dataclass(frozen=True, slots=True, kw_only=True)
class RoutingConfig:
    """Validated in config/; here only asserted."""

    policy: PolicyName = PolicyName.MIN_TTFT
    #: Of whatever a policy draws: the same seed and requests give the same choices.
    seed: int = 0
    #: Name the peer that holds more of a request's prefix than the worker does.
    reads_from_peers: bool = True
    #: How long an answer is expected to become; a request's own limit may be lower.
    expected_output_tokens: int = 256
    disagg: DisaggConfig = field(default_factory=DisaggConfig)
    min_ttft: MinTtftConfig = field(default_factory=MinTtftConfig)
    prefix_affinity: PrefixAffinityConfig = field(default_factory=PrefixAffinityConfig)
    dynamo_linear: DynamoLinearConfig = field(default_factory=DynamoLinearConfig)

    def __post_init__(self) -> None:
        assert self.expected_output_tokens >= 1, self
