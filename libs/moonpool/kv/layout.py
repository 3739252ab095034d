"""KvLayout: where the bytes of a block lie. Layout is data, and all arithmetic about it is here.

A pool is a number of blocks of `block_size` tokens. Layers fall into groups (one today); a group has
planes ("k", "v"; a latent or scales would be others). Within a plane the order is HND,
`[kv_head, token, dim]`, so that a slice of heads is one run and FlashInfer takes it as it is.

    block-major   [block, layer, plane, kv_head, token, dim]     a block is one run
    layer-major   [layer, block, plane, kv_head, token, dim]     a layer is one run

Both are the same KvLayout with other strides; no other file multiplies shapes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

KvDtype = Literal["float32", "bfloat16"]

_ITEM_SIZE: dict[str, int] = {"float32": 4, "bfloat16": 2}


@dataclass(frozen=True, slots=True, kw_only=True)
class KvGroup:
    """Layers whose KV has one shape and one block table."""

    first_layer: int
    num_layers: int
    #: KV heads that this rank holds, `first_kv_head` the first of them among `total_kv_heads`.
    num_kv_heads: int
    first_kv_head: int
    total_kv_heads: int
    head_dim: int
    dtype: KvDtype
    planes: tuple[str, ...] = ("k", "v")
    #: Sliding window in tokens, or None for full attention.
    window: int | None = None
    #: Byte distances; the plane's inside is contiguous.
    block_stride_bytes: int
    layer_stride_bytes: int
    plane_stride_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class KvLayout:
    """The layout of one rank's pool."""

    block_size: int
    num_blocks: int
    groups: tuple[KvGroup, ...]

    @classmethod
    def block_major(
        cls,
        *,
        num_blocks: int,
        num_layers: int,
        num_kv_heads: int,
        head_dim: int,
        dtype: KvDtype,
        block_size: int = 16,
    ) -> KvLayout:
        """All heads, one group, `[block, layer, plane, head, token, dim]`."""
        plane = num_kv_heads * block_size * head_dim * _ITEM_SIZE[dtype]
        return cls(
            block_size=block_size,
            num_blocks=num_blocks,
            groups=(
                KvGroup(
                    first_layer=0,
                    num_layers=num_layers,
                    num_kv_heads=num_kv_heads,
                    first_kv_head=0,
                    total_kv_heads=num_kv_heads,
                    head_dim=head_dim,
                    dtype=dtype,
                    block_stride_bytes=num_layers * 2 * plane,
                    layer_stride_bytes=2 * plane,
                    plane_stride_bytes=plane,
                ),
            ),
        )

    @classmethod
    def layer_major(
        cls,
        *,
        num_blocks: int,
        num_layers: int,
        num_kv_heads: int,
        head_dim: int,
        dtype: KvDtype,
        block_size: int = 16,
    ) -> KvLayout:
        """All heads, one group, `[layer, block, plane, head, token, dim]`."""
        plane = num_kv_heads * block_size * head_dim * _ITEM_SIZE[dtype]
        return cls(
            block_size=block_size,
            num_blocks=num_blocks,
            groups=(
                KvGroup(
                    first_layer=0,
                    num_layers=num_layers,
                    num_kv_heads=num_kv_heads,
                    first_kv_head=0,
                    total_kv_heads=num_kv_heads,
                    head_dim=head_dim,
                    dtype=dtype,
                    block_stride_bytes=2 * plane,
                    layer_stride_bytes=num_blocks * 2 * plane,
                    plane_stride_bytes=plane,
                ),
            ),
        )

    @property
    def num_layers(self) -> int:
        return sum(group.num_layers for group in self.groups)

    @property
    def block_bytes(self) -> int:
        """Payload of one block, all layers and planes of this rank."""
        return sum(self.layer_block_bytes(group) * group.num_layers for group in self.groups)

    @property
    def pool_bytes(self) -> int:
        return self.num_blocks * self.block_bytes

    @property
    def bytes_per_token(self) -> int:
        return self.block_bytes // self.block_size

    def plane_bytes(self, group: KvGroup) -> int:
        """One plane of one layer of one block: one contiguous run."""
        return group.num_kv_heads * self.block_size * group.head_dim * _ITEM_SIZE[group.dtype]

    def layer_block_bytes(self, group: KvGroup) -> int:
        """One layer of one block: what one leaf digest covers."""
        return self.plane_bytes(group) * len(group.planes)

    def num_blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)
