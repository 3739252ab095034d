"""Attention over a DevicePool by torch, where FlashInfer is missing: right, not fast.

Keys are gathered from their blocks in each layer. Decode rows share one call, padded to the longest;
a chunk that has something before it pays for a mask of queries x keys.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from moonpool.engine.batch import PageTables
from moonpool.engine.device.pool import DevicePool


@dataclass(frozen=True, slots=True, kw_only=True)
class _Decodes:
    """All rows of one token."""

    #: int64[rows * blocks]; short rows repeat their last block.
    block_ids: Tensor
    num_rows: int
    max_len: int
    #: bool[rows, 1, 1, max_len]: what each row sees.
    mask: Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class _Chunk:
    """Queries [begin, end) of the batch."""

    begin: int
    end: int
    #: int64[blocks]
    block_ids: Tensor
    kv_len: int
    #: bool[queries, kv_len]; None: as many queries as keys.
    mask: Tensor | None


class GatheredAttention:
    """An AttentionBackend. See the module."""

    def __init__(self, pool: DevicePool) -> None:
        self._pool = pool
        self._decodes: _Decodes | None = None
        self._chunks: list[_Chunk] = []

    def plan(self, pages: PageTables) -> None:
        num_decodes = pages.num_decode_rows
        self._decodes = self._plan_decodes(pages) if num_decodes else None
        self._chunks = [self._plan_chunk(pages, row) for row in range(num_decodes, pages.num_rows)]

    def run(self, layer: int, query: Tensor, kv: Tensor, *, is_last_only: bool = False) -> Tensor:
        out = torch.empty(query.shape, dtype=query.dtype, device=query.device)
        if self._decodes is not None:
            rows = slice(0, self._decodes.num_rows)
            out[rows] = self._decode(layer, self._decodes, query[rows])
        for chunk in self._chunks:
            rows = slice(chunk.begin, chunk.end)
            out[rows] = self._prefill(layer, chunk, query[rows])
        return out.flatten(1)

    def _plan_decodes(self, pages: PageTables) -> _Decodes:
        num_rows, device = pages.num_decode_rows, self._pool.device
        lengths = pages.kv_lens[:num_rows]
        max_len = int(lengths.max())
        first = pages.kv_indptr[:num_rows, None]
        last = pages.kv_indptr[1 : num_rows + 1, None] - 1
        index = np.minimum(first + np.arange(-(-max_len // pages.block_size)), last)
        block_ids = pages.kv_indices[index].astype(np.int64).reshape(-1)
        is_seen = np.arange(max_len) < lengths[:, None]
        return _Decodes(
            block_ids=torch.from_numpy(block_ids).to(device),
            num_rows=num_rows,
            max_len=max_len,
            mask=torch.from_numpy(is_seen).to(device)[:, None, None, :],
        )

    def _plan_chunk(self, pages: PageTables, row: int) -> _Chunk:
        device = self._pool.device
        begin, end = int(pages.qo_indptr[row]), int(pages.qo_indptr[row + 1])
        kv_len = int(pages.kv_lens[row])
        blocks = pages.kv_indices[pages.kv_indptr[row] : pages.kv_indptr[row + 1]]
        mask = None
        if kv_len > end - begin:
            ones = torch.ones(end - begin, kv_len, dtype=torch.bool, device=device)
            mask = ones.tril(kv_len - (end - begin))
        return _Chunk(
            begin=begin,
            end=end,
            block_ids=torch.from_numpy(blocks.astype(np.int64)).to(device),
            kv_len=kv_len,
            mask=mask,
        )

    def _decode(self, layer: int, group: _Decodes, query: Tensor) -> Tensor:
        keys, values = self._gather(layer, group.block_ids, group.num_rows, group.max_len, query)
        # The query heads of a KV head are consecutive queries of one head: no key is copied for them.
        shape = (group.num_rows, self._pool.num_kv_heads, -1, self._pool.head_dim)
        attended = functional.scaled_dot_product_attention(
            query.reshape(shape), keys, values, attn_mask=group.mask
        )
        return attended.reshape(query.shape)

    def _prefill(self, layer: int, chunk: _Chunk, query: Tensor) -> Tensor:
        keys, values = self._gather(layer, chunk.block_ids, 1, chunk.kv_len, query)
        group_size = query.shape[1] // self._pool.num_kv_heads
        attended = functional.scaled_dot_product_attention(
            query.transpose(0, 1)[None],
            keys.repeat_interleave(group_size, dim=1),
            values.repeat_interleave(group_size, dim=1),
            attn_mask=chunk.mask,
            is_causal=chunk.mask is None,
        )
        return attended[0].transpose(0, 1)

    def _gather(
        self, layer: int, block_ids: Tensor, num_rows: int, num_tokens: int, query: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Keys and values [rows, kv_heads, num_tokens, head_dim] in the query's dtype."""
        pool = self._pool
        kv = pool.gather(layer, block_ids).view(pool.dtype).to(query.dtype)
        kv = kv.view(2, num_rows, -1, *kv.shape[2:]).transpose(2, 3).flatten(3, 4)
        kv = kv[:, :, :, :num_tokens]
        return kv[0], kv[1]
