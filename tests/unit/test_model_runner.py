"""ModelRunner: what it promises beyond the right tokens."""

from __future__ import annotations

import itertools
import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file, save_file

from moonpool.core.step import StepPlan, StepRow
from moonpool.engine.kv_pool import KvPool
from moonpool.engine.linear import has_native_bfloat16, round_to_int8
from moonpool.engine.loader import load_model
from moonpool.engine.runner import ModelRunner, load_runner
from moonpool.engine.threads import kernels_for
from moonpool.hub.model_dir import ModelDir
from moonpool.kv.layout import KvLayout
from moonpool.native import Kernels, LeafGeometry, kernels, status
from moonpool.native.fallback import FallbackKernels
from support.engine import NoMark, open_tiny
from support.steps import GREEDY, make_row
from support.tiny_llama import TinyLlama, write_tiny_llama

NUM_BLOCKS = 32
SMALL = KvLayout.block_major(
    num_blocks=4, num_layers=1, num_kv_heads=1, head_dim=16, dtype="float32"
)


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory) -> ModelDir:
    path: Path = tmp_path_factory.mktemp("runner") / "tiny"
    return open_tiny(write_tiny_llama(path, TinyLlama()))


class Engine:
    """A runner and the pool it writes."""

    def __init__(
        self, model_dir: ModelDir, dtype: str = "float32", quantization: str = "none"
    ) -> None:
        self.layout: KvLayout = model_dir.config.kv_layout(NUM_BLOCKS, dtype)
        self.buffer = bytearray(self.layout.pool_bytes)
        self.pool = KvPool(self.buffer, self.layout)
        self.runner: ModelRunner = load_runner(
            model_dir,
            self.buffer,
            self.layout,
            dtype=dtype,
            max_num_seqs=4,
            kernels=kernels(),
            quantization=quantization,
        )

    def run(self, *rows: StepRow, zero_tails=(), mark=None):
        plan = StepPlan(
            step=1,
            rows=rows,
            leaf_block_ids=np.empty(0, np.int32),
            zero_tails=np.array(zero_tails, np.int32).reshape(-1, 2),
        )
        return self.runner.run(plan, mark or NoMark())

    def block(self, layer: int, block: int) -> torch.Tensor:
        """[2, kv_heads, tokens, dim]"""
        return self.pool.read(layer, self.pool.head_index(np.array([[block]])), 1)[:, 0]


def test_an_empty_row_continues_from_its_slot(model_dir: ModelDir) -> None:
    engine = Engine(model_dir)
    first = engine.run(make_row([5, 6, 7], [3], slot=2)).tokens[0]
    by_slot = engine.run(make_row([], [3], slot=2, start=3)).tokens
    by_value = Engine(model_dir)
    by_value.run(make_row([5, 6, 7], [3]))
    assert by_slot == by_value.run(make_row(list(first), [3], start=3)).tokens


def test_tokens_come_for_sampling_rows_in_row_order(model_dir: ModelDir) -> None:
    chunk, single, long = list(range(10, 30)), [9], list(range(40, 57))
    alone = [
        Engine(model_dir).run(make_row(ids, blocks)).tokens[0]
        for ids, blocks in ((chunk, [1, 2]), (single, [3]), (long, [4, 5]))
    ]
    engine = Engine(model_dir)
    result = engine.run(
        make_row(chunk, [1, 2], slot=0),
        make_row(list(range(60, 76)), [6], slot=3, sample=None),
        make_row(single, [3], slot=1),
        make_row(long, [4, 5], slot=2),
    )
    assert list(result.tokens) == alone
    assert result.step == 1


def test_marks_every_layer_once_when_its_kv_lies_there(model_dir: ModelDir) -> None:
    engine = Engine(model_dir)
    seen = []

    class Mark:
        def layer_done(self, layer: int) -> None:
            written = [bool(engine.block(i, 4).abs().sum() > 0) for i in range(3)]
            seen.append((layer, written))

    engine.run(make_row([8, 9], [4], sample=None), mark=Mark())
    assert seen == [
        (0, [True, False, False]),
        (1, [True, True, False]),
        (2, [True, True, True]),
    ]


def test_tails_are_zero_when_the_layer_is_marked(model_dir: ModelDir) -> None:
    engine = Engine(model_dir)
    engine.buffer[:] = b"\x3f" * len(engine.buffer)
    tails = []

    class Mark:
        def layer_done(self, layer: int) -> None:
            tails.append(float(engine.block(layer, 7)[:, :, 2:].abs().sum()))

    engine.run(make_row(list(range(9, 27)), [6, 7]), zero_tails=[(7, 2)], mark=Mark())
    assert tails == [0.0, 0.0, 0.0]
    assert bool((engine.block(0, 7)[:, :, :2].abs().sum() > 0).all())
    assert bool((engine.block(0, 6).abs().sum(-1) > 0).all())


def test_chunk_ends_off_block_edges_give_the_same_kv_and_token(model_dir: ModelDir) -> None:
    ids = list(range(20, 61))
    whole, parts = Engine(model_dir), Engine(model_dir)
    expected = whole.run(make_row(ids, [1, 2, 3])).tokens
    parts.run(make_row(ids[:7], [1], sample=None))
    parts.run(make_row(ids[7:33], [1, 2, 3], start=7, sample=None))
    assert parts.run(make_row(ids[33:], [1, 2, 3], start=33)).tokens == expected
    for layer in range(3):
        for block in (1, 2, 3):
            torch.testing.assert_close(
                parts.block(layer, block), whole.block(layer, block), atol=1e-5, rtol=1e-5
            )


def test_a_row_that_is_not_finite_fails_alone(model_dir: ModelDir) -> None:
    engine = Engine(model_dir)
    good = engine.run(make_row([5, 6], [1], slot=0)).tokens[0]
    engine.run(make_row(list(range(4, 20)), [2], slot=1, sample=None))
    poison = np.frombuffer(engine.buffer, np.float32).reshape(NUM_BLOCKS, -1)
    poison[2] = np.nan
    result = engine.run(make_row([5, 6], [1], slot=0), make_row([7], [2, 3], slot=1, start=16))
    assert result.tokens == (good, ())


def test_bfloat16_stores_half_the_bytes_and_stays_close(model_dir: ModelDir) -> None:
    engine, exact = Engine(model_dir, "bfloat16"), Engine(model_dir)
    assert 2 * len(engine.buffer) == len(exact.buffer)
    for one in (engine, exact):
        one.run(make_row(list(range(5, 25)), [1, 2], sample=None))
    torch.testing.assert_close(engine.block(0, 1).float(), exact.block(0, 1), atol=0.1, rtol=0.05)


def test_bfloat16_kv_read_back_equals_kv_just_computed(model_dir: ModelDir) -> None:
    """A key has one value: chunked and whole prefill differ by rounding of float32 only."""
    ids = list(range(20, 60))
    whole, parts = Engine(model_dir, "bfloat16"), Engine(model_dir, "bfloat16")
    whole.run(make_row(ids, [1, 2, 3], sample=None))
    parts.run(make_row(ids[:16], [1], sample=None))
    parts.run(make_row(ids[16:], [1, 2, 3], start=16, sample=None))
    torch.testing.assert_close(
        parts.block(0, 3).float(), whole.block(0, 3).float(), atol=1e-6, rtol=1e-2
    )


def multiplies_in_c(dtype: str) -> bool:
    """The C library does, on this CPU, for a model of `dtype`."""
    if dtype == "bfloat16" and has_native_bfloat16():
        return kernels().has_bfloat16_products
    return status().is_compiled


@pytest.mark.parametrize(
    "dtype",
    [
        pytest.param(
            dtype,
            marks=pytest.mark.skipif(
                not multiplies_in_c(dtype),
                reason="the C library promises an order of additions, others do not",
            ),
        )
        for dtype in ("float32", "bfloat16")
    ],
)
def test_kv_is_the_same_bits_however_a_prompt_is_computed(model_dir: ModelDir, dtype: str) -> None:
    """Whole, in chunks, after a cached prefix, token by token, and beside others."""
    ids = np.random.default_rng(8).integers(3, 200, 75).tolist()
    blocks = [1, 2, 3, 4, 5]
    whole = Engine(model_dir, dtype)
    expected = whole.run(make_row(ids, blocks)).tokens
    for cuts in ([16], [1, 2, 3], [31, 33, 64, 74], list(range(1, 75))):
        engine = Engine(model_dir, dtype)
        for start, end in itertools.pairwise([0, *cuts, len(ids)]):
            used = blocks[: -(-end // 16)]
            sample = GREEDY if end == len(ids) else None
            others = (make_row([7, 8, 9], [20], slot=1, sample=None), make_row([9], [21], slot=2))
            tokens = engine.run(
                *others, make_row(ids[start:end], used, start=start, sample=sample)
            ).tokens
        assert tokens[-1] == expected[0], cuts
        for layer in range(3):
            for block in blocks[:-1]:
                assert torch.equal(engine.block(layer, block), whole.block(layer, block)), cuts


@pytest.mark.parametrize("form", [kernels(), FallbackKernels()], ids=["native", "torch"])
def test_bfloat16_arithmetic_stays_close_on_every_path(model_dir: ModelDir, form: Kernels) -> None:
    """What a CPU with bfloat16 products does; by torch slow, but right, on one without."""
    engine, exact = Engine(model_dir, "bfloat16"), Engine(model_dir)
    model = load_model(model_dir, "bfloat16", compute_dtype="bfloat16", kernels=form)
    # What rounds for its products alone keeps float32 between them.
    assert model.dtype is (torch.float32 if form.has_bfloat16_products else torch.bfloat16)
    engine.runner = ModelRunner(model, engine.buffer, engine.layout, max_num_seqs=4, kernels=form)
    for one in (engine, exact):
        one.run(make_row(list(range(5, 25)), [1, 2], sample=None))
        one.run(make_row(list(range(30, 40)), [1, 2], start=20, sample=None))
        result = one.run(
            make_row([7], [1, 2], start=30), make_row([9], [3], slot=1), make_row([8, 9], [4])
        )
        assert all(len(run) == 1 for run in result.tokens)
    for layer in range(3):
        difference = engine.block(layer, 2).float() - exact.block(layer, 2)
        assert float(difference.abs().mean()) < 0.1 * float(exact.block(layer, 2).abs().mean())


def test_timing_adds_up_to_the_step(model_dir: ModelDir) -> None:
    timing = Engine(model_dir).run(make_row([5, 6, 7], [3])).timing
    assert min(timing.forward_s, timing.logits_s, timing.sample_s, timing.other_s) > 0


def test_refuses_the_layout_of_another_model(model_dir: ModelDir) -> None:
    layout = KvLayout.block_major(
        num_blocks=4, num_layers=2, num_kv_heads=2, head_dim=16, dtype="float32"
    )
    with pytest.raises(ValueError, match="layout has"):
        load_runner(
            model_dir,
            bytearray(layout.pool_bytes),
            layout,
            dtype="float32",
            max_num_seqs=1,
            kernels=kernels(),
        )


@pytest.mark.parametrize("is_tied", [False, True])
def test_int8_is_the_model_of_the_rounded_weights(tmp_path: Path, is_tied: bool) -> None:
    """Linears are rounded, the head with them; embeddings, also those that the head is tied to, are not."""
    path = write_tiny_llama(tmp_path / "tiny", TinyLlama(is_embedding_tied=is_tied, has_bias=True))
    weights = load_file(path / "model.safetensors")
    if is_tied:
        weights["lm_head.weight"] = weights["model.embed_tokens.weight"]
    for name, weight in weights.items():
        if weight.ndim == 2 and "embed" not in name:
            values, scale = round_to_int8(torch.from_numpy(weight))
            weights[name] = (values * scale[:, None]).numpy()
    rounded = shutil.copytree(path, tmp_path / "rounded")
    config = json.loads((rounded / "config.json").read_text())
    (rounded / "config.json").write_text(json.dumps({**config, "tie_word_embeddings": False}))
    save_file(weights, rounded / "model.safetensors")
    answers = []
    for directory, quantization in ((path, "int8"), (rounded, "none"), (path, "none")):
        engine = Engine(open_tiny(directory), quantization=quantization)
        prompt = list(range(3, 40))
        tokens = [engine.run(make_row(prompt, [1, 2, 3])).tokens[0][0]]
        for end in range(len(prompt), len(prompt) + 20):
            row = make_row([], [1, 2, 3, 4][: end // 16 + 1], start=end)
            tokens.append(engine.run(row).tokens[0][0])
        answers.append((tokens, engine.block(2, 1).clone()))
    (found, found_kv), (expected, expected_kv), (_, exact_kv) = answers
    assert found == expected
    torch.testing.assert_close(found_kv, expected_kv, atol=1e-4, rtol=1e-4)
    assert (found_kv - exact_kv).abs().max() > 1e-3, "nothing was rounded"


def test_an_engine_of_several_threads_leaves_all_arithmetic_to_torch() -> None:
    pool, geometry = np.zeros(2**16, np.uint8), LeafGeometry.of_layout(SMALL)
    weight = np.ones((16, 16), np.int8)
    for num_threads in (1, 2):
        form = kernels_for(kernels(), num_threads)
        in_c = [
            form.row_kernels(),
            form.pack_linear(weight, None, np.ones(16, np.float32)),
            form.paged_attention(pool, geometry, group_size=1, is_bfloat16=False),
        ]
        is_in_c = status().is_compiled and num_threads == 1
        assert not form.has_bfloat16_products or num_threads == 1
        assert [each is not None for each in in_c] == [is_in_c] * 3
