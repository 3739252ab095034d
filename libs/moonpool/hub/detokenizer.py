"""Detokenizer: token ids to text, one token at a time, never half a character.

Every token stands for bytes. They are put through an incremental UTF-8 decoder: what is complete
leaves at once, the bytes of an unfinished character wait for the next token. Work per token is that
of its own bytes, whatever came before.

Two ways in which a tokenizer.json says what a token's bytes are:

    byte level       each letter of the token is one byte, by GPT-2's table (GPT-2, Llama 3, SmolLM2)
    sentencepiece    "▁" is a space, "<0xE2>" is a byte, and the answer's first space is dropped
                     where the decoder says so (Llama 2), unless it goes on with a text

Bytes that are not UTF-8 become U+FFFD, as in every other decoder.
"""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import tokenizers

from moonpool.errors import ModelError

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenBytes:
    """What each token id stands for."""

    #: None for an id that no token has.
    by_id: tuple[bytes | None, ...]
    special_ids: frozenset[int]
    #: Drop one space at the start of a text.
    is_first_space_dropped: bool


class Detokenizer:
    """For one answer. Ids outside the vocabulary have no text."""

    __slots__ = ("_decoder", "_drop_space", "_skip_special_tokens", "_tokens")

    def __init__(
        self, tokens: TokenBytes, *, after: Sequence[int] = (), skip_special_tokens: bool = True
    ) -> None:
        """`after`: the tokens of the text that the answer goes on with."""
        self._tokens = tokens
        self._skip_special_tokens = skip_special_tokens
        self._drop_space = tokens.is_first_space_dropped and not any(map(self._bytes_of, after))
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, token_id: int) -> str:
        """Text that is complete with this token; may be empty."""
        data = self._bytes_of(token_id)
        if not data:
            return ""
        if self._drop_space:
            self._drop_space = False
            data = data.removeprefix(b" ")
        return self._decoder.decode(data)

    def finish(self) -> str:
        """U+FFFD for a character that stayed incomplete, else nothing. Called once, at the end."""
        return self._decoder.decode(b"", final=True)

    def _bytes_of(self, token_id: int) -> bytes | None:
        if not 0 <= token_id < len(self._tokens.by_id):
            return None
        if self._skip_special_tokens and token_id in self._tokens.special_ids:
            return None
        return self._tokens.by_id[token_id]


def token_bytes_of(tokenizer: tokenizers.Tokenizer) -> TokenBytes:
    """The table for a tokenizer; ModelError if its decoder is of neither kind."""
    kind = _decoder_kind(tokenizer)
    added = tokenizer.get_added_tokens_decoder()
    vocab = tokenizer.get_vocab(with_added_tokens=True)
    by_id: list[bytes | None] = [None] * (max(vocab.values(), default=-1) + 1)
    for text, token_id in vocab.items():
        if token_id in added:
            by_id[token_id] = text.encode()
        elif kind == "byte_level":
            by_id[token_id] = _byte_level_bytes(text)
        else:
            by_id[token_id] = _sentencepiece_bytes(text)
    return TokenBytes(
        by_id=tuple(by_id),
        special_ids=frozenset(token_id for token_id, token in added.items() if token.special),
        is_first_space_dropped=kind == "sentencepiece_stripped",
    )


def _decoder_kind(tokenizer: tokenizers.Tokenizer) -> str:
    decoder: dict[str, Any] = json.loads(tokenizer.to_str()).get("decoder") or {}  # Any: JSON
    parts = decoder.get("decoders", [decoder])
    names = [part.get("type") for part in parts]
    if names == ["ByteLevel"]:
        return "byte_level"
    if names[:3] == ["Replace", "ByteFallback", "Fuse"] and names[3:] in ([], ["Strip"]):
        return "sentencepiece_stripped" if names[3:] else "sentencepiece"
    raise ModelError(
        f"tokenizer.json: decoder {names} is not supported; supported: ByteLevel, and "
        "Replace + ByteFallback + Fuse with or without Strip"
    )


def _byte_by_letter() -> dict[str, int]:
    """GPT-2's bytes_to_unicode, inverted: printable Latin-1 is itself, the rest from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    table = {chr(byte): byte for byte in printable}
    others = [byte for byte in range(256) if byte not in set(printable)]
    return table | {chr(0x100 + index): byte for index, byte in enumerate(others)}


_BYTE_BY_LETTER = _byte_by_letter()


def _byte_level_bytes(text: str) -> bytes:
    try:
        return bytes(_BYTE_BY_LETTER[letter] for letter in text)
    except KeyError:
        # Not made of byte letters: a token that was put into the vocabulary as it is.
        return text.encode()


def _sentencepiece_bytes(text: str) -> bytes:
    if match := _BYTE_TOKEN.fullmatch(text):
        return bytes.fromhex(match.group(1))
    return text.replace("▁", " ").encode()
