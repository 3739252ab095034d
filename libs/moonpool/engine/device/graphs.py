"""DecodeGraphs: a decode step, from token ids to logits, as one CUDA graph for each of a few batch sizes.

A decode step of a small batch is hundreds of short kernels: asking for them one by one takes longer than
they run. A graph asks for all of them at once. It reads its arrays where it was captured, so each size
has its own tables, and a batch is filled up to the next size with rows that write to the pool's scratch
block and that nobody looks at.

    capture   once, when the engine starts: warm up, then record, the largest size first, since they
              share memory
    run       fill the tables -> plan (FlashInfer writes into them) -> replay -> logits of the real rows

Only FlashInfer's decode can be captured: it plans outside. Attention by torch cannot.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor

from moonpool.core.step import Int32Array
from moonpool.engine.batch import PageTables, StepBatch
from moonpool.engine.device.flashinfer import (
    FlashInferKernels,
    decode_wrapper,
    make_workspace,
    plan_decode,
)
from moonpool.engine.device.model import DeviceModel
from moonpool.engine.device.pool import DevicePool
from moonpool.engine.device.recording import Recording, recorder_of
from moonpool.engine.device.tables import DeviceBatch

_SIZES = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256)


def graph_sizes(max_num_seqs: int) -> tuple[int, ...]:
    """Batch sizes worth a graph, ascending: the last one holds `max_num_seqs` rows, if any does."""
    smaller = [size for size in _SIZES if size < max_num_seqs]
    return (*smaller, min(max_num_seqs, _SIZES[-1]))


def pad_decodes(batch: StepBatch, size: int, scratch_block: int) -> StepBatch:
    """The same step with `size` rows: those that fill it up read and write one scratch block."""
    pages = batch.pages
    num_more = size - pages.num_rows
    assert num_more >= 0, (size, pages.num_rows)
    if num_more == 0:
        return batch

    def padded(values: Int32Array, fill: Int32Array) -> Int32Array:
        return np.concatenate((values, fill.astype(values.dtype)))

    more = np.arange(1, num_more + 1, dtype=np.int32)
    zeros, ones = np.zeros_like(more), np.ones_like(more)
    return StepBatch(
        pages=PageTables(
            num_decode_rows=size,
            qo_indptr=padded(pages.qo_indptr, pages.qo_indptr[-1] + more),
            kv_indptr=padded(pages.kv_indptr, pages.kv_indptr[-1] + more),
            kv_indices=padded(pages.kv_indices, ones * scratch_block),
            kv_last_page_len=padded(pages.kv_last_page_len, ones),
            block_size=pages.block_size,
        ),
        token_ids=np.concatenate((batch.token_ids, zeros)),
        positions=np.concatenate((batch.positions, zeros)),
        block_ids=np.concatenate((batch.block_ids, ones * scratch_block)),
        block_offsets=np.concatenate((batch.block_offsets, zeros)),
        sample_tokens=batch.sample_tokens,
        sample_slots=batch.sample_slots,
        samples=batch.samples,
    )


class _GraphAttention:
    """An AttentionBackend whose decode wrapper was planned elsewhere."""

    def __init__(self, wrapper: Any, pool: DevicePool) -> None:  # Any: FlashInfer has no types
        self._wrapper = wrapper
        self._pool = pool

    def plan(self, pages: PageTables) -> None:
        raise AssertionError("a graph's attention is planned by its owner")

    def run(self, layer: int, query: Tensor, kv: Tensor, *, is_last_only: bool = False) -> Tensor:
        attended: Tensor = self._wrapper.run(query, self._pool.layer(layer))
        return attended.flatten(1)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Graph:
    """One size. Its tensors are where the graph reads and writes."""

    tables: DeviceBatch
    wrapper: Any  # Any: FlashInfer has no types
    #: From the tables to logits [size, vocab].
    recording: Recording


class DecodeGraphs:
    """Graphs of one model over one pool."""

    def __init__(
        self,
        flashinfer: ModuleType,
        model: DeviceModel,
        pool: DevicePool,
        *,
        sizes: Sequence[int],
        max_model_len: int,
    ) -> None:
        """Captures a graph for each of `sizes`, ascending."""
        self._flashinfer = flashinfer
        self._model = model
        self._pool = pool
        self._max_blocks = -(-max_model_len // pool.block_size)
        self._kernels = FlashInferKernels(flashinfer)
        self._workspace = make_workspace(pool.device)
        self._recorder = recorder_of(pool.device)
        captured = {size: self._capture(size) for size in sorted(sizes, reverse=True)}
        self._graphs = dict(sorted(captured.items()))

    def size_for(self, batch: StepBatch) -> int | None:
        """The smallest graph for this step; None: it is no decode step, or too large."""
        pages = batch.pages
        if pages.num_decode_rows < pages.num_rows or len(batch.samples) < pages.num_rows:
            return None
        return next((size for size in self._graphs if size >= pages.num_rows), None)

    def run(self, batch: StepBatch, size: int) -> Tensor:
        """Logits [samples, vocab] in the order of the step's samples; valid until the next step."""
        graph = self._graphs[size]
        padded = pad_decodes(batch, size, self._pool.scratch_block)
        graph.tables.token_ids.copy_(_int32(padded.token_ids), non_blocking=True)
        graph.tables.positions.copy_(_int32(padded.positions), non_blocking=True)
        self._plan(graph.wrapper, padded.pages)
        graph.recording.replay()
        order = torch.from_numpy(batch.sample_tokens).to(self._pool.device)
        return graph.recording.output.index_select(0, order)

    def _plan(self, wrapper: Any, pages: PageTables) -> None:  # Any: FlashInfer has no types
        plan_decode(
            wrapper,
            self._pool,
            torch.from_numpy(pages.kv_indptr),
            torch.from_numpy(pages.kv_indices),
            torch.from_numpy(pages.kv_last_page_len),
            num_heads=self._model.config.num_heads,
            dtype=self._model.dtype,
        )

    def _capture(self, size: int) -> _Graph:
        device = self._pool.device

        def ints(count: int) -> Tensor:
            return torch.zeros(count, dtype=torch.int32, device=device)

        idle = _idle_pages(size, self._pool)
        tables = DeviceBatch(
            pages=idle,
            token_ids=ints(size),
            positions=ints(size),
            row_of_token=torch.arange(size, dtype=torch.int32, device=device),
            kv_indptr=ints(size + 1),
            kv_indices=ints(size * self._max_blocks),
            kv_last_page_len=ints(size),
            sample_tokens=torch.arange(size, dtype=torch.int32, device=device),
        )
        wrapper = decode_wrapper(
            self._flashinfer,
            self._pool,
            num_heads=self._model.config.num_heads,
            workspace=self._workspace,
            graph_tables=tables,
        )
        attention = _GraphAttention(wrapper, self._pool)
        self._plan(wrapper, idle)

        def step() -> Tensor:
            hidden = self._model.forward(
                tables,
                pool=self._pool,
                attention=attention,
                kernels=self._kernels,
                before_layer=_nothing,
                after_layer=_nothing,
            )
            assert hidden is not None, "every row of a decode step is sampled"
            return self._model.lm_head(hidden)

        return _Graph(tables=tables, wrapper=wrapper, recording=self._recorder.record(step))


def _idle_pages(size: int, pool: DevicePool) -> PageTables:
    """Tables of `size` rows that all are in the scratch block."""
    indptr = np.arange(size + 1, dtype=np.int32)
    return PageTables(
        num_decode_rows=size,
        qo_indptr=indptr,
        kv_indptr=indptr,
        kv_indices=np.full(size, pool.scratch_block, dtype=np.int32),
        kv_last_page_len=np.ones(size, dtype=np.int32),
        block_size=pool.block_size,
    )


def _int32(values: Any) -> Tensor:  # Any: an array of integers
    return torch.from_numpy(values.astype(np.int32))


def _nothing(layer: int) -> None:
    return
