"""config.json and generation_config.json: what is read, what is refused, and in which words."""

from __future__ import annotations

import pytest

from moonpool.errors import ModelError
from moonpool.hub.model_config import (
    FrequencyFactors,
    LinearRopeScaling,
    Llama3RopeScaling,
    parse_model_config,
)

BASE = {
    "architectures": ["LlamaForCausalLM"],
    "num_hidden_layers": 2,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 100,
    "rms_norm_eps": 1e-5,
    "eos_token_id": 2,
}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


def parse(generation=None, **changes):
    return parse_model_config({**BASE, **changes}, generation or {})


def factors(values):
    return {"rope_scaling": {"rope_type": "frequency_factors", "factors": values}}


def test_defaults_are_those_of_llama() -> None:
    config = parse()
    assert (config.head_dim, config.rope_theta, config.max_positions) == (16, 10_000.0, 2048)
    flags = (config.is_embedding_tied, config.has_attention_bias, config.has_mlp_bias)
    assert flags == (False, False, False)
    assert config.rope_scaling is None
    layout = config.kv_layout(10, "bfloat16")
    assert layout.bytes_per_token == 2 * 2 * 2 * 16 * 2


def test_generation_config_decides_where_an_answer_ends() -> None:
    assert parse().eos_token_ids == (2,)
    assert parse({"eos_token_id": [5, 7]}).eos_token_ids == (5, 7)


@pytest.mark.parametrize("key", ["rope_scaling", "rope_parameters"])
def test_rope_scaling_in_both_spellings(key: str) -> None:
    expected = Llama3RopeScaling(
        factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_positions=8192
    )
    assert parse(**{key: LLAMA3}).rope_scaling == expected
    linear = parse(**{key: {"type": "linear", "factor": 2}})
    assert linear.rope_scaling == LinearRopeScaling(factor=2.0)
    factors = parse(**{key: {"rope_type": "frequency_factors", "factors": [1.0] * 8}})
    assert factors.rope_scaling == FrequencyFactors(factors=(1.0,) * 8)


def test_transformers_5_keeps_theta_beside_the_scaling() -> None:
    config = parse(rope_parameters={"rope_type": "default", "rope_theta": 500_000.0})
    assert (config.rope_theta, config.rope_scaling) == (500_000.0, None)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"architectures": ["MambaForCausalLM"]}, "'MambaForCausalLM' is not supported; supported"),
        ({"architectures": None}, "must name one; supported: LlamaForCausalLM"),
        ({"num_key_value_heads": 3}, "not a multiple of num_key_value_heads = 3"),
        ({"num_hidden_layers": 0}, "num_hidden_layers = 0 must be a positive integer"),
        ({"hidden_size": None}, "hidden_size = None must be a positive integer"),
        ({"rms_norm_eps": "small"}, "rms_norm_eps = 'small' must be a positive number"),
        ({"hidden_act": "gelu"}, "hidden_act = 'gelu' is not supported"),
        ({"rope_scaling": {"rope_type": "yarn"}}, "'yarn' is not supported; supported: default"),
        ({"quantization_config": {}}, "quantization_config is not supported"),
        ({"eos_token_id": 100}, "eos_token_id = 100 is not in the vocabulary"),
        ({"attention_bias": "yes"}, "attention_bias = 'yes' must be true or false"),
        ({"head_dim": 15}, "head_dim = 15 must be even"),
        (factors([1.0] * 7), "rope factors must be a list of 8 numbers"),
        (factors([1.0] * 7 + ["x"]), "rope factors = 'x' must be a positive number"),
        (factors([1.0] * 7 + [0]), "rope factors = 0 must be a positive number"),
        ({"rope_scaling": {**LLAMA3, "high_freq_factor": 1.0}}, "must be above low_freq_factor"),
    ],
)
def test_refuses_by_key_and_value(changes, words: str) -> None:
    with pytest.raises(ModelError, match=words):
        parse(**changes)


def test_fingerprint_follows_values_not_ends() -> None:
    hashes = {"model.safetensors": "ab"}
    base = parse().fingerprint(hashes)
    assert parse(eos_token_id=3).fingerprint(hashes) == base
    assert parse(max_position_embeddings=64).fingerprint(hashes) == base
    assert parse(rope_theta=9.0).fingerprint(hashes) != base
    assert parse(rope_scaling=LLAMA3).fingerprint(hashes) != base
    assert parse().fingerprint({"model.safetensors": "cd"}) != base
