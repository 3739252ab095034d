"""The handoff protocol, explored: the product's machines, every order of events in small worlds.

The full exploration (larger worlds, more walks) is one command: `python -m support.explore` in tests/.
"""

from __future__ import annotations

import pytest

from support.explore import CASES, MUTANTS, UNMUTATED, WALKS, Case, run_case, walk_case
from support.protocol_world import MUTATIONS


def _name(case: Case) -> str:
    return case.name


@pytest.mark.parametrize("case", [case for case in CASES if case.is_quick], ids=_name)
def test_every_run_ends_well(case: Case) -> None:
    report, ends = run_case(case)
    assert report.is_complete
    assert report.problems == {}
    assert not report.has_cycle
    assert ends <= case.ends


@pytest.mark.parametrize("case", MUTANTS, ids=_name)
def test_a_broken_rule_is_found(case: Case) -> None:
    report, _ = run_case(case)
    assert report.problems


@pytest.mark.parametrize("case", UNMUTATED, ids=_name)
def test_it_is_the_mutation_that_is_found(case: Case) -> None:
    report, _ = run_case(case)
    assert report.problems == {}


def test_every_mutation_is_tried() -> None:
    assert {case.config.mutation for case in MUTANTS} == MUTATIONS


@pytest.mark.parametrize("case", WALKS, ids=_name)
def test_random_runs_of_large_worlds_end_well(case: Case) -> None:
    problems, ends = walk_case(case, range(200))
    assert problems == {}
    assert ends <= case.ends
