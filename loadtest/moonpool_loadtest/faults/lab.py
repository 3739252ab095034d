"""FaultLab: a cluster to break, the answers it must give all the same, and the books kept of it."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from moonpool.cluster.free_port import free_port
from moonpool.cluster.local_cluster import ClusterOptions, LocalCluster
from moonpool.cluster.part import RestartPolicy
from moonpool.config.schema import ClusterConfig, WorkerGroup
from moonpool.errors import MoonpoolError
from moonpool.rpc.channel import open_channel
from moonpool_loadtest.faults.leftovers import Footprint
from moonpool_loadtest.faults.workload import Case, Client, Outcome, make_cases, make_family

#: Nobody is taken for dead sooner: keepalive time and timeout, less what passed of the first.
MIN_SILENCE_S = 2.5

_JOIN_S = 60.0
_QUIET_S = 15.0

Expected = Mapping[str, Sequence[int]]


@dataclass(frozen=True, slots=True, kw_only=True)
class LabSizes:
    """How large requests are; fits the model and the patience."""

    vocab_size: int
    #: Prefilled elsewhere (above local_prefill_tokens), and on the decode worker.
    long_prompt: int = 220
    short_prompt: int = 20
    max_tokens: int = 24


@dataclass(frozen=True, slots=True, kw_only=True)
class FaultReport:
    """One row of the table."""

    fault: str
    num_requests: int
    #: Answers equal to those without faults.
    num_equal: int
    #: Whole, in order, nothing lost or doubled, but with other tokens: `case@position`.
    differing: tuple[str, ...]
    #: Anything else that is wrong.
    problems: tuple[str, ...]
    duration_s: float
    slowest_s: float = 0.0
    num_attempts: int = 0
    note: str = ""

    @property
    def is_good(self) -> bool:
        return not self.problems


@dataclass(frozen=True, slots=True, kw_only=True)
class CaseSets:
    """Requests in sets: two long and two short ones that share nothing, or a family."""

    judged: tuple[tuple[Case, ...], ...]
    for_leavers: tuple[tuple[Case, ...], ...]

    @property
    def judged_cases(self) -> list[Case]:
        return [case for cases in self.judged for case in cases]


def make_sets(sizes: LabSizes, *, num_judged: int, num_for_leavers: int, seed: int = 7) -> CaseSets:
    """The same for the same arguments."""
    rng = random.Random(seed)
    sets = tuple(
        make_cases(
            vocab_size=sizes.vocab_size,
            prompt_lengths=(
                sizes.long_prompt,
                sizes.long_prompt - 11,
                sizes.short_prompt,
                sizes.short_prompt + 13,
            ),
            max_tokens=sizes.max_tokens,
            rng=rng,
            prefix=f"s{number}-",
        )
        for number in range(num_judged + num_for_leavers)
    )
    return CaseSets(judged=sets[:num_judged], for_leavers=sets[num_judged:])


@dataclass(frozen=True, slots=True, kw_only=True)
class FamilySizes:
    """How large requests are that share a prefix."""

    vocab_size: int
    prefix: int = 160
    #: With the prefix the last is too long to be prefilled where it is decoded, unless that is cached.
    tails: tuple[int, ...] = (8, 21, 45, 33, 130)
    max_tokens: int = 24


def make_families(
    sizes: FamilySizes, *, num_judged: int, num_for_leavers: int, seed: int = 11
) -> CaseSets:
    """Sets of requests that share a prefix within the set; the same for the same arguments."""
    rng = random.Random(seed)
    sets = tuple(
        make_family(
            vocab_size=sizes.vocab_size,
            prefix_length=sizes.prefix,
            tail_lengths=sizes.tails,
            max_tokens=sizes.max_tokens,
            rng=rng,
            prefix=f"f{number}-",
        )
        for number in range(num_judged + num_for_leavers)
    )
    return CaseSets(judged=sets[:num_judged], for_leavers=sets[num_judged:])


async def answers_without_faults(config: ClusterConfig, cases: Sequence[Case]) -> Expected:
    """What one aggregated worker answers.

    Raises:
        MoonpoolError: A request failed.
    """
    aggregated = config.model_copy(
        update={
            "workers": tuple(
                WorkerGroup(role="decode", settings=group.settings)
                for group in config.workers
                if group.role != "prefill"
            )[:1],
            "stores": (),
        }
    )
    expected: dict[str, Sequence[int]] = {}
    async with (
        LocalCluster(aggregated, options=ClusterOptions(is_pinned=False)) as cluster,
        open_channel(cluster.endpoints.grpc_address) as channel,
    ):
        client = Client(channel, key=cluster.door_key)
        for start in range(0, len(cases), 8):
            for outcome in await client.ask_all(cases[start : start + 8]):
                if outcome.error is not None:
                    raise outcome.error
                expected[outcome.case.name] = outcome.token_ids
    return expected


@dataclass(slots=True, kw_only=True)
class FaultLab:
    """A running cluster under test."""

    cluster: LocalCluster
    client: Client
    expected: Expected
    #: Sets of requests that nobody has asked yet.
    fresh: list[tuple[Case, ...]]
    #: The same, for clients that leave: nobody needs to know their answers.
    fresh_for_leavers: list[tuple[Case, ...]]
    reports: list[FaultReport] = field(default_factory=list)
    #: Failpoints that wait in a part's present life.
    armed: dict[str, str] = field(default_factory=dict)

    def take(self) -> tuple[Case, ...]:
        """A set of requests whose prompts no worker has seen."""
        return self.fresh.pop(0)

    def take_for_leavers(self) -> tuple[Case, ...]:
        """One more, whose answers are not known."""
        return self.fresh_for_leavers.pop(0)

    async def settle(self) -> list[str]:
        """Everyone is back and nobody holds anything; else what is wrong."""
        try:
            await self.cluster.wait_ready(timeout_s=_JOIN_S)
            await self.cluster.wait_quiet(timeout_s=_QUIET_S)
        except MoonpoolError as error:
            return [error.message]
        return []

    async def arm(self, failpoints: Mapping[str, str]) -> None:
        """Give parts that are not armed so a new life in which they are. Empty disarms."""
        targets = {
            target: text
            for target, text in failpoints.items()
            if self.armed.get(target, "") != text
        }
        num_starts = {}
        for target, text in targets.items():
            self.cluster.part(target).arm(text)
            num_starts[target] = self.cluster.part(target).num_starts
            await self.cluster.kill(target)
        for target, text in targets.items():
            await self.cluster.part(target).wait_starts(num_starts[target] + 1, timeout_s=_JOIN_S)
            self.armed[target] = text
        if targets:
            await self.cluster.wait_ready(timeout_s=_JOIN_S)

    def arm_next_life(self, target: str, failpoints: str) -> None:
        """What a part is armed with when it comes back from the fault that is about to happen."""
        self.cluster.part(target).arm(failpoints)
        self.armed[target] = failpoints

    async def disarm(self, target: str) -> None:
        """A fault that has not happened must not happen to others later."""
        self.armed[target] = "unknown"
        await self.arm({target: ""})

    async def died(self, target: str, num_starts: int) -> list[str]:
        """The part that was to die did, and lives again; else what is wrong."""
        try:
            await self.cluster.part(target).wait_starts(num_starts + 1, timeout_s=_JOIN_S)
        except MoonpoolError as error:
            return [f"the fault did not happen: {error.message}"]
        return []

    def judge(
        self,
        fault: str,
        outcomes: Sequence[Outcome],
        *,
        problems: Sequence[str],
        started: float,
        note: str = "",
    ) -> FaultReport:
        """Compare, and keep the row."""
        found = [outcome.problem for outcome in outcomes if outcome.problem]
        differing = []
        num_equal = 0
        for outcome in outcomes:
            if outcome.problem:
                continue
            position = outcome.first_difference(self.expected[outcome.case.name])
            if position is None:
                num_equal += 1
            elif len(outcome.token_ids) == len(self.expected[outcome.case.name]):
                differing.append(f"{outcome.case.name}@{position}")
            else:
                found.append(f"{outcome.case.name}: {len(outcome.token_ids)} tokens came")
        report = FaultReport(
            fault=fault,
            num_requests=len(outcomes),
            num_equal=num_equal,
            differing=tuple(differing),
            problems=(*found, *problems),
            duration_s=asyncio.get_running_loop().time() - started,
            slowest_s=max((outcome.duration_s for outcome in outcomes), default=0.0),
            num_attempts=sum(
                outcome.done.placement.num_attempts for outcome in outcomes if outcome.done
            ),
            note=note,
        )
        self.reports.append(report)
        return report


@asynccontextmanager
async def open_lab(
    config: ClusterConfig,
    *,
    expected: Expected,
    sets: CaseSets,
    is_whole: bool = False,
    failpoints: Mapping[str, str] | None = None,
) -> AsyncIterator[FaultLab]:
    """Start the workers of the cluster that is to be broken. Last, one more row says what is left of it.

    Args:
        is_whole: With broker and router, and ready; else there is neither yet.
        failpoints: Of parts in their first life.
    """
    # Both come and go, and must find their ports free each time.
    router = config.router.model_copy(update={"grpc_port": free_port()})
    nats = config.nats.model_copy(update={"port": free_port()})
    config = config.model_copy(update={"router": router, "nats": nats})
    footprint = Footprint()
    options = ClusterOptions(
        restart=RestartPolicy(min_pause_s=0.05, max_pause_s=0.5),
        is_pinned=False,
        has_nats=is_whole,
        has_router=is_whole,
        waits_ready=is_whole,
        failpoints=failpoints or {},
        environment=footprint.environment,
    )
    async with (
        LocalCluster(config, options=options) as cluster,
        open_channel(f"127.0.0.1:{router.grpc_port}") as channel,
    ):
        lab = FaultLab(
            cluster=cluster,
            client=Client(channel, key=cluster.door_key),
            expected=expected,
            fresh=list(sets.judged),
            fresh_for_leavers=list(sets.for_leavers),
        )
        yield lab
        footprint.note(cluster)
    started = asyncio.get_running_loop().time()
    problems = await asyncio.to_thread(footprint.leftovers)
    lab.judge("nothing is left behind", (), problems=problems, started=started)
