"""Pieces of text together are the whole text, and no piece ends inside a character."""

from __future__ import annotations

import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import decoders, normalizers
from tokenizers.models import BPE

from moonpool.hub.tokenizer import Tokenizer
from support.tiny_llama import make_tokenizer

VOCAB_SIZE = 320
BYTE_LEVEL_SOURCE = make_tokenizer(VOCAB_SIZE)
BYTE_LEVEL = Tokenizer.from_json(BYTE_LEVEL_SOURCE.to_str())


def sentencepiece() -> tokenizers.Tokenizer:
    """Like Llama 2's: pieces with a low line for a space, bytes as a fallback."""
    vocab = {"<unk>": 0, "<s>": 1, "</s>": 2}
    for byte in range(256):
        vocab[f"<0x{byte:02X}>"] = len(vocab)
    for piece in ("▁", "a", "b", "é", "▁a", "ab", "▁▁"):
        vocab[piece] = len(vocab)
    merges = [("▁", "a"), ("a", "b"), ("▁", "▁")]
    made = tokenizers.Tokenizer(BPE(vocab, merges, unk_token="<unk>", byte_fallback=True))
    made.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    made.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(content=" ", left=1, right=0),
        ]
    )
    made.add_special_tokens(["<unk>", "<s>", "</s>"])
    return made


SENTENCEPIECE = Tokenizer.from_json(sentencepiece().to_str())


def pieces(tokenizer: Tokenizer, ids: list[int]) -> list[str]:
    detokenizer = tokenizer.detokenizer()
    return [*map(detokenizer.push, ids), detokenizer.finish()]


@given(st.text(max_size=40))
def test_a_text_comes_back(text: str) -> None:
    for tokenizer in (BYTE_LEVEL, SENTENCEPIECE):
        found = pieces(tokenizer, tokenizer.encode(text))
        assert "".join(found) == text
        assert found[-1] == ""
        assert "�" in text or not any("�" in piece for piece in found)


@given(st.lists(st.integers(0, VOCAB_SIZE - 1), max_size=40))
def test_any_ids_give_what_the_library_gives(ids: list[int]) -> None:
    assert "".join(pieces(BYTE_LEVEL, ids)) == BYTE_LEVEL_SOURCE.decode(ids)


def test_a_character_waits_for_its_last_byte() -> None:
    ids = BYTE_LEVEL.encode("a🌙b")
    assert pieces(BYTE_LEVEL, ids) == ["a", "", "", "", "🌙", "b", ""]
    assert pieces(BYTE_LEVEL, ids[:3]) == ["a", "", "", "�"]


def test_special_and_unknown_ids_have_no_text() -> None:
    assert BYTE_LEVEL.decode([2, 10_000, *BYTE_LEVEL.encode("x"), 1]) == "x"
    assert BYTE_LEVEL.decode([2], skip_special_tokens=False) == "<|im_end|>"


def test_only_the_answers_first_space_is_dropped() -> None:
    ids = SENTENCEPIECE.encode("  a a")
    assert "".join(pieces(SENTENCEPIECE, ids)) == "  a a"
    assert SENTENCEPIECE.decode([1, *ids]) == "  a a"


def test_an_answer_that_goes_on_with_a_text_keeps_its_first_space() -> None:
    prompt, word = SENTENCEPIECE.encode("b"), SENTENCEPIECE.encode("a")
    after_text = SENTENCEPIECE.detokenizer(after=[1, *prompt])
    assert after_text.push(word[0]) == " a"
    # Nothing but the token that begins every prompt: the answer is where the text begins.
    assert SENTENCEPIECE.detokenizer(after=[1]).push(word[0]) == "a"


@given(st.text(max_size=20), st.text(max_size=20))
def test_a_prompt_and_its_answer_join(prompt: str, answer: str) -> None:
    for tokenizer in (BYTE_LEVEL, SENTENCEPIECE):
        after = tokenizer.encode(prompt)
        ids = tokenizer.encode(prompt + answer)
        if ids[: len(after)] == after:
            detokenizer = tokenizer.detokenizer(after=after)
            found = "".join(map(detokenizer.push, ids[len(after) :])) + detokenizer.finish()
            assert found == answer
