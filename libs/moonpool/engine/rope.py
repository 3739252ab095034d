"""Rotary position embedding, in the order of halves that Hugging Face's Llama uses."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from moonpool.hub.model_config import (
    FrequencyFactors,
    LinearRopeScaling,
    Llama3RopeScaling,
    ModelConfig,
)


def inverse_frequencies(config: ModelConfig) -> Tensor:
    """float32[head_dim / 2]: the angle per position of each pair of dimensions."""
    exponents = torch.arange(0, config.head_dim, 2, dtype=torch.int64).float() / config.head_dim
    frequencies = 1.0 / (config.rope_theta**exponents)
    scaling = config.rope_scaling
    if isinstance(scaling, LinearRopeScaling):
        return frequencies / scaling.factor
    if isinstance(scaling, FrequencyFactors):
        return frequencies / torch.tensor(scaling.factors, dtype=torch.float32)
    if isinstance(scaling, Llama3RopeScaling):
        return _scaled_by_wavelength(frequencies, scaling)
    return frequencies


def _scaled_by_wavelength(frequencies: Tensor, scaling: Llama3RopeScaling) -> Tensor:
    """Long waves are slowed by `factor`, short ones kept, those between interpolated."""
    wavelengths = 2 * math.pi / frequencies
    original = scaling.original_max_positions
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    smooth = (original / wavelengths - low) / (high - low)
    slowed = frequencies / scaling.factor
    between = (1 - smooth) * slowed + smooth * frequencies
    scaled = torch.where(wavelengths > original / low, slowed, frequencies)
    is_between = (wavelengths <= original / low) & (wavelengths >= original / high)
    return torch.where(is_between, between, scaled)


class RopeTable:
    """Cosines and sines of all positions, float32, made once."""

    def __init__(self, config: ModelConfig, num_positions: int) -> None:
        angles = torch.arange(num_positions, dtype=torch.float32)[:, None]
        angles = angles * inverse_frequencies(config)[None, :]
        cos, sin = angles.cos(), angles.sin()
        self._cos = torch.cat((cos, cos), dim=-1)
        #: The first half negated, so that rotating is `x * cos + swap_halves(x) * signed_sin`.
        self._signed_sin = torch.cat((-sin, sin), dim=-1)

    def halves(self) -> Tensor:
        """float32[positions, head_dim]: cosines of the pairs of dimensions, then their sines (FlashInfer)."""
        half = self._cos.shape[-1] // 2
        return torch.cat((self._cos[:, :half], self._signed_sin[:, half:]), dim=-1)

    def at(self, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Cosine and signed sine, each [tokens, 1, head_dim], for `positions` int64[tokens]."""
        cos = self._cos.index_select(0, positions).to(dtype)[:, None]
        return cos, self._signed_sin.index_select(0, positions).to(dtype)[:, None]


def rotate_(heads: Tensor, cos: Tensor, signed_sin: Tensor) -> None:
    """Rotates `heads` [tokens, heads, head_dim] in place."""
    swapped = heads.roll(heads.shape[-1] // 2, dims=-1)
    heads.mul_(cos).addcmul_(swapped, signed_sin)
