from __future__ import annotations

import numpy as np
import pytest
import xxhash

from moonpool.kv.digest import block_leaves, canonical_bytes, leaf_digest, record_digest
from moonpool.kv.layout import KvLayout, plan

SIZES = {"num_blocks": 4, "num_layers": 3, "num_kv_heads": 2, "head_dim": 4}


def make_pool(layout: KvLayout) -> np.ndarray[tuple[int], np.dtype[np.uint8]]:
    return np.random.default_rng(7).integers(0, 256, layout.pool_bytes, np.uint8)


def test_a_leaf_covers_k_then_v() -> None:
    layout = KvLayout.layer_major(**SIZES, dtype="bfloat16")
    pool = make_pool(layout)
    plane = 2 * 16 * 4 * 2
    by_place = pool.reshape(3, 4, 2, plane)
    k, v = by_place[1, 2]
    assert canonical_bytes(pool, layout, 2, 1) == k.tobytes() + v.tobytes()
    assert leaf_digest(pool, layout, 2, 1) == xxhash.xxh3_64_intdigest(k.tobytes() + v.tobytes())


def test_a_digest_does_not_depend_on_strides() -> None:
    a = KvLayout.block_major(**SIZES, dtype="float32")
    b = KvLayout.layer_major(**SIZES, dtype="float32")
    from_pool, to_pool = make_pool(a), np.zeros(b.pool_bytes, np.uint8)
    for start, to, length in plan(a, b).copies([3], [1], 0, 3).spans.tolist():
        to_pool[to : to + length] = from_pool[start : start + length]
    assert block_leaves(from_pool, a, 3).tolist() == block_leaves(to_pool, b, 1).tolist()
    to_pool[b.plane_offset(1, 2, 1)] ^= 1
    assert (block_leaves(from_pool, a, 3) != block_leaves(to_pool, b, 1)).tolist() == [
        *(False, False, True)
    ]


def test_a_record_is_digested_over_its_leaves_in_order() -> None:
    leaves = np.array([1, 2**64 - 1, 3], np.uint64)
    raw = b"".join(int(leaf).to_bytes(8, "little") for leaf in leaves)
    assert record_digest(leaves) == xxhash.xxh3_64_intdigest(raw)
    assert record_digest(leaves[::-1]) != record_digest(leaves)


def test_the_digest_is_pinned() -> None:
    layout = KvLayout.block_major(**SIZES, dtype="float32")
    pool = (np.arange(layout.pool_bytes) % 251).astype(np.uint8)
    assert f"{leaf_digest(pool, layout, 1, 2):016x}" == "72b9bcd857df1379"
    assert f"{record_digest(block_leaves(pool, layout, 1)):016x}" == "5f4d2c278ddf8d96"


def test_a_block_outside_the_pool_raises() -> None:
    layout = KvLayout.block_major(**SIZES, dtype="float32")
    with pytest.raises(ValueError, match="outside"):
        leaf_digest(make_pool(layout), layout, 4, 0)
