"""LlamaTensors: a model directory's safetensors under the names of the Llama family.

Every tensor that the configuration calls for must be there in its shape; anything else in the files
is refused by name, except what older exporters added and nobody reads. Matrices that read the same
rows come as one, so that they are one product.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from moonpool.errors import ModelError
from moonpool.hub.model_dir import ModelDir

_IGNORED_SUFFIXES = ("rotary_emb.inv_freq",)


@dataclass(frozen=True, slots=True, kw_only=True)
class Matrix:
    """A linear's weight [out, in] and bias [out]."""

    weight: Tensor
    bias: Tensor | None


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerTensors:
    """One decoder layer. Norms are [hidden]."""

    attention_norm: Tensor
    #: Q, K and V of all heads, in this order, in one matrix.
    qkv: Matrix
    attention_out: Matrix
    mlp_norm: Tensor
    #: Gate and up in one matrix.
    gate_up: Matrix
    down: Matrix


class LlamaTensors:
    """Takes each tensor once, rounded to one dtype, in memory of its own."""

    def __init__(self, model_dir: ModelDir, stored: torch.dtype) -> None:
        """Opens the files.

        Raises:
            ModelError: a file is damaged. So do all methods, if a tensor is missing, of the wrong shape
                or not floating point; they name file and tensor.
        """
        self._config = model_dir.config
        self._reader = _Reader(model_dir.weight_files, stored)

    def embedding(self) -> Tensor:
        """[vocab, hidden]"""
        config = self._config
        shape = (config.vocab_size, config.hidden_size)
        return self._reader.take("model.embed_tokens.weight", shape)

    def layer(self, index: int) -> LayerTensors:
        """All that belongs to one layer."""
        config, prefix = self._config, f"model.layers.{index}"
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
        return LayerTensors(
            attention_norm=self._norm(f"{prefix}.input_layernorm"),
            qkv=self._matrix(qkv, hidden, attention_bias),
            attention_out=self._matrix(attention_out, query_size, attention_bias),
            mlp_norm=self._norm(f"{prefix}.post_attention_layernorm"),
            gate_up=self._matrix(gate_up, hidden, mlp_bias),
            down=self._matrix({f"{prefix}.mlp.down_proj": hidden}, middle, mlp_bias),
        )

    def final_norm(self) -> Tensor:
        """[hidden]"""
        return self._norm("model.norm")

    def lm_head(self, embedding: Tensor) -> Tensor:
        """[vocab, hidden]: `embedding` itself, if the model ties the two."""
        config = self._config
        if config.is_embedding_tied:
            self._reader.skip("lm_head.weight")
            return embedding
        return self._reader.take("lm_head.weight", (config.vocab_size, config.hidden_size))

    def check_all_taken(self) -> None:
        """Raises ModelError if the files hold anything that was not asked for."""
        self._reader.check_all_taken()

    def _norm(self, name: str) -> Tensor:
        return self._reader.take(f"{name}.weight", (self._config.hidden_size,))

    def _matrix(self, parts: Mapping[str, int], in_size: int, has_bias: bool) -> Matrix:
        """One matrix of `parts`, output sizes by name, one below the other."""
        take = self._reader.take
        weights = [take(f"{name}.weight", (out, in_size)) for name, out in parts.items()]
        bias = None
        if has_bias:
            bias = torch.cat([take(f"{name}.bias", (out,)) for name, out in parts.items()])
        return Matrix(weight=torch.cat(weights) if len(weights) > 1 else weights[0], bias=bias)


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
