"""Tokenizer: text to token ids, and who may write special tokens.

Special tokens (<|im_end|> and the like) end turns and answers. Only the chat template may write them;
the same characters in a user's text are text. So there are two ways in:

    encode(text)            a user's text: never a special token, except those the tokenizer itself
                            puts in front (BOS) if asked
    encode_rendered(chat)   a rendered chat template (chat_template.py): template text may contain
                            special tokens, user text may not

How encode_rendered keeps them apart: the renderer breaks every special token that it finds in user
text by putting a guard character inside, which is a Unicode noncharacter that occurs nowhere in that
text. Special tokens that are still whole come from the template. Text between them is freed of the
guard and encoded as plain text. A chat without special tokens in user text has no guard and is
encoded in one call, exactly as a plain rendering would be.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import tokenizers

from moonpool.errors import ModelError
from moonpool.hub.detokenizer import Detokenizer, TokenBytes, token_bytes_of


@dataclass(frozen=True, slots=True, kw_only=True)
class RenderedChat:
    """A chat as one text."""

    text: str
    #: The character that breaks special tokens in user text; empty if there were none.
    guard: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class _SpecialToken:
    token_id: int
    is_left_stripped: bool
    is_right_stripped: bool


class Tokenizer:
    """A model's tokenizer. Thread-safe; encoding releases the GIL."""

    def __init__(self, template: tokenizers.Tokenizer, plain: tokenizers.Tokenizer) -> None:
        """Two copies of one tokenizer, of which `plain` treats special tokens as text."""
        template.no_padding()
        template.no_truncation()
        plain.no_padding()
        plain.no_truncation()
        template.encode_special_tokens = False
        plain.encode_special_tokens = True
        self._template = template
        self._plain = plain
        self._special_tokens = {
            added.content: _SpecialToken(
                token_id=token_id,
                is_left_stripped=added.lstrip,
                is_right_stripped=added.rstrip,
            )
            for token_id, added in template.get_added_tokens_decoder().items()
            if added.special
        }
        longest_first = sorted(self._special_tokens, key=len, reverse=True)
        self._special_pattern = re.compile("|".join(map(re.escape, longest_first)) or r"(?!)")
        self._token_bytes: TokenBytes = token_bytes_of(template)
        #: Of the longest token.
        self.max_token_bytes = max(
            (len(data or b"") for data in self._token_bytes.by_id), default=0
        )

    @classmethod
    def load(cls, directory: Path) -> Tokenizer:
        """Reads tokenizer.json of a model's directory; ModelError if it is missing or not understood."""
        path = directory / "tokenizer.json"
        try:
            text = path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ModelError(f"{path} cannot be read: {error}") from error
        return cls.from_json(text, name=str(path))

    @classmethod
    def from_json(cls, text: str, *, name: str = "tokenizer.json") -> Tokenizer:
        """From the `tokenizers` library's JSON form."""
        try:
            template, plain = (tokenizers.Tokenizer.from_str(text) for _ in range(2))
        except Exception as error:
            raise ModelError(f"{name} is not a tokenizer: {error}") from error
        return cls(template, plain)

    @property
    def vocab_size(self) -> int:
        """One more than the highest token id."""
        return len(self._token_bytes.by_id)

    @property
    def special_tokens(self) -> tuple[str, ...]:
        return tuple(self._special_tokens)

    def encode(self, text: str, *, add_special_tokens: bool = False) -> list[int]:
        """A user's text. `add_special_tokens` puts BOS in front if this model wants one."""
        ids: list[int] = self._plain.encode(text, add_special_tokens=add_special_tokens).ids
        return ids

    def encode_rendered(self, chat: RenderedChat) -> list[int]:
        """A rendered chat; the template has written BOS if the model wants one."""
        if not chat.guard:
            ids: list[int] = self._template.encode(chat.text, add_special_tokens=False).ids
            return ids
        return self._encode_guarded(chat)

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool = True) -> str:
        """All of an answer at once; the same text as a Detokenizer's pieces together."""
        detokenizer = self.detokenizer(skip_special_tokens=skip_special_tokens)
        return "".join(map(detokenizer.push, token_ids)) + detokenizer.finish()

    def detokenizer(
        self, *, after: Sequence[int] = (), skip_special_tokens: bool = True
    ) -> Detokenizer:
        """For one answer, from its first token on. `after`: the tokens of the text that it goes on with."""
        return Detokenizer(self._token_bytes, after=after, skip_special_tokens=skip_special_tokens)

    def _encode_guarded(self, chat: RenderedChat) -> list[int]:
        ids: list[int] = []
        begin = 0
        strip_next = False
        for match in self._special_pattern.finditer(chat.text):
            special = self._special_tokens[match.group()]
            piece = chat.text[begin : match.start()]
            ids += self._encode_piece(piece, chat.guard, strip_next, special.is_left_stripped)
            ids.append(special.token_id)
            begin, strip_next = match.end(), special.is_right_stripped
        ids += self._encode_piece(chat.text[begin:], chat.guard, strip_next, False)
        return ids

    def _encode_piece(
        self, piece: str, guard: str, is_left_stripped: bool, is_right_stripped: bool
    ) -> list[int]:
        if is_left_stripped:
            piece = piece.lstrip()
        if is_right_stripped:
            piece = piece.rstrip()
        return self.encode(piece.replace(guard, "")) if piece else []
