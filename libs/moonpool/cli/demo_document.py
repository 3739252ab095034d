"""Texts of an exact number of tokens: long documents to ask about, and short questions."""

from __future__ import annotations

import itertools

from moonpool.cli.demo_text import TURNS
from moonpool.errors import InternalError
from moonpool.hub.tokenizer import Tokenizer

#: What fills up a text: the first that does not make it too long.
_FILLERS = (" and so on", " and", " a", "7", ".")


def make_document(tokenizer: Tokenizer, number: int, *, num_tokens: int) -> str:
    """A document of exactly `num_tokens`. Those of two numbers differ from their first words on.

    Raises:
        InternalError: This tokenizer does not allow that.
    """
    text = f"{number}. book of the sea.\n"
    for page in itertools.count(1):
        if len(tokenizer.encode(text, add_special_tokens=True)) >= num_tokens:
            break
        question, answer = TURNS[page % len(TURNS)]
        text += f"\nPage {page}. {question} {answer}\n"
    token_ids = tokenizer.encode(text)
    return _filled(tokenizer, tokenizer.decode(token_ids[: num_tokens - 16]), num_tokens)


def make_prompt(tokenizer: Tokenizer, document: str, number: int, *, num_tokens: int) -> str:
    """The document and a question about it, `num_tokens` in all. Two numbers are two questions.

    Raises:
        InternalError: This tokenizer does not allow that.
    """
    question, _ = TURNS[number % len(TURNS)]
    return _filled(tokenizer, f"{document}\n\nQuestion {number}: {question}", num_tokens)


def _filled(tokenizer: Tokenizer, text: str, num_tokens: int) -> str:
    while missing := num_tokens - (length := _length(tokenizer, text)):
        for filler in _FILLERS:
            if length < _length(tokenizer, text + filler) <= num_tokens:
                text += filler
                break
        else:
            raise InternalError(f"{missing} tokens are missing from a text of {num_tokens}.")
    return text


def _length(tokenizer: Tokenizer, text: str) -> int:
    """As the router counts a text prompt."""
    return len(tokenizer.encode(text, add_special_tokens=True))
