"""Attention of a prefill chunk and of decodes, C beside torch: `python tests/bench/bench_attention.py`.

SmolLM2-135M's shape (9 query and 3 KV heads of 64), one thread, arms in turns: float32, and over a pool of
bfloat16 products of it too, where the CPU has them. Prints the median milliseconds of a layer, and the rate
of arithmetic of chunks, of reading keys and values of decodes.
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
#: Layers of decodes take turns: one alone would stay in the caches.
LAYERS = 4
CHUNKS = ((0, 512), (1536, 512), (0, 2048), (2048, 2048), (6144, 64))
#: Rows of one token, and tokens before each.
DECODES = ((1, 2047), (8, 511), (8, 2047), (32, 511))


def backends(pool: KvPool, memory: bytearray) -> dict[str, tuple[AttentionBackend, torch.dtype]]:
    """By name, with the dtype of queries."""
    is_bfloat16 = pool.dtype is torch.bfloat16
    arms: dict[str, tuple[AttentionBackend, torch.dtype]] = {}
    for dtype in (torch.float32, torch.bfloat16)[: 1 + is_bfloat16]:
        name = str(dtype).removeprefix("torch.")
        arms[f"torch {name}"] = TorchPagedAttention(pool, HEADS, dtype), dtype
        attention = native.kernels().paged_attention(
            np.frombuffer(memory, np.uint8),
            LeafGeometry.of_layout(pool.layout),
            group_size=HEADS // KV_HEADS,
            is_bfloat16=is_bfloat16,
            is_rounding=dtype is torch.bfloat16,
        )
        if attention is not None:
            arms[f"c {name}"] = NativePagedAttention(attention), torch.float32
    return arms


def measure(num_rows: int, start: int, count: int, dtype: KvDtype, rounds: int) -> dict[str, float]:
    """Seconds of a layer, by arm, for rows of `count` tokens behind `start`."""
    end = start + count
    num_blocks = -(-end // SIZE)
    layout = KvLayout.block_major(
        num_blocks=num_rows * num_blocks + 64,
        num_layers=LAYERS,
        num_kv_heads=KV_HEADS,
        head_dim=DIM,
        dtype=dtype,
    )
    memory = bytearray(layout.pool_bytes)
    values = torch.frombuffer(memory, dtype=getattr(torch, dtype))
    values.copy_(torch.randn(len(values)))
    pool = KvPool(memory, layout)
    blocks = np.random.default_rng(1).permutation(layout.num_blocks)[: num_rows * num_blocks]
    pages = PageTables(
        num_decode_rows=num_rows if count == 1 else 0,
        qo_indptr=np.arange(num_rows + 1, dtype=np.int32) * count,
        kv_indptr=np.arange(num_rows + 1, dtype=np.int32) * num_blocks,
        kv_indices=blocks.astype(np.int32),
        kv_last_page_len=np.full(num_rows, (end - 1) % SIZE + 1, np.int32),
        block_size=SIZE,
    )
    qkv = torch.randn(num_rows * count, HEADS + 2 * KV_HEADS, DIM)
    own = torch.randn(num_rows * count, 2, KV_HEADS, DIM)
    arms = backends(pool, memory)
    seconds: dict[str, list[float]] = {name: [] for name in arms}
    for attention, _ in arms.values():
        attention.plan(pages)
    for turn in range(rounds + 1):
        for name, (attention, query_dtype) in arms.items():
            query, kv = qkv[:, :HEADS].to(query_dtype), own.to(query_dtype)
            started = time.thread_time()
            for layer in range(LAYERS):
                attention.run(layer, query, kv)
            if turn:
                seconds[name].append((time.thread_time() - started) / LAYERS)
    return {name: statistics.median(values) for name, values in seconds.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    torch.set_num_threads(1)
    dtypes: tuple[KvDtype, ...] = ("bfloat16", "float32")
    sys.stdout.write("pool, rows x tokens behind: milliseconds (GFLOP/s)\n")
    for dtype in dtypes:
        for start, count in CHUNKS:
            found = measure(1, start, count, dtype, options.rounds)
            work = 4 * HEADS * DIM * (count * start + count * (count + 1) // 2)
            show(f"{dtype}, 1 x {count} behind {start}", found, work)
    sys.stdout.write("pool, rows x tokens behind: milliseconds (GB/s)\n")
    for dtype in dtypes:
        for num_rows, start in DECODES:
            found = measure(num_rows, start, 1, dtype, 3 * options.rounds)
            work = num_rows * (start + 1) * 2 * KV_HEADS * DIM * (2 if dtype == "bfloat16" else 4)
            show(f"{dtype}, {num_rows} x 1 behind {start}", found, work)


def show(what: str, seconds_by_arm: dict[str, float], work: int) -> None:
    arms = "  ".join(
        f"{name} {seconds * 1e3:.2f} ({work / seconds / 1e9:.0f})"
        for name, seconds in seconds_by_arm.items()
    )
    sys.stdout.write(f"{what}: {arms}\n")


if __name__ == "__main__":
    with torch.inference_mode():
        main()
