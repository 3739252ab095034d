"""Pace: how long things take in a replay. Tally: what came of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from moonpool.core.config import CoreConfig
from moonpool.ids import WorkerKey
from moonpool.latency.costs import DecodeCost, PrefillCost, TransferCost
from moonpool.routing.worker_view import WorkerFits
from moonpool_loadtest.replay.trace import SCALE

#: Llama-3-70B in bfloat16: 80 layers, 8 KV heads of 128.
BYTES_PER_TOKEN = 327_680 * SCALE
NUM_LAYERS = 80


@dataclass(frozen=True, slots=True, kw_only=True)
class Pace:
    """How long things take, in seconds, for tokens of the unscaled trace."""

    #: A step without tokens.
    step_s: float = 0.02
    #: Prefill, tokens per second.
    prefill_rate: float = 16_000.0
    #: One way, router to worker or back.
    message_s: float = 0.001
    #: Reads of another node's blocks: 100 Gbit/s.
    fetch: TransferCost = field(
        default_factory=lambda: TransferCost(latency_s=0.005, bytes_per_s=12.5e9)
    )

    def step(self, num_tokens: int) -> float:
        return self.step_s + num_tokens * SCALE / self.prefill_rate

    def fits(self, config: CoreConfig, peers: Sequence[WorkerKey]) -> WorkerFits:
        """The same as a worker would have learnt it."""
        return WorkerFits(
            prefill=PrefillCost(
                base_s=self.step_s,
                per_token_s=SCALE / self.prefill_rate,
                per_work_s=0.0,
                max_step_tokens=config.max_num_batched_tokens,
            ),
            decode=DecodeCost(
                base_s=self.step_s, per_context_token_s=0.0, per_request_s=SCALE / self.prefill_rate
            ),
            transfers=tuple((peer, self.fetch) for peer in peers),
        )


@dataclass(slots=True, kw_only=True)
class Tally:
    """What became of the prompts' blocks."""

    num_requests: int = 0
    num_failed: int = 0
    num_blocks: int = 0
    #: Of all prompts, the one behind the last block included.
    num_tokens: int = 0
    #: Prompt tokens that were computed, those again that a worker had to give up included.
    num_computed_tokens: int = 0
    #: Blocks that the worker's own pool had, and those that it read from a worker or from a store.
    num_device_hits: int = 0
    num_peer_hits: int = 0
    num_store_hits: int = 0
    #: Offers of chains to stores, those that a store refused, and blocks that were copied for them.
    num_puts: int = 0
    num_refused_puts: int = 0
    num_put_blocks: int = 0
    ttft_s: list[float] = field(default_factory=list)

    @property
    def hit_ratio(self) -> float:
        num_hits = self.num_device_hits + self.num_peer_hits + self.num_store_hits
        return num_hits / max(self.num_blocks, 1)

    @property
    def computed_ratio(self) -> float:
        """Of prompt tokens; with `hit_ratio` 1, or more by what was computed twice."""
        return self.num_computed_tokens / max(self.num_tokens, 1)
