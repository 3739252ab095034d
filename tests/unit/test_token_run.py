"""Runs of tokens that are joined keep every position and the last word."""

from __future__ import annotations

import pytest

from moonpool.inference.output import FinishReason, TokenRun


def test_runs_join_where_one_ends_and_the_next_begins() -> None:
    first = TokenRun(first_position=3, token_ids=(7, 8), choice=1)
    last = TokenRun(first_position=5, token_ids=(9,), choice=1, finish_reason=FinishReason.LENGTH)
    assert first.joined(last) == TokenRun(
        first_position=3, token_ids=(7, 8, 9), choice=1, finish_reason=FinishReason.LENGTH
    )


@pytest.mark.parametrize(
    "later",
    [
        TokenRun(first_position=4, token_ids=(9,)),
        TokenRun(first_position=6, token_ids=(9,)),
        TokenRun(first_position=5, token_ids=(9,), choice=1),
    ],
)
def test_a_gap_an_overlap_and_another_choice_do_not_join(later: TokenRun) -> None:
    with pytest.raises(AssertionError):
        TokenRun(first_position=3, token_ids=(7, 8)).joined(later)
    ended = TokenRun(first_position=3, token_ids=(7, 8), finish_reason=FinishReason.STOP)
    with pytest.raises(AssertionError):
        ended.joined(TokenRun(first_position=5, token_ids=(9,)))
