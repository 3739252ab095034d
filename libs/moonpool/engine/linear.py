"""Linear: one weight matrix, in the order in which this CPU multiplies best.

A weight is packed once for oneDNN, which then needs no reordering in any step: from one row to a few
hundred that is as fast as, or up to twice as fast as, functional.linear, and never slower, so the
plain weight is not kept. What oneDNN does not pack on this CPU stays a plain matrix.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

#: Rows that the packing is chosen for: a small decode batch. Prefill loses nothing by it.
_TYPICAL_ROWS = 8


class Linear:
    """y = x W^T + b for a fixed W [out, in]."""

    __slots__ = ("_bias", "_packed", "_weight")

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        """Copies `weight` if it is packed; the caller may drop its own."""
        self._bias = bias
        self._packed: Tensor | None = None
        self._weight: Tensor | None = None
        if _can_pack(weight.dtype):
            self._packed = torch.ops.mkldnn._reorder_linear_weight(weight, _TYPICAL_ROWS)
        else:
            self._weight = weight

    def __call__(self, x: Tensor) -> Tensor:
        """[rows, out] for x [rows, in]."""
        if self._weight is not None:
            return functional.linear(x, self._weight, self._bias)
        out: Tensor = torch.ops.mkldnn._linear_pointwise(
            x, self._packed, self._bias, "none", [], ""
        )
        return out


def _can_pack(dtype: torch.dtype) -> bool:
    if not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]  # torch has none
        return False
    return dtype is torch.float32 or (dtype is torch.bfloat16 and has_native_bfloat16())


def has_native_bfloat16() -> bool:
    """True if this CPU multiplies bfloat16 matrices faster than it would convert them.

    oneDNN has bfloat16 kernels from AVX-512 upwards; without them torch falls back to a loop that is
    about ten times slower than its float32 product.
    """
    return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
