"""Faults of a ring of stores: nodes come, leave and die, Redis and the broker go and come back, under load.

Two workers that prefill and decode, with pools so small that requests push each other out, and stores with
disks that find each other on Redis. Each scenario

1. asks the requests of a new family and of earlier ones, again and again, some at a time;
2. lets the fault happen while they run, and has all of them asked once more;
3. ends them, and waits until the cluster is whole and quiet and the router believes what is true;
4. has the workers forget all they hold and asks one request of each family: of what the family shares,
   `MIN_RECOVERED` of the share that came from stores before any fault must come from them, soon.

Each leaves one row in the lab's reports. They follow each other in the order of RING_SCENARIOS: one ring lives
through all of them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from moonpool.errors import MoonpoolError
from moonpool.kv.block_key import block_key
from moonpool_loadtest.faults.lab import FaultReport
from moonpool_loadtest.faults.log_mark import LogMark
from moonpool_loadtest.faults.ring import JOINS, LOOK_S, MIN_SHARE, Ring
from moonpool_loadtest.faults.waiting import within

LEAVES = "store-0"
DIES = "store-1"

#: Of the families that all scenarios take together: these before any fault, and one for each.
NUM_FIRST_FAMILIES = 4

_JOIN_S = 60.0
_RING_S = 15.0
#: The broker's clients try every quarter of a second.
_BUS_S = 5.0


async def run_without_fault(ring: Ring) -> FaultReport:
    """What the first families leave in two stores is what all that follows is measured by."""
    started = _now()
    problems = await within(
        _RING_S, "the stores have found each other", ring.is_listed, poll_s=LOOK_S
    )
    families = [ring.lab.take() for _ in range(NUM_FIRST_FAMILIES)]
    ring.families += families
    async with ring.load([case for family in families for case in family]) as load:
        await load.once_more()
        await load.once_more()
    problems += [*load.problems, *await ring.settle()]
    recalled = await ring.recall_until(MIN_SHARE)
    ring.share_before = recalled.share
    problems += recalled.problems
    if ring.share_before < MIN_SHARE:
        problems.append(f"only {ring.share_before:.0%} of what families share came from stores")
    return ring.lab.judge(
        "none: two workers, two stores, one Redis",
        [*load.outcomes, *recalled.outcomes],
        problems=problems,
        started=started,
        note=f"from stores: {ring.share_before:.0%} of what families share at pass "
        f"{recalled.num_passes}",
    )


async def run_join(ring: Ring) -> FaultReport:
    """A third store comes under load. What it is the home of by then is there once it was asked for."""
    async with ring.struck() as load:
        ring.cluster.start_store(JOINS)
        load.problems += await _joined(ring)
        joined = _now()
        await load.once_more()

        async def has_home() -> bool:
            return len(ring.at_home(JOINS, joined=joined)) >= ring.num_at_home

        load.problems += await within(
            _JOIN_S, f"{JOINS} is home of something", has_home, poll_s=LOOK_S
        )
        num_during = load.num_since
    load.problems += await ring.settle()
    # What workers hold already they do not offer again when a home changes by and by.
    load.problems += await ring.forget()
    at_home = ring.at_home(JOINS, joined=joined)[: ring.num_at_home]
    num_blocks = 0
    for case in at_home:
        load.outcomes.append(await ring.lab.client.ask(case))
        wanted = {block_key(block_hash) for block_hash in ring.chain(case)}
        num_blocks += len(wanted)
        which = f"of {case.name}, which it is the home of"
        load.problems += await _holds(ring, JOINS, wanted, which)
    return await ring.judge(
        "a third store joins",
        load,
        note=f"{load.num_struck} in flight when it came, {num_during} answered under load since; "
        f"the {num_blocks} blocks of {len(at_home)} requests that it is the home of are there",
    )


async def run_leave(ring: Ring) -> FaultReport:
    """A store drains and ends under load; what it alone held is handed over before."""
    async with ring.load(ring.take()) as load:
        await load.once_more()
        await load.running(ring.cluster)
        staying = [name for name in ring.cluster.store_ids if name != LEAVES]
        alone = await ring.held(LEAVES) - await ring.held(*staying)
        began_leaving = _now()
        await ring.cluster.remove_store(LEAVES)
        left_s = _now() - began_leaving
        num_during = load.num_since
        lost = alone - await ring.held(*staying)
        await load.once_more()
    if not alone:
        load.problems.append(f"{LEAVES} held nothing alone")
    if lost:
        load.problems.append(
            f"{len(lost)} of {len(alone)} blocks that {LEAVES} alone held are gone"
        )
    return await ring.judge(
        "a store leaves with a drain",
        load,
        note=f"{load.num_struck} in flight when it began, {num_during} answered until it ended "
        f"{left_s:.1f} s later; {len(alone) - len(lost)} of {len(alone)} blocks that it alone "
        "held are handed over",
    )


async def run_kill(ring: Ring) -> FaultReport:
    """A store dies under load and comes back; all that it had written is there again."""
    problems, written = await _written(ring)
    num_starts = ring.cluster.part(DIES).num_starts
    async with ring.struck() as load:
        load.problems += problems
        await ring.cluster.kill(DIES)
        load.problems += await _store_back(ring, num_starts, written)
        num_during = load.num_since
        await load.once_more()
    return await ring.judge(
        "kill -9 a store, it comes back",
        load,
        note=f"{load.num_struck} in flight when it died, {num_during} answered until it was back with "
        f"the {len(written)} blocks that it had written",
    )


async def run_redis_restart(ring: Ring) -> FaultReport:
    """Redis dies under load, stays away for a while, and comes back empty."""
    async with ring.struck() as load:
        ring.redis.kill()
        load.problems += await _missed_redis(ring)
        await load.once_more()
        num_during = load.num_since
        back = _now()
        load.problems += await _redis_back(ring)
        listed_s = _now() - back
        await load.once_more()
    return await ring.judge(
        "Redis killed and restarted, empty",
        load,
        note=f"{load.num_struck} in flight when it died, {num_during} answered while it was away; "
        f"{listed_s:.1f} s later it knew all stores again",
    )


async def run_nats_restart(ring: Ring) -> FaultReport:
    """The broker dies under load, stays away for a while, and comes back."""
    async with ring.struck() as load:
        await ring.cluster.kill_nats()
        load.problems += await _bus_is(ring, False)
        await load.once_more()
        num_during = load.num_since
        await ring.cluster.start_nats()
        load.problems += await _bus_is(ring, True)
        await load.once_more()
    return await ring.judge(
        "NATS killed and restarted",
        load,
        note=f"{load.num_struck} in flight when it died, {num_during} answered while it was away",
    )


async def run_all_at_once(ring: Ring) -> FaultReport:
    """Redis, the broker and a store die at once under load, and come back."""
    problems, written = await _written(ring)
    num_starts = ring.cluster.part(DIES).num_starts
    async with ring.struck() as load:
        load.problems += problems
        ring.redis.kill()
        await ring.cluster.kill_nats()
        await ring.cluster.kill(DIES)
        load.problems += await _bus_is(ring, False)
        load.problems += await _missed_redis(ring, but=DIES)
        await load.once_more()
        num_during = load.num_since
        await ring.cluster.start_nats()
        load.problems += await _redis_back(ring)
        load.problems += await _bus_is(ring, True)
        load.problems += await _store_back(ring, num_starts, written)
        await load.once_more()
    return await ring.judge(
        "Redis, NATS and a store killed at once, all come back",
        load,
        note=f"{load.num_struck} in flight when they died, {num_during} answered while they were "
        f"away; the store is back with the {len(written)} blocks that it had written",
    )


RING_SCENARIOS: tuple[Callable[[Ring], Awaitable[FaultReport]], ...] = (
    run_without_fault,
    run_join,
    run_leave,
    run_kill,
    run_redis_restart,
    run_nats_restart,
    run_all_at_once,
)
NUM_RING_FAMILIES = NUM_FIRST_FAMILIES + len(RING_SCENARIOS) - 1


# -- parts --


async def _joined(ring: Ring) -> list[str]:
    """Everyone has joined, and the stores have found each other; else what is wrong."""
    try:
        await ring.cluster.wait_ready(timeout_s=_JOIN_S)
    except MoonpoolError as error:
        return [error.message]
    return await within(_RING_S, "the stores have found each other", ring.is_listed, poll_s=LOOK_S)


async def _written(ring: Ring) -> tuple[list[str], set[int]]:
    """What DIES holds, once all of it lies on its disk. What is wrong comes first."""
    written = await ring.held(DIES)
    problems = await within(
        _RING_S, f"{DIES} has written", lambda: ring.has_written(DIES), poll_s=LOOK_S
    )
    return problems + ([] if written else [f"{DIES} holds nothing"]), written


async def _store_back(ring: Ring, num_starts: int, written: set[int]) -> list[str]:
    """DIES lives again, in a life after `num_starts`, and has all that it had written; else what is wrong."""
    problems = await ring.lab.died(DIES, num_starts)
    return problems + await _holds(ring, DIES, written, "that it had written")


async def _holds(ring: Ring, store_id: str, keys: set[int], which: str) -> list[str]:
    """A store holds these blocks, or does soon; else what is wrong."""
    return await within(
        _JOIN_S,
        f"{store_id} holds the {len(keys)} blocks {which}",
        lambda: ring.holds(store_id, keys),
        poll_s=LOOK_S,
    )


async def _missed_redis(ring: Ring, *, but: str = "") -> list[str]:
    """Every store that lives has noticed that Redis is away; else what is wrong."""
    alive = [name for name in ring.cluster.store_ids if name != but]
    logs = LogMark(cluster=ring.cluster, sizes={})

    def last(name: str, event: str) -> str:
        return max((str(one["timestamp"]) for one in logs.events(name, event)), default="")

    async def is_missed() -> bool:
        # A machine that is short of time loses it for moments at any time.
        return all(last(one, "directory.lost") > last(one, "directory.connected") for one in alive)

    return await within(_RING_S, "every store misses Redis", is_missed, poll_s=LOOK_S)


async def _redis_back(ring: Ring) -> list[str]:
    """Redis is started, and knows every store; else what is wrong."""

    async def is_listening() -> bool:
        return ring.redis.is_listening

    ring.redis.launch()
    return await within(_RING_S, "Redis listens", is_listening) + await within(
        _JOIN_S, "Redis knows every store again", ring.is_listed, poll_s=LOOK_S
    )


async def _bus_is(ring: Ring, is_there: bool) -> list[str]:
    """The router has the broker, or not; else what is wrong."""

    async def is_so() -> bool:
        return (await ring.cluster.status()).is_bus_connected is is_there

    return await within(_BUS_S, f"the router {'has' if is_there else 'misses'} the broker", is_so)


def _now() -> float:
    return asyncio.get_running_loop().time()
