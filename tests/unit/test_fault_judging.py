"""How answers under faults are judged: what is wrong, what merely differs."""

from __future__ import annotations

import random

import pytest

from moonpool.errors import UnavailableError
from moonpool.ids import RequestId
from moonpool.inference.generation import (
    GenerationChunk,
    GenerationDone,
    PlacementSummary,
    Timing,
    Usage,
)
from moonpool.inference.output import FinishReason
from moonpool_loadtest.faults.__main__ import make_kills, row, sets_for, verdict
from moonpool_loadtest.faults.lab import (
    FamilySizes,
    FaultReport,
    LabSizes,
    make_families,
    make_sets,
)
from moonpool_loadtest.faults.scenarios import DECODE, LAST_LIVES, PREFILL, next_lives
from moonpool_loadtest.faults.workload import Case, Outcome, make_cases

CASE = Case(name="c", prompt=(1, 2), max_tokens=3)


def outcome(*token_ids: int, first_position: int = 0, num_counted: int | None = None) -> Outcome:
    result = Outcome(case=CASE)
    result.add(
        GenerationChunk(
            request_id=RequestId("r"), text="", token_ids=token_ids, first_position=first_position
        )
    )
    result.done = GenerationDone(
        request_id=RequestId("r"),
        model="m",
        finish_reason=FinishReason.LENGTH,
        usage=Usage(
            num_prompt_tokens=2,
            num_completion_tokens=len(token_ids) if num_counted is None else num_counted,
            num_cached_tokens=0,
        ),
        timing=Timing(ttft_ms=1.0),
        placement=PlacementSummary(prefill_worker="", decode_worker="d", num_attempts=1, reason=""),
    )
    return result


def test_an_equal_answer_has_no_difference() -> None:
    assert outcome(7, 8, 9).problem == ""
    assert outcome(7, 8, 9).first_difference([7, 8, 9]) is None


@pytest.mark.parametrize(
    ("got", "position"), [((7, 0, 9), 1), ((7, 8), 2), ((7, 8, 9, 9), 3), ((), 0)]
)
def test_the_first_difference_is_named(got: tuple[int, ...], position: int) -> None:
    assert outcome(*got).first_difference([7, 8, 9]) == position


def test_gaps_wrong_usage_errors_and_missing_ends_are_problems() -> None:
    assert "out of order" in outcome(7, first_position=1).problem
    assert "usage counts 2" in outcome(7, num_counted=2).problem
    failed = Outcome(case=CASE, error=UnavailableError("gone"))
    assert "gone" in failed.problem
    assert "without an end" in Outcome(case=CASE).problem


def report(*, num_requests: int, differing: int = 0, problems: int = 0) -> FaultReport:
    return FaultReport(
        fault="f",
        num_requests=num_requests,
        num_equal=num_requests - differing - problems,
        differing=("x@1",) * differing,
        problems=("p",) * problems,
        duration_s=1.0,
    )


def test_tokens_may_differ_in_bfloat16_and_not_in_float32() -> None:
    assert verdict([report(num_requests=50)], dtype="float32")[0]
    assert not verdict([report(num_requests=50, differing=1)], dtype="float32")[0]
    assert verdict([report(num_requests=4, differing=4)], dtype="bfloat16")[0]
    assert not verdict([report(num_requests=50, problems=1)], dtype="bfloat16")[0]
    assert "WRONG: p" in row(report(num_requests=4, problems=1))


def test_no_two_prompts_share_their_first_block() -> None:
    sets = make_sets(LabSizes(vocab_size=320), num_judged=30, num_for_leavers=9)
    prompts = [case.prompt[:16] for cases in (*sets.judged, *sets.for_leavers) for case in cases]
    assert len(set(prompts)) == len(prompts)
    assert len({case.name for case in sets.judged_cases}) == len(sets.judged_cases)


def test_cases_alternate_greedy_and_seeded_and_are_the_same_each_time() -> None:
    first, second = (
        make_cases(vocab_size=99, prompt_lengths=(5, 6), max_tokens=2, rng=random.Random(1))
        for _ in range(2)
    )
    assert first == second
    assert [case.seed is None for case in first] == [True, False]


def test_the_whole_run_has_fifty_requests_at_least() -> None:
    sets = sets_for(make_kills(layers=(0, 15, 29)), vocab_size=320)
    assert len(sets.judged_cases) >= 50


def test_a_family_shares_its_prefix_and_nothing_with_another() -> None:
    sizes = FamilySizes(vocab_size=320)
    sets = make_families(sizes, num_judged=5, num_for_leavers=1)
    prefixes = set()
    for family in (*sets.judged, *sets.for_leavers):
        assert len(family) == len(sizes.tails)
        (prefix,) = {case.prompt[: sizes.prefix] for case in family}
        assert len({case.prompt[sizes.prefix :] for case in family}) == len(family)
        prefixes.add(prefix[:16])
    assert len(prefixes) == 6


def test_whoever_comes_back_is_armed_for_the_kill_that_is_next_in_turn() -> None:
    kills = make_kills(layers=(0, 29))
    lives = next_lives(kills)
    assert tuple(lives) == kills
    armed = {PREFILL: kills[0].failpoints, DECODE: ""}
    for kill, next_life in lives.items():
        if kill.target == DECODE and not armed[DECODE]:
            armed[DECODE] = kill.failpoints
        assert armed[kill.target] == kill.failpoints
        armed[kill.target] = next_life
    # What is left is for the scenarios after them, and nobody dies in those.
    assert armed == {name: LAST_LIVES[name] for name in (PREFILL, DECODE)}
