"""DevicePool: the KV of all blocks and layers in a device's memory.

    [block, layer, plane, kv_head, token, dim]     plane 0 keys, plane 1 values: HND blocks

A layer is a view of it, which FlashInfer takes as a paged cache as it is: it reads strides, and needs
no layer to be contiguous. One block more than the layout has is nobody's: rows that only fill up a
batch of a fixed size write there.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

from moonpool.core.step import Int32Array
from moonpool.engine.kv_pool import TORCH_DTYPES, moved_as
from moonpool.kv.layout import KvLayout


class DevicePool:
    """Owns its memory. Block ids are those of the pool in host memory that it stands beside."""

    def __init__(
        self, layout: KvLayout, device: torch.device, *, memory: Tensor | None = None
    ) -> None:
        """Takes the memory, zeroed: what nobody has written is finite.

        Args:
            memory: uint8[num_bytes] on the device, in place of what torch gives. Of a peer's pool: read only.

        Raises ValueError if the layout is not one that this engine computes.
        """
        shape = _shape(layout)
        (group,) = layout.groups
        self.layout = layout
        self.device = device
        self.dtype = TORCH_DTYPES[group.dtype]
        self.block_size = layout.block_size
        self.num_layers = group.num_layers
        self.num_kv_heads = group.num_kv_heads
        self.head_dim = group.head_dim
        #: The block that is nobody's.
        self.scratch_block = layout.num_blocks
        if memory is None:
            self._blocks = torch.zeros(shape, dtype=moved_as(self.dtype), device=device)
        else:
            self._blocks = memory.view(moved_as(self.dtype)).view(shape)

    @property
    def memory(self) -> Tensor:
        """uint8[num_bytes], all of it."""
        return self._blocks.view(-1).view(torch.uint8)

    @staticmethod
    def num_bytes(layout: KvLayout) -> int:
        """Of a pool of this layout; raises as the constructor does."""
        return math.prod(_shape(layout)) * TORCH_DTYPES[layout.groups[0].dtype].itemsize

    def layer(self, layer: int) -> Tensor:
        """A view [blocks, 2, kv_heads, tokens, head_dim]: a paged cache in FlashInfer's HND order."""
        return self._blocks[:, layer].view(self.dtype)

    def cast(self, kv: Tensor) -> Tensor:
        """`kv` in the pool's dtype; what float8 cannot hold becomes the largest that it can."""
        if self.dtype is torch.float8_e4m3fn:
            limit = torch.finfo(self.dtype).max
            return kv.clamp(-limit, limit).to(self.dtype)
        return kv.to(self.dtype)

    def put(self, layer: int, block_ids: Tensor, offsets: Tensor, kv: Tensor) -> None:
        """Stores tokens: `kv` [n, 2, kv_heads, head_dim] in slots `offsets` of `block_ids`, int[n] both."""
        self._blocks[block_ids, layer, :, :, offsets] = self.cast(kv).view(self._blocks.dtype)

    def gather(self, layer: int, block_ids: Tensor) -> Tensor:
        """A copy [2, n, kv_heads, tokens, head_dim] of `block_ids` int64[n]: what KvPool.read returns."""
        return self._blocks[:, layer].transpose(0, 1).index_select(1, block_ids)

    def scatter(self, layer: int, block_ids: Tensor, kv: Tensor) -> None:
        """Writes what `gather` of these blocks returns from then on."""
        self._blocks[:, layer].index_copy_(0, block_ids, kv.transpose(0, 1))

    def clear_tails(self, zero_tails: Int32Array) -> None:
        """Zeroes slots [first, block_size) of all layers, for each (block, first) of int32[m, 2]."""
        if len(zero_tails) == 0:
            return
        slots = np.arange(self.block_size)
        tails, offsets = np.nonzero(slots[None, :] >= zero_tails[:, 1:])
        blocks = zero_tails[tails, 0].astype(np.int64)
        index = torch.from_numpy(np.stack((blocks, offsets))).to(self.device)
        self._blocks[index[0], :, :, :, index[1]] = 0


def _shape(layout: KvLayout) -> tuple[int, ...]:
    if len(layout.groups) != 1 or layout.groups[0].planes != ("k", "v"):
        raise ValueError("the engine takes one group of layers with planes k and v")
    (group,) = layout.groups
    blocks = (layout.num_blocks + 1, group.num_layers, 2)
    return (*blocks, group.num_kv_heads, layout.block_size, group.head_dim)
