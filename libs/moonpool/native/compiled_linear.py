"""PackedLinear in C: src/linear.c says what the layout is and in which order it adds."""

from __future__ import annotations

import ctypes

import numpy as np
import numpy.typing as npt

from moonpool.native.binding import LinearStruct, NativeLibrary, address_of
from moonpool.native.geometry import Float32Array, WeightArray

#: MP_LINEAR_PANEL of src/moonpool_native.h: outputs that lie side by side.
_PANEL = 16
_CACHE_LINE_BYTES = 64


class CompiledLinear:
    """A weight of its own, and a call that gives the interpreter lock away."""

    def __init__(
        self,
        library: NativeLibrary,
        weight: WeightArray,
        bias: Float32Array | None,
        *,
        isa: str | None = None,
    ) -> None:
        """`isa` names a variant of src/dispatch.c; by default the one that suits this machine."""
        self.num_out, self.num_in = weight.shape
        is_bfloat16 = weight.dtype == np.uint16
        panels = _packed(weight, inputs_per_lane=2 if is_bfloat16 else 1)
        padded_bias = None
        if bias is not None:
            if bias.shape != (self.num_out,) or bias.dtype != np.float32:
                raise ValueError(f"bias is {bias.dtype}{bias.shape}, not float32[{self.num_out}]")
            padded_bias = np.zeros(panels.shape[0] * _PANEL, np.float32)
            padded_bias[: self.num_out] = bias
        self.size_bytes = panels.nbytes
        self._kept_alive = (panels, padded_bias)
        self._struct = LinearStruct(
            panels=address_of(panels, np.uint32),
            bias=None if padded_bias is None else address_of(padded_bias, np.float32),
            num_in=self.num_in,
            num_out=self.num_out,
            is_bfloat16=is_bfloat16,
        )
        self._address = ctypes.addressof(self._struct)
        self._multiply = library.kernel("mp_multiply", isa)

    def multiply(self, x: int, num_rows: int, y: int) -> None:
        self._multiply(self._address, x, num_rows, y)


def _packed(weight: WeightArray, *, inputs_per_lane: int) -> npt.NDArray[np.uint32]:
    """uint32[panels, steps, 16] at a cache line."""
    num_out, num_in = weight.shape
    if weight.dtype not in (np.uint16, np.float32) or min(num_out, num_in) < 1:
        raise ValueError(f"a weight is float32 or uint16 [out, in], not {weight.dtype}")
    num_panels = -(-num_out // _PANEL)
    num_steps = -(-num_in // inputs_per_lane)
    shape = (num_panels * _PANEL, num_steps * inputs_per_lane)
    if shape != weight.shape or not weight.flags.c_contiguous:
        padded = np.zeros(shape, weight.dtype)
        padded[:num_out, :num_in] = weight
        weight = padded
    lanes = weight.view(np.uint32).reshape(num_panels, _PANEL, num_steps)
    memory = np.empty(lanes.nbytes + _CACHE_LINE_BYTES, np.uint8)
    start = -memory.ctypes.data % _CACHE_LINE_BYTES
    panels = memory[start : start + lanes.nbytes].view(np.uint32)
    panels = panels.reshape(num_panels, num_steps, _PANEL)
    panels[...] = lanes.transpose(0, 2, 1)
    return panels
