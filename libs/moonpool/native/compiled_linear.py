"""PackedLinear in C: src/linear.c says what the layout is, it and src/bfloat16_linear.c in which order they add."""

from __future__ import annotations

import ctypes

import numpy as np
import numpy.typing as npt

from moonpool.native.binding import LinearStruct, NativeLibrary, address_of
from moonpool.native.geometry import LINEAR_PANEL, Float32Array, WeightArray
from moonpool.native.weight_memory import Allocate, of_its_own

#: MP_FLOAT32, MP_BFLOAT16 and MP_INT8, and how many inputs a step of 64 bytes holds.
_FORMATS = {np.dtype(np.float32): (0, 1), np.dtype(np.uint16): (1, 2), np.dtype(np.int8): (2, 4)}


class CompiledLinear:
    """A weight of its own, and a call that gives the interpreter lock away."""

    def __init__(
        self,
        library: NativeLibrary,
        weight: WeightArray,
        bias: Float32Array | None,
        *,
        scale: Float32Array | None = None,
        is_rounding: bool = False,
        isa: str | None = None,
        allocate: Allocate = of_its_own,
    ) -> None:
        """`isa` names a variant of src/dispatch.c; by default the one that suits this machine.

        `is_rounding`: rows are rounded to bfloat16, as the weight is; not every variant can.
        `allocate` gives the memory of the packed copy.
        """
        if weight.dtype not in _FORMATS or weight.ndim != 2 or 0 in weight.shape:
            raise ValueError(f"no weight is {weight.dtype}{list(weight.shape)}")
        if (scale is not None) != (weight.dtype == np.int8):
            raise ValueError("weights of int8 have a scale, and no others")
        if is_rounding and weight.dtype != np.uint16:
            raise ValueError(f"rows are rounded for weights of bfloat16, not {weight.dtype}")
        self.num_out, self.num_in = weight.shape
        number, per_step = _FORMATS[weight.dtype]
        panels = _packed(weight, per_step, allocate)
        padded_scale = None if scale is None else self._padded("scale", scale)
        padded_bias = None if bias is None else self._padded("bias", bias)
        self.size_bytes = panels.nbytes
        self._kept_alive = (panels, padded_scale, padded_bias)
        self._struct = LinearStruct(
            panels=address_of(panels, np.uint32, (-(-self.num_in // per_step), LINEAR_PANEL)),
            scale=None if padded_scale is None else address_of(padded_scale, np.float32),
            bias=None if padded_bias is None else address_of(padded_bias, np.float32),
            num_in=self.num_in,
            num_out=self.num_out,
            format=number,
        )
        self._address = ctypes.addressof(self._struct)
        name = "mp_multiply_bfloat16" if is_rounding else "mp_multiply"
        self._multiply = library.kernel(name, isa)

    def _padded(self, name: str, values: Float32Array) -> Float32Array:
        if values.shape != (self.num_out,) or values.dtype != np.float32:
            raise ValueError(
                f"{name} is {values.dtype}{list(values.shape)}, not float32[{self.num_out}]"
            )
        padded = np.zeros(-(-self.num_out // LINEAR_PANEL) * LINEAR_PANEL, np.float32)
        padded[: self.num_out] = values
        return padded

    def multiply(self, x: int, num_rows: int, y: int, largest: int = 0) -> None:
        self._multiply(self._address, x, num_rows, y, largest or None)


def _packed(
    weight: WeightArray, inputs_per_step: int, allocate: Allocate
) -> npt.NDArray[np.uint32]:
    """uint32[panels, steps, 16] at a cache line: a lane holds an output's inputs, or int8's outputs."""
    num_out, num_in = weight.shape
    num_panels = -(-num_out // LINEAR_PANEL)
    num_steps = -(-num_in // inputs_per_step)
    shape = (num_panels * LINEAR_PANEL, num_steps * inputs_per_step)
    if shape != weight.shape or not weight.flags.c_contiguous:
        padded = np.zeros(shape, weight.dtype)
        padded[:num_out, :num_in] = weight
        weight = padded
    panels = allocate(weight.nbytes).view(np.uint32)
    panels = panels.reshape(num_panels, num_steps, LINEAR_PANEL)
    # int8 of one input stand side by side, wider ones side by side in a lane.
    unit = np.dtype(np.int8 if weight.dtype == np.int8 else np.uint32)
    units = weight.view(unit).reshape(num_panels, LINEAR_PANEL, -1)
    panels.view(unit).reshape(num_panels, -1, LINEAR_PANEL)[...] = units.transpose(0, 2, 1)
    return panels
