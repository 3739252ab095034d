"""`moonpool cache`: what is reused of what is asked, why the rest is not, and how to forget it all."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from moonpool.cli.failure import EXIT_FAILED, EXIT_OK
from moonpool.cli.store_view import reports_json, store_lines
from moonpool.cli.target import Target
from moonpool.cli.terminal import make_console, print_json
from moonpool.dispatch.reuse_books import MissReason, ReuseCounts
from moonpool.errors import MoonpoolError, NotFoundError, UnavailableError
from moonpool.routing.worker_view import WorkerRole
from moonpool.rpc.admin import clear_cache, fetch_status
from moonpool.rpc.cache import fetch_cache_stats
from moonpool.rpc.store import fetch_store_report
from moonpool.wire.cache_stats import CacheStats, WorkerCache
from moonpool.wire.store import StoreReport

_DEADLINE_S = 5.0
#: Rows of the account, in the order in which a prompt is cut.
_MISSES = {
    MissReason.COLD: "cold: never asked before",
    MissReason.EVICTED: "evicted: asked before, nobody holds it",
    MissReason.ROUTED_AWAY: "routed away: held by a worker that was not read from",
    MissReason.TOO_SLOW: "too slow: a peer held it, and it was computed",
}


def run_cache_stats(target: Target, *, is_json: bool) -> int:
    """Print what the router has counted since it started, and what its stores say of their tiers.

    Raises:
        UnavailableError: The router does not answer.
    """
    stats, reports = asyncio.run(_fetch(target))
    if is_json:
        print_json({**stats_json(stats), "stores": reports_json(reports)})
    else:
        print_stats(stats, make_console(), reports=reports)
    return EXIT_OK


def run_cache_clear(target: Target, *, worker_id: str | None, is_json: bool) -> int:
    """Have the live workers and stores, or one, forget the cached blocks that nobody uses just now.

    Raises:
        NotFoundError: No live worker has this id.
        UnavailableError: The router does not answer, or the cluster's secret is not on this machine.
    """
    failures = asyncio.run(_clear(target, worker_id))
    if is_json:
        print_json(
            {
                "workers": [
                    {"worker_id": name, "is_cleared": not failure, "because": failure}
                    for name, failure in failures.items()
                ]
            }
        )
    else:
        console = make_console()
        for name, failure in failures.items():
            console.print(f"{name}: {failure or 'cleared'}", soft_wrap=True, markup=False)
        if not failures:
            console.print("no worker is live: nothing to clear")
    return EXIT_FAILED if any(failures.values()) else EXIT_OK


def print_stats(
    stats: CacheStats, console: Console, *, reports: Mapping[str, StoreReport | str] | None = None
) -> None:
    """The account of all prompts, the ceiling, a row per worker, and what each store says.

    Args:
        reports: By store; a text says why there is none.
    """
    total = stats.total
    console.print(
        f"{stats.router_id}  model {stats.model}  {total.num_requests:,} requests, "
        f"{total.num_prompt_tokens:,} prompt tokens",
        soft_wrap=True,
        markup=False,
    )
    console.print()
    console.print(_account(total))
    console.print()
    console.print(_held_words(total), soft_wrap=True, markup=False)
    console.print(_ceiling_words(stats), soft_wrap=True, markup=False)
    console.print()
    workers = [worker for worker in stats.workers if worker.role is not WorkerRole.STORE]
    if workers:
        console.print(_worker_table(workers))
    else:
        console.print("no worker has joined yet")
    for store in stats.workers:
        if store.role is WorkerRole.STORE:
            report = (reports or {}).get(store.worker_id, "")
            _print_store(store, report, console, block_size=stats.block_size)


def stats_json(stats: CacheStats) -> dict[str, Any]:  # Any: JSON
    """For programs; a ratio of nothing is null."""
    return {
        "router_id": stats.router_id,
        "model": stats.model,
        "block_size": stats.block_size,
        "total": counts_json(stats.total),
        "num_indexed_blocks": stats.num_indexed_blocks,
        "num_asked_keys": stats.num_asked_keys,
        "kept_fraction": stats.kept_fraction,
        "workers": [
            {
                "worker_id": worker.worker_id,
                "is_live": worker.is_live,
                "role": worker.role.value if worker.role is not None else "",
                "num_published_blocks": worker.num_published_blocks,
                "num_total_blocks": worker.num_total_blocks,
                "kv_eviction_policy": worker.kv_eviction_policy,
                **counts_json(worker.counts),
            }
            for worker in stats.workers
        ],
    }


def counts_json(counts: ReuseCounts) -> dict[str, Any]:
    """Tokens; the ratios are of all prompt tokens."""
    return {
        "num_requests": counts.num_requests,
        "num_prompt_tokens": counts.num_prompt_tokens,
        "hit_tokens_by_source": {
            "device": counts.num_device_tokens,
            "peer": counts.num_peer_tokens,
            "store": counts.num_store_tokens,
        },
        "missed_tokens_by_reason": {
            reason.value: number for reason, number in counts.num_missed_tokens.items()
        },
        "recomputed_held_tokens_by_reason": {
            reason.value: number
            for reason, number in counts.num_missed_tokens.items()
            if reason.is_held
        },
        "tail_tokens": counts.num_tail_tokens,
        "predicted_hit_tokens": counts.num_predicted_tokens,
        "ceiling_hit_tokens": counts.num_ceiling_tokens,
        "ceiling_max_error_tokens": counts.max_error_tokens,
        "hit_ratio": _ratio(counts.num_found_tokens, counts.num_prompt_tokens),
        "ceiling_hit_ratio": _ratio(counts.num_ceiling_tokens, counts.num_prompt_tokens),
    }


# -- parts --


async def _fetch(target: Target) -> tuple[CacheStats, dict[str, StoreReport | str]]:
    """The router's counts, then the report of each live store, or why there is none."""
    stats = await fetch_cache_stats(target.address, key=target.api_key, deadline_s=_DEADLINE_S)
    stores = {worker.worker_id for worker in stats.workers if worker.role is WorkerRole.STORE}
    if not stores:
        return stats, {}
    router = await fetch_status(target.address, key=target.api_key, deadline_s=_DEADLINE_S)
    key = target.rpc_key
    async with asyncio.TaskGroup() as asking:
        tasks = {
            worker.worker_id: asking.create_task(_report(worker.address, key))
            for worker in router.workers
            if worker.is_live and worker.worker_id in stores
        }
    return stats, {store_id: task.result() for store_id, task in tasks.items()}


async def _report(address: str, key: str | None) -> StoreReport | str:
    if key is None:
        return "the cluster's secret is not on this machine"
    try:
        return await fetch_store_report(address, key=key, deadline_s=_DEADLINE_S)
    except MoonpoolError as error:
        return error.message


async def _clear(target: Target, worker_id: str | None) -> Mapping[str, str]:
    """Why it failed, by worker; empty where it did not."""
    router = await fetch_status(target.address, key=target.api_key, deadline_s=_DEADLINE_S)
    addresses = {
        worker.worker_id: worker.address
        for worker in router.workers
        if worker.is_live and worker_id in (None, worker.worker_id)
    }
    if worker_id is not None and not addresses:
        raise NotFoundError(f"no live worker is called {worker_id!r}", code="worker_not_found")
    key = target.rpc_key
    if key is None:
        raise UnavailableError(
            f"the cluster's secret is not under {target.data_dir}: workers take this from its holders "
            "only. Run it where the cluster runs, or name its --data-dir",
            code="no_cluster_secret",
        )
    async with asyncio.TaskGroup() as asking:
        tasks = {
            name: asking.create_task(_clear_one(address, key))
            for name, address in sorted(addresses.items())
        }
    return {name: task.result() for name, task in tasks.items()}


async def _clear_one(address: str, key: str) -> str:
    try:
        await clear_cache(address, key=key, deadline_s=_DEADLINE_S)
    except MoonpoolError as error:
        return error.message or error.code
    return ""


def _account(counts: ReuseCounts) -> Table:
    """Every prompt token, once."""
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), show_header=False)
    table.add_column("what", no_wrap=True)
    table.add_column("tokens", justify="right")
    table.add_column("share", justify="right")
    rows = [
        ("hit on the worker that prefilled", counts.num_device_tokens),
        ("hit on a peer, read from there", counts.num_peer_tokens),
        ("hit on a store, read from there", counts.num_store_tokens),
        *((words, counts.num_missed_tokens[reason]) for reason, words in _MISSES.items()),
        ("tail: not in a full block, always computed", counts.num_tail_tokens),
    ]
    for words, num_tokens in rows:
        table.add_row(words, f"{num_tokens:,}", _share(num_tokens, counts.num_prompt_tokens))
    return table


def _held_words(counts: ReuseCounts) -> str:
    return (
        f"recomputed while held: {counts.num_recomputed_held_tokens:,} tokens "
        f"({counts.num_routed_away_tokens:,} routed away, {counts.num_too_slow_tokens:,} too slow)"
    )


def _ceiling_words(stats: CacheStats) -> str:
    """What was found beside what could have been."""
    total = stats.total
    found = _share(total.num_found_tokens, total.num_prompt_tokens)
    ceiling = _share(total.num_ceiling_tokens, total.num_prompt_tokens)
    words = f"hit ratio {found}, ceiling {ceiling} (a cache that never forgets)"
    if stats.kept_fraction < 1.0:
        error = _share(total.max_error_tokens, total.num_prompt_tokens)
        words += f", estimated within {error} from {stats.kept_fraction:.2%} of the block keys"
    return words


def _print_store(
    store: WorkerCache, report: StoreReport | str, console: Console, *, block_size: int
) -> None:
    console.print()
    console.print(
        f"{store.worker_id}  store, {store.num_published_blocks:,} blocks in the router's index",
        soft_wrap=True,
        markup=False,
    )
    lines = (
        [f"no report: {report or 'not asked'}"]
        if isinstance(report, str)
        else store_lines(report, block_size=block_size)
    )
    for line in lines:
        console.print(f"  {line}", soft_wrap=True, markup=False)


def _worker_table(workers: Sequence[WorkerCache]) -> Table:
    """Fits 80 columns: shares of the prompts that each worker prefilled, and what it holds.

    `read` is the part of `hit` that was read from peers and stores.
    """
    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0), header_style="bold")
    table.add_column("worker", overflow="fold")
    table.add_column("role", no_wrap=True)
    for column in ("asked", "hit", "read", "cold", "evict", "away", "slow", "blocks"):
        table.add_column(column, justify="right", no_wrap=True)
    table.add_column("evicts", no_wrap=True)
    for worker in workers:
        table.add_row(*_worker_cells(worker))
    return table


def _worker_cells(worker: WorkerCache) -> list[str]:
    counts, total = worker.counts, worker.counts.num_prompt_tokens
    held = f"{worker.num_published_blocks}/{worker.num_total_blocks}"
    return [
        worker.worker_id,
        worker.role.value if worker.role is not None else "gone",
        f"{counts.num_requests:,}",
        _share(counts.num_found_tokens, total),
        _share(counts.num_peer_tokens + counts.num_store_tokens, total),
        *(_share(counts.num_missed_tokens[reason], total) for reason in _MISSES),
        held if worker.is_live else "-",
        worker.kv_eviction_policy or "-",
    ]


def _ratio(part: int, whole: int) -> float | None:
    return part / whole if whole else None


def _share(part: int, whole: int) -> str:
    return f"{part / whole:.1%}" if whole else "-"
