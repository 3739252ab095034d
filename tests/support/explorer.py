"""Exhaustive exploration of a finite world, and random walks through one that is too large.

A world gives its initial state, the moves of a state, and what is wrong with a state. States are
hashable values; two that behave alike should be equal, or the exploration does not end.

`explore` visits every reachable state once. A finding comes with the shortest way to it, since the
visit is breadth-first. That every run ends is shown by two facts together: a state without moves is
right (`problems`), and the graph of moves has no cycle (`has_cycle`).
"""

from __future__ import annotations

import gc
import random
from collections.abc import Hashable, Iterable
from dataclasses import dataclass, field
from typing import Protocol

State = Hashable


class World(Protocol):
    """What is explored."""

    def initial(self) -> State: ...

    def moves(self, state: State) -> list[tuple[Hashable, State]]:
        """Every next state, each with a label for the way there; raises BrokenRuleError on a broken rule."""
        ...

    def describe(self, label: Hashable) -> str:
        """A label in words."""
        ...

    def problems(self, state: State, *, is_final: bool) -> Iterable[str]:
        """What is wrong with a state; `is_final`: it has no moves."""
        ...


class BrokenRuleError(AssertionError):
    """A move broke a rule: an invariant of a machine, or what a client may see."""


@dataclass
class Report:
    """What an exploration found."""

    num_states: int = 0
    num_moves: int = 0
    num_final_states: int = 0
    #: Problem to the shortest way to the first state that has it.
    problems: dict[str, list[str]] = field(default_factory=dict)
    #: False if the limit was reached first.
    is_complete: bool = True
    has_cycle: bool = False

    def __str__(self) -> str:
        found = sorted(self.problems) or "none"
        more = "" if self.is_complete else ", INCOMPLETE"
        cycle = ", CYCLE" if self.has_cycle else ""
        return (
            f"{self.num_states} states, {self.num_moves} moves, {self.num_final_states} final"
            f"{cycle}{more}; problems: {found}"
        )


def explore(
    world: World, *, max_states: int = 10_000_000, stop_at_first: bool = False, cycles: bool = True
) -> Report:
    """Visit every state. `stop_at_first` ends at the first problem: enough to show that one is found."""
    # Millions of small tuples live to the end: nothing for the collector to find.
    gc.disable()
    try:
        return _explore(world, max_states, stop_at_first, cycles)
    finally:
        gc.enable()


def _explore(world: World, max_states: int, stop_at_first: bool, cycles: bool) -> Report:
    report = Report()
    initial = world.initial()
    number: dict[State, int] = {initial: 0}
    states: list[State] = [initial]
    came_from: list[tuple[int, Hashable]] = [(-1, "")]
    successors: list[list[int]] = []

    def found(problem: str, index: int) -> None:
        if problem not in report.problems:
            way: list[str] = []
            while index > 0:
                index, label = came_from[index]
                way.append(world.describe(label))
            report.problems[problem] = way[::-1]

    index = 0
    while index < len(states):
        state = states[index]
        try:
            moves = world.moves(state)
        except BrokenRuleError as violation:
            found(str(violation).split("\n")[0], index)
            successors.append([])
            index += 1
            if stop_at_first:
                break
            continue
        report.num_moves += len(moves)
        report.num_final_states += not moves
        for problem in world.problems(state, is_final=not moves):
            found(problem, index)
        if report.problems and stop_at_first:
            break
        after: list[int] = []
        for label, next_state in moves:
            known = number.get(next_state)
            if known is None:
                known = number[next_state] = len(states)
                states.append(next_state)
                came_from.append((index, label))
            after.append(known)
        if cycles:
            successors.append(after)
        index += 1
        if len(states) > max_states:
            report.is_complete = False
            break
    report.num_states = len(states)
    if cycles and report.is_complete and not stop_at_first:
        report.has_cycle = _has_cycle(successors)
    return report


def _has_cycle(successors: list[list[int]]) -> bool:
    """Kahn: take away states that nothing leads to until none is left, or only cycles are."""
    num_before = [0] * len(successors)
    for after in successors:
        for index in after:
            num_before[index] += 1
    ready = [index for index, num in enumerate(num_before) if num == 0]
    num_taken = 0
    while ready:
        num_taken += 1
        for index in successors[ready.pop()]:
            num_before[index] -= 1
            if num_before[index] == 0:
                ready.append(index)
    return num_taken < len(successors)


def walk(world: World, seed: int, *, max_moves: int = 10_000) -> Report:
    """One random run to its end."""
    rng = random.Random(seed)
    report = Report()
    state = world.initial()
    way: list[str] = []
    for _ in range(max_moves):
        report.num_states += 1
        try:
            moves = world.moves(state)
        except BrokenRuleError as violation:
            report.problems[str(violation).split("\n")[0]] = way
            return report
        for problem in world.problems(state, is_final=not moves):
            report.problems[problem] = list(way)
        if not moves or report.problems:
            report.num_final_states += not moves
            return report
        report.num_moves += 1
        label, state = rng.choice(moves)
        way.append(world.describe(label))
    report.is_complete = False
    report.problems["the run does not end"] = way[-50:]
    return report
