"""Attention in C, straight from the blocks (native/src/attention.c, chunk_attention.c).

A token's result depends on its own query and on the keys before it only: not on the chunk that it comes in,
nor on what of its sequence was cached, nor on the other rows of the batch.
"""

from __future__ import annotations

import torch
from torch import Tensor

from moonpool.engine.batch import PageTables
from moonpool.native import PagedAttention


class NativePagedAttention:
    """An AttentionBackend for queries of float32. See the module."""

    def __init__(self, attention: PagedAttention) -> None:
        """`attention` is bound to the pool's memory."""
        self._attention = attention
        self._num_queries = 0

    def plan(self, pages: PageTables) -> None:
        self._attention.plan(
            pages.qo_indptr,
            pages.kv_indptr,
            pages.kv_indices,
            pages.kv_lens,
            num_decode_rows=pages.num_decode_rows,
        )
        self._num_queries = int(pages.qo_indptr[-1])

    def run(self, layer: int, query: Tensor, kv: Tensor, *, is_last_only: bool = False) -> Tensor:
        assert query.dtype is torch.float32, query.dtype
        assert query.stride()[1:] == (query.shape[2], 1), query.stride()
        if len(query) != self._num_queries:
            raise ValueError(f"{len(query)} queries, not the {self._num_queries} of the plan")
        out = query.new_empty((len(query), query.shape[1] * query.shape[2]))
        self._attention.run(
            layer,
            query.data_ptr(),
            query.stride(0),
            out.data_ptr(),
            is_last_only=is_last_only,
        )
        return out
