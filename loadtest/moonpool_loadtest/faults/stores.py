"""Faults of a store: what it keeps outlives workers and itself, and its death costs nobody a token.

One or two workers with pools so small that requests push each other out, and one store with a disk.
Requests come in families with one prefix. Each scenario leaves the cluster whole and quiet, and one row
in the lab's reports.
"""

from __future__ import annotations

import asyncio

from moonpool.config.secret import load_or_create_secret
from moonpool.errors import MoonpoolError
from moonpool.rpc.admin import clear_cache
from moonpool.tiering.protocol import StoreStats
from moonpool_loadtest.faults.lab import FaultLab, FaultReport
from moonpool_loadtest.faults.store_cluster import BLOCK_SIZE
from moonpool_loadtest.faults.waiting import within
from moonpool_loadtest.faults.workload import Case, Outcome

STORE = "store-0"
#: Where it dies, in turn: a put is answered; its first piece has come; blocks are about to be written, or
#: are and nobody has been told; a reader has been told what it may read.
PLACES = (
    "fetch.before_open=kill",
    "fetch.after_read=kill",
    "store.before_write=kill",
    "store.after_write=kill",
    "hold.after_opened=kill",
)
NUM_FAMILIES_BESIDE_KILLS = 3

_JOIN_S = 60.0
_KEPT_S = 15.0


async def run_outlives_workers(lab: FaultLab) -> FaultReport:
    """All workers die; what they had computed comes from the store's memory."""
    started = asyncio.get_running_loop().time()
    first, *followers = lab.take()
    outcomes, problems = await _lead(lab, first)
    problems += await _restart(lab, *lab.cluster.worker_ids)
    problems += await _known(lab, first)
    before = await lab.cluster.store_report(STORE)
    outcomes += await lab.client.ask_all(followers)
    after = await lab.cluster.store_report(STORE)
    if after.stats.num_hit_host_blocks <= before.stats.num_hit_host_blocks:
        problems.append("nothing came from the store's memory")
    problems += await lab.settle()
    return _judge(lab, "kill -9 all workers: from the store's memory", outcomes, problems, started)


async def run_outlives_itself(lab: FaultLab) -> FaultReport:
    """The store dies, and workers forget; what it had written comes from its disk."""
    started = asyncio.get_running_loop().time()
    first, *followers = lab.take()
    outcomes, problems = await _lead(lab, first)
    problems += await _restart(lab, STORE)
    problems += await _clear_workers(lab)
    problems += await _known(lab, first)
    outcomes += await lab.client.ask_all(followers)
    report = await lab.cluster.store_report(STORE)
    if not report.stats.num_hit_disk_blocks:
        problems.append("nothing came from the store's disk")
    problems += await lab.settle()
    return _judge(lab, "kill -9 the store: from its disk", outcomes, problems, started)


async def run_store_kills(lab: FaultLab, *, num_kills: int) -> FaultReport:
    """It dies so often in the middle of puts and gets, under load; what it had written is there again.

    Takes a family for each, and one more.
    """
    started = asyncio.get_running_loop().time()
    part = lab.cluster.part(STORE)
    places = [PLACES[number % len(PLACES)] for number in range(num_kills)]
    kept = earlier = lab.take()
    outcomes, problems = await _lead(lab, kept[0])
    # All lives at once: what workers offer to one that comes back may kill it before anything else is done.
    num_starts = part.num_starts + 1
    part.arm(*places, "")
    await lab.cluster.kill(STORE)
    problems += await lab.died(STORE, num_starts - 1)
    num_written = 0
    for number, place in enumerate(places):
        found = await _written(lab)
        if found is not None and found < num_written:
            problems.append(f"of {num_written} blocks that were written {found} are there again")
        if place.startswith("hold."):
            # What lies on its disk for certain is asked for, and nowhere else.
            problems += await _clear_workers(lab)
            problems += await _known(lab, kept[0])
            earlier = kept
        family = lab.take()
        async with asyncio.TaskGroup() as tasks:
            asking = tasks.create_task(lab.client.ask_all([*family, *earlier]))
            watch = tasks.create_task(_most_written(lab, until=asking))
        outcomes += asking.result()
        num_written = max(num_written, watch.result())
        # What workers offer to a store that has come back may have killed it before it was asked.
        died = await lab.died(STORE, num_starts + number)
        problems += [f"{place}: {text}" for text in died]
        earlier = family
    lab.armed[STORE] = ""
    problems += await lab.settle()
    found = await _written(lab)
    if found is None or found < num_written:
        problems.append(f"of {num_written} blocks that were written {found} are there in the end")
    return _judge(
        lab, f"kill -9 the store {num_kills} times under load", outcomes, problems, started
    )


# -- parts --


def _judge(
    lab: FaultLab, what: str, outcomes: list[Outcome], problems: list[str], started: float
) -> FaultReport:
    done = [outcome.done.usage for outcome in outcomes if outcome.done]
    note = (
        f"of {sum(usage.num_prompt_tokens for usage in done)} prompt tokens "
        f"{sum(usage.num_cached_tokens for usage in done)} not computed"
    )
    return lab.judge(what, outcomes, problems=problems, started=started, note=note)


async def _lead(lab: FaultLab, case: Case) -> tuple[list[Outcome], list[str]]:
    """Ask the first of a family, until the store has it in memory and on disk; what is wrong, if anything."""
    before = (await lab.cluster.store_report(STORE)).stats
    outcome = await lab.client.ask(case)
    num_blocks = len(case.prompt) // BLOCK_SIZE

    async def is_kept() -> bool:
        stats = await _stats(lab)
        return (
            stats is not None
            and stats.num_host_blocks >= before.num_host_blocks + num_blocks
            and stats.num_disk_blocks >= before.num_disk_blocks + num_blocks
            and stats.num_unwritten_blocks == 0
        )

    problems = await within(_KEPT_S, f"the store keeps {num_blocks} more blocks", is_kept)
    return [outcome], problems


async def _known(lab: FaultLab, case: Case) -> list[str]:
    """The router knows that the store has at least so many blocks as the prompt; else what is wrong."""
    num_blocks = len(case.prompt) // BLOCK_SIZE

    async def is_known() -> bool:
        stats = await lab.cluster.cache_stats()
        return any(
            worker.worker_id == STORE and worker.num_published_blocks >= num_blocks
            for worker in stats.workers
        )

    return await within(_KEPT_S, "the router knows", is_known)


async def _restart(lab: FaultLab, *names: str) -> list[str]:
    """Kill these, and wait until they and their routers are ready again."""
    num_starts = {name: lab.cluster.part(name).num_starts for name in names}
    for name in names:
        await lab.cluster.kill(name)
    problems = []
    for name in names:
        problems += await lab.died(name, num_starts[name])
    return problems + await lab.settle()


async def _clear_workers(lab: FaultLab) -> list[str]:
    """Have workers forget what they hold, and the router hear of it, so that they read it."""
    key = load_or_create_secret(lab.cluster.config.data_dir).rpc_key

    async def is_cleared() -> bool:
        # Again each time: what a reader has locked is not forgotten.
        for name in lab.cluster.worker_ids:
            address = str(lab.cluster.part(name).fact("grpc_address"))
            await clear_cache(address, key=key, deadline_s=5.0)
        workers = (await lab.cluster.cache_stats()).workers
        return all(w.num_published_blocks == 0 for w in workers if w.worker_id != STORE)

    return await within(_KEPT_S, "workers hold nothing", is_cleared)


async def _stats(lab: FaultLab) -> StoreStats | None:
    """None while it does not answer."""
    try:
        return (await lab.cluster.store_report(STORE)).stats
    except MoonpoolError:
        return None


async def _written(lab: FaultLab) -> int | None:
    """Blocks on its disk, once it answers."""
    counts: list[int] = []

    async def is_told() -> bool:
        stats = await _stats(lab)
        if stats is not None:
            counts.append(stats.num_disk_blocks)
        return bool(counts)

    await within(_JOIN_S, "the store answers", is_told)
    return counts[0] if counts else None


async def _most_written(lab: FaultLab, *, until: asyncio.Task[list[Outcome]]) -> int:
    """The most blocks that it said lie on its disk, at some moment."""
    most = 0
    while not until.done():
        stats = await _stats(lab)
        most = max(most, stats.num_disk_blocks if stats is not None else 0)
        await asyncio.wait((until,), timeout=0.02)
    return most
