"""CoreConfig: the limits that the core enforces."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from moonpool.kv.eviction import EvictionName

#: How the weights of linears are rounded when they are loaded.
Quantization = Literal["none", "int8"]


@dataclass(frozen=True, slots=True, kw_only=True)
class CoreConfig:
    """Validated in config/; here only asserted."""

    num_blocks: int
    block_size: int = 16
    #: Token budget of one step, decodes first (vLLM's name).
    max_num_batched_tokens: int = 2048
    #: Most requests in one step.
    max_num_seqs: int = 64
    #: Longest prompt + answer.
    max_model_len: int = 8192
    #: What a decode worker repairs itself when it has a source; beyond it hands back.
    local_prefill_tokens: int = 256
    #: A worker's prefill queue: this many steps of work, then it refuses.
    max_queued_steps: int = 2
    #: Expected growth of a running request, in tokens, kept free when a new one is taken.
    headroom_tokens: int = 32
    #: Which cached block goes first when the pool is full.
    eviction: EvictionName = EvictionName.LRU
    #: Tokens at which an answer ends, from the model's generation_config.
    eos_token_ids: tuple[int, ...] = ()
    #: Run validate() after every command and step (tests, debugging).
    is_checked: bool = False
