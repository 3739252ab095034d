from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest

from moonpool.kv.layout import IncompatibleLayoutError, KvLayout, plan

SIZES: dict[str, Any] = {
    "num_blocks": 8,
    "num_layers": 3,
    "num_kv_heads": 2,
    "head_dim": 4,
    "dtype": "float32",
}
PLANE = 2 * 16 * 4 * 4


def block_major(**changes: Any) -> KvLayout:
    return KvLayout.block_major(**(SIZES | changes))


def layer_major(**changes: Any) -> KvLayout:
    return KvLayout.layer_major(**(SIZES | changes))


def changed(layout: KvLayout, **changes: Any) -> KvLayout:
    (group,) = layout.groups
    return dataclasses.replace(layout, groups=(dataclasses.replace(group, **changes),))


def test_sizes_count_heads_and_both_planes() -> None:
    layout = block_major()
    assert layout.block_bytes == 3 * 2 * PLANE
    assert layout.pool_bytes == 8 * 3 * 2 * PLANE
    assert layout.bytes_per_token == 3 * 2 * 2 * 4 * 4
    assert [layout.num_blocks_for(n) for n in (0, 1, 16, 17)] == [0, 1, 1, 2]


def test_offsets_follow_the_order() -> None:
    assert block_major().plane_offset(5, 2, 1) == ((5 * 3 + 2) * 2 + 1) * PLANE
    assert layer_major().plane_offset(5, 2, 1) == ((2 * 8 + 5) * 2 + 1) * PLANE
    start = layer_major().plane_offset(5, 2, 0)
    assert layer_major().leaf_ranges(5, 2) == (
        (start, start + PLANE),
        (start + PLANE, start + 2 * PLANE),
    )


def test_layers_are_those_of_the_model() -> None:
    layout = changed(block_major(), first_layer=10)
    assert layout.plane_offset(0, 12, 0) == block_major().plane_offset(0, 2, 0)
    spans = plan(layout, layout).copies([1], [1], 11, 13).spans
    assert spans.tolist() == [[8 * PLANE, 8 * PLANE, 4 * PLANE]]
    for layer in (9, 13):
        with pytest.raises(ValueError, match="layer"):
            layout.plane_offset(0, layer, 0)


@pytest.mark.parametrize("place", [(8, 0, 0), (-1, 0, 0), (0, 0, 2), (0, 0, -1)])
def test_an_offset_outside_the_pool_raises(place: tuple[int, int, int]) -> None:
    with pytest.raises(ValueError, match="outside"):
        block_major().plane_offset(*place)


def test_block_major_to_block_major_is_one_run_a_block() -> None:
    copy_plan = plan(block_major(), block_major())
    block = 6 * PLANE
    assert copy_plan.copies([1, 4], [2, 0], 0, 3).spans.tolist() == [
        [block, 2 * block, block],
        [4 * block, 0, block],
    ]
    assert copy_plan.copies([1, 2, 3], [4, 5, 6], 0, 3).spans.tolist() == [
        [block, 4 * block, 3 * block]
    ]
    assert copy_plan.copies([1, 2, 3], [4, 5, 7], 0, 3).spans[:, 2].tolist() == [2 * block, block]
    assert copy_plan.copies([1, 2], [4, 5], 1, 2).spans.tolist() == [
        [block + 2 * PLANE, 4 * block + 2 * PLANE, 2 * PLANE],
        [2 * block + 2 * PLANE, 5 * block + 2 * PLANE, 2 * PLANE],
    ]


def test_layer_major_to_layer_major_joins_consecutive_blocks() -> None:
    spans = plan(layer_major(), layer_major()).copies([1, 2, 3], [4, 5, 6], 0, 3).spans
    assert spans[:, 2].tolist() == [6 * PLANE] * 3


def test_orders_are_converted_layer_by_layer() -> None:
    spans = plan(block_major(), layer_major()).copies([1], [4], 0, 3).spans
    assert spans.tolist() == [
        [(6 + 2 * layer) * PLANE, (layer * 8 + 4) * 2 * PLANE, 2 * PLANE] for layer in range(3)
    ]


def test_a_rank_of_all_heads_reads_from_ranks_of_one_and_back() -> None:
    both = block_major()
    for rank in range(2):
        one = block_major(num_kv_heads=1, first_kv_head=rank, total_kv_heads=2)
        gather, scatter = plan(one, both), plan(both, one)
        assert not gather.is_complete
        assert scatter.is_complete
        head = PLANE // 2
        (first, second) = gather.copies([0], [0], 0, 1).spans.tolist()
        assert first == [0, rank * head, head]
        assert second == [head, PLANE + rank * head, head]
        assert scatter.copies([0], [0], 0, 1).spans.tolist() == [
            [to, start, length] for start, to, length in (first, second)
        ]


def test_nothing_to_copy_is_no_span() -> None:
    copy_plan = plan(block_major(), layer_major())
    for arguments in (([], [], 0, 3), ([1, 2], [1, 2], 1, 1)):
        copies = copy_plan.copies(*arguments)
        assert copies.spans.shape == (0, 3)
        assert copies.last_spans.size == 0


def test_ids_and_layers_outside_the_pools_raise() -> None:
    copy_plan = plan(block_major(), block_major(num_blocks=4))
    assert len(copy_plan.copies(np.array([7], np.int32), [3], 0, 3).spans) == 1
    for from_ids, to_ids in (([8], [0]), ([-1], [0]), ([0], [4]), ([0], [-1])):
        with pytest.raises(ValueError, match="outside"):
            copy_plan.copies(from_ids, to_ids, 0, 3)
    for first, end in ((-1, 1), (0, 4), (2, 1)):
        with pytest.raises(ValueError, match="outside"):
            copy_plan.copies([0], [0], first, end)
    with pytest.raises(ValueError, match="1 source blocks for 2"):
        copy_plan.copies([0], [0, 1], 0, 3)


@pytest.mark.parametrize(
    ("target", "difference"),
    [
        (block_major(block_size=32), "block_size: 16 != 32"),
        (block_major(dtype="bfloat16"), "dtype: float32 != bfloat16"),
        (block_major(head_dim=8), "head_dim: 4 != 8"),
        (block_major(num_layers=4), "num_layers: 3 != 4"),
        (block_major(num_kv_heads=4), "total_kv_heads: 2 != 4"),
        (changed(block_major(), first_layer=1), "first_layer: 0 != 1"),
        (changed(block_major(), planes=("v", "k")), "planes: k,v != v,k"),
        (changed(block_major(), window=128), "window: None != 128"),
    ],
)
def test_what_changes_the_values_is_refused_readably(target: KvLayout, difference: str) -> None:
    with pytest.raises(IncompatibleLayoutError) as caught:
        plan(block_major(), target)
    assert caught.value.differences == (difference,)
    assert difference in caught.value.message
    assert caught.value.code == "incompatible"


def test_all_differences_are_listed() -> None:
    with pytest.raises(IncompatibleLayoutError) as caught:
        plan(block_major(), block_major(head_dim=8, num_layers=4))
    assert caught.value.differences == ("head_dim: 4 != 8", "num_layers: 3 != 4")


def test_ranks_without_a_common_head_are_refused() -> None:
    a = block_major(num_kv_heads=1, first_kv_head=0, total_kv_heads=2)
    b = block_major(num_kv_heads=1, first_kv_head=1, total_kv_heads=2)
    with pytest.raises(IncompatibleLayoutError, match=r"kv_heads: \[0, 1\) != \[1, 2\)"):
        plan(a, b)


@pytest.mark.parametrize(
    ("layout", "problem"),
    [
        (dataclasses.replace(block_major(), groups=()), "groups: 0"),
        (dataclasses.replace(block_major(), num_blocks=0), "num_blocks: 0"),
        (changed(block_major(), planes=()), "planes: 0"),
        (changed(block_major(), dtype="int3"), "dtype: int3"),
        (changed(block_major(), first_kv_head=1), "first_kv_head: 1"),
        (changed(block_major(), first_kv_head=-1), "first_kv_head: -1"),
        (changed(block_major(), layer_stride_bytes=PLANE), "layer_stride_bytes: 512"),
        (changed(block_major(), plane_stride_bytes=-PLANE), "plane_stride_bytes: -512"),
        (changed(block_major(), block_stride_bytes=7 * PLANE), "strides: reach byte"),
        (block_major(num_blocks=1 << 60), "pool_bytes"),
    ],
)
def test_a_layout_that_contradicts_itself_is_refused(layout: KvLayout, problem: str) -> None:
    with pytest.raises(IncompatibleLayoutError, match=f"target {problem}"):
        plan(block_major(), layout)
