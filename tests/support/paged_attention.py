"""Paged attention with made-up sequences: what a backend says, and softmax written out."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch

from moonpool import native
from moonpool.engine.attention import AttentionBackend, TorchPagedAttention
from moonpool.engine.batch import PageTables
from moonpool.engine.kv_pool import KvPool
from moonpool.engine.native_attention import NativePagedAttention
from moonpool.kv.layout import KvLayout
from moonpool.native import LeafGeometry
from moonpool.native.binding import NativeLibrary, load_library
from moonpool.native.compiled_attention import CompiledAttention
from moonpool.native.loading import LIBRARY_NAME

KV_HEADS, GROUP, DIM, SIZE, BLOCKS = 2, 3, 16, 16, 400


class VariantKernels:
    """The paged attention of one variant of a library, in float32 or `is_rounding`."""

    def __init__(self, library: NativeLibrary, isa: str, *, is_rounding: bool = False) -> None:
        self._library = library
        self._how: dict[str, Any] = {"isa": isa, "is_rounding": is_rounding}

    def paged_attention(self, pool: Any, geometry: LeafGeometry, **what: Any) -> CompiledAttention:
        return CompiledAttention(self._library, pool, geometry, **self._how, **what)


def variant_kernels(isa: str, *, is_rounding: bool = False) -> VariantKernels:
    library = load_library(Path(native.__file__).with_name(LIBRARY_NAME))
    return VariantKernels(library, isa, is_rounding=is_rounding)


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
    """In float64, of [tokens, heads, dim] and [start + tokens, 2, kv heads, dim]."""
    num_tokens, num_heads, dim = query.shape
    keys, values = kv.double().repeat_interleave(num_heads // KV_HEADS, dim=2).unbind(1)
    scores = torch.einsum("qhd,khd->hqk", query.double(), keys) / dim**0.5
    is_later = torch.arange(len(kv)) > start + torch.arange(num_tokens)[:, None]
    weights = scores.masked_fill(is_later, -torch.inf).softmax(-1)
    return torch.einsum("hqk,khd->qhd", weights, values).float().reshape(num_tokens, -1)


class Sequences:
    """Sequences of random queries, keys and values, each with its blocks in one pool."""

    def __init__(self, form, lengths: list[int], *, group: int, dim: int, dtype: str) -> None:
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
        self._values = values.view(BLOCKS, 2, 2, KV_HEADS, SIZE, dim)
        self._attention = make_backend(form, KvPool(memory, layout), memory, group)

    def spoil(self, row: int, token: int, value: float) -> None:
        """Let a token's key and value hold something that is not finite."""
        block = self._tables[row][token // SIZE]
        self._values[block, 1, :, :, token % SIZE, -1] = value

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
