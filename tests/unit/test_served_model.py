"""ServedModel: where an answer's text begins."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from moonpool.hub.gguf_tokenizer import GgufTokenizer, build_tokenizer
from moonpool.hub.tokenizer import Tokenizer
from moonpool.inference.generation import (
    ChatMessage,
    ChatPrompt,
    Prompt,
    SamplingDefaults,
    TextPrompt,
    TokenPrompt,
)
from moonpool_router.served_model import ModelFacts, ServedModel

TOKENS = ("<unk>", "<s>", "</s>", "▁", "a", "▁a")
SENTENCEPIECE = GgufTokenizer(
    kind="llama",
    pre="default",
    tokens=TOKENS,
    token_types=(2, 3, 3, 1, 1, 1),
    merges=(),
    scores=(0.0, 0.0, 0.0, -3.0, -2.0, -1.0),
    has_bos_prefix=True,
    has_space_prefix=True,
    bos_token_id=1,
    eos_token_id=2,
    eot_token_id=None,
    unknown_token_id=0,
    pad_token_id=None,
)


@pytest.fixture
def model(tmp_path: Path) -> Iterator[ServedModel]:
    facts = ModelFacts(
        name="llama-2",
        fingerprint="",
        vocab_size=len(TOKENS),
        max_model_len=64,
        defaults=SamplingDefaults(),
    )
    tokenizer = Tokenizer.from_json(build_tokenizer(SENTENCEPIECE).to_str())
    model = ServedModel(facts, tokenizer, tmp_path)
    yield model
    model.close()


@pytest.mark.parametrize(
    ("prompt", "answer"),
    [
        (TextPrompt(text="a"), " a"),
        (TokenPrompt(token_ids=(1, 5)), " a"),
        (TokenPrompt(token_ids=(1,)), "a"),
        (ChatPrompt(messages=(ChatMessage(role="user", content="a"),)), "a"),
    ],
)
def test_a_completions_first_space_belongs_to_its_text(
    model: ServedModel, prompt: Prompt, answer: str
) -> None:
    token_ids = prompt.token_ids if isinstance(prompt, TokenPrompt) else (1, 5)
    assert model.detokenizer(prompt, token_ids).push(5) == answer
