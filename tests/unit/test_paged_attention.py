"""TorchPagedAttention against softmax written out, for mixed batches over scattered blocks."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from moonpool.engine.attention import TorchPagedAttention
from moonpool.engine.batch import PageTables
from moonpool.engine.kv_pool import KvPool
from moonpool.kv.layout import KvLayout

KV_HEADS, GROUP, DIM, SIZE, BLOCKS = 2, 3, 16, 16, 400


def run(rows: list[tuple[int, int]], dtype: str = "float32"):
    """Rows of (start, tokens), decodes first; returns the backend's and the reference's results."""
    rng = np.random.Generator(np.random.PCG64(7))
    layout = KvLayout.block_major(
        num_blocks=BLOCKS, num_layers=2, num_kv_heads=KV_HEADS, head_dim=DIM, dtype=dtype
    )
    pool = KvPool(bytearray(layout.pool_bytes), layout)
    free = rng.permutation(BLOCKS)
    queries, owns, expected = [], [], []
    qo, kv_indptr, indices, last = [0], [0], [], []
    for start, length in rows:
        end = start + length
        blocks, free = free[: -(-end // SIZE)], free[-(-end // SIZE) :]
        kv = torch.from_numpy(rng.standard_normal((end, 2, KV_HEADS, DIM)).astype(np.float32))
        kv = kv.to(pool.dtype)
        positions = np.arange(end)
        pool.write(1, pool.token_index(blocks[positions // SIZE], positions % SIZE), kv)
        query = torch.from_numpy(
            rng.standard_normal((length, KV_HEADS * GROUP, DIM)).astype(np.float32)
        )
        expected.append(reference(query, kv.float(), start))
        queries.append(query)
        owns.append(kv[start:].float())
        qo.append(qo[-1] + length)
        kv_indptr.append(kv_indptr[-1] + len(blocks))
        indices.append(blocks)
        last.append((end - 1) % SIZE + 1)
    attention = TorchPagedAttention(pool, KV_HEADS * GROUP, torch.float32)
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
    return attention.run(1, torch.cat(queries), torch.cat(owns)), torch.cat(expected)


def reference(query: torch.Tensor, kv: torch.Tensor, start: int) -> torch.Tensor:
    out = torch.empty_like(query, dtype=torch.float64)
    for token in range(len(query)):
        for head in range(query.shape[1]):
            keys = kv[: start + token + 1, 0, head // GROUP].double()
            values = kv[: start + token + 1, 1, head // GROUP].double()
            weights = (keys @ query[token, head].double() / DIM**0.5).softmax(0)
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
def test_equals_softmax(rows) -> None:
    found, expected = run(rows)
    torch.testing.assert_close(found, expected, atol=2e-6, rtol=1e-5)


def test_chunks_over_a_bfloat16_pool_are_computed_in_float32() -> None:
    found, expected = run([(33, 20)], dtype="bfloat16")
    torch.testing.assert_close(found, expected, atol=2e-6, rtol=1e-5)


def test_decodes_over_a_bfloat16_pool_are_computed_in_bfloat16() -> None:
    found, expected = run([(40, 1), (60, 1)], dtype="bfloat16")
    torch.testing.assert_close(found, expected, atol=2e-2, rtol=2e-2)
