"""A pool by blocks or by layers: what each costs where KV is read and copied: `python tests/bench/bench_layout.py`.

SmolLM2-135M's shape (30 layers, 9 query and 3 KV heads of 64, bfloat16), one thread, blocks scattered over a
pool of 1 GiB. Both pools hold the same values; the arms take turns.

    decode b x c     attention of a step of b rows around a context of c tokens, all layers
    chunk n after c  attention of a prefill chunk of n tokens behind c cached ones, all layers
    one layer        of a chain copied and verified as a handoff does, layer by layer
    chain            all layers of it, as a fetch of a prefix does
    write            KV of a chunk of n tokens put into its blocks, all layers

Prints the median milliseconds of each, and by layers over by blocks: more than 1 is for blocks.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from moonpool import native
from moonpool.engine.batch import PageTables
from moonpool.engine.kv_pool import KvPool
from moonpool.engine.native_attention import NativePagedAttention
from moonpool.kv.layout import KvLayout, plan
from moonpool.native import LeafGeometry
from moonpool.transport.base import KvRead

LAYERS, KV_HEADS, HEADS, DIM, SIZE = 30, 3, 9, 64, 16
#: What a case does to one of the pools.
Case = Callable[["Pool"], None]


class Pool:
    """One pool of `layout`, and attention over it."""

    def __init__(self, layout: KvLayout) -> None:
        self.layout = layout
        memory = bytearray(layout.pool_bytes)
        self.bytes = np.frombuffer(memory, np.uint8)
        self.kv = KvPool(memory, layout)
        self.geometry = LeafGeometry.of_layout(layout)
        attention = native.kernels().paged_attention(
            self.bytes, self.geometry, group_size=HEADS // KV_HEADS, is_bfloat16=True
        )
        assert attention is not None, "the C library attends"
        self.attention = NativePagedAttention(attention)
        # Small numbers of any kind: attention of NaN would be another thing to measure.
        self.bytes.view(np.uint16)[:] = np.random.default_rng(0).integers(
            0x3C00, 0x3F80, layout.pool_bytes // 2, np.uint16
        )


def blocks_of(num_blocks: int, num_rows: int, context: int) -> list[np.ndarray]:
    """Scattered blocks for each row."""
    per_row = -(-context // SIZE)
    order = np.random.default_rng(1).permutation(num_blocks)[: num_rows * per_row]
    return list(order.astype(np.int32).reshape(num_rows, per_row))


def attend(num_blocks: int, *, rows: int, count: int, end: int) -> Case:
    """`rows` rows of `count` tokens, the last of which sees `end` tokens."""
    tables = blocks_of(num_blocks, rows, end)
    pages = PageTables(
        num_decode_rows=rows if count == 1 else 0,
        qo_indptr=np.arange(rows + 1, dtype=np.int32) * count,
        kv_indptr=np.arange(rows + 1, dtype=np.int32) * len(tables[0]),
        kv_indices=np.concatenate(tables),
        kv_last_page_len=np.full(rows, (end - 1) % SIZE + 1, np.int32),
        block_size=SIZE,
    )
    query = torch.randn(rows * count, HEADS, DIM)
    own = torch.randn(rows * count, 2, KV_HEADS, DIM)

    def run(pool: Pool) -> None:
        pool.attention.plan(pages)
        for layer in range(LAYERS):
            pool.attention.run(layer, query, own)

    return run


def write(num_blocks: int, num_tokens: int) -> Case:
    (table,) = blocks_of(num_blocks, 1, num_tokens)
    positions = np.arange(num_tokens)
    kv = torch.randn(num_tokens, 2, KV_HEADS, DIM).bfloat16()

    def run(pool: Pool) -> None:
        index = pool.kv.token_index(table[positions // SIZE].astype(np.int64), positions % SIZE)
        for layer in range(LAYERS):
            pool.kv.write(layer, index, kv)

    return run


def copy(num_blocks: int, num_tokens: int, *, layers_at_once: int) -> Case:
    """From the pool to another place in it, and checked."""
    sources = np.concatenate(blocks_of(num_blocks, 2, num_tokens)).astype(np.int64)
    sources, targets = np.split(sources, 2)
    kernels = native.kernels()
    digests = np.zeros((num_blocks, LAYERS), np.uint64)

    def run(pool: Pool) -> None:
        copy_plan = plan(pool.layout, pool.layout)
        for first in range(0, LAYERS, layers_at_once):
            layers = (first, first + layers_at_once)
            copies = copy_plan.copies(sources, targets, *layers)
            read = KvRead.of(
                copies.spans,
                blocks=np.repeat(targets, layers_at_once),
                layers=np.tile(np.arange(*layers), len(targets)),
                expected=digests[targets, slice(*layers)].reshape(-1),
                after_span=copies.last_spans.reshape(-1),
            )
            # What was copied is hashed, whether or not it is what was expected.
            kernels.copy_verify(pool.bytes, pool.bytes, read.spans, pool.geometry, read.checks)

    return run


def cases(num_blocks: int) -> dict[str, Case]:
    return {
        "decode 1 x 2000": attend(num_blocks, rows=1, count=1, end=2000),
        "decode 8 x 512": attend(num_blocks, rows=8, count=1, end=512),
        "decode 8 x 2000": attend(num_blocks, rows=8, count=1, end=2000),
        "chunk 512 after 0": attend(num_blocks, rows=1, count=512, end=512),
        "chunk 64 after 6144": attend(num_blocks, rows=1, count=64, end=6208),
        "write 512": write(num_blocks, 512),
        "one layer of 512": copy(num_blocks, 512, layers_at_once=1),
        "chain of 512": copy(num_blocks, 512, layers_at_once=LAYERS),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--blocks", type=int, default=2_900)
    options = parser.parse_args()
    torch.set_num_threads(1)
    shape = {
        "num_blocks": options.blocks,
        "num_layers": LAYERS,
        "num_kv_heads": KV_HEADS,
        "head_dim": DIM,
    }
    pools = {
        "blocks": Pool(KvLayout.block_major(dtype="bfloat16", **shape)),
        "layers": Pool(KvLayout.layer_major(dtype="bfloat16", **shape)),
    }
    found: dict[str, dict[str, float]] = {}
    sys.stdout.write(f"{'':22}{'by blocks':>10}{'by layers':>10}  ms; ratio\n")
    for name, case in cases(options.blocks).items():
        seconds: dict[str, list[float]] = {arm: [] for arm in pools}
        for turn in range(options.rounds + 1):
            for arm, pool in pools.items():
                started = time.perf_counter()
                case(pool)
                if turn:
                    seconds[arm].append(time.perf_counter() - started)
        ratio = statistics.median(
            slow / fast for fast, slow in zip(seconds["blocks"], seconds["layers"], strict=True)
        )
        milliseconds = {arm: statistics.median(values) * 1e3 for arm, values in seconds.items()}
        found[name] = {**milliseconds, "ratio": ratio}
        by_blocks, by_layers = milliseconds["blocks"], milliseconds["layers"]
        sys.stdout.write(f"{name:22}{by_blocks:10.2f}{by_layers:10.2f}  {ratio:.2f}\n")
    load = [round(one, 1) for one in os.getloadavg()]
    sys.stdout.write(
        json.dumps({"load_average": load, "rounds": options.rounds, **found}, indent=2) + "\n"
    )


if __name__ == "__main__":
    with torch.inference_mode():
        main()
