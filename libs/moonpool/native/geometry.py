"""What the kernels are told: where leaves lie, which to check, and what went wrong."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from moonpool.kv.layout import KvLayout

ByteArray = npt.NDArray[np.uint8]
Int32Array = npt.NDArray[np.int32]
Int64Array = npt.NDArray[np.int64]
DigestArray = npt.NDArray[np.uint64]
BoolArray = npt.NDArray[np.bool_]
Float32Array = npt.NDArray[np.float32]
#: MP_LINEAR_PANEL of src/moonpool_native.h: outputs of a product that lie side by side.
LINEAR_PANEL = 16
#: float32, bfloat16 as the uint16 of its bits, or int8 in shares of its output's scale.
WeightArray = npt.NDArray[np.float32] | npt.NDArray[np.uint16] | npt.NDArray[np.int8]
#: An array of LEAF_CHECK_DTYPE.
LeafCheckArray = npt.NDArray[np.void]

#: One leaf to check. `after_span` is the index of the span that writes its last byte; -1: it is there
#: already. The layout is that of `mp_leaf` in src/moonpool_native.h.
LEAF_CHECK_DTYPE = np.dtype(
    [("block", "<i8"), ("layer", "<i8"), ("after_span", "<i8"), ("expected", "<u8")]
)

#: How each row is drawn from: the layout of `mp_draw` in src/moonpool_native.h. Temperature 0 takes the
#: largest logit, top_p 1 and top_k 0 keep all tokens; `number` is uniform in [0, 1).
DRAW_DTYPE = np.dtype(
    [("temperature", "<f8"), ("top_p", "<f8"), ("number", "<f8"), ("top_k", "<i8")]
)
#: An array of DRAW_DTYPE.
DrawArray = npt.NDArray[np.void]


class RangeError(ValueError):
    """A span, block, layer or slot lies outside of its region. Nothing was written.

    Attributes:
        index: Which of the spans, blocks or leaves given.
    """

    def __init__(self, what: str, index: int) -> None:
        super().__init__(f"{what} {index} is out of bounds")
        self.what = what
        self.index = index


@dataclass(frozen=True, slots=True, kw_only=True)
class LeafGeometry:
    """Where the leaves of one group of layers lie in a pool; byte distances, from kv/layout.py."""

    region_bytes: int
    first_byte: int
    num_blocks: int
    num_layers: int
    num_planes: int
    block_stride: int
    layer_stride: int
    plane_stride: int
    plane_bytes: int
    block_size: int
    #: One token of one head: the innermost run of a plane.
    token_bytes: int

    @classmethod
    def of_layout(cls, layout: KvLayout) -> LeafGeometry:
        """The geometry of a layout with one group (all that exist today)."""
        (group,) = layout.groups
        return cls(
            region_bytes=layout.pool_bytes,
            first_byte=0,
            num_blocks=layout.num_blocks,
            num_layers=group.num_layers,
            num_planes=len(group.planes),
            block_stride=group.block_stride_bytes,
            layer_stride=group.layer_stride_bytes,
            plane_stride=group.plane_stride_bytes,
            plane_bytes=layout.plane_bytes(group),
            block_size=layout.block_size,
            token_bytes=layout.token_bytes(group),
        )

    @property
    def last_byte(self) -> int:
        """End of the last plane of the last layer of the last block."""
        return (
            self.first_byte
            + (self.num_blocks - 1) * self.block_stride
            + (self.num_layers - 1) * self.layer_stride
            + (self.num_planes - 1) * self.plane_stride
            + self.plane_bytes
        )

    def leaf_ends(self, blocks: Int64Array, layers: Int64Array) -> Int64Array:
        """int64[n]: where the last plane of each (block, layer) ends, in bytes from the pool's start."""
        return (
            blocks * self.block_stride
            + layers * self.layer_stride
            + (self.first_byte + (self.num_planes - 1) * self.plane_stride + self.plane_bytes)
        )

    def validate(self) -> None:
        """Raise ValueError unless every leaf lies inside of the region."""
        counts = (self.num_blocks, self.num_layers, self.num_planes, self.plane_bytes)
        strides = (self.first_byte, self.block_stride, self.layer_stride, self.plane_stride)
        head_bytes = self.block_size * self.token_bytes
        if (
            min(counts) < 1
            or min(strides) < 0
            or head_bytes < 1
            or self.plane_bytes % head_bytes
            or self.last_byte > self.region_bytes
        ):
            raise ValueError(f"not a geometry: {self}")


def leaf_checks(
    blocks: npt.ArrayLike,
    layers: npt.ArrayLike,
    expected: npt.ArrayLike,
    after_span: npt.ArrayLike = -1,
) -> LeafCheckArray:
    """LEAF_CHECK_DTYPE[n] from parallel columns; scalars are broadcast. The order is the caller's."""
    columns = (("block", blocks), ("layer", layers), ("expected", expected))
    checks = np.empty(max(np.size(column) for _, column in columns), LEAF_CHECK_DTYPE)
    for name, column in (*columns, ("after_span", after_span)):
        checks[name] = column
    return checks
