"""Attention with decode rows in C (native/src/attention.c) and chunks by torch.

A decode row's result depends on its own query and keys only: neither padding nor a mask enters, and
the other rows of the batch do not either.
"""

from __future__ import annotations

import torch
from torch import Tensor

from moonpool.engine.attention import TorchPagedAttention
from moonpool.engine.batch import PageTables
from moonpool.engine.kv_pool import KvPool
from moonpool.native import DecodeAttention


class NativePagedAttention:
    """An AttentionBackend for queries of float32. See the module."""

    def __init__(self, pool: KvPool, num_heads: int, decode: DecodeAttention) -> None:
        """`decode` is bound to the memory of `pool`."""
        self._chunks = TorchPagedAttention(pool, num_heads, torch.float32)
        self._decode = decode
        self._head_dim = pool.head_dim
        self._num_decode_rows = 0

    def plan(self, pages: PageTables) -> None:
        count = self._num_decode_rows = pages.num_decode_rows
        if count:
            self._decode.plan(pages.kv_indptr[: count + 1], pages.kv_indices, pages.kv_lens[:count])
        self._chunks.plan(pages.without_decode_rows())

    def run(self, layer: int, query: Tensor, kv: Tensor, *, is_last_only: bool = False) -> Tensor:
        out = self._chunks.run(layer, query, kv, is_last_only=is_last_only)
        if self._num_decode_rows:
            assert query.dtype is torch.float32, query.dtype
            assert query.stride()[1:] == (self._head_dim, 1), query.stride()
            self._decode.run(layer, query.data_ptr(), query.stride(0), out.data_ptr())
        return out
