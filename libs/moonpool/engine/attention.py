"""Attention over the paged pool: the interface, and plain torch for a CPU.

A backend is planned once per step and run once per layer, as FlashInfer's wrappers are. K and V of
the step's own tokens lie in the pool before `run`, so a key is read from one place whether it was
computed in this step, in an earlier one, or by another worker.

The torch backend gathers (copies) the keys it needs and leaves the arithmetic to
torch's CPU flash attention.

- Rows of one token are batched: those of similar length share one call, padded to the longest and
  masked. The query heads that share a KV head are treated as consecutive queries of one head, so
  grouped-query attention costs no copies.
- A chunk attends to its own keys as they come out of the projection, causally, and in a second call
  to the gathered keys before it, without a mask; the two are merged by their sums of exponentials. One
  call with a mask would compute the upper triangle too, and a mask of queries x keys.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from moonpool.engine.batch import Int64Array, PageTables
from moonpool.engine.kv_pool import KvPool


class AttentionBackend(Protocol):
    """Causal attention of a step's queries over paged keys."""

    def plan(self, pages: PageTables) -> None:
        """Prepares for `run` on these tables; they hold for one step."""
        ...

    def run(self, layer: int, query: Tensor, kv: Tensor, *, is_last_only: bool = False) -> Tensor:
        """[tokens, heads * head_dim] for `query` [tokens, heads, head_dim].

        `kv` [tokens, 2, kv_heads, head_dim] are the step's own keys and values as the pool holds
        them, in the query's dtype: a backend may use them instead of reading them back. With
        `is_last_only` a result is wanted for the last token of each row only, and the others are
        undefined.
        """
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class _DecodeGroup:
    """Decode rows that share one call."""

    #: Rows of the batch; None if they are all decode rows in order.
    rows: Tensor | None
    num_rows: int
    head_index: Tensor
    #: Longest row, in tokens.
    max_len: int
    #: [rows, 1, 1, max_len] of 0 and -inf; None if all rows are equally long.
    mask: Tensor | None


@dataclass(frozen=True, slots=True, kw_only=True)
class _Chunk:
    """Queries [begin, end) of the batch; the first has position `start` in its sequence."""

    begin: int
    end: int
    start: int
    #: Blocks of positions [0, start); None for a chunk that starts its sequence.
    prefix_index: Tensor | None


#: Decode rows share a call while padding adds at most this share of keys, or this many tokens.
_PAD_RATIO = 1.25
_PAD_TOKENS = 64


class TorchPagedAttention:
    """See the module."""

    def __init__(self, pool: KvPool, num_heads: int, dtype: torch.dtype) -> None:
        """`dtype` is that of queries and results."""
        self._pool = pool
        self._num_heads = num_heads
        self._group_size = num_heads // pool.num_kv_heads
        self._dtype = dtype
        self._groups: list[_DecodeGroup] = []
        self._chunks: list[_Chunk] = []
        self._num_decode_rows = 0

    def plan(self, pages: PageTables) -> None:
        lengths = pages.kv_lens
        self._num_decode_rows = pages.num_decode_rows
        self._groups = self._plan_decodes(pages, lengths[: pages.num_decode_rows])
        self._chunks = [
            self._plan_chunk(pages, row, int(lengths[row]))
            for row in range(pages.num_decode_rows, pages.num_rows)
        ]

    def run(self, layer: int, query: Tensor, kv: Tensor, *, is_last_only: bool = False) -> Tensor:
        out = query.new_empty(query.shape)
        for group in self._groups:
            if group.rows is None:
                out[: group.num_rows] = self._decode(layer, group, query[: group.num_rows])
            else:
                out[group.rows] = self._decode(layer, group, query[group.rows])
        for chunk in self._chunks:
            asking = slice(chunk.end - 1 if is_last_only else chunk.begin, chunk.end)
            out[asking] = self._prefill(layer, chunk, query[asking], kv[chunk.begin : chunk.end])
        return out.view(len(query), -1)

    # -- decode --

    def _plan_decodes(self, pages: PageTables, lengths: Int64Array) -> list[_DecodeGroup]:
        order = np.argsort(lengths, kind="stable")
        groups: list[_DecodeGroup] = []
        first = 0
        while first < len(order):
            limit = max(lengths[order[first]] * _PAD_RATIO, lengths[order[first]] + _PAD_TOKENS)
            last = int(np.searchsorted(lengths[order], limit, side="right"))
            groups.append(self._plan_group(pages, lengths, np.sort(order[first:last])))
            first = last
        return groups

    def _plan_group(self, pages: PageTables, lengths: Int64Array, rows: Int64Array) -> _DecodeGroup:
        lens = lengths[rows]
        max_len = int(lens.max())
        num_blocks = -(-max_len // pages.block_size)
        first = pages.kv_indptr[rows].astype(np.int64)[:, None]
        last = pages.kv_indptr[rows + 1].astype(np.int64)[:, None] - 1
        # Short rows repeat their last block: padding reads memory that is there, and is masked.
        blocks = pages.kv_indices[np.minimum(first + np.arange(num_blocks), last)]
        mask = None
        if (lens != max_len).any():
            is_visible = np.arange(max_len) < lens[:, None]
            bias = np.where(is_visible, np.float32(0), np.float32(-np.inf))
            mask = torch.from_numpy(bias).to(self._pool.dtype)[:, None, None, :]
        is_all = len(rows) == pages.num_decode_rows
        return _DecodeGroup(
            rows=None if is_all else torch.from_numpy(rows),
            num_rows=len(rows),
            head_index=self._pool.head_index(blocks.astype(np.int64)),
            max_len=max_len,
            mask=mask,
        )

    def _decode(self, layer: int, group: _DecodeGroup, query: Tensor) -> Tensor:
        # In the pool's dtype: reading the keys is the work here, and converting them doubles it.
        keys, values = self._gather(layer, group.head_index, group.num_rows, group.max_len)
        shape = (group.num_rows, self._pool.num_kv_heads, self._group_size, self._pool.head_dim)
        attended = functional.scaled_dot_product_attention(
            query.reshape(shape).to(keys.dtype), keys, values, attn_mask=group.mask
        )
        return attended.reshape(query.shape).to(query.dtype)

    # -- prefill --

    def _plan_chunk(self, pages: PageTables, row: int, kv_len: int) -> _Chunk:
        begin, end = int(pages.qo_indptr[row]), int(pages.qo_indptr[row + 1])
        start = kv_len - (end - begin)
        prefix_index = None
        if start:
            first = int(pages.kv_indptr[row])
            blocks = pages.kv_indices[first : first + -(-start // pages.block_size)]
            prefix_index = self._pool.head_index(blocks.astype(np.int64)[None, :])
        return _Chunk(begin=begin, end=end, start=start, prefix_index=prefix_index)

    def _prefill(self, layer: int, chunk: _Chunk, query: Tensor, kv: Tensor) -> Tensor:
        """Attention to the chunk itself (causal) and to what lies before it (full), merged.

        `query` is of all tokens of the chunk or of its last one, which sees them all.
        """
        heads = query.transpose(0, 1)[None]
        keys, values = kv[:, 0].transpose(0, 1)[None], kv[:, 1].transpose(0, 1)[None]
        is_causal = len(query) == len(kv)
        attended, log_sum = _flash_attention(heads, keys, values, is_causal=is_causal)
        if chunk.prefix_index is not None:
            keys, values = self._gather(layer, chunk.prefix_index, 1, chunk.start)
            # Without a mask, the heads of a group are more queries of one head: larger products, and
            # each key is read once instead of once for each of them.
            grouped = heads.reshape(1, self._pool.num_kv_heads, -1, self._pool.head_dim)
            before, log_sum_before = _flash_attention(
                grouped, keys.to(self._dtype), values.to(self._dtype), is_causal=False
            )
            # Two softmaxes over disjoint keys: each weighs as much as its sum of exponentials.
            share = torch.sigmoid(log_sum_before.reshape(log_sum.shape) - log_sum).to(query.dtype)
            attended = torch.lerp(attended, before.reshape(heads.shape), share[..., None])
        return attended[0].transpose(0, 1)

    def _gather(
        self, layer: int, head_index: Tensor, num_rows: int, num_tokens: int
    ) -> tuple[Tensor, Tensor]:
        """Keys and values [rows, kv_heads, num_tokens, head_dim] in the pool's dtype."""
        kv = self._pool.read(layer, head_index, num_rows)[:, :, :, :num_tokens]
        return kv[0], kv[1]


def _flash_attention(
    query: Tensor, keys: Tensor, values: Tensor, *, is_causal: bool
) -> tuple[Tensor, Tensor]:
    """Result [1, heads, queries, head_dim] and float32 log-sum-exp [1, heads, queries].

    The operation behind scaled_dot_product_attention, which does not hand out the second.
    """
    attended, log_sum = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        query, keys, values, 0.0, is_causal
    )
    return attended, log_sum
