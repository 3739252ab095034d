"""Loads a model for this process's CPU: what LlamaTensors reads, packed for whoever multiplies."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from moonpool.core.config import Quantization
from moonpool.engine.kv_pool import TORCH_DTYPES
from moonpool.engine.linear import Linear, has_native_bfloat16
from moonpool.engine.model import LlamaLayer, LlamaModel
from moonpool.engine.rope import RopeTable
from moonpool.engine.row_math import RowMath
from moonpool.engine.weights import LayerTensors, LlamaTensors, Matrix
from moonpool.hub.model_dir import ModelDir
from moonpool.kv.layout import KvDtype
from moonpool.native import Kernels


def load_model(
    model_dir: ModelDir,
    dtype: KvDtype,
    *,
    quantization: Quantization = "none",
    num_positions: int | None = None,
    compute_dtype: KvDtype | None = None,
    kernels: Kernels,
) -> LlamaModel:
    """Loads all weights, rounded to `dtype`; those of linears further, by `quantization`.

    `compute_dtype` does the arithmetic; by default `dtype`, except that bfloat16 is computed in
    float32 where the CPU has no bfloat16 products: the weights have the same values, the intermediate
    results more bits, and it is several times faster. Products in bfloat16 by `kernels` round their
    inputs themselves: all else is then in float32.
    `num_positions` bounds the positions (default: the model's). `kernels` may multiply.

    Raises:
        ModelError: a tensor is missing, of the wrong shape, or unknown; names file and tensor.
    """
    stored = TORCH_DTYPES[dtype]
    if compute_dtype is None:
        is_emulated = stored is torch.bfloat16 and not has_native_bfloat16()
        computed = torch.float32 if is_emulated else stored
    else:
        computed = TORCH_DTYPES[compute_dtype]
    is_rounding = stored is computed is torch.bfloat16 and kernels.has_bfloat16_products
    if is_rounding:
        computed = torch.float32
    config = model_dir.config
    tensors = LlamaTensors(model_dir, stored)
    pack = _Packer(
        dtype=computed, kernels=kernels, quantization=quantization, is_rounding=is_rounding
    )
    embedding = tensors.embedding()
    layers = tuple(pack.layer(tensors.layer(index)) for index in range(config.num_layers))
    final_norm = tensors.final_norm().to(computed)
    head = tensors.lm_head(embedding)
    tensors.check_all_taken()
    return LlamaModel(
        config=config,
        dtype=computed,
        is_rounding=is_rounding,
        embedding=embedding,
        layers=layers,
        final_norm=final_norm,
        lm_head=pack.linear(Matrix(weight=head, bias=None)),
        rope=RopeTable(config, num_positions or config.max_positions),
        row_math=RowMath(eps=config.rms_norm_eps, dtype=computed, kernels=kernels),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Packer:
    """From tensors as they were read to what the forward pass takes."""

    dtype: torch.dtype
    kernels: Kernels
    quantization: Quantization
    is_rounding: bool

    def layer(self, tensors: LayerTensors) -> LlamaLayer:
        return LlamaLayer(
            attention_norm=tensors.attention_norm.to(self.dtype),
            qkv=self.linear(tensors.qkv),
            attention_out=self.linear(tensors.attention_out),
            mlp_norm=tensors.mlp_norm.to(self.dtype),
            gate_up=self.linear(tensors.gate_up),
            down=self.linear(tensors.down),
        )

    def linear(self, matrix: Matrix) -> Linear:
        bias = None if matrix.bias is None else matrix.bias.to(self.dtype)
        return Linear(
            matrix.weight,
            bias,
            dtype=self.dtype,
            kernels=self.kernels,
            quantization=self.quantization,
            is_rounding=self.is_rounding,
        )
