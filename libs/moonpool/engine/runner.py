"""ModelRunner: implements core.step.Runner with torch on this process's CPU.

    plan -> StepBatch (numpy, once) -> attention.plan -> model.forward -> lm_head -> sample -> result

It keeps nothing between steps but the last token of each slot: everything else is in the plan and in
the pool.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from moonpool.core.config import Quantization
from moonpool.core.step import LayerMark, StepPlan, StepResult, StepTiming
from moonpool.engine.attention import AttentionBackend, TorchPagedAttention
from moonpool.engine.batch import Int64Array, build_batch
from moonpool.engine.kv_pool import KvPool
from moonpool.engine.loader import load_model
from moonpool.engine.model import LlamaModel
from moonpool.engine.native_attention import NativePagedAttention
from moonpool.engine.native_sampler import Sampler
from moonpool.engine.threads import kernels_for
from moonpool.hub.model_dir import ModelDir
from moonpool.kv.layout import KvDtype, KvLayout
from moonpool.native import Kernels, LeafGeometry

if TYPE_CHECKING:
    from _typeshed import WriteableBuffer


class ModelRunner:
    """Runs plans over one pool. Not thread-safe; one plan at a time."""

    def __init__(
        self,
        model: LlamaModel,
        buffer: WriteableBuffer,
        layout: KvLayout,
        *,
        max_num_seqs: int,
        kernels: Kernels,
        seconds: Callable[[], float] = time.perf_counter,
    ) -> None:
        """`buffer` is the writable pool; it must outlive the runner and hold `layout`.

        `seconds` is what steps are timed by.
        """
        config = model.config
        group = layout.groups[0]
        shape = (group.num_layers, group.num_kv_heads, group.head_dim)
        expected = (config.num_layers, config.num_kv_heads, config.head_dim)
        if shape != expected:
            raise ValueError(f"layout has (layers, KV heads, head size) {shape}, model {expected}")
        self._model = model
        self._seconds = seconds
        self._pool = KvPool(buffer, layout)
        self._attention = _attention(model, self._pool, buffer, kernels)
        self._sampler = Sampler(kernels)
        #: Last token drawn into each slot.
        self._last_tokens: Int64Array = np.zeros(max_num_seqs, dtype=np.int64)

    def run(self, plan: StepPlan, mark: LayerMark) -> StepResult:
        """Computes the plan; `mark.layer_done` is called once for every layer, in order."""
        if torch.is_inference_mode_enabled():
            return self._run(plan, mark)
        with torch.inference_mode():
            return self._run(plan, mark)

    def _run(self, plan: StepPlan, mark: LayerMark) -> StepResult:
        started = self._seconds()
        batch = build_batch(plan, self._last_tokens, self._pool.block_size)
        self._attention.plan(batch.pages)
        token_index = self._pool.token_index(batch.block_ids, batch.block_offsets)
        sample_tokens = torch.from_numpy(batch.sample_tokens) if batch.samples else None

        planned = self._seconds()
        hidden = self._model.forward(
            token_ids=torch.from_numpy(batch.token_ids),
            positions=torch.from_numpy(batch.positions),
            token_index=token_index,
            zero_index=self._zero_index(plan),
            sample_tokens=sample_tokens,
            pool=self._pool,
            attention=self._attention,
            mark=mark,
        )
        forwarded = self._seconds()
        drawn: list[int | None] = []
        headed = forwarded
        if hidden is not None:
            logits, largest = self._model.lm_head.surveyed(hidden)
            headed = self._seconds()
            drawn = self._sampler.sample(logits, batch.samples, largest)
        sampled = self._seconds()
        # A row that drew nothing ends: what its slot holds is of no account.
        self._last_tokens[batch.sample_slots] = [token or 0 for token in drawn]
        tokens = tuple([() if token is None else (token,) for token in drawn])
        ended = self._seconds()
        return StepResult(
            step=plan.step,
            tokens=tokens,
            timing=StepTiming(
                forward_s=forwarded - planned,
                logits_s=headed - forwarded,
                sample_s=sampled - headed,
                other_s=(planned - started) + (ended - sampled),
            ),
        )

    def _zero_index(self, plan: StepPlan) -> Tensor | None:
        """Pool rows of the unused slots that `plan.zero_tails` names."""
        if len(plan.zero_tails) == 0:
            return None
        size = self._pool.block_size
        blocks = np.repeat(plan.zero_tails[:, 0].astype(np.int64), size)
        offsets = np.tile(np.arange(size, dtype=np.int64), len(plan.zero_tails))
        is_unused = offsets >= np.repeat(plan.zero_tails[:, 1], size)
        return self._pool.token_index(blocks[is_unused], offsets[is_unused])


def _attention(
    model: LlamaModel, pool: KvPool, buffer: WriteableBuffer, kernels: Kernels
) -> AttentionBackend:
    num_heads = model.config.num_heads
    if model.dtype is torch.float32:
        attention = kernels.paged_attention(
            np.frombuffer(memoryview(buffer), np.uint8),
            LeafGeometry.of_layout(pool.layout),
            group_size=num_heads // pool.num_kv_heads,
            is_bfloat16=pool.dtype is torch.bfloat16,
            is_rounding=model.is_rounding and pool.dtype is torch.bfloat16,
        )
        if attention is not None:
            return NativePagedAttention(attention)
    return TorchPagedAttention(pool, num_heads, model.dtype)


def load_runner(
    model_dir: ModelDir,
    buffer: WriteableBuffer,
    layout: KvLayout,
    *,
    dtype: KvDtype,
    compute_dtype: KvDtype | None = None,
    max_num_seqs: int,
    kernels: Kernels,
    quantization: Quantization = "none",
    max_model_len: int | None = None,
    num_threads: int = 1,
    seconds: Callable[[], float] = time.perf_counter,
) -> ModelRunner:
    """Loads the model and binds it to a pool; sets torch's threads for this process.

    `compute_dtype`: see load_model.

    Raises:
        ModelError: the model's files are damaged or do not fit its configuration.
        ValueError: the layout is not this model's, or the buffer is too small.
    """
    torch.set_num_threads(num_threads)
    kernels = kernels_for(kernels, num_threads)
    model = load_model(
        model_dir,
        dtype,
        compute_dtype=compute_dtype,
        quantization=quantization,
        num_positions=max_model_len,
        kernels=kernels,
    )
    return ModelRunner(
        model, buffer, layout, max_num_seqs=max_num_seqs, kernels=kernels, seconds=seconds
    )
