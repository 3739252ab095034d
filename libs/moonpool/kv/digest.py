"""Digests: what tells a reader that its copy of a block is what the block's maker wrote.

    leaf    XXH3-64 over one (block, layer) in canonical order: the planes in the layout's order (k, then
            v), each HND and contiguous, whatever the strides
    record  XXH3-64 over a block's leaves, in layer order, as little-endian 64-bit numbers

Rules
- Leaves are made by the process that computed the block, when it is written; a copy never gets new ones.
- Leaves lie in an array uint64[num_blocks, num_layers] beside the pool, and travel with the block.
- A digest belongs to a copy, not to a key: two right copies may differ (another batch, another kernel).
- A digest finds accidents, not attacks: it is not keyed.

This is the definition. The native library computes the same, faster.
"""

from __future__ import annotations

import enum

import numpy as np
import numpy.typing as npt
import xxhash

from moonpool.kv.layout import KvLayout

ByteArray = npt.NDArray[np.uint8]
DigestArray = npt.NDArray[np.uint64]


class DigestKind(enum.StrEnum):
    """Named in a worker's descriptor: what is compared must be made alike."""

    XXH3_64 = "xxh3-64"


def canonical_bytes(pool: ByteArray, layout: KvLayout, block: int, layer: int) -> bytes:
    """One layer of one block in canonical order.

    Args:
        pool: uint8[layout.pool_bytes].
        layer: Of the model.

    Raises:
        ValueError: block or layer is outside the pool.
    """
    return b"".join(pool[start:end].tobytes() for start, end in layout.leaf_ranges(block, layer))


def leaf_digest(pool: ByteArray, layout: KvLayout, block: int, layer: int) -> int:
    """The digest of one layer of one block; arguments as for `canonical_bytes`."""
    return xxhash.xxh3_64_intdigest(canonical_bytes(pool, layout, block, layer))


def block_leaves(pool: ByteArray, layout: KvLayout, block: int) -> DigestArray:
    """uint64[num_layers]: all leaves of one block."""
    (group,) = layout.groups
    layers = range(group.first_layer, group.first_layer + group.num_layers)
    return np.array([leaf_digest(pool, layout, block, layer) for layer in layers], np.uint64)


def record_digest(leaves: DigestArray) -> int:
    """The digest of a block's store record from its leaves, uint64[num_layers]."""
    return xxhash.xxh3_64_intdigest(leaves.astype("<u8").tobytes())
