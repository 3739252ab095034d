"""The device runner against the CPU engine: the same random weights, the same plans.

Both keep weights in bfloat16 and KV in one dtype; the CPU computes in float32. So KV may differ by
rounding, which grows from layer to layer, and a token where two logits are nearly equal; a table, a position
or a mask that is wrong makes KV differ by about its own size. Each step is given the same input tokens,
whatever was drawn. KV of 8 bits, which the CPU engine does not have, is compared with the device runner on
the CPU. With `--self-check` the device is torch's CPU in both.
"""

from __future__ import annotations

import tempfile
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import numpy as np
import torch
from lab import Lab
from random_engine import NoMark, row

from moonpool.core.step import Runner, StepPlan, StepRow
from moonpool.engine.device.model import (
    DeviceLayer,
    DeviceLinear,
    DeviceModel,
    load_device_model,
)
from moonpool.engine.device.pool import DevicePool
from moonpool.engine.device.runner import DeviceRunner, make_parts
from moonpool.engine.device.streams import streams_of
from moonpool.engine.device.tables import StepUpload
from moonpool.engine.kv_pool import KvPool
from moonpool.engine.runner import load_runner
from moonpool.hub.model_dir import ModelDir, open_model_dir
from moonpool.kv.layout import KvDtype
from moonpool.native import kernels
from support.tiny_llama import TinyLlama, write_tiny_llama

CPU = torch.device("cpu")
NUM_BLOCKS = 96
#: A shape whose kernels the benchmarks use, too: each takes a minute to compile.
NUM_LAYERS, HEAD_DIM = 3, 128
#: Mean difference of a layer's KV, as a share of its mean size.
_MAX_DIFFERENCE = {"bfloat16": 0.06, "float8_e4m3": 0.2}
#: Share of tokens that must be the CPU's; the others are near ties.
_MIN_EQUAL = {"bfloat16": 0.85, "float8_e4m3": 0.6}


class _Pair:
    """The same plans on both, and what came of them."""

    def __init__(
        self, lab: Lab, model_dir: ModelDir, kv_dtype: KvDtype, *, has_graphs: bool
    ) -> None:
        layout = model_dir.config.kv_layout(NUM_BLOCKS, kv_dtype)
        buffers = [bytearray(layout.pool_bytes) for _ in range(2)]
        self._expected, self._found = (KvPool(buffer, layout) for buffer in buffers)
        weights = load_device_model(model_dir, lab.device, dtype=torch.bfloat16)
        sizes = (1, 4, 8) if has_graphs and lab.flashinfer is not None else ()
        self._runner = _device_runner(weights, self._found, lab.device, lab.flashinfer, sizes)
        self._reference: Runner
        if kv_dtype == "bfloat16":
            self._reference = load_runner(
                model_dir,
                buffers[0],
                layout,
                dtype="bfloat16",
                max_num_seqs=16,
                kernels=kernels(),
            )
        else:
            exact = widened(load_device_model(model_dir, CPU, dtype=torch.bfloat16))
            self._reference = _device_runner(exact, self._expected, CPU, None, ())
        self.num_tokens = self.num_equal = 0

    def run(self, *rows: StepRow, leaving: tuple[int, ...] = ()) -> None:
        plan = StepPlan(
            step=1,
            rows=rows,
            leaf_block_ids=np.array(leaving, np.int32),
            zero_tails=np.empty((0, 2), np.int32),
        )
        expected = self._reference.run(plan, NoMark()).tokens
        found = self._runner.run(plan, NoMark()).tokens
        assert len(expected) == len(found), (expected, found)
        self.num_tokens += len(expected)
        self.num_equal += sum(a == b for a, b in zip(expected, found, strict=True))

    def difference(self, layer: int, blocks: list[int]) -> float:
        """Mean difference of these blocks in host memory from the CPU's."""
        ids = np.array(blocks)[:, None]
        expected, found = (
            pool.read(layer, pool.head_index(ids), len(blocks)).view(pool.dtype).float()
            for pool in (self._expected, self._found)
        )
        return float((found - expected).abs().mean() / expected.abs().mean())


def _device_runner(
    model: DeviceModel,
    host: KvPool,
    device: torch.device,
    flashinfer: ModuleType | None,
    graph_batch_sizes: tuple[int, ...],
) -> DeviceRunner:
    pool, upload = DevicePool(host.layout, device), StepUpload(device)
    parts = make_parts(
        model,
        pool,
        upload,
        flashinfer=flashinfer,
        graph_batch_sizes=graph_batch_sizes,
        max_model_len=1_024,
    )
    return DeviceRunner(
        model,
        pool,
        host,
        upload=upload,
        parts=parts,
        streams=streams_of(device),
        max_num_seqs=16,
    )


def widened(model: DeviceModel) -> DeviceModel:
    """The same weights, for arithmetic in float32."""

    def wide(linear: DeviceLinear) -> DeviceLinear:
        return DeviceLinear(weight=linear.weight.float())

    layers = tuple(
        DeviceLayer(
            attention_norm=layer.attention_norm.float(),
            qkv=wide(layer.qkv),
            attention_out=wide(layer.attention_out),
            mlp_norm=layer.mlp_norm.float(),
            gate_up=wide(layer.gate_up),
            down=wide(layer.down),
        )
        for layer in model.layers
    )
    return replace(
        model,
        dtype=torch.float32,
        embedding=model.embedding.float(),
        layers=layers,
        final_norm=model.final_norm.float(),
        lm_head=wide(model.lm_head),
    )


def check(lab: Lab) -> list[str]:
    """Problems, none if all is well; prints a line for each case."""
    problems = []
    with tempfile.TemporaryDirectory() as folder:
        shape = TinyLlama(
            num_layers=NUM_LAYERS,
            hidden_size=256,
            intermediate_size=512,
            num_heads=8,
            head_dim=HEAD_DIM,
        )
        path = write_tiny_llama(Path(folder) / "tiny", shape)
        model_dir = open_model_dir(path, name="tiny", data_dir=Path(folder) / "home")
        for kv_dtype in ("bfloat16", "float8_e4m3"):
            num_tokens = num_equal = 0
            for case in _RUNS:
                has_graphs = "graph" in case
                pair = _Pair(lab, model_dir, kv_dtype, has_graphs=has_graphs)
                blocks = _RUNS[case](pair)
                gap = max(pair.difference(layer, blocks) for layer in range(NUM_LAYERS))
                num_tokens += pair.num_tokens
                num_equal += pair.num_equal
                print(
                    f"{case}, KV {kv_dtype}: KV differs by {gap:.3%}, "
                    f"{pair.num_equal} of {pair.num_tokens} tokens are the CPU's",
                    flush=True,
                )
                if not gap <= _MAX_DIFFERENCE[kv_dtype]:
                    problems.append(f"{case}, {kv_dtype}: KV differs by {gap:.1%}")
            if num_equal < _MIN_EQUAL[kv_dtype] * num_tokens:
                problems.append(f"{kv_dtype}: {num_equal} of {num_tokens} tokens are the CPU's")
    return problems


def _ids(length: int, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(3, 300, length).astype(np.int32)


def _whole(pair: _Pair) -> list[int]:
    """A prompt in one step, its blocks in no order."""
    blocks = np.random.default_rng(1).permutation(NUM_BLOCKS)[:21]
    pair.run(row(0, 0, _ids(333, 1), blocks), leaving=tuple(blocks[:20].tolist()))
    return [int(block) for block in blocks[:20]]


def _chunks(pair: _Pair) -> list[int]:
    """A prompt in chunks that end on block edges."""
    ids, blocks = _ids(333, 2), np.random.default_rng(2).permutation(NUM_BLOCKS)[:21]
    for start, end in ((0, 64), (64, 80), (80, 320), (320, 333)):
        done = tuple(int(block) for block in blocks[start // 16 : end // 16])
        pair.run(row(0, start, ids[start:end], blocks[: -(-end // 16)]), leaving=done)
    return [int(block) for block in blocks[:20]]


def _decode(pair: _Pair) -> list[int]:
    """Several rows of different lengths, token by token, past block edges."""
    lengths = (1, 15, 16, 17, 130)
    tables = np.random.default_rng(3).permutation(NUM_BLOCKS)[: 5 * 12].reshape(5, 12)
    prompts = [_ids(length + 40, 10 + length) for length in lengths]
    full: set[int] = set()
    for slot, length in enumerate(lengths):
        blocks = tables[slot, : -(-length // 16)]
        pair.run(row(slot, 0, prompts[slot][:length], blocks))
    for step in range(20):
        rows, done = [], []
        for slot, length in enumerate(lengths):
            at = length + step
            rows.append(row(slot, at, prompts[slot][at : at + 1], tables[slot, : at // 16 + 1]))
            if (at + 1) % 16 == 0:
                done.append(int(tables[slot, at // 16]))
        full.update(done)
        pair.run(*rows, leaving=tuple(done))
    return sorted(full)


def _mixed(pair: _Pair) -> list[int]:
    """Decodes and chunks of several prompts in one step."""
    tables = np.random.default_rng(4).permutation(NUM_BLOCKS)[: 4 * 20].reshape(4, 20)
    ids = [_ids(320, 20 + slot) for slot in range(4)]
    pair.run(*(row(slot, 0, ids[slot][:48], tables[slot, :3]) for slot in range(4)))
    leaving = [int(block) for block in (*tables[2, 3:20], *tables[3, 3:10])]
    pair.run(
        row(0, 48, ids[0][48:49], tables[0, :4]),
        row(2, 48, ids[2][48:320], tables[2]),
        row(1, 48, ids[1][48:49], tables[1, :4]),
        row(3, 48, ids[3][48:160], tables[3, :10]),
        leaving=tuple(leaving),
    )
    return leaving


_RUNS = {
    "a prompt at once": _whole,
    "a prompt in chunks": _chunks,
    "decodes, kernel by kernel": _decode,
    "decodes, as a graph": _decode,
    "decodes and chunks mixed": _mixed,
}
