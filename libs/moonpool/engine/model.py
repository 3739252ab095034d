"""The Llama family as one function over a flat batch of tokens.

A forward pass takes prefill chunks and decodes of any number of requests mixed. Per layer: QKV, rope,
K and V into the pool, the mark that others may read them, attention, MLP. After the last layer's KV
only the tokens whose logits are wanted go on.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from moonpool.core.step import LayerMark
from moonpool.engine.attention import AttentionBackend
from moonpool.engine.kv_pool import KvPool
from moonpool.engine.linear import Linear
from moonpool.engine.rope import RopeTable, rotate_
from moonpool.engine.row_math import RowMath
from moonpool.hub.model_config import ModelConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class LlamaLayer:
    """One decoder layer's weights. Norms are [hidden]."""

    attention_norm: Tensor
    #: Q, K and V of all heads, in this order, in one matrix.
    qkv: Linear
    attention_out: Linear
    mlp_norm: Tensor
    #: Gate and up in one matrix.
    gate_up: Linear
    down: Linear


@dataclass(frozen=True, slots=True, kw_only=True)
class LlamaModel:
    """Weights of a whole model."""

    config: ModelConfig
    #: Of what passes between products, the norms and the biases.
    dtype: torch.dtype
    #: Products round what they multiply to bfloat16, those of attention too.
    is_rounding: bool
    #: [vocab, hidden], in the dtype of the weights' values.
    embedding: Tensor
    layers: tuple[LlamaLayer, ...]
    final_norm: Tensor
    lm_head: Linear
    rope: RopeTable
    row_math: RowMath

    def forward(
        self,
        *,
        token_ids: Tensor,
        positions: Tensor,
        token_index: Tensor,
        zero_index: Tensor | None,
        sample_tokens: Tensor | None,
        pool: KvPool,
        attention: AttentionBackend,
        mark: LayerMark,
    ) -> Tensor | None:
        """Final hidden states [samples, hidden], or None if nothing is sampled.

        `token_ids`, `positions`: int64[tokens]. `token_index`, `zero_index`: rows of the pool to
        write and to clear (KvPool.token_index). `sample_tokens`: int64[samples] into the tokens, or
        None for none. `attention` is planned for this batch. `mark.layer_done` is called once per
        layer, in order, as soon as the layer's KV is written.
        """
        config = self.config
        num_tokens = len(token_ids)
        num_heads, math = config.num_heads, self.row_math
        num_rotated = num_heads + config.num_kv_heads
        cos, signed_sin = self.rope.at(positions, self.dtype)
        hidden = functional.embedding(token_ids, self.embedding).to(self.dtype)
        last = len(self.layers) - 1
        for index, layer in enumerate(self.layers):
            normed = math.rms_norm(hidden, layer.attention_norm)
            qkv = layer.qkv(normed).view(num_tokens, -1, config.head_dim)
            rotate_(qkv[:, :num_rotated], cos, signed_sin)
            kv = qkv[:, num_heads:].reshape(num_tokens, 2, config.num_kv_heads, config.head_dim)
            stored = kv.to(pool.dtype)
            pool.write(index, token_index, stored)
            if zero_index is not None:
                pool.clear(index, zero_index)
            mark.layer_done(index)
            if index == last and sample_tokens is None:
                return None
            # Back from the pool's dtype: a key has one value, read from the pool or not.
            attended = attention.run(
                index, qkv[:, :num_heads], stored.to(self.dtype), is_last_only=index == last
            )
            if index == last and sample_tokens is not None:
                hidden, attended = hidden[sample_tokens], attended[sample_tokens]
            hidden = hidden.add_(layer.attention_out(attended))
            normed = math.rms_norm(hidden, layer.mlp_norm)
            hidden = hidden.add_(layer.down(math.silu_mul(layer.gate_up(normed))))
        return math.rms_norm(hidden, self.final_norm)
