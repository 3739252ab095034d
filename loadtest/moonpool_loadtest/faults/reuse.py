"""Faults of reuse: prefixes read from peers, the router's index, and two routers on one cluster.

Two workers that prefill and decode, with pools so small that requests push each other out. Requests come
in families with one prefix; a router that takes its workers in turn sends a family to both, so that each
reads from the other what it lacks. Each scenario leaves the cluster whole and quiet, the index of each
router at the truth, and one row in the lab's reports.
"""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from moonpool.cluster.local_cluster import ROUTER, LocalCluster
from moonpool.config.schema import ClusterConfig
from moonpool.errors import MoonpoolError, UnavailableError
from moonpool.rpc.channel import open_channel
from moonpool_loadtest.faults.lab import MIN_SILENCE_S, FaultLab, FaultReport
from moonpool_loadtest.faults.log_mark import LogMark
from moonpool_loadtest.faults.waiting import within
from moonpool_loadtest.faults.workload import Case, Client, Outcome

#: Reads by shm, if it can; dies and comes back.
LEFT = "left-0"
#: Reads by gRPC, sometimes slowly; some changes of its cache get lost on their way to routers.
RIGHT = "right-0"
OTHER_ROUTER = "router-1"

_LATE_MS = 1_500
#: What the lives of LEFT are armed with, in order.
LEFT_LIVES = (
    "hold.after_opened=kill",
    "kv.before_snapshot=kill",
    "fetch.after_read=kill",
    "fetch.read=flip@1;fetch.read=drop@2",
)
RIGHT_LIFE = ";".join(
    (
        # The first holder has time to die; a later one is merely slow.
        "fetch.read=delay:300@1",
        f"fetch.read=delay:{_LATE_MS}@3",
        # Some at first, and then, when that is looked for, every other one.
        *(f"kv.publish=drop@{number}" for number in (3, 6, 7, 11, 16, 22, *range(26, 120, 2))),
    )
)
FAILPOINTS = {LEFT: LEFT_LIVES[0], RIGHT: RIGHT_LIFE}

#: Of the families that all scenarios take together.
NUM_FAMILIES = 20
NUM_FAMILIES_FOR_LEAVERS = 2

_JOIN_S = 60.0
_INDEX_S = 15.0
#: State of a router that is gone is gone from its workers: keepalive time and timeout, 2 s and 3 s.
_FORGOTTEN_S = 5.0


def reuse_config(
    model: str, *, data_dir: Path, dtype: str, is_checked: bool = False
) -> ClusterConfig:
    """Two workers of role both with 48 blocks each; the router takes them in turn."""
    return ClusterConfig.model_validate(
        {
            "name": "reuse",
            "data_dir": data_dir,
            "model": model,
            "dtype": dtype,
            "local_prefill_tokens": 256,
            "router": {
                "http_port": 0,
                "grpc_port": 0,
                "placement": {"disagg": "threshold", "mode": "round_robin"},
            },
            "worker": {
                "num_blocks": 48,
                "max_num_batched_tokens": 64,
                # Blocks are what there is too little of.
                "max_num_seqs": 16,
                "max_queued_steps": 64,
                "max_model_len": 512,
                # What is faster does not matter here.
                "kv_peer_reads": "always",
                "is_checked": is_checked,
            },
            "workers": [
                {"role": "both", "name": "left", "transports": ["shm", "grpc"]},
                {"role": "both", "name": "right", "transports": ["grpc"]},
            ],
        }
    )


def _judge(
    lab: FaultLab, what: str, outcomes: list[Outcome], problems: list[str], started: float
) -> FaultReport:
    """The verdict on a scenario, with how much its requests reused."""
    return lab.judge(what, outcomes, problems=problems, started=started, note=_reuse_note(outcomes))


async def run_peer_reads(lab: FaultLab) -> FaultReport:
    """A holder dies as soon as it has told a reader what it holds; then while it says all it holds.

    Takes LEFT's first two lives.
    """
    left = lab.cluster.part(LEFT)
    left.arm(*LEFT_LIVES[1:])
    mark = LogMark.now(lab.cluster)
    started = asyncio.get_running_loop().time()
    led = await _lead(lab, num_families=2)
    problems = led.problems
    outcomes = led.outcomes + await _follow(lab, led, holder=LEFT)
    problems += await lab.died(LEFT, 1)
    if not mark.events(RIGHT, "kv.fetched", outcome="lost"):
        problems.append(f"no read of {RIGHT} lost its holder")
    # Its second life is asked for a snapshot as soon as it has joined, while it is given work.
    outcomes += await lab.client.ask_all(lab.take())
    problems += await lab.died(LEFT, 2)
    problems += await settle(lab)
    return _judge(
        lab,
        "kill -9 the holder of a prefix, and again in its snapshot",
        outcomes,
        problems,
        started,
    )


async def run_reader_killed(lab: FaultLab) -> FaultReport:
    """A reader dies when the first bytes of a prefix have come. Takes LEFT's third life."""
    started = asyncio.get_running_loop().time()
    led = await _lead(lab, num_families=2)
    problems = led.problems
    # What its next life does to its first reads is for the scenario after this one.
    with lab.cluster.part(LEFT).held():
        outcomes = led.outcomes + await _follow(lab, led, holder=RIGHT)
    problems += await lab.died(LEFT, 3)
    problems += await settle(lab)
    return _judge(lab, "kill -9 the reader of a prefix", outcomes, problems, started)


async def run_bad_reads(lab: FaultLab) -> FaultReport:
    """What LEFT reads comes damaged, then not at all; what RIGHT reads, late."""
    mark = LogMark.now(lab.cluster)
    started = asyncio.get_running_loop().time()
    led = await _lead(lab, num_families=4)
    problems = led.problems
    outcomes = led.outcomes
    for held in led.followers.values():
        for family in held:
            # One goes to its prefix, the other has it fetched.
            outcomes += [await lab.client.ask(case) for case in family[:2]]
    problems += await settle(lab)
    problems += [
        f"{LEFT} did not meet {event}"
        for event in ("kv.digest_mismatch", "kv.read_failed")
        if not mark.events(LEFT, event)
    ]
    if not any(read["elapsed_ms"] >= _LATE_MS for read in mark.events(RIGHT, "kv.fetched")):
        problems.append(f"{RIGHT} did not meet a read that was late")
    return _judge(lab, "prefixes damaged, lost and late on their way", outcomes, problems, started)


async def run_holder_frozen(lab: FaultLab) -> FaultReport:
    """The holder's service stops without dying, while LEFT is told to read from it."""
    started = asyncio.get_running_loop().time()
    led = await _lead(lab, num_families=2)
    problems = led.problems
    mark = LogMark.now(lab.cluster)
    process = lab.cluster.part(RIGHT).process
    assert process is not None
    process.send_signal(signal.SIGSTOP)
    try:
        outcomes = led.outcomes + await lab.client.ask_all(led.cases(held_by=(RIGHT, LEFT)))
    finally:
        process.send_signal(signal.SIGCONT)
    if not mark.events(LEFT, "kv.fetched", outcome="lost"):
        problems.append(f"no read of {LEFT} met the holder that was frozen")
    if all(outcome.duration_s < MIN_SILENCE_S for outcome in outcomes):
        problems.append(f"nobody waited for {RIGHT}")
    problems += await settle(lab)
    return _judge(
        lab,
        "SIGSTOP the holder of a prefix until all have their answers",
        outcomes,
        problems,
        started,
    )


async def run_index_gaps(lab: FaultLab) -> FaultReport:
    """Changes of caches get lost; the broker goes, blocks come and go unheard, it comes back."""
    started = asyncio.get_running_loop().time()
    cluster = lab.cluster
    mark = LogMark.now(cluster)
    outcomes = await lab.client.ask_all(lab.take())
    problems = await within(
        _INDEX_S, f"{ROUTER} misses a change of {RIGHT}", lambda: _has_missed_change(mark)
    )
    problems += await followed(lab)
    async with asyncio.TaskGroup() as tasks:
        before = tasks.create_task(lab.client.ask_all(lab.take()))
        problems += await within(5.0, "requests run", lambda: _is_running(cluster, ROUTER))
        await cluster.kill_nats()
        away = LogMark.now(cluster)
    outcomes += before.result()
    # By then what the index knows of the earlier families is wrong.
    outcomes += await lab.client.ask_all(lab.take())
    async with asyncio.TaskGroup() as tasks:
        after = tasks.create_task(lab.client.ask_all(lab.take()))
        problems += await within(5.0, "requests run", lambda: _is_running(cluster, ROUTER))
        await cluster.start_nats()
    outcomes += after.result()
    problems += await settle(lab)
    # While the bus was away, or for what it saw missing when it was back, whatever came first.
    if not away.events(ROUTER, "index.asks"):
        problems.append(f"{ROUTER} did not ask for what it could not hear")
    num_missed = len(_missed_changes(mark))
    return lab.judge(
        "changes of caches lost, NATS killed and restarted",
        outcomes,
        problems=problems,
        started=started,
        note=f"{_reuse_note(outcomes)}; {num_missed} times a change was missing",
    )


async def run_two_routers(lab: FaultLab) -> FaultReport:
    """Two routers send more than the workers hold; then one of them is killed in the middle.

    Neither knows of the other; a worker takes or refuses in one step of its own. That it gives no block
    twice is told by the tokens, and by itself if it checks its invariants: then it would have crashed.
    """
    started = asyncio.get_running_loop().time()
    cluster = lab.cluster
    cluster.start_router(OTHER_ROUTER)
    await cluster.wait_ready(timeout_s=_JOIN_S)
    mark = LogMark.now(cluster)
    num_lives = {name: cluster.part(name).num_starts for name in cluster.worker_ids}
    outcomes: list[Outcome] = []
    problems: list[str] = []
    async with AsyncExitStack() as stack:
        address = str(cluster.part(OTHER_ROUTER).fact("grpc_address"))
        other = Client(await stack.enter_async_context(open_channel(address)))
        # The same prefixes from both: what one router's request leaves, the other's finds.
        families = [lab.take() for _ in range(3)]
        ours = [case for family in families for case in family[::2]]
        theirs = [case for family in families for case in family[1::2]]
        async with asyncio.TaskGroup() as tasks:
            asking = [
                tasks.create_task(client.ask_all(cases))
                for client, cases in ((lab.client, ours), (other, theirs))
            ]
        outcomes += [outcome for task in asking for outcome in task.result()]
        problems += await settle(lab)

        leaving = [*lab.take_for_leavers(), *lab.take_for_leavers()]
        async with asyncio.TaskGroup() as tasks:
            cut = tasks.create_task(other.ask_all(leaving))
            problems += await within(
                10.0, "the other router's requests run", lambda: _is_running(cluster, OTHER_ROUTER)
            )
            staying = tasks.create_task(lab.client.ask_all([*lab.take(), *lab.take()]))
            num_starts = cluster.part(OTHER_ROUTER).num_starts
            process = cluster.part(OTHER_ROUTER).process
            assert process is not None
            # Without the wait of Part.kill: the next router must not be there yet.
            process.kill_now()
            problems += await within(
                _FORGOTTEN_S, "its sessions are gone", lambda: _num_sessions_is(cluster, 1)
            )
        outcomes += staying.result()
        if all(outcome.done for outcome in cut.result()):
            problems.append("all of the other router's requests had ended before it was killed")
        problems += [
            f"{outcome.case.name} did not see the cut"
            for outcome in cut.result()
            if outcome.done is None and not isinstance(outcome.error, UnavailableError)
        ]
        problems += await lab.died(OTHER_ROUTER, num_starts)
        problems += await settle(lab)
        refusals = [
            placed["after"]
            for router in cluster.router_names
            for placed in mark.events(router, "request.placed")
            if placed.get("after", "").endswith("refused: no_blocks")
        ]
        if not refusals:
            problems.append("no worker was ever short of blocks")
        problems += [
            f"{name} crashed"
            for name, num in num_lives.items()
            if cluster.part(name).num_starts > num
        ]
    return lab.judge(
        "two routers compete, one is killed",
        outcomes,
        problems=problems,
        started=started,
        note=f"{_reuse_note(outcomes)}; {len(refusals)} times a worker lacked blocks",
    )


SCENARIOS = (
    run_peer_reads,
    run_reader_killed,
    run_bad_reads,
    run_holder_frozen,
    run_index_gaps,
    run_two_routers,
)


async def settle(lab: FaultLab) -> list[str]:
    """Everyone is back, nobody holds anything, routers believe what is true; else what is wrong."""
    return await lab.settle() + await followed(lab)


async def followed(lab: FaultLab) -> list[str]:
    """Routers believe what is true of quiet workers, or do so soon; else what is wrong."""
    try:
        await lab.cluster.wait_followed(timeout_s=_INDEX_S)
    except MoonpoolError as error:
        return [error.message]
    return []


# -- parts --


@dataclass(frozen=True, slots=True, kw_only=True)
class _Families:
    """Families whose first members have been answered, each by a worker that holds the prefix now."""

    outcomes: list[Outcome]
    problems: list[str]
    #: All others, by that worker.
    followers: dict[str, list[tuple[Case, ...]]]

    def cases(self, *, held_by: Sequence[str]) -> list[Case]:
        """All followers of prefixes that these workers hold, in their order."""
        return [case for name in held_by for family in self.followers[name] for case in family]


async def _lead(lab: FaultLab, *, num_families: int) -> _Families:
    """Ask the first of each family, one after the other, so that each worker holds some prefixes."""
    followers: dict[str, list[tuple[Case, ...]]] = {LEFT: [], RIGHT: []}
    outcomes: list[Outcome] = []
    for _ in range(num_families):
        first, *others = lab.take()
        outcome = await lab.client.ask(first)
        outcomes.append(outcome)
        if outcome.done is not None:
            followers[outcome.done.placement.decode_worker].append(tuple(others))
    problems = [f"no first request went to {name}" for name in followers if not followers[name]]
    problems += await followed(lab)
    return _Families(outcomes=outcomes, problems=problems, followers=followers)


async def _follow(lab: FaultLab, led: _Families, *, holder: str) -> list[Outcome]:
    """Ask all followers; the other worker reads a prefix from `holder` for one of the first two.

    Those two come one after the other, for only workers that have room take turns. The rest come at once.
    """
    first, second, *others = led.cases(held_by=(holder, RIGHT if holder == LEFT else LEFT))
    outcomes = [await lab.client.ask(case) for case in (first, second)]
    return outcomes + await lab.client.ask_all(others)


def _reuse_note(outcomes: Sequence[Outcome]) -> str:
    done = [outcome.done.usage for outcome in outcomes if outcome.done]
    return (
        f"of {sum(usage.num_prompt_tokens for usage in done)} prompt tokens "
        f"{sum(usage.num_cached_tokens for usage in done)} cached, "
        f"{sum(usage.num_peer_tokens for usage in done)} of them read from a peer"
    )


def _missed_changes(mark: LogMark) -> list[dict[str, Any]]:  # Any: JSON
    """What the router has asked since then because a change of RIGHT was missing."""
    asked = mark.events(ROUTER, "index.asks")
    return [
        one
        for one in asked
        if one["why"] in ("gap", "mismatch") and one["worker"].startswith(f"{RIGHT}@")
    ]


async def _has_missed_change(mark: LogMark) -> bool:
    return bool(_missed_changes(mark))


async def _is_running(cluster: LocalCluster, router: str) -> bool:
    return (await cluster.status(router)).num_running > 0


async def _num_sessions_is(cluster: LocalCluster, num_sessions: int) -> bool:
    reports = [await cluster.ledger(name) for name in cluster.worker_ids]
    return all(report.num_router_sessions == num_sessions for report in reports)
