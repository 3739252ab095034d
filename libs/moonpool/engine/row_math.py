"""RowMath: what stands between the products of a layer, in C or by torch.

In C each is one pass over the rows; by torch it is six operations and their intermediate results, which
in a step of few rows cost more than the arithmetic.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from moonpool.native import Kernels


class RowMath:
    """RMSNorm and SiLU x up over rows of one dtype."""

    __slots__ = ("_eps", "_native")

    def __init__(self, *, eps: float, dtype: torch.dtype, kernels: Kernels) -> None:
        """`kernels` work on float32; rows of another dtype are torch's."""
        self._eps = eps
        self._native = kernels.row_kernels() if dtype is torch.float32 else None

    def rms_norm(self, x: Tensor, weight: Tensor) -> Tensor:
        """x / rms(x) * weight, for x [rows, size]; the mean is taken in float32."""
        if self._native is None:
            wide = x.float()
            scale = (wide * wide).mean(-1, keepdim=True).add_(self._eps).rsqrt_()
            return (wide * scale).to(x.dtype).mul_(weight)
        num_rows, size = x.shape
        x, weight = _checked(x), _checked(weight)
        out = torch.empty_like(x)
        if weight.numel() != size:
            raise ValueError(f"a weight of {weight.numel()} for rows of {size}")
        self._native.rms_norm(
            x.data_ptr(), weight.data_ptr(), self._eps, num_rows, size, out.data_ptr()
        )
        return out

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        """silu(gate) * up, [rows, size] for the two side by side, [rows, 2 * size]."""
        if self._native is None:
            gate, up = gate_up.chunk(2, dim=-1)
            return functional.silu(gate).mul_(up)
        num_rows, size = len(gate_up), gate_up.shape[1] // 2
        gate_up = _checked(gate_up)
        out = gate_up.new_empty((num_rows, size))
        self._native.silu_mul(gate_up.data_ptr(), num_rows, size, out.data_ptr())
        return out


def _checked(x: Tensor) -> Tensor:
    if x.dtype is not torch.float32:
        raise ValueError(f"{x.dtype}, not float32")
    return x.contiguous()
