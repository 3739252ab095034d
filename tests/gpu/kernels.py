"""G0 to G2: what the machine reaches, and attention and append beside it."""

from __future__ import annotations

import numpy as np
import torch
from lab import Lab
from random_engine import BLOCK, NO_BLOCKS, fill, row

from moonpool.core.step import StepPlan, StepRow
from moonpool.engine.batch import StepBatch, build_batch
from moonpool.engine.device.attention import GatheredAttention
from moonpool.engine.device.flashinfer import (
    FlashInferAttention,
    FlashInferKernels,
    make_workspace,
)
from moonpool.engine.device.kernels import TorchKernels
from moonpool.engine.device.pool import DevicePool
from moonpool.engine.device.tables import StepUpload
from moonpool.kv.layout import KvDtype, KvLayout


def ceilings(lab: Lab) -> None:
    """G0: a copy in the device's memory, and a large product, both of random values."""
    lab.copy_rate = _copy_rate(lab)
    lab.add("G0", "copy, reads and writes counted", lab.copy_rate / 1e9, "GB/s")
    lab.release()
    size = lab.scale.matrix_size
    left, right = torch.randn(2, size, size, device=lab.device, dtype=torch.bfloat16)
    seconds = lab.device_s(lambda: left @ right)
    lab.flop_rate = 2 * size**3 / seconds
    lab.add("G0", f"product of {size} x {size}, bfloat16", lab.flop_rate / 1e12, "TFLOP/s")


def _copy_rate(lab: Lab) -> float:
    count = lab.scale.copy_bytes // 2
    source = torch.empty(count, dtype=torch.bfloat16, device=lab.device).normal_()
    target = torch.empty_like(source)
    seconds = lab.device_s(lambda: target.copy_(source), repeat=3)
    return 2 * source.numel() * source.itemsize / seconds


class Attention:
    """One layer's pool and the attention over it."""

    def __init__(self, lab: Lab, num_blocks: int, kv_dtype: KvDtype = "bfloat16") -> None:
        scale = lab.scale
        self.layout = KvLayout.block_major(
            num_blocks=num_blocks,
            num_layers=1,
            num_kv_heads=scale.num_kv_heads,
            head_dim=scale.head_dim,
            dtype=kv_dtype,
        )
        self.pool = DevicePool(self.layout, lab.device)
        if kv_dtype == "bfloat16":
            fill(self.pool)
        self.upload = StepUpload(lab.device)
        self.kernels = (
            TorchKernels() if lab.flashinfer is None else FlashInferKernels(lab.flashinfer)
        )
        self.backend = (
            GatheredAttention(self.pool)
            if lab.flashinfer is None
            else FlashInferAttention(
                lab.flashinfer,
                self.pool,
                self.upload,
                num_heads=scale.num_heads,
                dtype=torch.bfloat16,
                workspace=make_workspace(lab.device),
            )
        )
        self._heads = (scale.num_heads, scale.head_dim)

    def batch(self, rows: list[StepRow]) -> StepBatch:
        plan = StepPlan(
            step=1,
            rows=tuple(rows),
            leaf_block_ids=NO_BLOCKS,
            zero_tails=np.empty((0, 2), np.int32),
        )
        return build_batch(plan, np.zeros(256, np.int64), BLOCK)

    def query(self, num_tokens: int) -> torch.Tensor:
        return torch.randn(num_tokens, *self._heads, device=self.pool.device, dtype=torch.bfloat16)


@torch.inference_mode()
def decode_attention(lab: Lab) -> None:
    """G1: bytes of keys and values that are read, against the copy."""
    for batch, context in lab.scale.decode_cases:
        per_row = -(-context // BLOCK)
        one = Attention(lab, batch * per_row)
        tables = np.random.default_rng(1).permutation(batch * per_row).reshape(batch, per_row)
        rows = [
            row(slot, context - 1, np.array([1], np.int32), tables[slot]) for slot in range(batch)
        ]
        step = one.batch(rows)
        one.upload.send(step)
        one.backend.plan(step.pages)
        query, kv = one.query(batch), torch.empty(0, device=lab.device)
        seconds = lab.device_s(lambda one=one, q=query, kv=kv: one.backend.run(0, q, kv))
        rate = batch * context * one.layout.bytes_per_token / seconds
        lab.add(
            "G1",
            f"decode attention, {batch} rows of {context:,}",
            rate / 1e9,
            "GB/s",
            share=rate / lab.copy_rate,
            target=".80, aim .90",
        )
        lab.release()


@torch.inference_mode()
def prefill_attention(lab: Lab) -> None:
    """G2: a causal prompt at once, and appending its keys and values."""
    scale, tokens = lab.scale, lab.scale.prefill_tokens
    one = Attention(lab, -(-tokens // BLOCK))
    blocks = np.random.default_rng(1).permutation(one.layout.num_blocks)
    step = one.batch([row(0, 0, np.ones(tokens, np.int32), blocks)])
    sent = one.upload.send(step)
    one.backend.plan(step.pages)
    query, kv = one.query(tokens), torch.empty(0, device=lab.device)
    seconds = lab.device_s(lambda: one.backend.run(0, query, kv))
    flops = 4 * scale.num_heads * scale.head_dim * tokens**2 / 2
    rate = flops / seconds
    lab.add(
        "G2",
        f"prefill attention, {tokens:,} tokens, causal",
        rate / 1e12,
        "TFLOP/s",
        share=rate / lab.flop_rate,
        target=".50, aim .70",
    )
    key = one.query(tokens)[:, : scale.num_kv_heads].contiguous()
    seconds = lab.device_s(lambda: one.kernels.append(one.pool, 0, key, key, sent))
    rate = 2 * tokens * one.layout.bytes_per_token / seconds
    lab.add(
        "G2",
        f"append, {tokens:,} tokens, reads and writes counted",
        rate / 1e9,
        "GB/s",
        share=rate / lab.copy_rate,
    )
