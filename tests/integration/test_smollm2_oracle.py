"""SmolLM2-135M against transformers' greedy tokens: the short part; oracle/check.py runs it whole."""

from __future__ import annotations

import pytest
from oracle import cases

from moonpool.hub.chat_template import ChatTemplate
from moonpool.hub.tokenizer import Tokenizer
from moonpool.inference.sampling import SamplingParams
from support.engine import generate, make_core, make_requests, make_runner
from support.real_model import smollm2

pytestmark = pytest.mark.real_model

NUM_BLOCKS = 64
NUM_TOKENS = 24
NAMES = ("text of 1", "text of 15", "text of 16", "text of 17", "text of 100", "chat 0")


@pytest.fixture(scope="module")
def model_dir():
    return smollm2()


def test_greedy_tokens_equal_transformers(model_dir) -> None:
    expected = cases.read_oracle(cases.SMOLLM2_FILE).models["smollm2-135m"]
    assert model_dir.fingerprint == expected.fingerprint
    chosen = [case for case in expected.cases if case.name in NAMES]
    assert len(chosen) == len(NAMES)
    runner = make_runner(model_dir, num_blocks=NUM_BLOCKS)
    sampling = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True)
    requests = make_requests([case.prompt for case in chosen], sampling)
    for case, tokens in zip(chosen, generate(make_core(NUM_BLOCKS), runner, requests), strict=True):
        assert tokens == case.tokens[:NUM_TOKENS], case.name


def test_its_chat_template_gives_the_oracles_prompt(model_dir) -> None:
    expected = cases.read_oracle(cases.SMOLLM2_FILE).models["smollm2-135m"]
    prompt = next(case.prompt for case in expected.cases if case.name == "chat 0")
    tokenizer = Tokenizer.load(model_dir.path)
    template = ChatTemplate.load(model_dir.path, special_tokens=tokenizer.special_tokens)
    assert template is not None
    chat = template.render([{"role": "user", "content": cases.CHATS[0]}])
    assert tokenizer.encode_rendered(chat) == prompt
    # Digits are split one by one, as the model was trained.
    assert len(tokenizer.encode("1234567890")) == 10
