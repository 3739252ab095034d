from __future__ import annotations

import pytest

from moonpool.inference.stop_text import StopMatcher, StopScan


def test_a_stop_string_across_pieces_is_cut_out() -> None:
    matcher = StopMatcher(("\nUser:",))
    assert matcher.push("Hello") == StopScan(text="Hello", is_stopped=False)
    assert matcher.push(".\nUs") == StopScan(text=".", is_stopped=False)
    assert matcher.held == "\nUs"
    assert matcher.push("er: x") == StopScan(text="", is_stopped=True)


def test_a_false_start_is_let_out() -> None:
    matcher = StopMatcher(("aab",))
    assert matcher.push("aa") == StopScan(text="", is_stopped=False)
    assert matcher.push("a") == StopScan(text="a", is_stopped=False)
    assert matcher.finish() == "aa"


def test_first_to_complete_wins_over_first_to_begin() -> None:
    assert StopMatcher(("abcd", "bc")).push("xabcd") == StopScan(text="xa", is_stopped=True)


def test_nothing_may_follow_the_end() -> None:
    matcher = StopMatcher(("x",))
    matcher.push("x")
    with pytest.raises(AssertionError):
        matcher.push("y")
