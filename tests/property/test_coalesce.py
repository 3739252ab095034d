"""Coalesced spans copy the same bytes, and no two of them could still be one."""

from __future__ import annotations

import itertools

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from moonpool.transport.nixl import coalesce

#: (gap before it at the source, gap before it at the target, length); mostly neighbours.
steps = st.lists(
    st.tuples(
        st.sampled_from([0, 0, 0, 5]), st.sampled_from([0, 0, 0, 7]), st.sampled_from([0, 3, 16])
    ),
    max_size=30,
)


@given(steps=steps, data=st.data())
def test_coalesced_spans_copy_the_same_bytes(
    steps: list[tuple[int, int, int]], data: st.DataObject
) -> None:
    rows, source, target = [], 0, 0
    for source_gap, target_gap, length in steps:
        source, target = source + source_gap, target + target_gap
        rows.append((source, target, length))
        source, target = source + length, target + length
    order = data.draw(st.permutations(range(len(rows)))) if data.draw(st.booleans()) else None
    spans = np.array([rows[i] for i in order] if order else rows, np.int64).reshape(-1, 3)
    before = spans.copy()
    merged = coalesce(spans)
    assert np.array_equal(spans, before)
    assert _bytes_of(merged) == _bytes_of(spans)
    assert (merged[:, 2] > 0).all()
    for first, second in itertools.pairwise(merged):
        assert tuple(second[:2]) != tuple(first[:2] + first[2])


def _bytes_of(spans: np.ndarray) -> list[tuple[int, int]]:
    return [
        (source + i, target + i) for source, target, length in spans.tolist() for i in range(length)
    ]
