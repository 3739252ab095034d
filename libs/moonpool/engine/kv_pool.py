"""KvPool: a pool's bytes as rows that torch can gather and scatter, for any strides of a KvLayout.

Within a plane the bytes are contiguous `[kv_head, token, dim]`, so two kinds of run exist: one head of
one block (`block_size * head_dim` elements: what attention reads) and one token of one head
(`head_dim` elements: what the model writes). The pool is viewed as a matrix whose row length divides
every stride and the run; a run is then one row, or a few where the strides are odd. Gathering whole
rows is a copy of memory, several times faster than indexing a strided tensor.

    layer 0:   row = (block * block_stride + plane * plane_stride + head and token) / row length
    layer i:   the same index in a view that starts i * layer_stride later
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from moonpool.kv.layout import KvGroup, KvLayout

if TYPE_CHECKING:
    from _typeshed import WriteableBuffer

Int64Array = npt.NDArray[np.int64]

TORCH_DTYPES: dict[str, torch.dtype] = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float8_e4m3": torch.float8_e4m3fn,
}


def moved_as(dtype: torch.dtype) -> torch.dtype:
    """What torch gathers and scatters values of `dtype` as: it has no such operations for float8."""
    return torch.uint8 if dtype.itemsize == 1 else dtype


class KvPool:
    """The KV of all layers. Owns no memory: the buffer must outlive it."""

    def __init__(self, buffer: WriteableBuffer, layout: KvLayout) -> None:
        """`buffer` is writable and as long as the layout says.

        Raises ValueError if the layout is not one that this engine computes (several groups, planes
        other than k and v, strides that are not whole elements) or the buffer is too small.
        """
        if len(layout.groups) != 1 or layout.groups[0].planes != ("k", "v"):
            raise ValueError("the engine takes one group of layers with planes k and v")
        group = layout.groups[0]
        self.layout = layout
        self.dtype = TORCH_DTYPES[group.dtype]
        self.block_size = layout.block_size
        self.num_kv_heads = group.num_kv_heads
        self.head_dim = group.head_dim
        item = self.dtype.itemsize
        strides = (group.block_stride_bytes, group.layer_stride_bytes, group.plane_stride_bytes)
        if any(stride % item for stride in strides):
            raise ValueError(f"strides {strides} are not multiples of {item} bytes")
        end = _end_bytes(layout, group)
        flat = torch.frombuffer(buffer, dtype=torch.uint8)
        if flat.numel() < end:
            raise ValueError(f"the pool has {flat.numel()} bytes, its layout needs {end}")
        flat = flat[:end].view(moved_as(self.dtype))
        self._block, self._layer, self._plane = (stride // item for stride in strides)
        head_run = self.block_size * self.head_dim
        self._token_width = math.gcd(*self._strides, self.head_dim, flat.numel())
        self._head_width = math.gcd(*self._strides, head_run, flat.numel())
        tokens = flat.view(-1, self._token_width)
        heads = flat.view(-1, self._head_width)
        layers = range(group.num_layers)
        self._token_rows = [tokens[i * self._layer // self._token_width :] for i in layers]
        self._head_rows = [heads[i * self._layer // self._head_width :] for i in layers]
        self._blocks = flat.as_strided(
            (layout.num_blocks, group.num_layers, 2, head_run * self.num_kv_heads),
            (*self._strides, 1),
        )
        # Elements from a block's start to each (plane, head), shape [2, kv_heads].
        planes = np.arange(2, dtype=np.int64)[:, None] * self._plane
        self._head_offsets = planes + np.arange(self.num_kv_heads, dtype=np.int64) * head_run
        # In rows of a token: from block to block, from slot to slot, and to all of one token.
        width = self._token_width
        self._block_rows, self._slot_rows = self._block // width, self.head_dim // width
        heads_of_token = self._head_offsets.reshape(-1, 1) // width
        self._token_offsets = (heads_of_token + np.arange(self._slot_rows)).reshape(-1)

    @property
    def _strides(self) -> tuple[int, int, int]:
        return self._block, self._layer, self._plane

    def token_index(self, block_ids: Int64Array, offsets: Int64Array) -> Tensor:
        """Rows to write for tokens in slots `offsets` of `block_ids`, order [token, plane, head]."""
        first = block_ids * self._block_rows + offsets * self._slot_rows
        return torch.from_numpy((first[:, None] + self._token_offsets).reshape(-1))

    def head_index(self, block_ids: Int64Array) -> Tensor:
        """Rows to read for `block_ids` [rows, blocks], in the order [plane, row, head, block]."""
        start = (block_ids * self._block)[None, :, None, :]
        runs = start + self._head_offsets[:, None, :, None]
        first = runs.reshape(-1, 1) // self._head_width
        num_rows = self.block_size * self.head_dim // self._head_width
        return torch.from_numpy((first + np.arange(num_rows, dtype=np.int64)).reshape(-1))

    def write(self, layer: int, token_index: Tensor, kv: Tensor) -> None:
        """Stores `kv` [tokens, 2, kv_heads, head_dim], of the pool's dtype, at `token_index`."""
        self._token_rows[layer].index_copy_(0, token_index, kv.reshape(-1, self._token_width))

    def clear(self, layer: int, token_index: Tensor) -> None:
        """Zeroes K and V of the tokens at `token_index`."""
        self._token_rows[layer].index_fill_(0, token_index, 0)

    def read(self, layer: int, head_index: Tensor, num_rows: int) -> Tensor:
        """A copy of whole blocks, [2, rows, kv_heads, tokens, head_dim], as the pool's dtype is moved."""
        rows = self._head_rows[layer].index_select(0, head_index)
        return rows.view(2, num_rows, self.num_kv_heads, -1, self.head_dim)

    def read_into(self, layer: int, head_index: Tensor, out: Tensor) -> None:
        """`read` into a contiguous tensor of that shape."""
        torch.index_select(
            self._head_rows[layer], 0, head_index, out=out.view(-1, self._head_width)
        )

    def store(self, layer: int, head_index: Tensor, kv: Tensor) -> None:
        """Writes whole blocks, `kv` [2, rows, kv_heads, tokens, head_dim] in the order of `read`."""
        self._head_rows[layer].index_copy_(0, head_index, kv.reshape(-1, self._head_width))


def _end_bytes(layout: KvLayout, group: KvGroup) -> int:
    """First byte after the last plane of the last block and layer."""
    last_block = (layout.num_blocks - 1) * group.block_stride_bytes
    last_layer = (group.num_layers - 1) * group.layer_stride_bytes
    return last_block + last_layer + group.plane_stride_bytes + layout.plane_bytes(group)
