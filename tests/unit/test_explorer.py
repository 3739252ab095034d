"""The explorer itself, on worlds that fit on a line."""

from __future__ import annotations

from collections.abc import Hashable, Iterable

from support.explorer import BrokenRuleError, explore, walk


class Line:
    """Numbers from 0 to `end`; one may add 1 or 2, and with `back` go from `back` to 0."""

    def __init__(self, end: int, *, bad: int = -1, back: int = -1, breaks: int = -1) -> None:
        self._end, self._bad, self._back, self._breaks = end, bad, back, breaks

    def initial(self) -> Hashable:
        return 0

    def moves(self, state: Hashable) -> list[tuple[Hashable, Hashable]]:
        assert isinstance(state, int)
        if state == self._breaks:
            raise BrokenRuleError("broken")
        moves = [(step, state + step) for step in (1, 2) if state + step <= self._end]
        return [*moves, ("back", 0)] if state == self._back else moves  # type: ignore[list-item]

    def describe(self, label: Hashable) -> str:
        return f"+{label}"

    def problems(self, state: Hashable, *, is_final: bool) -> Iterable[str]:
        if state == self._bad:
            yield "bad"


def test_every_state_is_visited_once() -> None:
    report = explore(Line(10))
    assert (report.num_states, report.num_moves, report.num_final_states) == (11, 19, 1)
    assert report.problems == {}
    assert not report.has_cycle


def test_a_problem_comes_with_the_shortest_way() -> None:
    assert explore(Line(10, bad=5)).problems == {"bad": ["+1", "+2", "+2"]}


def test_a_broken_rule_is_a_problem() -> None:
    assert explore(Line(10, breaks=2)).problems == {"broken": ["+2"]}


def test_a_run_that_may_not_end_is_a_cycle() -> None:
    assert explore(Line(10, back=7)).has_cycle


def test_a_limit_is_reported() -> None:
    assert not explore(Line(1_000), max_states=10).is_complete


def test_a_walk_is_repeatable() -> None:
    assert walk(Line(10), seed=1) == walk(Line(10), seed=1)
    assert walk(Line(10, bad=10), seed=1).problems.keys() == {"bad"}
