"""DeviceRunner on torch's CPU, by torch's kernels and by FlashInfer's stand-in, against ModelRunner."""

from __future__ import annotations

import importlib
import itertools
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from moonpool.core.step import StepPlan, StepRow
from moonpool.engine.device.held import HeldBlocks
from moonpool.engine.device.runner import load_device_runner, warm_up
from moonpool.errors import ConfigError
from moonpool.hub.model_dir import ModelDir
from moonpool.inference.sampling import SamplingParams
from moonpool.kv.layout import KvLayout
from support.device import DeviceEngine
from support.engine import NoMark, generate, make_core, make_requests, make_runner, open_tiny
from support.flashinfer_stand_in import make_flashinfer
from support.steps import make_row
from support.tiny_llama import LLAMA3_ROPE, TinyLlama, write_tiny_llama

PARTS = {
    "torch": {},
    "flashinfer": {"flashinfer": make_flashinfer()},
    "graphs": {"flashinfer": make_flashinfer(), "graph_batch_sizes": (1, 3, 8)},
}
parts = pytest.mark.parametrize("parts", PARTS)


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> ModelDir:
    path: Path = tmp_path_factory.mktemp("device") / "tiny"
    model = TinyLlama(num_heads=8, num_kv_heads=2, rope_scaling=LLAMA3_ROPE, has_bias=True)
    return open_tiny(write_tiny_llama(path, model))


def make_plan(*rows: StepRow, leaves=(), zero_tails=(), arrived=()) -> StepPlan:
    return StepPlan(
        step=1,
        rows=rows,
        leaf_block_ids=np.array(leaves, np.int32),
        zero_tails=np.array(zero_tails, np.int32).reshape(-1, 2),
        arrived_block_ids=np.array(arrived, np.int32),
    )


def prompts() -> list[list[int]]:
    rng = np.random.default_rng(4)
    return [rng.integers(3, 300, length).tolist() for length in (1, 5, 16, 17, 40, 75)]


@parts
def test_greedy_tokens_are_those_of_the_cpu_engine(model_dir: ModelDir, parts: str) -> None:
    """Prefill whole and in chunks, decode, mixed batches, and prefixes that are found again."""
    sampling = SamplingParams(temperature=0.0, max_tokens=9, ignore_eos=True)
    requests = make_requests([*prompts(), prompts()[5]], sampling)
    limits = {"max_num_batched_tokens": 32, "max_num_seqs": 8}
    expected = generate(make_core(64, **limits), make_runner(model_dir, num_blocks=64), requests)
    engine = DeviceEngine(model_dir, **PARTS[parts])
    found = generate(make_core(64, **limits), engine.runner, requests)
    assert found == expected


@parts
def test_drawn_tokens_are_those_of_the_cpu_engine(model_dir: ModelDir, parts: str) -> None:
    sampling = SamplingParams(temperature=0.9, top_k=40, top_p=0.9, seed=11, max_tokens=8)
    requests = make_requests(prompts(), sampling)
    expected = generate(make_core(64), make_runner(model_dir, num_blocks=64), requests)
    engine = DeviceEngine(model_dir, **PARTS[parts])
    assert generate(make_core(64), engine.runner, requests) == expected


@parts
@pytest.mark.parametrize("order", ["block_major", "layer_major"])
def test_final_blocks_lie_in_host_memory_when_their_layer_is_marked(
    model_dir: ModelDir, parts: str, order: str
) -> None:
    config = model_dir.config
    layout = getattr(KvLayout, order)(
        num_blocks=32, num_layers=config.num_layers, num_kv_heads=2, head_dim=16, dtype="float32"
    )
    buffer = bytearray(layout.pool_bytes)
    reference = make_runner(model_dir, layout=layout, buffer=buffer)
    engine = DeviceEngine(model_dir, layout=layout, **PARTS[parts])
    ids = np.random.default_rng(5).integers(3, 300, 40).tolist()
    index = engine.host.head_index(np.array([[7], [3], [9]]))
    seen: list[tuple[int, list[bool]]] = []

    class Mark:
        def layer_done(self, layer: int) -> None:
            blocks = [engine.host.read(i, index, 3) for i in range(config.num_layers)]
            seen.append((layer, [bool(block.abs().sum() > 0) for block in blocks]))

    plan = make_plan(
        make_row(ids, [7, 3, 9]), make_row([5], [4], slot=1), leaves=[7, 3, 9], zero_tails=[(9, 8)]
    )
    reference.run(plan, NoMark())
    engine.buffer[:] = bytes(len(engine.buffer))
    result = engine.runner.run(plan, Mark())
    assert len(result.tokens) == 2
    assert [layer for layer, _ in seen] == [0, 1, 2]
    assert all(written[layer] for layer, written in seen)
    expected = np.frombuffer(buffer, np.float32).copy()
    found = np.frombuffer(engine.buffer, np.float32)
    # What is not final stays on the device.
    geometry = [layout.leaf_ranges(4, layer) for layer in range(config.num_layers)]
    for start, end in itertools.chain.from_iterable(geometry):
        assert not found[start // 4 : end // 4].any()
        expected[start // 4 : end // 4] = 0.0
    np.testing.assert_allclose(found, expected, atol=2e-5, rtol=1e-4)


@parts
def test_blocks_that_arrive_are_used(model_dir: ModelDir, parts: str) -> None:
    """What one engine left in host memory, read into other blocks of another, goes on as if here."""
    ids = np.random.default_rng(6).integers(3, 300, 40).tolist()
    source = DeviceEngine(model_dir)
    first = source.runner.run(
        make_plan(make_row(ids, [1, 2, 3]), leaves=[1, 2, 3], zero_tails=[(3, 8)]), NoMark()
    ).tokens[0]
    expected = source.runner.run(make_plan(make_row(list(first), [1, 2, 3], start=40)), NoMark())

    engine = DeviceEngine(model_dir, **PARTS[parts])
    # Something else was in these blocks before.
    engine.runner.run(make_plan(make_row(ids[::-1], [8, 5, 6], sample=None)), NoMark())
    for theirs, ours in ((1, 8), (2, 5), (3, 6)):
        for layer in range(3):
            kv = source.host.read(layer, source.host.head_index(np.array([[theirs]])), 1)
            engine.host.store(layer, engine.host.head_index(np.array([[ours]])), kv)
    row = make_row(list(first), [8, 5, 6], start=40)
    found = engine.runner.run(make_plan(row, arrived=[8, 5, 6]), NoMark())
    assert found.tokens == expected.tokens


@parts
def test_blocks_that_are_on_the_device_do_not_come_in_until_something_else_wrote_them(
    model_dir: ModelDir, parts: str
) -> None:
    leaves = np.full((64, 3), 7, np.uint64)
    held = HeldBlocks(leaves)
    engine = DeviceEngine(model_dir, held=held, **PARTS[parts])
    blocks = np.array([5, 6])
    held.note(blocks, 0, leaves[blocks], np.ones((2, 3), np.bool_))
    for layer in range(3):
        engine.pool.layer(layer)[5:7] = 0.5
        engine.host.store(
            layer, engine.host.head_index(blocks[:, None]), torch.ones(2, 2, 2, 16, 16)
        )

    def values() -> list[float]:
        return [float(engine.pool.layer(1)[block].mean()) for block in (5, 6)]

    engine.runner.run(make_plan(make_row([9], [3]), arrived=[5, 6]), NoMark())
    assert values() == [0.5, 0.5]
    engine.runner.run(make_plan(make_row([9], [5])), NoMark())
    engine.runner.run(make_plan(make_row([9], [3]), arrived=[5, 6]), NoMark())
    assert values() == [1.0, 0.5]
    leaves[6] = 8
    engine.runner.run(make_plan(make_row([9], [3]), arrived=[5, 6]), NoMark())
    assert values() == [1.0, 1.0]
    # What it held before that is there no more.
    leaves[6] = 7
    for layer in range(3):
        head = engine.host.head_index(np.array([[6]]))
        engine.host.store(layer, head, torch.zeros(2, 1, 2, 16, 16))
    engine.runner.run(make_plan(make_row([9], [3]), arrived=[6]), NoMark())
    assert values() == [1.0, 0.0]


@parts
def test_a_row_that_is_not_finite_fails_alone(model_dir: ModelDir, parts: str) -> None:
    engine = DeviceEngine(model_dir, **PARTS[parts])
    good = engine.runner.run(make_plan(make_row([5], [1])), NoMark()).tokens[0]
    engine.runner.run(make_plan(make_row(list(range(4, 20)), [2], sample=None)), NoMark())
    engine.pool.layer(0)[2] = float("nan")
    result = engine.runner.run(
        make_plan(make_row([5], [1]), make_row([7], [2, 3], slot=1, start=16)), NoMark()
    )
    assert result.tokens == (good, ())


@parts
def test_tails_are_zero(model_dir: ModelDir, parts: str) -> None:
    engine = DeviceEngine(model_dir, **PARTS[parts])
    for layer in range(3):
        engine.pool.layer(layer).fill_(1.0)
    plan = make_plan(make_row(list(range(9, 27)), [6, 7]), zero_tails=[(7, 2)], leaves=[6, 7])
    engine.runner.run(plan, NoMark())
    for layer in range(3):
        cache = engine.pool.layer(layer)
        assert not cache[7, :, :, 2:].any()
        assert bool((cache[7, :, :, :2].abs().sum(-1) > 0).all())
        assert bool((cache[8] == 1.0).all())


@parts
def test_warming_up_touches_nobodys_block(model_dir: ModelDir, parts: str) -> None:
    engine = DeviceEngine(model_dir, **PARTS[parts])
    warm_up(engine.runner, engine.pool)
    assert not any(bool(engine.pool.layer(layer)[:-1].any()) for layer in range(3))
    assert not any(engine.buffer)


@parts
def test_float8_kv_is_the_same_values_rounded(model_dir: ModelDir, parts: str) -> None:
    """In the first layer KV comes from the prompt alone: there it can be compared value by value."""
    config, ids = model_dir.config, list(range(20, 52))
    engine = DeviceEngine(model_dir, layout=config.kv_layout(16, "float8_e4m3"), **PARTS[parts])
    exact = DeviceEngine(model_dir, layout=config.kv_layout(16, "float32"))
    results = [
        one.runner.run(make_plan(make_row(ids, [4, 2]), leaves=[4, 2]), NoMark())
        for one in (engine, exact)
    ]
    assert [len(result.tokens) for result in results] == [1, 1]
    index = np.array([[4], [2]])
    found = engine.host.read(0, engine.host.head_index(index), 2).view(torch.float8_e4m3fn)
    expected = exact.host.read(0, exact.host.head_index(index), 2)
    torch.testing.assert_close(found.float(), expected, atol=2e-3, rtol=0.07)
    # Back into other blocks: nothing is lost on the way.
    engine.host.store(0, engine.host.head_index(np.array([[9], [1]])), found.view(torch.uint8))
    engine.runner.run(make_plan(make_row([5], [3]), arrived=[9, 1]), NoMark())
    assert torch.equal(engine.pool.layer(0)[9].float(), engine.pool.layer(0)[4].float())


def test_what_float8_cannot_hold_becomes_the_largest_that_it_can(model_dir: ModelDir) -> None:
    pool = DeviceEngine(model_dir, layout=model_dir.config.kv_layout(4, "float8_e4m3")).pool
    values = torch.tensor([1e4, -500.0, 448.0, 0.5])
    assert pool.cast(values).float().tolist() == [448.0, -448.0, 448.0, 0.5]


def test_timing_adds_up_to_the_step(model_dir: ModelDir) -> None:
    timing = DeviceEngine(model_dir).runner.run(make_plan(make_row([5, 6], [3])), NoMark()).timing
    assert min(timing.forward_s, timing.sample_s, timing.other_s) > 0


def test_without_a_gpu_an_engine_for_one_does_not_start(model_dir: ModelDir) -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a GPU here")
    layout = model_dir.config.kv_layout(4, "bfloat16")
    with pytest.raises(ConfigError, match="finds no GPU"):
        load_device_runner(
            model_dir,
            bytearray(layout.pool_bytes),
            layout,
            device="cuda",
            dtype="bfloat16",
            max_num_seqs=1,
            max_model_len=64,
        )


def test_an_engine_on_a_cpu_imports_neither_flashinfer_nor_cuda() -> None:
    importlib.import_module("moonpool.worker.engine_main")
    assert "flashinfer" not in sys.modules
    assert not torch.cuda.is_initialized()
