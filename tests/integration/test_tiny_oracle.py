"""The engine against transformers' greedy tokens, on small random Llamas of many shapes."""

from __future__ import annotations

from pathlib import Path

import pytest
from oracle import cases

from moonpool.inference.sampling import SamplingParams
from moonpool.kv.layout import KvLayout
from support.engine import generate, make_core, make_requests, make_runner, open_tiny
from support.tiny_llama import write_tiny_llama

SAMPLING = SamplingParams(temperature=0.0, max_tokens=cases.NUM_TINY_TOKENS, ignore_eos=True)
ORACLE = cases.read_oracle(cases.TINY_FILE).models
NUM_BLOCKS = 128


def answers_of(model_dir, expected, *, num_at_once: int, layout=None, **limits: int):
    core = make_core(NUM_BLOCKS, **limits)
    runner = make_runner(model_dir, num_blocks=NUM_BLOCKS, layout=layout)
    prompts = [case.prompt for case in expected.cases]
    answers = []
    for first in range(0, len(prompts), num_at_once):
        batch = prompts[first : first + num_at_once]
        answers += generate(core, runner, make_requests(batch, SAMPLING, first))
    return answers


def assert_equal(expected, answers) -> None:
    for case, tokens in zip(expected.cases, answers, strict=True):
        found = cases.compare(case, tokens)
        assert found.is_equal or found.is_excused, (case.name, found)


@pytest.mark.parametrize("name", list(cases.TINY_MODELS))
def test_greedy_tokens_equal_transformers(tmp_path: Path, name: str) -> None:
    model_dir = open_tiny(write_tiny_llama(tmp_path / "model", cases.TINY_MODELS[name]))
    assert model_dir.fingerprint == ORACLE[name].fingerprint
    for num_at_once in (1, len(ORACLE[name].cases)):
        answers = answers_of(model_dir, ORACLE[name], num_at_once=num_at_once, is_checked=False)
        assert_equal(ORACLE[name], answers)


@pytest.mark.parametrize("budget", [16, 48])
def test_chunks_of_any_size_give_the_same_tokens(tmp_path: Path, budget: int) -> None:
    model_dir = open_tiny(write_tiny_llama(tmp_path / "model", cases.TINY_MODELS["plain"]))
    answers = answers_of(
        model_dir, ORACLE["plain"], num_at_once=9, max_num_batched_tokens=budget, max_num_seqs=9
    )
    assert_equal(ORACLE["plain"], answers)


def test_layer_major_pool_gives_the_same_tokens(tmp_path: Path) -> None:
    model_dir = open_tiny(write_tiny_llama(tmp_path / "model", cases.TINY_MODELS["plain"]))
    config = model_dir.config
    layout = KvLayout.layer_major(
        num_blocks=NUM_BLOCKS,
        num_layers=config.num_layers,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        dtype="float32",
    )
    answers = answers_of(model_dir, ORACLE["plain"], num_at_once=9, layout=layout)
    assert_equal(ORACLE["plain"], answers)
