"""The Llama family on a device: engine/model.py's arithmetic over DeviceKernels.

The residual stream is one tensor; each norm adds the last product to it and norms the sum, one kernel.

    residual = embedding
    layer: norm -> QKV -> rope -> append -> attention -> out  \\  added to the residual by
           norm -> gate, up -> silu x up -> down              /   the norm that comes next
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from moonpool.engine.attention import AttentionBackend
from moonpool.engine.device.kernels import DeviceKernels
from moonpool.engine.device.pool import DevicePool
from moonpool.engine.device.tables import DeviceBatch
from moonpool.engine.rope import RopeTable
from moonpool.engine.weights import LlamaTensors, Matrix
from moonpool.hub.model_config import ModelConfig
from moonpool.hub.model_dir import ModelDir

OnLayer = Callable[[int], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceLinear:
    """y = x W^T + b; the library that torch brings for the device multiplies."""

    weight: Tensor
    bias: Tensor | None = None

    def __call__(self, x: Tensor) -> Tensor:
        """[rows, out] for x [rows, in]."""
        return functional.linear(x, self.weight, self.bias)


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceLayer:
    """One decoder layer's weights. Norms are [hidden]."""

    attention_norm: Tensor
    #: Q, K and V of all heads, in this order.
    qkv: DeviceLinear
    attention_out: DeviceLinear
    mlp_norm: Tensor
    gate_up: DeviceLinear
    down: DeviceLinear


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceModel:
    """Weights of a whole model, on one device, in the dtype of the arithmetic."""

    config: ModelConfig
    dtype: torch.dtype
    #: [vocab, hidden]
    embedding: Tensor
    layers: tuple[DeviceLayer, ...]
    final_norm: Tensor
    lm_head: DeviceLinear
    #: float32[positions, head_dim] (RopeTable.halves).
    rope: Tensor

    def forward(
        self,
        batch: DeviceBatch,
        *,
        pool: DevicePool,
        attention: AttentionBackend,
        kernels: DeviceKernels,
        before_layer: OnLayer,
        after_layer: OnLayer,
    ) -> Tensor | None:
        """Final hidden states [samples, hidden], or None if nothing is sampled.

        Asks for work and does not wait. `attention` is planned for this batch. `before_layer` is called
        before a layer's KV is read or written, `after_layer` when its writing was asked for.
        """
        config, eps = self.config, self.config.rms_norm_eps
        num_heads, num_kv_heads = config.num_heads, config.num_kv_heads
        num_tokens, last = batch.num_tokens, len(self.layers) - 1
        residual = functional.embedding(batch.token_ids, self.embedding)
        delta: Tensor | None = None
        for index, layer in enumerate(self.layers):
            if delta is None:
                normed = kernels.rms_norm(residual, layer.attention_norm, eps)
            else:
                normed = kernels.add_rms_norm_(delta, residual, layer.attention_norm, eps)
            qkv = layer.qkv(normed).view(num_tokens, -1, config.head_dim)
            query = qkv[:, :num_heads]
            kv = qkv[:, num_heads:].view(num_tokens, 2, num_kv_heads, config.head_dim)
            kernels.rotate_(batch.positions, query, kv[:, 0], self.rope)
            before_layer(index)
            kernels.append(pool, index, kv[:, 0], kv[:, 1], batch)
            after_layer(index)
            if index == last and batch.sample_tokens is None:
                return None
            attended = attention.run(index, query, kv, is_last_only=index == last)
            if index == last and batch.sample_tokens is not None:
                residual = residual.index_select(0, batch.sample_tokens)
                attended = attended.index_select(0, batch.sample_tokens)
            delta = layer.attention_out(attended)
            normed = kernels.add_rms_norm_(delta, residual, layer.mlp_norm, eps)
            delta = layer.down(kernels.silu_mul(layer.gate_up(normed)))
        assert delta is not None, "a model has layers"
        return kernels.add_rms_norm_(delta, residual, self.final_norm, eps)


def load_device_model(
    model_dir: ModelDir,
    device: torch.device,
    *,
    dtype: torch.dtype,
    num_positions: int | None = None,
) -> DeviceModel:
    """Loads all weights, rounded to `dtype`, layer by layer.

    `num_positions` bounds the positions (default: the model's).

    Raises:
        ModelError: a tensor is missing, of the wrong shape, or unknown; names file and tensor.
    """
    config = model_dir.config
    tensors = LlamaTensors(model_dir, dtype)

    def linear(matrix: Matrix) -> DeviceLinear:
        bias = None if matrix.bias is None else matrix.bias.to(device)
        return DeviceLinear(weight=matrix.weight.to(device), bias=bias)

    def layer(index: int) -> DeviceLayer:
        one = tensors.layer(index)
        return DeviceLayer(
            attention_norm=one.attention_norm.to(device),
            qkv=linear(one.qkv),
            attention_out=linear(one.attention_out),
            mlp_norm=one.mlp_norm.to(device),
            gate_up=linear(one.gate_up),
            down=linear(one.down),
        )

    embedding = tensors.embedding()
    on_device = embedding.to(device)
    layers = tuple(layer(index) for index in range(config.num_layers))
    final_norm = tensors.final_norm().to(device)
    head = tensors.lm_head(embedding)
    tensors.check_all_taken()
    return DeviceModel(
        config=config,
        dtype=dtype,
        embedding=on_device,
        layers=layers,
        final_norm=final_norm,
        lm_head=DeviceLinear(weight=on_device if head is embedding else head.to(device)),
        rope=RopeTable(config, num_positions or config.max_positions).halves().to(device),
    )
