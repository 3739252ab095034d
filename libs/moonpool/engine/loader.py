"""Reads a model directory's safetensors into fused weights.

Every tensor that the configuration calls for must be there in its shape; anything else in the files
is refused by name, except what older exporters added and nobody reads.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from moonpool.core.config import Quantization
from moonpool.engine.kv_pool import TORCH_DTYPES
from moonpool.engine.linear import Linear, has_native_bfloat16
from moonpool.engine.model import LlamaLayer, LlamaModel
from moonpool.engine.rope import RopeTable
from moonpool.engine.row_math import RowMath
from moonpool.errors import ModelError
from moonpool.hub.model_config import ModelConfig
from moonpool.hub.model_dir import ModelDir
from moonpool.kv.layout import KvDtype
from moonpool.native import Kernels

_IGNORED_SUFFIXES = ("rotary_emb.inv_freq",)


def load_model(
    model_dir: ModelDir,
    dtype: KvDtype,
    *,
    quantization: Quantization = "none",
    num_positions: int | None = None,
    compute_dtype: torch.dtype | None = None,
    kernels: Kernels,
) -> LlamaModel:
    """Loads all weights, rounded to `dtype`; those of linears further, by `quantization`.

    `compute_dtype` does the arithmetic; by default `dtype`, except that bfloat16 is computed in
    float32 where the CPU has no bfloat16 products: the weights have the same values, the intermediate
    results more bits, and it is several times faster.
    `num_positions` bounds the positions (default: the model's). `kernels` may multiply.

    Raises:
        ModelError: a tensor is missing, of the wrong shape, or unknown; names file and tensor.
    """
    stored = TORCH_DTYPES[dtype]
    if compute_dtype is None:
        is_emulated = stored is torch.bfloat16 and not has_native_bfloat16()
        compute_dtype = torch.float32 if is_emulated else stored
    config = model_dir.config
    reader = _Reader(model_dir.weight_files, stored)
    build = _LayerBuilder(
        reader=reader,
        config=config,
        dtype=compute_dtype,
        kernels=kernels,
        quantization=quantization,
    )
    embedding = reader.take("model.embed_tokens.weight", (config.vocab_size, config.hidden_size))
    layers = tuple(build.layer(index) for index in range(config.num_layers))
    final_norm = reader.take("model.norm.weight", (config.hidden_size,)).to(compute_dtype)
    if config.is_embedding_tied:
        reader.skip("lm_head.weight")
        head = embedding
    else:
        head = reader.take("lm_head.weight", (config.vocab_size, config.hidden_size))
    reader.check_all_taken()
    return LlamaModel(
        config=config,
        dtype=compute_dtype,
        embedding=embedding,
        layers=layers,
        final_norm=final_norm,
        lm_head=build.linear(head, None),
        rope=RopeTable(config, num_positions or config.max_positions),
        row_math=RowMath(eps=config.rms_norm_eps, dtype=compute_dtype, kernels=kernels),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _LayerBuilder:
    """Takes a layer's tensors and packs them."""

    reader: _Reader
    config: ModelConfig
    dtype: torch.dtype
    kernels: Kernels
    quantization: Quantization

    def layer(self, index: int) -> LlamaLayer:
        config, prefix = self.config, f"model.layers.{index}"
        hidden, middle = config.hidden_size, config.intermediate_size
        query_size = config.num_heads * config.head_dim
        kv_size = config.num_kv_heads * config.head_dim
        qkv = {
            f"{prefix}.self_attn.q_proj": query_size,
            f"{prefix}.self_attn.k_proj": kv_size,
            f"{prefix}.self_attn.v_proj": kv_size,
        }
        gate_up = {f"{prefix}.mlp.gate_proj": middle, f"{prefix}.mlp.up_proj": middle}
        attention_out = {f"{prefix}.self_attn.o_proj": hidden}
        attention_bias, mlp_bias = config.has_attention_bias, config.has_mlp_bias
        return LlamaLayer(
            attention_norm=self._norm(f"{prefix}.input_layernorm"),
            qkv=self._linear(qkv, hidden, attention_bias),
            attention_out=self._linear(attention_out, query_size, attention_bias),
            mlp_norm=self._norm(f"{prefix}.post_attention_layernorm"),
            gate_up=self._linear(gate_up, hidden, mlp_bias),
            down=self._linear({f"{prefix}.mlp.down_proj": hidden}, middle, mlp_bias),
        )

    def _norm(self, name: str) -> Tensor:
        return self.reader.take(f"{name}.weight", (self.config.hidden_size,)).to(self.dtype)

    def _linear(self, parts: Mapping[str, int], in_size: int, has_bias: bool) -> Linear:
        """One matrix of `parts`, output sizes by name, one below the other."""
        take = self.reader.take
        weights = [take(f"{name}.weight", (out, in_size)) for name, out in parts.items()]
        bias = None
        if has_bias:
            biases = [take(f"{name}.bias", (out,)) for name, out in parts.items()]
            bias = torch.cat(biases).to(self.dtype)
        weight = torch.cat(weights) if len(weights) > 1 else weights[0]
        return self.linear(weight, bias)

    def linear(self, weight: Tensor, bias: Tensor | None) -> Linear:
        return Linear(
            weight,
            bias,
            dtype=self.dtype,
            kernels=self.kernels,
            quantization=self.quantization,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Entry:
    file: Path
    shape: tuple[int, ...]


class _Reader:
    """Tensors of one or several safetensors files, each taken once."""

    def __init__(self, files: tuple[Path, ...], stored: torch.dtype) -> None:
        self._stored = stored
        self._open: dict[Path, Any] = {}  # Any: safetensors has no types
        self._entries: dict[str, _Entry] = {}
        for file in files:
            try:
                handle: Any = safe_open(file, framework="pt")  # Any: safetensors has no types
                for name in handle.keys():  # noqa: SIM118 (not a dict)
                    shape = tuple(handle.get_slice(name).get_shape())
                    self._entries[name] = _Entry(file=file, shape=shape)
            except (SafetensorError, OSError) as error:
                raise ModelError(f"{file} is damaged or not safetensors: {error}") from error
            self._open[file] = handle

    def take(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """The tensor, rounded to the stored dtype, in memory of its own."""
        entry = self._entries.pop(name, None)
        if entry is None:
            names = ", ".join(sorted(file.name for file in self._open))
            raise ModelError(f"tensor {name} is missing in {names}; copy the model again")
        if entry.shape != shape:
            raise ModelError(
                f"{entry.file}: tensor {name} has shape {list(entry.shape)}, but config.json "
                f"calls for {list(shape)}"
            )
        tensor: Tensor = self._open[entry.file].get_tensor(name)
        if not tensor.is_floating_point():
            raise ModelError(f"{entry.file}: tensor {name} is {tensor.dtype}, not floating point")
        return tensor.to(self._stored, copy=True)

    def skip(self, name: str) -> None:
        self._entries.pop(name, None)

    def check_all_taken(self) -> None:
        left = [name for name in self._entries if not name.endswith(_IGNORED_SUFFIXES)]
        if left:
            file = self._entries[left[0]].file
            raise ModelError(
                f"{file}: tensor {left[0]} (and {len(left) - 1} more) is not part of the "
                "architecture that config.json names"
            )
