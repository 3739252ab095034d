"""CopyPlan against plain numpy: fill the target plane by plane, compare every byte of the pool."""

from __future__ import annotations

import dataclasses
from itertools import pairwise

import numpy as np
import numpy.typing as npt
from hypothesis import given, settings
from hypothesis import strategies as st

from moonpool.kv.layout import KvGroup, KvLayout, plan

ByteArray = npt.NDArray[np.uint8]


def strides_in_order(layout: KvLayout, order: tuple[str, ...]) -> KvLayout:
    """The same blocks with the axes `block`, `layer`, `plane` nested in another order."""
    (group,) = layout.groups
    sizes = {"block": layout.num_blocks, "layer": group.num_layers, "plane": len(group.planes)}
    strides, step = {}, layout.plane_bytes(group)
    for axis in reversed(order):
        strides[f"{axis}_stride_bytes"] = step
        step *= sizes[axis]
    return dataclasses.replace(layout, groups=(dataclasses.replace(group, **strides),))


@st.composite
def layout_pairs(draw: st.DrawFn) -> tuple[KvLayout, KvLayout]:
    num_layers = draw(st.integers(1, 4))
    head_dim = draw(st.integers(1, 2))
    block_size = draw(st.integers(1, 2))
    dtype = draw(st.sampled_from(["float32", "bfloat16"]))
    total_heads = draw(st.integers(1, 4))
    shared_head = draw(st.integers(0, total_heads - 1))
    pair = []
    for _ in range(2):
        first = draw(st.integers(0, shared_head))
        end = draw(st.integers(shared_head + 1, total_heads))
        layout = KvLayout.block_major(
            num_blocks=draw(st.integers(1, 6)),
            num_layers=num_layers,
            num_kv_heads=end - first,
            head_dim=head_dim,
            dtype=dtype,
            block_size=block_size,
            first_kv_head=first,
            total_kv_heads=total_heads,
        )
        order = draw(st.permutations(("block", "layer", "plane")))
        pair.append(strides_in_order(layout, tuple(order)))
    return pair[0], pair[1]


def heads_of(pool: ByteArray, layout: KvLayout, block: int, layer: int, plane: int) -> ByteArray:
    """A view [heads, bytes] of one plane."""
    (group,) = layout.groups
    start = (
        block * group.block_stride_bytes
        + layer * group.layer_stride_bytes
        + plane * group.plane_stride_bytes
    )
    return pool[start : start + layout.plane_bytes(group)].reshape(group.num_kv_heads, -1)


def shared_heads(mine: KvGroup, theirs: KvGroup) -> slice:
    first = max(mine.first_kv_head, theirs.first_kv_head)
    end = min(mine.first_kv_head + mine.num_kv_heads, theirs.first_kv_head + theirs.num_kv_heads)
    return slice(first - mine.first_kv_head, end - mine.first_kv_head)


@given(data=st.data(), layouts=layout_pairs())
@settings(max_examples=150)
def test_spans_copy_exactly_the_blocks(
    data: st.DataObject, layouts: tuple[KvLayout, KvLayout]
) -> None:
    source, target = layouts
    (a,), (b,) = source.groups, target.groups
    num_pairs = data.draw(st.integers(0, target.num_blocks))
    to_ids = data.draw(st.permutations(range(target.num_blocks)))[:num_pairs]
    if data.draw(st.booleans()):
        to_ids = sorted(to_ids)
    first_id = data.draw(st.integers(0, source.num_blocks - 1))
    from_ids = [(first_id + i) % source.num_blocks for i in range(num_pairs)]
    first_layer = data.draw(st.integers(0, a.num_layers))
    end_layer = data.draw(st.integers(first_layer, a.num_layers))

    rng = np.random.default_rng(1)
    from_pool = rng.integers(0, 256, source.pool_bytes, np.uint8)
    expected = rng.integers(0, 256, target.pool_bytes, np.uint8)
    to_pool = expected.copy()
    for from_id, to_id in zip(from_ids, to_ids, strict=True):
        for layer in range(first_layer, end_layer):
            for plane in range(2):
                to_view = heads_of(expected, target, to_id, layer, plane)
                from_view = heads_of(from_pool, source, from_id, layer, plane)
                to_view[shared_heads(b, a)] = from_view[shared_heads(a, b)]

    copy_plan = plan(source, target)
    copies = copy_plan.copies(from_ids, to_ids, first_layer, end_layer)
    spans, last_spans = copies.spans, copies.last_spans
    assert spans.dtype == last_spans.dtype == np.int64
    assert last_spans.shape == (num_pairs, end_layer - first_layer)
    for row, (start, to, length) in enumerate(spans.tolist()):
        assert length > 0
        to_pool[to : to + length] = from_pool[start : start + length]
        for pair, offset in np.argwhere(last_spans == row).tolist():
            for plane in range(2):
                place = to_ids[pair], first_layer + offset, plane
                copied = heads_of(to_pool, target, *place)[shared_heads(b, a)]
                wanted = heads_of(expected, target, *place)[shared_heads(b, a)]
                assert np.array_equal(copied, wanted)
    assert np.array_equal(to_pool, expected)
    assert np.all((last_spans >= 0) & (last_spans < len(spans)))
    for (start, to, length), (next_start, next_to, _) in pairwise(spans.tolist()):
        assert (start + length, to + length) != (next_start, next_to), "neighbours are two spans"
    heads = shared_heads(b, a)
    assert copy_plan.is_complete == (heads.stop - heads.start == b.num_kv_heads)
