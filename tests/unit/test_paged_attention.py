"""Paged attention against softmax written out, for mixed batches over scattered blocks."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from moonpool.engine.batch import PageTables
from moonpool.engine.native_attention import NativePagedAttention
from moonpool.kv.layout import KvLayout
from moonpool.native import LeafGeometry, RangeError, kernels, status
from moonpool.native.fallback import FallbackKernels
from support.native_isas import runnable_isas
from support.paged_attention import SIZE, Sequences, run, variant_kernels

VARIANTS = [pytest.param(variant_kernels(isa), id=isa) for isa in runnable_isas()]
FORMS = [pytest.param(FallbackKernels(), id="torch"), *VARIANTS]
forms = pytest.mark.parametrize("form", FORMS)


@pytest.mark.parametrize(
    "rows",
    [
        [(0, 1)],
        [(0, 40)],
        [(15, 1), (16, 1), (17, 1)],
        [(3, 1), (900, 1), (30, 1), (850, 1)],  # two groups of similar length
        [(16, 20)],
        [(21, 33)],
        [(5, 1), (70, 1), (0, 17), (48, 16), (7, 2)],
    ],
)
@forms
def test_equals_softmax(form, rows) -> None:
    found, expected = run(form, rows)
    torch.testing.assert_close(found, expected, atol=2e-6, rtol=1e-5)


@forms
def test_the_last_token_of_each_row_alone_gives_the_same(form) -> None:
    found, expected = run(form, [(5, 1), (70, 1), (0, 17), (48, 16), (7, 2)], is_last_only=True)
    torch.testing.assert_close(found, expected, atol=2e-6, rtol=1e-5)


def test_chunks_over_a_bfloat16_pool_are_computed_in_float32() -> None:
    found, expected = run(FallbackKernels(), [(33, 20)], dtype="bfloat16")
    torch.testing.assert_close(found, expected, atol=2e-6, rtol=1e-5)


def test_decodes_over_a_bfloat16_pool_are_computed_in_bfloat16_by_torch() -> None:
    found, expected = run(FallbackKernels(), [(40, 1), (60, 1)], dtype="bfloat16")
    torch.testing.assert_close(found, expected, atol=2e-2, rtol=2e-2)


native_only = pytest.mark.skipif(not status().is_compiled, reason=status().message)
variants = pytest.mark.parametrize("variant", VARIANTS)
DECODES = [(0, 1), (15, 1), (16, 1), (40, 1), (61, 1), (300, 1)]
CHUNKS = [(0, 2), (0, 16), (5, 11), (16, 20), (290, 33), (0, 95)]
SHAPES = [(1, 16), (2, 48), (3, 64), (4, 80), (5, 128), (8, 256)]


@variants
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(("group", "dim"), SHAPES)
def test_attention_in_c_is_computed_in_float32(variant, group: int, dim: int, dtype: str) -> None:
    found, expected = run(variant, DECODES + CHUNKS, dtype, group=group, dim=dim)
    torch.testing.assert_close(found, expected, atol=2e-6, rtol=1e-5)


@variants
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(("group", "dim"), SHAPES)
def test_a_token_in_c_is_the_same_bits_in_any_batch_and_chunk(
    variant, group: int, dim: int, dtype: str
) -> None:
    """Alone, with others, in one chunk, in several, with any part of what is before it cached."""
    sequences = Sequences(variant, [1, 2, 15, 16, 17, 47, 150], group=group, dim=dim, dtype=dtype)
    alone = [[(row, at, 1)] for row, end in enumerate(sequences.lengths) for at in range(end)]
    expected = torch.cat([sequences.attend(rows) for rows in alone])
    whole = [(row, 0, end) for row, end in enumerate(sequences.lengths)]
    assert torch.equal(sequences.attend(whole), expected)
    rng = np.random.default_rng(group)
    first = np.concatenate(([0], np.cumsum(sequences.lengths)))
    for _ in range(6):
        rows = []
        for row in rng.permutation(len(sequences.lengths)).tolist():
            start, end = np.sort(rng.choice(sequences.lengths[row] + 1, 2, replace=False)).tolist()
            rows.append((row, start, end - start))
        rows.sort(key=lambda one: one[2] > 1)
        wanted = torch.cat([expected[first[row] + start :][:count] for row, start, count in rows])
        assert torch.equal(sequences.attend(rows), wanted), rows


@variants
@pytest.mark.parametrize("value", [np.nan, np.inf])
@pytest.mark.parametrize(("group", "dim"), [(1, 16), (3, 64), (4, 80)])
def test_what_is_not_finite_stays_with_those_that_see_it(
    variant, group: int, dim: int, value: float
) -> None:
    sequences = Sequences(variant, [150], group=group, dim=dim, dtype="float32")
    expected = sequences.attend([(0, 0, 150)])
    for token in (149, 130, 64, 17):
        sequences.spoil(0, token, value)
        found = sequences.attend([(0, 0, 150)])
        assert torch.equal(found[:token], expected[:token])
        assert not found[token:].isfinite().all(dim=1).any()


@native_only
def test_queries_that_were_not_planned_are_refused() -> None:
    layout = KvLayout.block_major(
        num_blocks=4, num_layers=1, num_kv_heads=1, head_dim=16, dtype="float32"
    )
    attention = kernels().paged_attention(
        np.zeros(layout.pool_bytes, np.uint8),
        LeafGeometry.of_layout(layout),
        group_size=1,
        is_bfloat16=False,
    )
    backend = NativePagedAttention(attention)
    backend.plan(
        PageTables(
            num_decode_rows=0,
            qo_indptr=np.array([0, 2], np.int32),
            kv_indptr=np.array([0, 1], np.int32),
            kv_indices=np.array([0], np.int32),
            kv_last_page_len=np.array([2], np.int32),
            block_size=SIZE,
        )
    )
    for num_queries in (1, 3):
        query = torch.zeros(num_queries, 1, 16)
        with pytest.raises(ValueError, match="queries, not the 2 of the plan"):
            backend.run(0, query, query)


@native_only
@pytest.mark.parametrize("num_queries", [1, 2])
@pytest.mark.parametrize(
    ("layer", "qo_indptr", "indptr", "indices", "length", "what"),
    [
        (2, None, [0, 1], [0], 5, "layer"),
        (-1, None, [0, 1], [0], 5, "layer"),
        (0, None, [0, 1], [4], 5, "block"),
        (0, None, [0, 1], [-1], 5, "block"),
        (0, None, [0, 1], [0], 17, "row"),
        (0, None, [0, 1], [0], 0, "row"),
        (0, None, [0, 2], [0], 5, "row"),
        (0, None, [1, 0], [0], 5, "row"),
        (0, [0, 6], [0, 1], [0], 5, "row"),
        (0, [1, 1], [0, 1], [0], 5, "row"),
        (0, [-1, 1], [0, 1], [0], 5, "row"),
    ],
)
def test_nothing_out_of_bounds_is_read(
    num_queries: int, layer, qo_indptr, indptr, indices, length, what: str
) -> None:
    layout = KvLayout.block_major(
        num_blocks=4, num_layers=2, num_kv_heads=1, head_dim=16, dtype="float32"
    )
    attention = kernels().paged_attention(
        np.zeros(layout.pool_bytes, np.uint8),
        LeafGeometry.of_layout(layout),
        group_size=1,
        is_bfloat16=False,
    )
    attention.plan(
        np.array(qo_indptr or [0, num_queries], np.int32),
        np.array(indptr, np.int32),
        np.array(indices, np.int32),
        np.array([length], np.int64),
        num_decode_rows=num_queries == 1,
    )
    query, out = np.zeros((2, 16), np.float32), np.full((2, 16), 7.0, np.float32)
    with pytest.raises(RangeError, match=what):
        attention.run(layer, query.ctypes.data, 16, out.ctypes.data)
    assert (out == 7.0).all()
