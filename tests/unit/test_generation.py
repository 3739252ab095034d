from __future__ import annotations

import math

import pytest

from moonpool.errors import InvalidRequestError
from moonpool.inference.generation import (
    SamplingDefaults,
    SamplingOptions,
    check_prompt_token_ids,
    check_text_length,
    resolve_sampling,
)
from moonpool.inference.sampling import SamplingParams


def resolve(options: SamplingOptions, *, num_prompt_tokens: int = 10) -> SamplingParams:
    return resolve_sampling(
        options,
        defaults=SamplingDefaults(temperature=0.7, top_p=0.9, top_k=40),
        num_prompt_tokens=num_prompt_tokens,
        max_model_len=100,
        vocab_size=50,
        minted_seed=7,
    )


def test_silence_means_the_models_defaults_and_the_rest_of_the_context() -> None:
    assert resolve(SamplingOptions()) == SamplingParams(
        temperature=0.7, top_p=0.9, top_k=40, seed=7, max_tokens=90
    )


def test_a_top_k_beyond_the_vocabulary_keeps_all_of_it() -> None:
    assert resolve(SamplingOptions(top_k=49)).top_k == 49
    for top_k in (50, 2**31, 2**64):
        assert resolve(SamplingOptions(top_k=top_k)).top_k == 50


def test_a_stop_token_counts_once() -> None:
    options = SamplingOptions(stop_token_ids=(7, 3, 7))
    assert resolve(options).stop_token_ids == (7, 3)


def test_a_negative_seed_keeps_its_64_bits() -> None:
    assert resolve(SamplingOptions(seed=-1)).seed == 2**64 - 1


@pytest.mark.parametrize(
    ("options", "param"),
    [
        (SamplingOptions(temperature=-1.0), "temperature"),
        (SamplingOptions(temperature=2.1), "temperature"),
        (SamplingOptions(temperature=math.nan), "temperature"),
        (SamplingOptions(top_p=0.0), "top_p"),
        (SamplingOptions(top_p=math.inf), "top_p"),
        (SamplingOptions(top_k=-2), "top_k"),
        (SamplingOptions(seed=2**63), "seed"),
        (SamplingOptions(max_tokens=0), "max_tokens"),
        (SamplingOptions(max_tokens=91), "max_tokens"),
        (SamplingOptions(stop=("",)), "stop"),
        (SamplingOptions(stop=("a",) * 5), "stop"),
        (SamplingOptions(stop=("a" * 257,)), "stop"),
        (SamplingOptions(stop_token_ids=(50,)), "stop_token_ids"),
        (SamplingOptions(stop_token_ids=(1,) * 1_025), "stop_token_ids"),
    ],
)
def test_a_bad_value_names_its_field(options: SamplingOptions, param: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        resolve(options)
    assert caught.value.param == param


def test_the_context_limit_itself_is_allowed() -> None:
    assert resolve(SamplingOptions(max_tokens=90)).max_tokens == 90
    assert resolve(SamplingOptions(), num_prompt_tokens=99).max_tokens == 1
    with pytest.raises(InvalidRequestError) as caught:
        resolve(SamplingOptions(), num_prompt_tokens=100)
    assert caught.value.code == "context_length_exceeded"


def test_a_text_is_too_long_when_no_tokens_of_the_vocabulary_make_it_shorter() -> None:
    check_text_length(400, max_model_len=100, max_token_bytes=4)
    with pytest.raises(InvalidRequestError) as caught:
        check_text_length(401, max_model_len=100, max_token_bytes=4)
    assert caught.value.code == "context_length_exceeded"


def test_prompt_ids_are_checked() -> None:
    check_prompt_token_ids((0, 49), vocab_size=50)
    with pytest.raises(InvalidRequestError, match="empty"):
        check_prompt_token_ids((), vocab_size=50)
    with pytest.raises(InvalidRequestError) as caught:
        check_prompt_token_ids((3, 50), vocab_size=50)
    assert caught.value.param == "prompt[1]"
