"""PrefillCost, DecodeCost, TransferCost: what a piece of work takes, as values that travel.

    prefill    base_s * steps + per_token_s * tokens + per_work_s * tokens * (tokens + 2 * cached)
    decode     base_s + per_context_token_s * context + per_request_s * batch          (one step)
    transfer   latency_s + size_bytes / bytes_per_s

`tokens * (tokens + 2 * cached)` is twice the number of (query, key) pairs, and it telescopes: the
chunks of a prompt sum to the whole prompt's, so one formula serves a step and a prompt of many steps.
"""

from __future__ import annotations

from dataclasses import dataclass


def prefill_work(num_tokens: int, num_cached_tokens: int) -> int:
    """Attention of `num_tokens` new tokens behind `num_cached_tokens`: twice the pairs."""
    return num_tokens * (num_tokens + 2 * num_cached_tokens)


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillCost:
    """Seconds to compute a prompt's uncached tokens, alone."""

    base_s: float
    per_token_s: float
    #: Per unit of `prefill_work`.
    per_work_s: float
    #: Most tokens of one step: a longer prompt pays `base_s` once per step.
    max_step_tokens: int

    def __post_init__(self) -> None:
        assert min(self.base_s, self.per_token_s, self.per_work_s) >= 0.0, self
        assert self.max_step_tokens >= 1, self

    def predict(self, num_tokens: int, num_cached_tokens: int = 0) -> float:
        """Seconds for `num_tokens` new tokens behind `num_cached_tokens`; 0 for none."""
        num_steps = -(-num_tokens // self.max_step_tokens)
        return (
            self.base_s * num_steps
            + self.per_token_s * num_tokens
            + self.per_work_s * prefill_work(num_tokens, num_cached_tokens)
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeCost:
    """Seconds of one decode step."""

    base_s: float
    per_context_token_s: float
    per_request_s: float

    def __post_init__(self) -> None:
        assert min(self.base_s, self.per_context_token_s, self.per_request_s) >= 0.0, self

    def predict(self, batch: int, num_context_tokens: int) -> float:
        """Seconds for `batch` requests that have `num_context_tokens` together; 0 for none."""
        return self.base_s + self.predict_added(batch, num_context_tokens) if batch else 0.0

    def predict_added(self, batch: int, num_context_tokens: int) -> float:
        """Seconds that these requests add to a step that runs anyway."""
        return self.per_request_s * batch + self.per_context_token_s * num_context_tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class TransferCost:
    """Seconds to read KV from one peer."""

    latency_s: float
    bytes_per_s: float

    def __post_init__(self) -> None:
        assert self.latency_s >= 0.0, self
        assert self.bytes_per_s > 0.0, self

    def predict(self, num_bytes: int) -> float:
        """Seconds until the last of `num_bytes` is here; 0 for none."""
        return self.latency_s + num_bytes / self.bytes_per_s if num_bytes else 0.0
