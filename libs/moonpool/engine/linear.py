"""Linear: one weight matrix and how a CPU multiplies by it."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional


class Linear:
    """y = x W^T + b for a fixed W [out, in]."""

    __slots__ = ("_transposed", "bias", "weight")

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        self.weight = weight
        self.bias = bias
        self._transposed = weight.t()

    def __call__(self, x: Tensor) -> Tensor:
        """[rows, out] for x [rows, in]."""
        return functional.linear(x, self.weight, self.bias)

    def add_to(self, residual: Tensor, x: Tensor) -> Tensor:
        """residual + x W^T + b; may overwrite and return `residual`."""
        residual = residual.addmm_(x, self._transposed)
        return residual if self.bias is None else residual.add_(self.bias)


def has_native_bfloat16() -> bool:
    """True if this CPU multiplies bfloat16 matrices faster than it would convert them.

    oneDNN has bfloat16 kernels from AVX-512 upwards; without them torch falls back to a loop that is
    about ten times slower than its float32 product.
    """
    return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
