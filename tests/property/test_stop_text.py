"""The stop matcher against the plain definition, on whole texts and every way to cut them."""

from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import strategies as st

from moonpool.inference.stop_text import StopMatcher

_TEXT = st.text(alphabet="ab\n", max_size=40)
_STOPS = st.lists(st.text(alphabet="ab\n", min_size=1, max_size=5), max_size=4).map(tuple)


def naive(text: str, stop: tuple[str, ...]) -> tuple[str, bool]:
    """Grow the text by one character at a time; the first stop string at its end cuts it."""
    for end in range(1, len(text) + 1):
        found = [s for s in stop if text[:end].endswith(s)]
        if found:
            return text[: end - max(map(len, found))], True
    return text, False


def cut(text: str, edges: list[int]) -> list[str]:
    points = sorted({min(edge, len(text)) for edge in edges} | {0, len(text)})
    return [text[a:b] for a, b in itertools.pairwise(points)]


@given(text=_TEXT, stop=_STOPS, edges=st.lists(st.integers(0, 40), max_size=8))
def test_answer_depends_on_the_text_only(
    text: str, stop: tuple[str, ...], edges: list[int]
) -> None:
    matcher = StopMatcher(stop)
    answer = ""
    is_stopped = False
    for piece in cut(text, edges):
        scan = matcher.push(piece)
        matcher.validate()
        answer += scan.text
        if scan.is_stopped:
            is_stopped = True
            break
    if not is_stopped:
        answer += matcher.finish()
    assert (answer, is_stopped) == naive(text, stop)


@given(text=_TEXT, stop=_STOPS)
def test_nothing_let_out_is_ever_taken_back(text: str, stop: tuple[str, ...]) -> None:
    expected, _ = naive(text, stop)
    matcher = StopMatcher(stop)
    answer = ""
    for character in text:
        scan = matcher.push(character)
        answer += scan.text
        assert expected.startswith(answer)
        if scan.is_stopped:
            return
        # As much as can be let out is: what is held could still become a stop string.
        assert answer + matcher.held == text[: len(answer) + len(matcher.held)]
        assert not matcher.held or any(s.startswith(matcher.held) for s in stop)
