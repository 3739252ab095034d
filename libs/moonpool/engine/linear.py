"""Linear: one weight matrix, in the orders in which this CPU multiplies best.

A weight is packed once for oneDNN, which then needs no reordering in any step: from two rows to a few
hundred that is up to twice as fast as functional.linear, and never slower. One row of float32 is a
matrix-vector product, which is as fast as memory only if it runs along the longer side of the matrix:
for that a second, plain copy is kept (twice the memory, 1.5 times the tokens per second at batch 1).
bfloat16 needs no copy: oneDNN's packed product of one row is the fastest there. What oneDNN does not
pack on this CPU stays a plain matrix.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

#: Rows that the packing is chosen for: a small decode batch. Prefill loses nothing by it.
_TYPICAL_ROWS = 8


class Linear:
    """y = x W^T + b for a fixed W [out, in]."""

    __slots__ = ("_bias", "_packed", "_plain")

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        """Keeps or copies `weight`; the caller may drop its own."""
        self._bias = bias
        self._packed: Tensor | None = None
        #: [out, in] in either order of memory: for one row, or for all if nothing is packed.
        self._plain: Tensor | None = weight
        if _can_pack(weight.dtype):
            self._packed = torch.ops.mkldnn._reorder_linear_weight(weight, _TYPICAL_ROWS)
            self._plain = _longer_side_contiguous(weight) if weight.dtype is torch.float32 else None

    def __call__(self, x: Tensor) -> Tensor:
        """[rows, out] for x [rows, in]."""
        if self._plain is not None and (self._packed is None or len(x) == 1):
            return functional.linear(x, self._plain, self._bias)
        out: Tensor = torch.ops.mkldnn._linear_pointwise(
            x, self._packed, self._bias, "none", [], ""
        )
        return out


def _longer_side_contiguous(weight: Tensor) -> Tensor:
    num_out, num_in = weight.shape
    return weight.t().contiguous().t() if num_out > num_in else weight.contiguous()


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
