"""The faults: how each is brought about, and what is asked meanwhile.

Each scenario leaves the cluster whole and quiet, and one row in the lab's reports.
"""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

from moonpool.cluster.local_cluster import ROUTER, LocalCluster
from moonpool.errors import UnavailableError
from moonpool_loadtest.faults.lab import MIN_SILENCE_S, FaultLab, FaultReport
from moonpool_loadtest.faults.waiting import within
from moonpool_loadtest.faults.workload import Outcome

PREFILL = "prefill-0"
#: Reads KV as the cluster's configuration says: shm by default.
DECODE = "decode-0"
#: Reads KV over gRPC.
DECODE_GRPC = "grpc-0"

#: A router serves this soon after the broker is there: it and workers try every
#: quarter of a second, a try takes two at most, and workers announce themselves once a second.
READY_AFTER_NATS_S = 5.0

#: Slow enough to be met at every stage: each layer of a chunk, each step.
SLOW_PREFILL = "prefill.after_layer=sleep:20"
SLOW_DECODE = "engine.after_step=sleep:10"
#: What the workers are armed with once nobody kills them any more: damage, once, and slow from then on.
#: One life each for all scenarios that come last, since another one takes seconds.
LAST_LIVES = {
    PREFILL: SLOW_PREFILL,
    DECODE: f"transport.read=flip@2;{SLOW_DECODE}",
    DECODE_GRPC: f"transport.read=drop@2;{SLOW_DECODE}",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Kill:
    """SIGKILL of one part at an exact place, under four concurrent requests."""

    name: str
    target: str
    failpoints: str


def prefill_kills(*, layers: Sequence[int]) -> tuple[Kill, ...]:
    """After each of `layers`, and around the commit."""
    return (
        *(
            Kill(
                name=f"kill -9 prefill after layer {layer}",
                target=PREFILL,
                failpoints=f"prefill.after_layer({layer})=kill",
            )
            for layer in layers
        ),
        Kill(
            name="kill -9 prefill before commit",
            target=PREFILL,
            failpoints="prefill.before_commit=kill",
        ),
        Kill(
            name="kill -9 prefill after commit",
            target=PREFILL,
            failpoints="prefill.after_commit=kill",
        ),
    )


def decode_kills(*, positions: Sequence[int]) -> tuple[Kill, ...]:
    """Around the transfer, and when a token at each of `positions` leaves."""
    places = ("decode.after_reserve", "decode.after_read", "decode.before_admit")
    return (
        *(
            Kill(
                name=f"kill -9 decode {place.removeprefix('decode.').replace('_', ' ')}",
                target=DECODE,
                failpoints=f"{place}=kill",
            )
            for place in places
        ),
        *(
            Kill(
                name=f"kill -9 decode at token {position}",
                target=DECODE,
                failpoints=f"decode.after_token({position})=kill",
            )
            for position in positions
        ),
    )


def next_lives(kills: Sequence[Kill]) -> dict[Kill, str]:
    """What each target comes back armed with: for the kill after this one, or for the rest. In their order."""
    following: dict[str, str] = dict(LAST_LIVES)
    lives = {}
    for kill in reversed(kills):
        lives[kill] = following[kill.target]
        following[kill.target] = kill.failpoints
    return dict(reversed(lives.items()))


async def run_boot_without_nats(lab: FaultLab) -> FaultReport:
    """No broker and no router at first; then a router, which is not ready; then the broker."""
    loop = asyncio.get_running_loop()
    started = loop.time()
    cluster = lab.cluster
    problems: list[str] = []
    for worker_id in cluster.worker_ids:
        await cluster.part(worker_id).wait_ready(timeout_s=60.0)
    cluster.start_router()
    await cluster.part(ROUTER).wait_ready(timeout_s=60.0)
    status = await cluster.status()
    if status.is_ready or status.is_bus_connected:
        problems.append("the router was ready without a broker")
    await cluster.start_nats()
    nats_at = loop.time()
    await cluster.wait_ready(timeout_s=30.0)
    ready_after_s = loop.time() - nats_at
    if ready_after_s > READY_AFTER_NATS_S:
        problems.append(f"ready only {ready_after_s:.1f} s after the broker")
    problems += [
        f"{name} crashed without the broker"
        for name in (ROUTER, *cluster.worker_ids)
        if cluster.part(name).num_starts > 1
    ]
    outcomes = await lab.client.ask_all(lab.take())
    problems += await lab.settle()
    return lab.judge(
        "NATS absent at boot, router after the workers",
        outcomes,
        problems=problems,
        started=started,
        note=f"ready {ready_after_s:.2f} s after NATS",
    )


async def run_without_fault(lab: FaultLab) -> FaultReport:
    """Prefilled elsewhere and read over each transport, or all on the decode worker; at any batch."""
    started = asyncio.get_running_loop().time()
    outcomes = await lab.client.ask_all([case for _ in range(2) for case in lab.take()])
    first, second, *others = lab.take()
    # While one decode worker has a request, the other is the less loaded.
    leading = Outcome(case=first)
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(lab.client.read(leading))
        await within(30.0, "the first token", lambda: _has_token(leading))
        outcomes.append(await lab.client.ask(second))
    outcomes.append(leading)
    for case in others:
        outcomes.append(await lab.client.ask(case))
    used = {
        outcome.done.placement.decode_worker
        for outcome in outcomes
        if outcome.done is not None and outcome.done.placement.prefill_worker
    }
    problems = [f"no long request was decoded on {name}" for name in {DECODE, DECODE_GRPC} - used]
    problems += await lab.settle()
    return lab.judge("none: two workers against one", outcomes, problems=problems, started=started)


async def run_kill(lab: FaultLab, kill: Kill, next_life: str = "") -> FaultReport:
    """Four requests at once, two of them long.

    Args:
        next_life: What the target comes back armed with: saves a restart.
    """
    await lab.arm({kill.target: kill.failpoints})
    lab.arm_next_life(kill.target, next_life)
    num_starts = lab.cluster.part(kill.target).num_starts
    started = asyncio.get_running_loop().time()
    # Who asks again must not meet the next life: what that is armed with is for others.
    with lab.cluster.part(kill.target).held():
        outcomes = await lab.client.ask_all(lab.take())
    problems = await lab.died(kill.target, num_starts)
    if problems:
        await lab.disarm(kill.target)
    problems += await lab.settle()
    return lab.judge(kill.name, outcomes, problems=problems, started=started)


async def run_freeze(lab: FaultLab, target: str) -> FaultReport:
    """A worker's service stops without dying: silence is death, and a late waking harms nobody."""
    started = asyncio.get_running_loop().time()
    process = lab.cluster.part(target).process
    assert process is not None
    process.send_signal(signal.SIGSTOP)
    try:
        outcomes = await lab.client.ask_all(lab.take())
    finally:
        process.send_signal(signal.SIGCONT)
    slowest_s = max(outcome.duration_s for outcome in outcomes)
    problems = await lab.settle()
    if slowest_s < MIN_SILENCE_S:
        problems.append(f"nobody waited for {target}: the slowest took {slowest_s:.1f} s")
    return lab.judge(
        f"SIGSTOP {target} until all have their answers",
        outcomes,
        problems=problems,
        started=started,
    )


async def run_damage(lab: FaultLab) -> FaultReport:
    """KV arrives wrong on one decode worker and not at all on the other: recomputed, never used.

    Takes what their last lives are armed with.
    """
    await lab.arm({name: LAST_LIVES[name] for name in (DECODE, DECODE_GRPC)})
    started = asyncio.get_running_loop().time()
    outcomes = await lab.client.ask_all(lab.take())
    problems = await lab.settle()
    attempts = [outcome.done.placement.num_attempts for outcome in outcomes if outcome.done]
    if attempts and max(attempts) == 1:
        problems.append("nobody noticed the damage: every request took one attempt")
    return lab.judge(
        "KV damaged and (by gRPC) lost on its way", outcomes, problems=problems, started=started
    )


async def run_nats_restart(lab: FaultLab) -> FaultReport:
    """The broker dies under load, stays away, and comes back under load."""
    started = asyncio.get_running_loop().time()
    outcomes: list[Outcome] = []
    problems: list[str] = []
    async with asyncio.TaskGroup() as tasks:
        before = tasks.create_task(lab.client.ask_all(lab.take()))
        problems += await within(5.0, "requests run", lambda: _is_running(lab.cluster, 1))
        await lab.cluster.kill_nats()
    outcomes += before.result()
    outcomes += await lab.client.ask_all(lab.take())
    if await _has_bus(lab.cluster):
        problems.append("the router did not notice the loss")
    async with asyncio.TaskGroup() as tasks:
        after = tasks.create_task(lab.client.ask_all(lab.take()))
        problems += await within(5.0, "requests run", lambda: _is_running(lab.cluster, 1))
        await lab.cluster.start_nats()
    outcomes += after.result()
    problems += await within(
        READY_AFTER_NATS_S, "the router is connected again", lambda: _has_bus(lab.cluster)
    )
    problems += await lab.settle()
    return lab.judge(
        "NATS killed and restarted under load", outcomes, problems=problems, started=started
    )


async def run_router_restart(lab: FaultLab) -> FaultReport:
    """The router is killed under load: its clients see the cut, its workers drop what was theirs."""
    started = asyncio.get_running_loop().time()
    router = lab.cluster.part(ROUTER)
    num_starts = router.num_starts
    problems: list[str] = []
    async with asyncio.TaskGroup() as tasks:
        asking = tasks.create_task(lab.client.ask_all(lab.take_for_leavers()))
        problems += await within(5.0, "requests run", lambda: _is_running(lab.cluster, 1))
        await lab.cluster.kill(ROUTER)
    problems += [
        f"{outcome.case.name} did not see the cut"
        for outcome in asking.result()
        if outcome.done is None and not isinstance(outcome.error, UnavailableError)
    ]
    problems += await lab.died(ROUTER, num_starts)
    problems += await lab.settle()
    outcomes = await lab.client.ask_all(lab.take())
    problems += await lab.settle()
    return lab.judge(
        "kill -9 router, started after the workers", outcomes, problems=problems, started=started
    )


async def run_disconnects(lab: FaultLab) -> FaultReport:
    """Clients leave while queued, in prefill, in transfer, in decode, and after the last token.

    The workers are slowed by failpoints, so that every stage can be met; beside those who leave,
    others stay and must get their whole answers.
    """
    started = asyncio.get_running_loop().time()
    await lab.arm(LAST_LIVES)
    outcomes: list[Outcome] = []
    met: list[str] = []
    problems: list[str] = []
    for stage in (_leave_queue, _leave_prefill, _leave_transfer, _leave_decode, _leave_last):
        stays = lab.take()
        async with asyncio.TaskGroup() as tasks:
            staying = tasks.create_task(lab.client.ask_all(stays))
            if await stage(lab):
                met.append(stage.__name__.removeprefix("_leave_"))
            else:
                problems.append(f"stage {stage.__name__} was not met")
        outcomes += staying.result()
        problems += await lab.settle()
    return lab.judge(
        "clients leave at every stage",
        outcomes,
        problems=problems,
        started=started,
        note=f"met: {', '.join(met)}",
    )


# -- leaving at a stage: True if the stage was met --


async def _leave_queue(lab: FaultLab) -> bool:
    """More requests than there are slots; those that wait in the router's queue leave."""
    cases = [case for _ in range(4) for case in lab.take_for_leavers()]
    leavers = [Outcome(case=case) for case in cases]
    async with asyncio.TaskGroup() as tasks:
        reading = [tasks.create_task(lab.client.read(leaver)) for leaver in leavers]
        met = not await within(5.0, "queued", lambda: _is_queued(lab.cluster, 1))
        for task in reversed(reading):
            task.cancel()
    return met


async def _leave_prefill(lab: FaultLab) -> bool:
    return await _leave_when(lab, lambda: _has_prefill(lab.cluster))


async def _leave_transfer(lab: FaultLab) -> bool:
    return await _leave_when(lab, lambda: _has_transfer(lab.cluster))


async def _leave_decode(lab: FaultLab) -> bool:
    return await _leave_after(lab, 3)


async def _leave_last(lab: FaultLab) -> bool:
    return await _leave_after(lab, None)


async def _leave_when(lab: FaultLab, is_met: Callable[[], Awaitable[bool]]) -> bool:
    """Two long requests start, and leave as soon as the stage is met."""
    leavers = [Outcome(case=case) for case in lab.take_for_leavers()[:2]]
    async with asyncio.TaskGroup() as tasks:
        reading = [tasks.create_task(lab.client.read(leaver)) for leaver in leavers]
        met = not await within(5.0, "stage", is_met)
        for task in reading:
            task.cancel()
    return met and not any(leaver.done for leaver in leavers)


async def _leave_after(lab: FaultLab, num_tokens: int | None) -> bool:
    """A long and a short request leave when they have so many tokens; None: all of them."""
    cases = lab.take_for_leavers()
    num_tokens = num_tokens or cases[0].max_tokens
    leavers = [Outcome(case=cases[0]), Outcome(case=cases[2])]
    async with asyncio.TaskGroup() as tasks:
        for leaver in leavers:
            tasks.create_task(lab.client.read(leaver, num_tokens=num_tokens))
    return all(len(leaver.token_ids) >= num_tokens and not leaver.done for leaver in leavers)


# -- looking at the cluster --


async def _has_token(outcome: Outcome) -> bool:
    return bool(outcome.token_ids or outcome.error)


async def _has_bus(cluster: LocalCluster) -> bool:
    return (await cluster.status()).is_bus_connected


async def _is_running(cluster: LocalCluster, num_requests: int) -> bool:
    return (await cluster.status()).num_running >= num_requests


async def _is_queued(cluster: LocalCluster, num_requests: int) -> bool:
    return (await cluster.status()).num_queued >= num_requests


async def _has_prefill(cluster: LocalCluster) -> bool:
    return (await cluster.ledger(PREFILL)).ledger.num_prefills > 0


async def _has_transfer(cluster: LocalCluster) -> bool:
    """A decode worker reads what the prefill worker still computes."""
    source = await cluster.ledger(PREFILL)
    return source.ledger.num_prefills > 0 and source.num_open_streams > 0
