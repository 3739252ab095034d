"""Tokens to text with stop strings: however tokens come in runs, the same answer ends at the same token."""

from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import strategies as st

from moonpool.inference.answer_text import AnswerPiece, AnswerText
from moonpool.inference.output import FinishReason, TokenRun

#: Token id -> its text; 6 is half a character that shows with the token after it.
_VOCABULARY = ("a", "b", "ab", "ba", "\n", "aab")
_HALF = len(_VOCABULARY)


class Decoder:
    def __init__(self) -> None:
        self._num_half = 0

    def push(self, token_id: int) -> str:
        if token_id == _HALF:
            self._num_half += 1
            return ""
        return "h" * self.take_half() + _VOCABULARY[token_id]

    def finish(self) -> str:
        return "?" * self.take_half()

    def take_half(self) -> int:
        num_half, self._num_half = self._num_half, 0
        return num_half


def answer(
    token_ids: list[int], sizes: list[int], stop: tuple[str, ...], finish: FinishReason
) -> tuple[str, tuple[int, ...], FinishReason | None, bool]:
    edges = [min(edge, len(token_ids)) for edge in itertools.accumulate(sizes, initial=0)]
    edges.append(len(token_ids))
    text = AnswerText(Decoder(), stop)
    pieces: list[AnswerPiece] = []
    for start, end in itertools.pairwise(edges):
        pieces.append(
            text.push(
                TokenRun(
                    first_position=start,
                    token_ids=tuple(token_ids[start:end]),
                    finish_reason=finish if end == len(token_ids) else None,
                )
            )
        )
        if pieces[-1].finish_reason is not None:
            break
    assert text.num_tokens == sum(len(piece.token_ids) for piece in pieces)
    return (
        "".join(piece.text for piece in pieces),
        tuple(token for piece in pieces for token in piece.token_ids),
        pieces[-1].finish_reason,
        text.is_stopped_by_text,
    )


@given(
    token_ids=st.lists(st.integers(0, _HALF), min_size=1, max_size=20),
    sizes=st.lists(st.integers(1, 6), max_size=6),
    stop=st.lists(st.text("abh?\n", min_size=1, max_size=4), max_size=3).map(tuple),
    finish=st.sampled_from([FinishReason.LENGTH, FinishReason.STOP]),
)
def test_runs_do_not_matter(
    token_ids: list[int], sizes: list[int], stop: tuple[str, ...], finish: FinishReason
) -> None:
    whole = answer(token_ids, [1] * len(token_ids), stop, finish)
    assert answer(token_ids, sizes, stop, finish) == whole
    text, shown, reason, by_text = whole
    assert shown == tuple(token_ids[: len(shown)])
    assert reason is not None
    assert not any(s in text for s in stop)
    if not by_text:
        assert (len(shown), reason) == (len(token_ids), finish)
