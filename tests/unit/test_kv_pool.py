"""KvPool against the layout's own arithmetic, byte by byte, for ordinary and odd strides."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch

from moonpool.engine.kv_pool import KvPool
from moonpool.kv.layout import KvGroup, KvLayout

BLOCKS, LAYERS, HEADS, DIM, SIZE = 5, 3, 2, 8, 4


def block_major() -> KvLayout:
    return KvLayout.block_major(
        num_blocks=BLOCKS,
        num_layers=LAYERS,
        num_kv_heads=HEADS,
        head_dim=DIM,
        dtype="float32",
        block_size=SIZE,
    )


def layer_major() -> KvLayout:
    return KvLayout.layer_major(
        num_blocks=BLOCKS,
        num_layers=LAYERS,
        num_kv_heads=HEADS,
        head_dim=DIM,
        dtype="float32",
        block_size=SIZE,
    )


def padded() -> KvLayout:
    """Gaps after every plane and block that divide nothing."""
    layout = block_major()
    plane = layout.plane_bytes(layout.groups[0]) + 12
    group = dataclasses.replace(
        layout.groups[0],
        plane_stride_bytes=plane,
        layer_stride_bytes=2 * plane + 4,
        block_stride_bytes=LAYERS * (2 * plane + 4) + 20,
    )
    return dataclasses.replace(layout, groups=(group,))


def element(group: KvGroup, block: int, layer: int, plane: int, head: int, token: int) -> int:
    start = (
        block * group.block_stride_bytes
        + layer * group.layer_stride_bytes
        + plane * group.plane_stride_bytes
    )
    return start // 4 + (head * SIZE + token) * DIM


def size_of(layout: KvLayout) -> int:
    return BLOCKS * max(
        layout.groups[0].block_stride_bytes, LAYERS * layout.groups[0].layer_stride_bytes
    )


LAYOUTS = pytest.mark.parametrize("make", [block_major, layer_major, padded])


@LAYOUTS
def test_writes_land_where_the_layout_says_and_nowhere_else(make) -> None:
    layout = make()
    buffer = bytearray(size_of(layout))
    pool = KvPool(buffer, layout)
    blocks, offsets = np.array([4, 0, 2]), np.array([3, 0, 1])
    kv = torch.randn(3, 2, HEADS, DIM)
    pool.write(1, pool.token_index(blocks, offsets), kv)
    expected = np.zeros(len(buffer) // 4, np.float32)
    for token in range(3):
        for plane in range(2):
            for head in range(HEADS):
                at = element(layout.groups[0], blocks[token], 1, plane, head, offsets[token])
                expected[at : at + DIM] = kv[token, plane, head].numpy()
    assert (np.frombuffer(buffer, np.float32) == expected).all()


@LAYOUTS
def test_reads_are_what_the_layout_says(make) -> None:
    layout = make()
    values = np.random.default_rng(1).standard_normal(size_of(layout) // 4).astype(np.float32)
    pool = KvPool(bytearray(values.tobytes()), layout)
    blocks = np.array([[3, 1], [0, 4]])
    read = pool.read(2, pool.head_index(blocks), 2)
    assert read.shape == (2, 2, HEADS, 2 * SIZE, DIM)
    for plane in range(2):
        for row in range(2):
            for head in range(HEADS):
                for token in range(2 * SIZE):
                    block = blocks[row, token // SIZE]
                    at = element(layout.groups[0], block, 2, plane, head, token % SIZE)
                    found = read[plane, row, head, token].numpy()
                    assert (found == values[at : at + DIM]).all()


@LAYOUTS
def test_clear_touches_its_block_only(make) -> None:
    layout = make()
    buffer = bytearray(np.ones(size_of(layout) // 4, np.float32).tobytes())
    pool = KvPool(buffer, layout)
    pool.clear(0, pool.token_index(np.array([2, 2]), np.array([1, 2])))
    assert np.frombuffer(buffer, np.float32).sum() == size_of(layout) // 4 - 2 * 2 * HEADS * DIM
    index = pool.head_index(np.array([[2], [3], [4]]))
    for layer in range(LAYERS):
        found = pool.read(layer, index, 3)
        assert bool((found[:, 0] == 1).all()) == (layer > 0)
        assert bool((found[:, 1:] == 1).all())


def test_refuses_a_small_buffer_and_a_broken_stride() -> None:
    layout = block_major()
    with pytest.raises(ValueError, match="its layout needs"):
        KvPool(bytearray(layout.pool_bytes - 1), layout)
    group = dataclasses.replace(layout.groups[0], plane_stride_bytes=1025)
    with pytest.raises(ValueError, match="not multiples"):
        KvPool(bytearray(10 * layout.pool_bytes), dataclasses.replace(layout, groups=(group,)))


def test_a_block_out_of_range_is_an_error_not_a_stray_write() -> None:
    pool = KvPool(bytearray(block_major().pool_bytes), block_major())
    with pytest.raises(IndexError):
        pool.write(0, pool.token_index(np.array([BLOCKS]), np.array([0])), torch.ones(1, 2, 2, 8))
