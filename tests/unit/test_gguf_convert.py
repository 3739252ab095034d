"""GGUF metadata: rope scaled as llama.cpp scales it, and what cannot be is refused by key."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch

from moonpool.engine.rope import inverse_frequencies
from moonpool.errors import ModelError
from moonpool.hub import resolve
from moonpool.hub.model_config import (
    FrequencyFactors,
    LinearRopeScaling,
    ModelConfig,
    parse_model_config,
)
from support.gguf_file import write_gguf
from support.tiny_llama import LLAMA3_ROPE, TinyLlama, write_tiny_llama

MODEL = TinyLlama(num_layers=1)
Change = Callable[[gguf.GGUFWriter], None]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_llama(tmp_path_factory.mktemp("source") / "tiny", MODEL)


def converted(tiny: Path, tmp_path: Path, *changes: Change) -> ModelConfig:
    def change(writer: gguf.GGUFWriter) -> None:
        for each in changes:
            each(writer)

    source = write_gguf(tmp_path / "tiny.gguf", tiny, MODEL, change=change)
    return resolve(str(source), data_dir=tmp_path / "home").config


def number(key: str, value: float) -> Change:
    return lambda writer: writer.add_float32(f"llama.rope.{key}", value)


def text(key: str, value: str) -> Change:
    return lambda writer: writer.add_string(f"llama.rope.{key}", value)


def rope_freqs(factors: np.ndarray) -> Change:
    return lambda writer: writer.add_tensor("rope_freqs.weight", factors.astype(np.float32))


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ([], None),
        ([text("scaling.type", "linear")], None),
        ([number("scaling.factor", 4.0)], 4.0),
        ([number("scaling.factor", 4.0), text("scaling.type", "linear")], 4.0),
        ([number("scaling.factor", 4.0), text("scaling.type", "none")], None),
        ([number("scaling.factor", 0.0)], None),
        ([number("scale_linear", 2.0)], 2.0),
        ([number("scale_linear", 2.0), number("scaling.factor", 4.0)], 4.0),
        ([number("scaling.attn_factor", 1.0)], None),
    ],
)
def test_positions_are_scaled_by_the_files_factor(
    tiny: Path, tmp_path: Path, changes: list[Change], expected: float | None
) -> None:
    scaling = converted(tiny, tmp_path, *changes).rope_scaling
    assert scaling == (None if expected is None else LinearRopeScaling(factor=expected))


def test_factors_by_frequency_hold_beside_a_factor_for_all(tiny: Path, tmp_path: Path) -> None:
    factors = np.linspace(1.0, 8.0, MODEL.head_dim // 2)
    found = converted(tiny, tmp_path, rope_freqs(factors), number("scaling.factor", 2.0))
    expected = tuple(2.0 * factors.astype(np.float32).astype(np.float64))
    assert found.rope_scaling == FrequencyFactors(factors=expected)


def test_llama_3s_scaling_by_way_of_factors(tiny: Path, tmp_path: Path) -> None:
    # As llama.cpp's convert_hf_to_gguf.py computes them for a Llama 3 config.
    dims = np.arange(0, MODEL.head_dim, 2) / MODEL.head_dim
    wavelengths = 2 * np.pi * 10_000.0**dims
    low, high = LLAMA3_ROPE["low_freq_factor"], LLAMA3_ROPE["high_freq_factor"]
    original = LLAMA3_ROPE["original_max_position_embeddings"]
    smooth = np.clip((original / wavelengths - low) / (high - low), 0.0, 1.0)
    factors = 1 / ((1 - smooth) / LLAMA3_ROPE["factor"] + smooth)
    assert len(set(factors)) == 3, "kept, between and slowed"
    found = inverse_frequencies(converted(tiny, tmp_path, rope_freqs(factors)))
    of_config = parse_model_config(_config_with(LLAMA3_ROPE), {})
    torch.testing.assert_close(found, inverse_frequencies(of_config), rtol=1e-6, atol=0.0)


def _config_with(rope_scaling: dict[str, object]) -> dict[str, object]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "num_hidden_layers": MODEL.num_layers,
        "hidden_size": MODEL.hidden_size,
        "intermediate_size": MODEL.intermediate_size,
        "num_attention_heads": MODEL.num_heads,
        "num_key_value_heads": MODEL.num_kv_heads,
        "vocab_size": MODEL.vocab_size,
        "rope_scaling": rope_scaling,
    }


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (text("scaling.type", "yarn"), r"llama.rope.scaling.type = 'yarn' is not supported"),
        (number("scaling.attn_factor", 1.5), r"llama.rope.scaling.attn_factor = 1.5 is not supp"),
        (number("scaling.factor", -2.0), r"llama.rope.scaling.factor = -2.0 must be positive"),
        (text("scaling.factor", "2"), r"llama.rope.scaling.factor = 2 must be a number"),
        (rope_freqs(np.ones(3)), r"rope factors must be a list of 8 numbers"),
        (rope_freqs(np.zeros(8)), r"rope factors = 0.0 must be a positive number"),
        (lambda w: w.add_head_count_kv([2, 4]), r"head_count_kv = \[2, 4\] must be a positive int"),
        (lambda w: w.add_head_count(5), r"64 rows are not those of 5 heads"),
        (lambda w: w.add_token_types([1, 1]), r"token_type has 2 entries for 320 tokens"),
        (lambda w: w.add_token_merges(["no such"]), r"tokenizer.ggml.merges do not fit"),
        (lambda w: w.add_bos_token_id(320), r"bos_token_id = 320 must be the id of one of 320"),
        (lambda w: w.add_array("tokenizer.ggml.tokens", [1, 2]), r"tokens = .* a list of texts"),
        (lambda w: w.add_uint32("tokenizer.chat_template", 1), r"chat_template = 1 must be a text"),
    ],
)
def test_what_a_file_should_not_hold_is_named(
    tiny: Path, tmp_path: Path, change: Change, words: str
) -> None:
    with pytest.raises(ModelError, match=words):
        converted(tiny, tmp_path, change)
