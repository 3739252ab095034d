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
    num_heads = pool.num_kv_heads * group
    decode = form.decode_attention(
        np.frombuffer(memory, np.uint8),
        LeafGeometry.of_layout(pool.layout),
        group_size=group,
        is_bfloat16=pool.dtype is torch.bfloat16,
    )
    if decode is None:
        return TorchPagedAttention(pool, num_heads, torch.float32)
    return NativePagedAttention(pool, num_heads, decode)


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


@native_only
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(("group", "dim"), [(1, 16), (2, 48), (3, 64), (4, 80), (5, 128), (8, 256)])
def test_decodes_in_c_are_computed_in_float32(group: int, dim: int, dtype: str) -> None:
    found, expected = run(kernels(), DECODES, dtype, group=group, dim=dim)
    torch.testing.assert_close(found, expected, atol=2e-6, rtol=1e-5)


@native_only
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_decode_in_c_is_the_same_bits_in_any_batch(dtype: str) -> None:
    together = decode_attention(DECODES, dtype)
    for row in range(len(DECODES)):
        assert torch.equal(decode_attention(DECODES, dtype, only=[row])[0], together[row])


def decode_attention(rows, dtype: str, only: list[int] | None = None) -> torch.Tensor:
    """Decode rows over a pool that does not depend on which of them run."""
    layout = KvLayout.block_major(
        num_blocks=BLOCKS, num_layers=2, num_kv_heads=KV_HEADS, head_dim=32, dtype=dtype
    )
    memory = bytearray(layout.pool_bytes)
    torch.manual_seed(3)
    values = torch.frombuffer(memory, dtype=getattr(torch, dtype))
    values.copy_(torch.randn(len(values)))
    lengths = np.array([start + 1 for start, _ in rows])
    num_blocks = -(-lengths // SIZE)
    blocks = np.random.default_rng(3).permutation(BLOCKS)[: num_blocks.sum()].astype(np.int32)
    tables = np.split(blocks, np.cumsum(num_blocks)[:-1])
    query = torch.randn(len(rows), KV_HEADS * GROUP, 32)
    chosen = list(range(len(rows))) if only is None else only
    attention = make_backend(kernels(), KvPool(memory, layout), memory, GROUP)
    indptr = np.concatenate(([0], np.cumsum(num_blocks[chosen])))
    attention.plan(
        PageTables(
            num_decode_rows=len(chosen),
            qo_indptr=np.arange(len(chosen) + 1, dtype=np.int32),
            kv_indptr=indptr.astype(np.int32),
            kv_indices=np.concatenate([tables[row] for row in chosen]),
            kv_last_page_len=((lengths[chosen] - 1) % SIZE + 1).astype(np.int32),
            block_size=SIZE,
        )
    )
    return attention.run(1, query[chosen], torch.empty(len(chosen), 2, KV_HEADS, 32))


@native_only
@pytest.mark.parametrize(
    ("layer", "indptr", "indices", "lengths", "what"),
    [
        (2, [0, 1], [0], [5], "layer"),
        (-1, [0, 1], [0], [5], "layer"),
        (0, [0, 1], [4], [5], "block"),
        (0, [0, 1], [-1], [5], "block"),
        (0, [0, 1], [0], [17], "row"),
        (0, [0, 1], [0], [0], "row"),
        (0, [0, 2], [0], [5], "row"),
        (0, [1, 0], [0], [5], "row"),
    ],
)
def test_nothing_out_of_bounds_is_read(layer, indptr, indices, lengths, what: str) -> None:
    layout = KvLayout.block_major(
        num_blocks=4, num_layers=2, num_kv_heads=1, head_dim=16, dtype="float32"
    )
    attention = kernels().decode_attention(
        np.zeros(layout.pool_bytes, np.uint8),
        LeafGeometry.of_layout(layout),
        group_size=1,
        is_bfloat16=False,
    )
    attention.plan(
        np.array(indptr, np.int32), np.array(indices, np.int32), np.array(lengths, np.int64)
    )
    query, out = np.zeros(16, np.float32), np.full(16, 7.0, np.float32)
    with pytest.raises(RangeError, match=what):
        attention.run(layer, query.ctypes.data, 16, out.ctypes.data)
    assert (out == 7.0).all()
