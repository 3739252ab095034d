"""Linear: one weight matrix, packed once for whoever multiplies by it on this CPU.

Float32 arithmetic: the C library (native/src/linear.c), for any number of rows. It keeps a weight of bfloat16
in 2 bytes and expands it in registers, and one of float32 in 4. A step of few rows is bound by reading the
weights once, and many rows are multiplied as fast as oneDNN multiplies float32. A row's result does not depend
on the other rows. It works in one thread (threads.py).

Bfloat16 arithmetic, of weights of bfloat16, on a CPU with AVX512-BF16: the C library too
(native/src/bfloat16_linear.c), with the same promise. Rows come and go in float32 and are rounded for the product
alone, so what stands between products is computed as in float32.

A weight may be rounded to int8, which is what each output's largest weight is 127 of (Quantization). The C
library keeps it in 1 byte on any CPU, since what a decode step waits for is reading it; without that
library its values are kept as others are.

Otherwise, or without the C library, oneDNN: a weight is packed once, so that no step reorders it. One row of
float32 is as fast as memory only along the longer side of the matrix: for that a second, plain copy is kept
(8 bytes a weight). bfloat16 needs no copy. What oneDNN does not pack on this CPU stays a plain matrix.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from moonpool.core.config import Quantization
from moonpool.native import LINEAR_PANEL, Kernels, PackedLinear

#: Rows that oneDNN's packing is chosen for: a small decode batch. Prefill loses nothing by it.
_TYPICAL_ROWS = 8


class Linear:
    """y = x W^T + b for a fixed W [out, in]."""

    __slots__ = ("_bias", "_dtype", "_native", "_packed", "_plain")

    def __init__(
        self,
        weight: Tensor,
        bias: Tensor | None,
        *,
        dtype: torch.dtype,
        kernels: Kernels,
        quantization: Quantization = "none",
        is_rounding: bool = False,
    ) -> None:
        """Keeps or copies `weight`; the caller may drop its own.

        `dtype` is that of x, y and `bias`, at least as wide as the weight's. Without `quantization` its
        values are kept exactly. `is_rounding`, of a weight of bfloat16 and x of float32: x is rounded to
        bfloat16 as well, by `kernels` with bfloat16 products; int8 is multiplied in float32 all the same.
        """
        self._bias = bias
        self._dtype = dtype
        self._packed: Tensor | None = None
        #: [out, in] in either order of memory: for one row, or for all if nothing is packed.
        self._plain: Tensor | None = None
        self._native: PackedLinear | None = None
        if quantization == "int8":
            rounded, scale = round_to_int8(weight)
            self._native = kernels.pack_linear(
                rounded.numpy(), None if bias is None else bias.float().numpy(), scale.numpy()
            )
            weight = rounded * scale[:, None]
        else:
            self._native = _native(weight, bias, dtype, kernels, is_rounding=is_rounding)
        if self._native is not None:
            return
        self._plain = weight.to(dtype)
        if _can_pack(dtype):
            self._packed = torch.ops.mkldnn._reorder_linear_weight(self._plain, _TYPICAL_ROWS)
            is_narrow = dtype is torch.bfloat16
            self._plain = None if is_narrow else _longer_side_contiguous(self._plain)

    def __call__(self, x: Tensor) -> Tensor:
        """[rows, out] for x [rows, in]."""
        if self._native is not None:
            self._check_dtype(x)
            return _multiply(self._native, x.float())[0].to(self._dtype)
        if self._plain is not None and (self._packed is None or len(x) == 1):
            return functional.linear(x, self._plain, self._bias)
        out: Tensor = torch.ops.mkldnn._linear_pointwise(
            x, self._packed, self._bias, "none", [], ""
        )
        return out

    def surveyed(self, x: Tensor) -> tuple[Tensor, Tensor | None]:
        """The same, and float32[rows, panels] of what PackedLinear calls `largest`, if it was noted."""
        if self._native is None or self._dtype is not torch.float32:
            return self(x), None
        self._check_dtype(x)
        return _multiply(self._native, x, is_surveyed=True)

    def _check_dtype(self, x: Tensor) -> None:
        if x.dtype is not self._dtype:
            raise ValueError(f"x is {x.dtype}, not {self._dtype}")


def _multiply(
    linear: PackedLinear, x: Tensor, *, is_surveyed: bool = False
) -> tuple[Tensor, Tensor | None]:
    num_rows, num_in = x.shape
    if num_in != linear.num_in:
        raise ValueError(f"x is {list(x.shape)}, not [rows, {linear.num_in}]")
    x = x.contiguous()
    out = x.new_empty((num_rows, linear.num_out))
    if not is_surveyed:
        linear.multiply(x.data_ptr(), num_rows, out.data_ptr())
        return out, None
    largest = x.new_empty((num_rows, -(-linear.num_out // LINEAR_PANEL)))
    linear.multiply(x.data_ptr(), num_rows, out.data_ptr(), largest.data_ptr())
    return out, largest


def round_to_int8(weight: Tensor) -> tuple[Tensor, Tensor]:
    """int8[out, in] and float32[out] whose product is nearly `weight`: off by half a scale at most."""
    wide = weight.float()
    scale = wide.abs().amax(dim=1) / 127
    scale[scale == 0] = 1.0
    return (wide / scale[:, None]).round().to(torch.int8), scale


def _native(
    weight: Tensor, bias: Tensor | None, dtype: torch.dtype, kernels: Kernels, *, is_rounding: bool
) -> PackedLinear | None:
    if dtype is not torch.float32:
        return None
    bits = weight.contiguous()
    return kernels.pack_linear(
        # numpy has no bfloat16.
        bits.view(torch.int16).numpy().view(np.uint16)
        if weight.dtype is torch.bfloat16
        else bits.numpy(),
        None if bias is None else bias.numpy(),
        is_rounding=is_rounding,
    )


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
