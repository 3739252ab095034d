"""Tokenizers out of GGUF metadata: each kind encodes as its model was trained."""

from __future__ import annotations

import dataclasses

import pytest
from tokenizers import pre_tokenizers

from moonpool.errors import ModelError
from moonpool.hub.gguf_tokenizer import GgufTokenizer, build_tokenizer
from moonpool.hub.tokenizer import Tokenizer

LETTERS = sorted(pre_tokenizers.ByteLevel.alphabet())
BYTE_LEVEL = GgufTokenizer(
    kind="gpt2",
    pre="smollm",
    tokens=("<|end|>", "<|user|>", *LETTERS, "12", "123", "Ġ1", "ab"),
    token_types=(3, 4, *[1] * (len(LETTERS) + 4)),
    merges=("1 2", "12 3", "Ġ 1", "a b"),
    scores=(),
    has_bos_prefix=False,
    has_space_prefix=False,
    bos_token_id=None,
    eos_token_id=0,
    eot_token_id=1,
    unknown_token_id=None,
    pad_token_id=None,
)
PIECES = ("▁", "a", "b", "c", "▁a", "ab", "▁ab", "bc")
SENTENCEPIECE = GgufTokenizer(
    kind="llama",
    pre="default",
    tokens=("<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *PIECES),
    token_types=(2, 3, 3, *[6] * 256, *[1] * len(PIECES)),
    merges=(),
    # A score is the better the higher: "▁a" before "ab", "bc" before "▁ab".
    scores=(0.0,) * 259 + (-9.0, -9.0, -9.0, -9.0, -1.0, -3.0, -4.0, -2.0),
    has_bos_prefix=True,
    has_space_prefix=True,
    bos_token_id=1,
    eos_token_id=2,
    eot_token_id=None,
    unknown_token_id=0,
    pad_token_id=None,
)


def pieces(source: GgufTokenizer, text: str, *, add_special_tokens: bool = False) -> list[str]:
    tokenizer = Tokenizer.from_json(build_tokenizer(source).to_str())
    ids = tokenizer.encode(text, add_special_tokens=add_special_tokens)
    assert tokenizer.decode(ids) == text
    return [source.tokens[token_id] for token_id in ids]


def test_smollm_splits_digits() -> None:
    assert pieces(BYTE_LEVEL, "ab 123") == ["ab", "Ġ", "1", "2", "3"]


def test_llama3_keeps_up_to_three_digits() -> None:
    source = dataclasses.replace(BYTE_LEVEL, pre="llama-bpe")
    assert pieces(source, "ab 1231") == ["ab", "Ġ", "123", "1"]


def test_gpt2_splits_at_words_only() -> None:
    source = dataclasses.replace(BYTE_LEVEL, pre="gpt-2")
    assert pieces(source, "ab 123") == ["ab", "Ġ", "123"]


def test_only_control_tokens_and_those_that_frame_a_text_are_special() -> None:
    source = dataclasses.replace(
        BYTE_LEVEL,
        tokens=("<|end|>", "<|user|>", "<think>", *LETTERS),
        token_types=(3, 4, 4, *[1] * len(LETTERS)),
        merges=(),
    )
    tokenizer = Tokenizer.from_json(build_tokenizer(source).to_str())
    assert source.end_token_ids == (0, 1)
    assert set(tokenizer.special_tokens) == {"<|end|>", "<|user|>"}
    # What its makers added as a whole is text: a user may write it, and an answer shows it.
    ids = tokenizer.encode("a<think>b")
    assert ids == [source.tokens.index("a"), 2, source.tokens.index("b")]
    assert tokenizer.decode([*ids, 0]) == "a<think>b"


def test_sentencepiece_joins_by_score() -> None:
    assert pieces(SENTENCEPIECE, "ab") == ["▁ab"]
    assert pieces(SENTENCEPIECE, "abc") == ["▁a", "bc"]
    assert pieces(SENTENCEPIECE, "a ab") == ["▁a", "▁ab"]


def test_sentencepiece_falls_back_to_bytes_and_begins_with_bos() -> None:
    assert pieces(SENTENCEPIECE, "aé") == ["▁a", "<0xC3>", "<0xA9>"]
    assert pieces(SENTENCEPIECE, "a", add_special_tokens=True) == ["<s>", "▁a"]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"pre": "deepseek"}, "pre-tokenizer 'deepseek' is not supported; supported: smollm"),
        ({"kind": "bert"}, "tokenizer 'bert' is not supported; supported: gpt2, llama"),
        ({"kind": "llama"}, "needs one score for each token"),
    ],
)
def test_what_is_not_known_is_refused_by_name(changes, words: str) -> None:
    with pytest.raises(ModelError, match=words):
        build_tokenizer(dataclasses.replace(BYTE_LEVEL, **changes))
