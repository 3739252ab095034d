"""The explorations of the handoff protocol, by name. Run all of them: `python -m support.explore` in tests/.

`CASES` marked `is_quick` run in CI; all together take a few minutes on one core. Every case ends
without a problem, without a cycle, and with the ways to end that are named; every mutation of
`MUTANTS` ends with a problem, which shows that the exploration would notice.
"""

from __future__ import annotations

import sys
import time
from dataclasses import dataclass, replace
from typing import Any

from moonpool.core.config import CoreConfig
from moonpool.handoff.effects import FetchOutcome
from moonpool.inference.request import InferenceRequest
from moonpool.routing.worker_view import WorkerRole
from support.explorer import Report, explore, walk
from support.honest_core import HonestConfig
from support.protocol_world import ProtocolWorld, WorldConfig
from support.requests import make_request

ALL_FAULTS = frozenset({"crash", "cut_router", "cut_handoff", "bad_leaf"})
FINISHES = frozenset({"length"})
#: `server_overloaded`: the last allowed placement was refused; `worker_lost`: three failures.
GIVES_UP = frozenset({"server_overloaded", "worker_lost"})
OLDEST = frozenset({"r1"})
BOTH = (WorkerRole.BOTH, WorkerRole.BOTH)


#: Random runs of each world in WALKS, in the full exploration.
NUM_WALKS = 10_000


@dataclass(frozen=True, kw_only=True)
class Case:
    name: str
    config: WorldConfig
    #: All ways in which requests may end.
    ends: frozenset[str] = FINISHES
    is_quick: bool = True
    #: All ways in which fetches end; at least these are to occur.
    fetches: frozenset[FetchOutcome] = frozenset()


def one(max_tokens: int) -> tuple[InferenceRequest, ...]:
    return (make_request("r1", prompt=3, max_tokens=max_tokens, arrival=1.0),)


def two(max_tokens: int) -> tuple[InferenceRequest, ...]:
    """r1 is the older."""
    return (*one(max_tokens), make_request("r2", prompt=3, max_tokens=max_tokens, arrival=2.0))


SMALL = HonestConfig(num_blocks=4)
REFUSING = HonestConfig(num_blocks=4, refuses_at_will=True)
REPAIRING = HonestConfig(num_blocks=4, repairs=True, fails_prefills=True)
#: Two blocks, two chunks, two layers: reads overlap with computing.
LAYERED = HonestConfig(num_blocks=4, block_size=2, chunk_tokens=2, num_layers=2, has_page=True)


def product_core(num_blocks: int) -> CoreConfig:
    """A request of 3 + 2 tokens needs one block."""
    return CoreConfig(
        num_blocks=num_blocks,
        block_size=4,
        max_num_batched_tokens=8,
        max_num_seqs=2,
        max_model_len=8,
        local_prefill_tokens=0,
        headroom_tokens=0,
    )


def fetching(
    *,
    num_requests: int = 1,
    num_blocks: int = 4,
    has_one_prefix: bool = True,
    must_finish: frozenset[str] | None = None,
    **config: Any,
) -> WorldConfig:
    """Worker 0 computes, worker 1 holds two blocks of the last prompt; perhaps of the others, too."""
    requests = tuple(
        make_request(
            f"r{n}",
            prompt=[*([9] * 8 if has_one_prefix else [n] * 8), n],
            max_tokens=1,
            arrival=float(n),
        )
        for n in range(1, num_requests + 1)
    )
    core = CoreConfig(
        num_blocks=num_blocks,
        block_size=4,
        max_num_batched_tokens=16,
        max_num_seqs=2,
        max_model_len=16,
        local_prefill_tokens=0,
        headroom_tokens=0,
    )
    if must_finish is None:
        must_finish = frozenset(request.request_id for request in requests)
    defaults = {
        "max_attempts": 2,
        "num_peer_tokens": 8,
        "warm": frozenset({1}),
        "must_finish": must_finish,
    }
    if "roles" not in config:
        # Worker 1 is no decode worker, and none is asked for a prefill.
        defaults["roles"] = (WorkerRole.DECODE, WorkerRole.PREFILL)
        defaults["threshold_tokens"] = 1_000_000
    return WorldConfig(requests=requests, core=core, **{**defaults, **config})


_FETCHED = frozenset({FetchOutcome.WHOLE})
_CUT_SHORT = frozenset({FetchOutcome.LOST, FetchOutcome.CANCELLED})

CASES = (
    Case(
        name="a fetch from a peer, no fault",
        config=fetching(has_block_ids=True),
        fetches=_FETCHED,
    ),
    Case(
        name="a fetch from a peer that holds nothing",
        config=fetching(warm=frozenset()),
        fetches=frozenset({FetchOutcome.ABSENT}),
    ),
    Case(
        name="a fetch from a peer, every fault, cancel",
        config=fetching(num_faults=1, num_cancels=1, fault_kinds=ALL_FAULTS, has_block_ids=True),
        ends=FINISHES | {"cancelled"},
        # Refused: the peer has begun another life.
        fetches=_FETCHED | _CUT_SHORT | {FetchOutcome.DAMAGED, FetchOutcome.REFUSED},
    ),
    Case(
        name="a fetch from a peer, two faults, timers at any time, cancel",
        config=fetching(
            num_faults=2,
            num_cancels=1,
            num_early_ticks=1,
            must_finish=frozenset(),
            fault_kinds=ALL_FAULTS,
            has_block_ids=True,
        ),
        # Poison: both faults may be the loss of the worker that computes.
        ends=FINISHES | GIVES_UP | {"cancelled", "poison_request"},
        is_quick=False,
        # Absent: the peer was asked in its next life.
        fetches=frozenset(FetchOutcome) - {FetchOutcome.RECOMPUTE, FetchOutcome.SHORT},
    ),
    Case(
        name="a fetch from a peer, timers at any time, cancel",
        config=fetching(num_early_ticks=1, num_cancels=1, has_block_ids=True),
        ends=FINISHES | {"cancelled"},
        # Refused: the peer's core does not answer in time.
        fetches=_FETCHED | {FetchOutcome.SLOW, FetchOutcome.CANCELLED, FetchOutcome.REFUSED},
    ),
    Case(
        name="two fetches of one prefix, pools of one request, in any order",
        config=fetching(
            num_requests=2, num_blocks=3, must_finish=OLDEST, reorders=frozenset({"R"})
        ),
        ends=FINISHES | GIVES_UP,
        fetches=_FETCHED,
    ),
    Case(
        name="a fetch that is revoked for an older request, cancel",
        config=fetching(
            num_requests=2,
            num_blocks=3,
            has_one_prefix=False,
            must_finish=OLDEST,
            reorders=frozenset({"R"}),
            num_cancels=1,
            has_block_ids=True,
        ),
        ends=FINISHES | GIVES_UP | {"cancelled"},
        fetches=_FETCHED | {FetchOutcome.ABSENT, FetchOutcome.CANCELLED},
    ),
    Case(
        name="two fetches of one prefix, any order, crash, cancel",
        config=fetching(
            num_requests=2,
            must_finish=frozenset(),
            reorders=frozenset({"R"}),
            num_faults=1,
            num_cancels=1,
        ),
        ends=FINISHES | GIVES_UP | {"cancelled"},
        is_quick=False,
        fetches=_FETCHED | _CUT_SHORT | {FetchOutcome.REFUSED},
    ),
    Case(
        name="a prefill fetches from the decode worker that reads from it",
        config=fetching(roles=(WorkerRole.PREFILL, WorkerRole.DECODE)),
        fetches=_FETCHED,
    ),
    Case(
        name="a prefill fetches from the decode worker that reads from it, crash, cancel",
        config=fetching(
            roles=(WorkerRole.PREFILL, WorkerRole.DECODE),
            must_finish=frozenset(),
            num_faults=1,
            num_cancels=1,
        ),
        ends=FINISHES | GIVES_UP | {"cancelled"},
        is_quick=False,
        fetches=_FETCHED | _CUT_SHORT | {FetchOutcome.REFUSED, FetchOutcome.ABSENT},
    ),
    Case(
        name="one request, no fault",
        config=WorldConfig(requests=one(3), core=SMALL, must_finish=frozenset({"r1"})),
    ),
    Case(
        name="one request, layer by layer",
        config=WorldConfig(requests=one(2), core=LAYERED, must_finish=frozenset({"r1"})),
    ),
    Case(
        name="one request, layer by layer, cancel",
        config=WorldConfig(requests=one(2), core=LAYERED, max_attempts=2, num_cancels=1),
        ends=FINISHES | {"cancelled"},
    ),
    Case(
        name="one request, refusals, crash, cancel, 2 tokens, 2 attempts",
        config=WorldConfig(
            requests=one(2), core=REFUSING, max_attempts=2, num_faults=1, num_cancels=1
        ),
        ends=FINISHES | GIVES_UP | {"cancelled"},
    ),
    Case(
        name="one request, refusals, crash, cancel, 3 tokens, 3 attempts",
        config=WorldConfig(
            requests=one(3), core=REFUSING, max_attempts=3, num_faults=1, num_cancels=1
        ),
        ends=FINISHES | GIVES_UP | {"cancelled"},
        is_quick=False,
    ),
    Case(
        name="one request, every fault, cancel",
        config=WorldConfig(
            requests=one(2),
            core=SMALL,
            max_attempts=2,
            num_faults=1,
            num_cancels=1,
            fault_kinds=ALL_FAULTS,
        ),
        ends=FINISHES | GIVES_UP | {"cancelled"},
    ),
    Case(
        name="one request, every fault, cancel, failing prefills and repairs",
        config=WorldConfig(
            requests=one(2),
            core=REPAIRING,
            max_attempts=2,
            num_faults=1,
            num_cancels=1,
            fault_kinds=ALL_FAULTS,
        ),
        ends=FINISHES | GIVES_UP | {"cancelled"},
        is_quick=False,
    ),
    Case(
        name="one request, two faults",
        config=WorldConfig(
            requests=one(2), core=SMALL, max_attempts=3, num_faults=2, fault_kinds=ALL_FAULTS
        ),
        ends=FINISHES | GIVES_UP | {"poison_request"},
        is_quick=False,
    ),
    Case(
        name="one request, layer by layer, every fault",
        config=WorldConfig(
            requests=one(2), core=LAYERED, max_attempts=2, num_faults=1, fault_kinds=ALL_FAULTS
        ),
        ends=FINISHES | GIVES_UP,
        is_quick=False,
    ),
    Case(
        name="one request, timers at any time, every fault",
        config=WorldConfig(
            requests=one(2),
            core=SMALL,
            max_attempts=2,
            num_faults=1,
            num_early_ticks=1,
            fault_kinds=ALL_FAULTS,
        ),
        ends=FINISHES | GIVES_UP,
        is_quick=False,
    ),
    Case(
        name="one request, messages overtake each other and come twice",
        config=WorldConfig(
            requests=one(2),
            core=SMALL,
            max_attempts=2,
            num_faults=1,
            fault_kinds=frozenset({"duplicate"}),
            reorders=frozenset({"R", "S", "A"}),
        ),
        ends=FINISHES | GIVES_UP,
    ),
    Case(
        name="one request, messages overtake each other and come twice, cuts, cancel",
        config=WorldConfig(
            requests=one(2),
            core=SMALL,
            max_attempts=2,
            num_faults=1,
            num_cancels=1,
            fault_kinds=frozenset({"duplicate", "cut_router"}),
            reorders=frozenset({"R", "S", "A"}),
        ),
        ends=FINISHES | GIVES_UP | {"cancelled"},
        is_quick=False,
    ),
    Case(
        name="two requests crossing, pools of one request",
        config=WorldConfig(
            requests=two(2),
            roles=BOTH,
            core=HonestConfig(num_blocks=1),
            max_attempts=2,
            must_finish=frozenset({"r1"}),
        ),
        ends=FINISHES | GIVES_UP,
        # Quick is the same world with the product's core.
        is_quick=False,
    ),
    Case(
        name="two requests crossing, pools of two requests",
        config=WorldConfig(
            requests=two(2),
            roles=BOTH,
            core=HonestConfig(num_blocks=2),
            max_attempts=2,
            must_finish=frozenset({"r1", "r2"}),
        ),
    ),
    Case(
        name="two requests crossing, the product's core, pools of one request",
        config=WorldConfig(
            requests=two(2),
            roles=BOTH,
            core=product_core(1),
            max_attempts=2,
            must_finish=frozenset({"r1"}),
        ),
        ends=FINISHES | GIVES_UP,
    ),
    Case(
        name="two requests crossing, the product's core, pools of two requests",
        config=WorldConfig(
            requests=two(2),
            roles=BOTH,
            core=product_core(2),
            max_attempts=2,
            must_finish=frozenset({"r1", "r2"}),
        ),
    ),
    Case(
        name="one request, the product's core, every fault, cancel",
        config=WorldConfig(
            requests=one(2),
            core=product_core(4),
            max_attempts=2,
            num_faults=1,
            num_cancels=1,
            fault_kinds=ALL_FAULTS,
        ),
        ends=FINISHES | GIVES_UP | {"cancelled"},
    ),
    Case(
        name="two requests crossing, pools of one request, 3 attempts",
        config=WorldConfig(
            requests=two(2),
            roles=BOTH,
            core=HonestConfig(num_blocks=1),
            max_attempts=3,
            must_finish=frozenset({"r1"}),
        ),
        ends=FINISHES | GIVES_UP,
        is_quick=False,
    ),
)

#: Worlds too large to exhaust, walked through at random. Copies and early timers do not meet in one
#: world: a copy of a message that comes later than its abort is remembered (2 s) is taken for new,
#: which no stream does; the memory is for what comes on another stream.
WALKS = (
    Case(
        name="crossing with two faults and a cancel",
        config=WorldConfig(
            requests=two(3),
            roles=BOTH,
            core=HonestConfig(num_blocks=2, block_size=2, chunk_tokens=2),
            max_attempts=6,
            num_faults=2,
            num_cancels=1,
            fault_kinds=ALL_FAULTS,
        ),
        ends=FINISHES | GIVES_UP | {"cancelled", "poison_request"},
    ),
    Case(
        name="crossing with two faults and a cancel, the product's core",
        config=WorldConfig(
            requests=two(3),
            roles=BOTH,
            core=product_core(2),
            max_attempts=6,
            num_faults=2,
            num_cancels=1,
            fault_kinds=ALL_FAULTS,
        ),
        ends=FINISHES | GIVES_UP | {"cancelled", "poison_request"},
    ),
    Case(
        name="a link that cuts, duplicates, reorders and delays, layer by layer",
        config=WorldConfig(
            requests=two(4),
            roles=(WorkerRole.PREFILL, WorkerRole.DECODE),
            core=HonestConfig(
                num_blocks=8,
                block_size=2,
                chunk_tokens=2,
                num_layers=3,
                has_page=True,
                repairs=True,
                fails_prefills=True,
            ),
            layers_per_group=2,
            max_attempts=6,
            num_faults=4,
            num_cancels=1,
            fault_kinds=ALL_FAULTS | {"duplicate"},
            reorders=frozenset({"R", "S", "A"}),
        ),
        ends=FINISHES | GIVES_UP | {"cancelled", "poison_request"},
    ),
)


def _mutant(
    mutation: str,
    *,
    requests: tuple[InferenceRequest, ...] | None = None,
    roles: tuple[WorkerRole, ...] = (WorkerRole.PREFILL, WorkerRole.DECODE),
    num_blocks: int = 4,
    num_cancels: int = 0,
    must_finish: frozenset[str] = frozenset({"r1"}),
    reorders: frozenset[str] = frozenset(),
) -> Case:
    return Case(
        name=mutation,
        config=WorldConfig(
            requests=requests or one(2),
            roles=roles,
            core=HonestConfig(num_blocks=num_blocks),
            max_attempts=2,
            # Nothing breaks here: not one attempt may fail.
            max_failures=1,
            num_cancels=num_cancels,
            must_finish=must_finish,
            reorders=reorders,
            mutation=mutation,
        ),
    )


MUTANTS = (
    _mutant("no_parking"),
    _mutant("no_tombstone", num_cancels=1, reorders=frozenset({"R"})),
    _mutant("no_end_abort", num_cancels=1),
    _mutant("decode_starts_at_token_2"),
    _mutant("release_at_commit"),
    _mutant("no_read_wait", num_cancels=1),
    _mutant("younger_may_revoke", requests=two(2), roles=BOTH, num_blocks=1),
    *(
        Case(
            name=mutation,
            config=fetching(num_cancels=1, has_block_ids=True, mutation=mutation),
        )
        for mutation in (
            "fetch_ends_before_its_reads",
            "fetch_never_ends",
            "unlock_at_opened",
            "no_unlock",
        )
    ),
)

#: The same worlds without the mutation: right, so that it is the mutation that is found.
UNMUTATED = tuple(
    Case(
        name=f"without {case.name}",
        config=replace(case.config, mutation=""),
        ends=FINISHES | GIVES_UP | {"cancelled"},
    )
    for case in MUTANTS
    # These are among CASES.
    if case.config.mutation != "younger_may_revoke" and not case.config.num_peer_tokens
)


def run_case(case: Case) -> tuple[Report, frozenset[str]]:
    """Explore one case; returns the report and the ways in which requests ended.

    That no fetch ended in one of the ways that are to occur is a problem as well.
    """
    world = ProtocolWorld(case.config)
    report = explore(world, stop_at_first=bool(case.config.mutation))
    if not case.config.mutation and world.fetch_outcomes != case.fetches:
        report.problems[f"fetches end {sorted(world.fetch_outcomes)}"] = []
    return report, frozenset(world.ends)


def walk_case(case: Case, seeds: range) -> tuple[dict[str, list[str]], frozenset[str]]:
    """Random runs of one case; returns the problems found, with the seed in front, and the ends."""
    world = ProtocolWorld(case.config)
    problems: dict[str, list[str]] = {}
    for seed in seeds:
        for problem, way in walk(world, seed).problems.items():
            problems.setdefault(problem, [f"seed {seed}", *way])
    return problems, frozenset(world.ends)


def main() -> int:
    """Run everything; 1 if anything is not as it should be."""
    is_right = True
    for case in (*CASES, *UNMUTATED):
        began = time.perf_counter()
        report, ends = run_case(case)
        is_good = not report.problems and not report.has_cycle and ends <= case.ends
        is_right = is_right and is_good
        _say(is_good, case.name, f"{report}, ends {sorted(ends)}", began)
        _say_ways(report.problems)
    for case in MUTANTS:
        began = time.perf_counter()
        report, _ = run_case(case)
        is_right = is_right and bool(report.problems)
        _say(bool(report.problems), f"mutant {case.name}", str(report), began)
    for case in WALKS:
        began = time.perf_counter()
        problems, ends = walk_case(case, range(NUM_WALKS))
        is_good = not problems and ends <= case.ends
        is_right = is_right and is_good
        _say(is_good, f"{NUM_WALKS} walks, {case.name}", f"ends {sorted(ends)}", began)
        _say_ways(problems)
    return 0 if is_right else 1


def _say(is_good: bool, name: str, what: str, began: float) -> None:
    seconds = time.perf_counter() - began
    sys.stdout.write(f"{'ok ' if is_good else 'BAD'} {name}: {what}, {seconds:.1f} s\n")
    sys.stdout.flush()


def _say_ways(problems: dict[str, list[str]]) -> None:
    for problem, way in problems.items():
        sys.stdout.write("\n        ".join([f"    {problem}", *way]) + "\n")


if __name__ == "__main__":
    sys.exit(main())
