"""Attention with products of bfloat16: bits, rounding, and where there is none.

Its error beside float64 is bounded in tests/property/test_native_arithmetic.py.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from moonpool import native
from moonpool.kv.layout import KvDtype, KvLayout
from moonpool.native import Kernels, LeafGeometry, PagedAttention, RangeError
from moonpool.native.binding import load_library
from moonpool.native.compiled_attention import CompiledAttention
from moonpool.native.fallback import FallbackKernels
from moonpool.native.loading import LIBRARY_NAME
from support.native_isas import runnable_isas
from support.paged_attention import Sequences, VariantKernels, run, variant_kernels

HAS_PRODUCTS = native.kernels().has_bfloat16_products
needs_products = pytest.mark.skipif(
    not HAS_PRODUCTS, reason="no AVX512-BF16 here, or its compiler did not know it"
)
#: Query heads that share a KV head, some more than a tile has lines; a head's dimensions.
SHAPES = [(1, 16), (2, 48), (3, 64), (4, 80), (5, 128), (8, 256), (30, 64)]
shapes = pytest.mark.parametrize(("group", "dim"), SHAPES)


def rounding() -> VariantKernels:
    return variant_kernels("avx512_bf16", is_rounding=True)


def make_layout(dtype: KvDtype) -> KvLayout:
    return KvLayout.block_major(
        num_blocks=4, num_layers=2, num_kv_heads=1, head_dim=16, dtype=dtype
    )


def make(kernels: Kernels, dtype: KvDtype) -> PagedAttention | None:
    layout = make_layout(dtype)
    return kernels.paged_attention(
        np.zeros(layout.pool_bytes, np.uint8),
        LeafGeometry.of_layout(layout),
        group_size=1,
        is_bfloat16=dtype == "bfloat16",
        is_rounding=True,
    )


@needs_products
@shapes
def test_it_is_near_softmax(group: int, dim: int) -> None:
    """Queries are rounded too here: each score is off by a few hundredths at most."""
    rows = [(0, 1), (15, 1), (16, 1), (61, 1), (300, 1), (0, 16), (5, 11), (290, 33), (240, 270)]
    found, expected = run(rounding(), rows, "bfloat16", group=group, dim=dim)
    torch.testing.assert_close(found, expected, atol=2e-2, rtol=2e-2)


@needs_products
@shapes
def test_a_token_is_the_same_bits_in_any_batch_and_chunk(group: int, dim: int) -> None:
    """Alone, with others, in one chunk, in several, with any part of what is before it cached."""
    lengths = [1, 2, 15, 16, 17, 47, 150, 256, 257, 530]
    sequences = Sequences(rounding(), lengths, group=group, dim=dim, dtype="bfloat16")
    rows = [(row, at, 1) for row, end in enumerate(lengths) for at in range(end)]
    expected = torch.cat([sequences.attend([row]) for row in rows])
    whole = [(row, 0, end) for row, end in enumerate(lengths)]
    assert torch.equal(sequences.attend(whole), expected)
    rng = np.random.default_rng(group)
    first = np.concatenate(([0], np.cumsum(lengths)))
    for _ in range(6):
        rows = []
        for row in rng.permutation(len(lengths)).tolist():
            start, end = np.sort(rng.choice(lengths[row] + 1, 2, replace=False)).tolist()
            rows.append((row, start, end - start))
        rows.sort(key=lambda one: one[2] > 1)
        wanted = torch.cat([expected[first[row] + start :][:count] for row, start, count in rows])
        assert torch.equal(sequences.attend(rows), wanted), rows


@needs_products
def test_the_last_token_of_each_row_alone_gives_the_same() -> None:
    rows = [(5, 1), (300, 1), (0, 17), (248, 16), (7, 2)]
    found, _ = run(rounding(), rows, "bfloat16", is_last_only=True)
    whole, _ = run(rounding(), rows, "bfloat16")
    assert torch.equal(found, whole[np.cumsum([count for _, count in rows]) - 1])


@needs_products
@pytest.mark.parametrize("value", [np.nan, np.inf])
@pytest.mark.parametrize(("group", "dim"), [(1, 16), (3, 64), (4, 80)])
def test_what_is_not_finite_stays_with_those_that_see_it(
    group: int, dim: int, value: float
) -> None:
    sequences = Sequences(rounding(), [300], group=group, dim=dim, dtype="bfloat16")
    expected = sequences.attend([(0, 0, 300)])
    for token in (299, 256, 255, 130, 64, 17):
        sequences.spoil(0, token, value)
        found = sequences.attend([(0, 0, 300)])
        assert torch.equal(found[:token], expected[:token])
        assert not found[token:].isfinite().all(dim=1).any()


@needs_products
@pytest.mark.parametrize("value", [1e20, 1e30, 1e34])
def test_scores_of_any_size_give_weights(value: float) -> None:
    """One token has all of the weight, or none."""
    sequences = Sequences(rounding(), [300], group=3, dim=64, dtype="bfloat16")
    sequences.spoil(0, 130, value)
    assert sequences.attend([(0, 0, 300)]).isfinite().all()


@needs_products
@pytest.mark.parametrize("num_queries", [1, 40])
def test_queries_are_rounded_to_the_nearest(num_queries: int) -> None:
    layout = make_layout("bfloat16")
    pool = torch.randn(layout.pool_bytes // 2).bfloat16().view(torch.uint8).numpy()
    attention = native.kernels().paged_attention(
        pool,
        LeafGeometry.of_layout(layout),
        group_size=1,
        is_bfloat16=True,
        is_rounding=True,
    )
    attention.plan(
        np.array([0, num_queries], np.int32),
        np.array([0, 4], np.int32),
        np.arange(4, dtype=np.int32),
        np.array([50], np.int64),
        num_decode_rows=num_queries == 1,
    )
    query = torch.randn(num_queries, 16)
    results = []
    for asked in (query, query.bfloat16().float()):
        out = torch.empty_like(asked)
        attention.run(0, asked.data_ptr(), 16, out.data_ptr())
        results.append(out)
    assert torch.equal(*results)


@needs_products
@pytest.mark.parametrize(
    ("layer", "indptr", "indices", "length", "what"),
    [
        (2, [0, 1], [0], 5, "layer"),
        (0, [0, 1], [4], 5, "block"),
        (0, [0, 1], [0], 17, "row"),
        (0, [0, 1], [0], 0, "row"),
    ],
)
@pytest.mark.parametrize("num_queries", [1, 2])
def test_nothing_out_of_bounds_is_read(
    num_queries: int, layer, indptr, indices, length, what: str
) -> None:
    attention = make(native.kernels(), "bfloat16")
    assert attention is not None
    attention.plan(
        np.array([0, num_queries], np.int32),
        np.array(indptr, np.int32),
        np.array(indices, np.int32),
        np.array([length], np.int64),
        num_decode_rows=num_queries == 1,
    )
    query, out = np.zeros((2, 16), np.float32), np.full((2, 16), 7.0, np.float32)
    with pytest.raises(RangeError, match=what):
        attention.run(layer, query.ctypes.data, 16, out.ctypes.data)
    assert (out == 7.0).all()


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_there_is_none_where_nothing_multiplies_it(dtype: KvDtype) -> None:
    assert make(FallbackKernels(), dtype) is None
    has_attention = make(native.kernels(), dtype) is not None
    assert has_attention == (HAS_PRODUCTS and dtype == "bfloat16")


@pytest.mark.skipif(not native.status().is_compiled, reason=native.status().message)
def test_a_pool_or_variant_without_such_products_is_refused() -> None:
    library = load_library(Path(native.__file__).with_name(LIBRARY_NAME))
    for dtype, isa in (("float32", None), *(("bfloat16", isa) for isa in runnable_isas()[:3])):
        layout = make_layout(dtype)
        with pytest.raises(ValueError, match="products of bfloat16"):
            CompiledAttention(
                library,
                np.zeros(layout.pool_bytes, np.uint8),
                LeafGeometry.of_layout(layout),
                group_size=1,
                is_bfloat16=dtype == "bfloat16",
                is_rounding=True,
                isa=isa,
            )
