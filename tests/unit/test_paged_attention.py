"""Paged attention against softmax written out, for mixed batches over scattered blocks."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from moonpool.engine.attention import AttentionBackend, TorchPagedAttention
from moonpool.engine.batch import PageTables
from moonpool.engine.kv_pool import KvPool
from moonpool.engine.native_attention import NativePagedAttention
from moonpool.kv.layout import KvLayout
from moonpool.native import LeafGeometry, RangeError, kernels, status
from moonpool.native.fallback import FallbackKernels

KV_HEADS, GROUP, DIM, SIZE, BLOCKS = 2, 3, 16, 16, 400
FORMS = [pytest.param(FallbackKernels(), id="torch")]
if status().is_compiled:
    FORMS.append(pytest.param(kernels(), id="native"))
forms = pytest.mark.parametrize("form", FORMS)


def make_backend(form, pool: KvPool, memory: bytearray, group: int) -> AttentionBackend:
    """As ModelRunner chooses it."""
    attention = form.paged_attention(
        np.frombuffer(memory, np.uint8),
        LeafGeometry.of_layout(pool.layout),
        group_size=group,
        is_bfloat16=pool.dtype is torch.bfloat16,
    )
    if attention is None:
        return TorchPagedAttention(pool, pool.num_kv_heads * group, torch.float32)
    return NativePagedAttention(attention)


def run(
    form,
    rows: list[tuple[int, int]],
    dtype: str = "float32",
    *,
    group: int = GROUP,
    dim: int = DIM,
    is_last_only: bool = False,
):
    """Rows of (start, tokens), decodes first; returns the backend's and the reference's results."""
    rng = np.random.Generator(np.random.PCG64(7))
    layout = KvLayout.block_major(
        num_blocks=BLOCKS, num_layers=2, num_kv_heads=KV_HEADS, head_dim=dim, dtype=dtype
    )
    memory = bytearray(layout.pool_bytes)
    pool = KvPool(memory, layout)
    free = rng.permutation(BLOCKS)
    queries, owns, expected = [], [], []
    qo, kv_indptr, indices, last = [0], [0], [], []
    for start, length in rows:
        end = start + length
        blocks, free = free[: -(-end // SIZE)], free[-(-end // SIZE) :]
        kv = torch.from_numpy(rng.standard_normal((end, 2, KV_HEADS, dim)).astype(np.float32))
        kv = kv.to(pool.dtype)
        positions = np.arange(end)
        pool.write(1, pool.token_index(blocks[positions // SIZE], positions % SIZE), kv)
        query = torch.from_numpy(
            rng.standard_normal((length, KV_HEADS * group, dim)).astype(np.float32)
        )
        expected.append(reference(query, kv.float(), start))
        queries.append(query)
        owns.append(kv[start:].float())
        qo.append(qo[-1] + length)
        kv_indptr.append(kv_indptr[-1] + len(blocks))
        indices.append(blocks)
        last.append((end - 1) % SIZE + 1)
    attention = make_backend(form, pool, memory, group)
    attention.plan(
        PageTables(
            num_decode_rows=sum(length == 1 for _, length in rows),
            qo_indptr=np.array(qo, np.int32),
            kv_indptr=np.array(kv_indptr, np.int32),
            kv_indices=np.concatenate(indices).astype(np.int32),
            kv_last_page_len=np.array(last, np.int32),
            block_size=SIZE,
        )
    )
    found = attention.run(1, torch.cat(queries), torch.cat(owns), is_last_only=is_last_only)
    wanted = np.array(qo[1:]) - 1 if is_last_only else slice(None)
    return found[wanted], torch.cat(expected)[wanted]


def reference(query: torch.Tensor, kv: torch.Tensor, start: int) -> torch.Tensor:
    out = torch.empty_like(query, dtype=torch.float64)
    for token in range(len(query)):
        for head in range(query.shape[1]):
            keys = kv[: start + token + 1, 0, head // (query.shape[1] // KV_HEADS)].double()
            values = kv[: start + token + 1, 1, head // (query.shape[1] // KV_HEADS)].double()
            weights = (keys @ query[token, head].double() / query.shape[2] ** 0.5).softmax(0)
            out[token, head] = weights @ values
    return out.float().view(len(query), -1)


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
DECODES = [(0, 1), (15, 1), (16, 1), (40, 1), (61, 1), (300, 1)]
CHUNKS = [(0, 2), (0, 16), (5, 11), (16, 20), (290, 33), (0, 95)]
SHAPES = [(1, 16), (2, 48), (3, 64), (4, 80), (5, 128), (8, 256)]


@native_only
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(("group", "dim"), SHAPES)
def test_attention_in_c_is_computed_in_float32(group: int, dim: int, dtype: str) -> None:
    found, expected = run(kernels(), DECODES + CHUNKS, dtype, group=group, dim=dim)
    torch.testing.assert_close(found, expected, atol=2e-6, rtol=1e-5)


@native_only
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(("group", "dim"), SHAPES)
def test_a_token_in_c_is_the_same_bits_in_any_batch_and_chunk(
    group: int, dim: int, dtype: str
) -> None:
    """Alone, with others, in one chunk, in several, with any part of what is before it cached."""
    sequences = Sequences([1, 2, 15, 16, 17, 47, 150], group=group, dim=dim, dtype=dtype)
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


class Sequences:
    """Sequences of random queries, keys and values, each with its blocks in one pool."""

    def __init__(self, lengths: list[int], *, group: int, dim: int, dtype: str) -> None:
        self.lengths = lengths
        layout = KvLayout.block_major(
            num_blocks=BLOCKS, num_layers=2, num_kv_heads=KV_HEADS, head_dim=dim, dtype=dtype
        )
        memory = bytearray(layout.pool_bytes)
        torch.manual_seed(3)
        values = torch.frombuffer(memory, dtype=getattr(torch, dtype))
        values.copy_(torch.randn(len(values)))
        blocks = np.random.default_rng(3).permutation(BLOCKS).astype(np.int32)
        counts = [-(-length // SIZE) for length in lengths]
        self._tables = np.split(blocks, np.cumsum(counts))[: len(lengths)]
        self._queries = [torch.randn(length, KV_HEADS * group, dim) for length in lengths]
        self._attention = make_backend(kernels(), KvPool(memory, layout), memory, group)

    def attend(self, rows: list[tuple[int, int, int]]) -> torch.Tensor:
        """Of (sequence, first token, number of tokens), rows of one token first."""
        ends = np.array([start + count for _, start, count in rows])
        tables = [
            self._tables[row][: -(-end // SIZE)] for (row, *_), end in zip(rows, ends, strict=True)
        ]
        queries = [self._queries[row][start : start + count] for row, start, count in rows]
        self._attention.plan(
            PageTables(
                num_decode_rows=sum(count == 1 for *_, count in rows),
                qo_indptr=np.cumsum([0, *(count for *_, count in rows)]).astype(np.int32),
                kv_indptr=np.cumsum([0, *map(len, tables)]).astype(np.int32),
                kv_indices=np.concatenate(tables),
                kv_last_page_len=((ends - 1) % SIZE + 1).astype(np.int32),
                block_size=SIZE,
            )
        )
        query = torch.cat(queries)
        return self._attention.run(1, query, torch.empty(len(query), 2, KV_HEADS, query.shape[2]))


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
