"""Attention of one prefill chunk: native C beside torch's flash attention: `python tests/bench/bench_attention.py`.

One layer of SmolLM2-135M's shape (9 query and 3 KV heads of 64), one thread, arms in turns. Prints the
median milliseconds of each, and the share of the C arm's arithmetic in what the chunk needs at least.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from pathlib import Path

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from moonpool import native
from moonpool.engine.attention import AttentionBackend, TorchPagedAttention
from moonpool.engine.batch import PageTables
from moonpool.engine.kv_pool import KvPool
from moonpool.engine.native_attention import NativePagedAttention
from moonpool.kv.layout import KvDtype, KvLayout
from moonpool.native import LeafGeometry

KV_HEADS, HEADS, DIM, SIZE = 3, 9, 64, 16


def backends(pool: KvPool, memory: bytearray) -> dict[str, AttentionBackend]:
    attention = native.kernels().paged_attention(
        np.frombuffer(memory, np.uint8),
        LeafGeometry.of_layout(pool.layout),
        group_size=HEADS // KV_HEADS,
        is_bfloat16=pool.dtype is torch.bfloat16,
    )
    arms: dict[str, AttentionBackend] = {"torch": TorchPagedAttention(pool, HEADS, torch.float32)}
    if attention is not None:
        arms["c"] = NativePagedAttention(attention)
    return arms


def measure(start: int, count: int, dtype: KvDtype, rounds: int) -> dict[str, float]:
    end = start + count
    layout = KvLayout.block_major(
        num_blocks=-(-end // SIZE) + 64,
        num_layers=1,
        num_kv_heads=KV_HEADS,
        head_dim=DIM,
        dtype=dtype,
    )
    memory = bytearray(layout.pool_bytes)
    values = torch.frombuffer(memory, dtype=getattr(torch, dtype))
    values.copy_(torch.randn(len(values)))
    pool = KvPool(memory, layout)
    blocks = np.random.default_rng(1).permutation(layout.num_blocks)[: -(-end // SIZE)]
    pages = PageTables(
        num_decode_rows=0,
        qo_indptr=np.array([0, count], np.int32),
        kv_indptr=np.array([0, len(blocks)], np.int32),
        kv_indices=blocks.astype(np.int32),
        kv_last_page_len=np.array([(end - 1) % SIZE + 1], np.int32),
        block_size=SIZE,
    )
    qkv = torch.randn(count, HEADS + 2 * KV_HEADS, DIM)
    own = torch.randn(count, 2, KV_HEADS, DIM)
    arms = backends(pool, memory)
    seconds: dict[str, list[float]] = {name: [] for name in arms}
    for attention in arms.values():
        attention.plan(pages)
    for turn in range(rounds + 1):
        for name, attention in arms.items():
            started = time.thread_time()
            attention.run(0, qkv[:, :HEADS], own)
            if turn:
                seconds[name].append(time.thread_time() - started)
    return {name: statistics.median(values) for name, values in seconds.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    torch.set_num_threads(1)
    sys.stdout.write(f"{'cached':>7} {'tokens':>7} {'pool':>9}  milliseconds, GFLOP/s\n")
    dtypes: tuple[KvDtype, ...] = ("bfloat16", "float32")
    for dtype in dtypes:
        for start, count in ((0, 512), (1536, 512), (0, 2048), (2048, 2048), (6144, 64)):
            found = measure(start, count, dtype, options.rounds)
            pairs = count * start + count * (count + 1) // 2
            arms = "  ".join(
                f"{name} {seconds * 1e3:.1f} ({4 * pairs * HEADS * DIM / seconds / 1e9:.0f})"
                for name, seconds in found.items()
            )
            sys.stdout.write(f"{start:>7} {count:>7} {dtype:>9}  {arms}\n")


if __name__ == "__main__":
    with torch.inference_mode():
        main()
