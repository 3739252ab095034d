"""Why a peer that was named spared nothing, as the router's books tell it: real workers, and real faults.

Each time one worker holds a prompt, and another one, which holds nothing, is asked for it next.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from moonpool.client import AsyncClient, GenerationResult
from moonpool.handoff.effects import FetchOutcome
from moonpool.rpc.admin import clear_cache
from moonpool.rpc.cache import fetch_cache_stats
from moonpool.telemetry import names
from support.indexed_cluster import IndexedCluster, IndexedRouter, IndexedWorker, indexed_cluster
from support.requests import make_request

#: 12 blocks and 8 tokens.
PROMPT = [7 * i % 251 for i in range(200)]
NUM_SHARED = 192
ROUND_ROBIN = {"mode": "round_robin"}


async def ask(router: IndexedRouter) -> GenerationResult:
    async with AsyncClient(router.address) as client:
        return await client.complete(
            token_ids=PROMPT, max_tokens=3, temperature=0.0, seed=1, ignore_eos=True
        )


async def clear(cluster: IndexedCluster, worker: IndexedWorker) -> None:
    await clear_cache(worker.worker.address, key=cluster.rpc_key, deadline_s=5.0)


def outcomes(worker: IndexedWorker) -> dict[str, int]:
    """Its fetches, by outcome."""
    counts = {o.value: int(worker.metric(names.KV_FETCHES, outcome=o.value)) for o in FetchOutcome}
    return {outcome: count for outcome, count in counts.items() if count}


async def books(router: IndexedRouter) -> dict[str, int]:
    """What became of the prompt when it was asked for the second time; the first time it was cold."""
    total = (await fetch_cache_stats(router.address, key=None, deadline_s=5.0)).total
    assert total.num_requests == 2
    told = {"peer": total.num_peer_tokens}
    told |= {reason.value: n for reason, n in total.num_missed_tokens.items()}
    assert told.pop("cold") == NUM_SHARED
    for reason in ("evicted", "routed_away", "too_slow"):
        metric = router.metric(names.MISSED_TOKENS, model="model", reason=reason)
        assert metric == told[reason], reason
    held = router.metric(names.RECOMPUTED_HELD_TOKENS, model="model", reason="too_slow")
    assert held == told["too_slow"]
    return {what: n for what, n in told.items() if n}


@pytest.mark.parametrize(
    ("at_holder", "at_reader", "reads", "outcome", "told"),
    [
        ("hold.before_opened=delay:1000", "", "auto", "slow", {"too_slow": NUM_SHARED}),
        ("", "fetch.read=delay:1000", "auto", "slow", {"too_slow": NUM_SHARED}),
        ("", "fetch.read=flip", "always", "damaged", {"evicted": NUM_SHARED}),
        ("", "fetch.read=drop", "always", "lost", {"evicted": NUM_SHARED}),
    ],
)
async def test_a_read_that_suffers(
    tmp_path: Path,
    at_holder: str,
    at_reader: str,
    reads: str,
    outcome: str,
    told: dict[str, int],
) -> None:
    async with indexed_cluster(tmp_path) as cluster:
        router = await cluster.start_router(local_prefill_tokens=1_000, placement=ROUND_ROBIN)
        holder = await cluster.start_worker("d0", failpoints=at_holder)
        await router.follows(holder)
        await ask(router)
        reader = await cluster.start_worker("d1", kv_peer_reads=reads, failpoints=at_reader)
        await router.follows(holder, reader)
        answer = await ask(router)
        assert answer.placement.decode_worker == "d1"
        assert outcomes(reader) == {outcome: 1}
        assert await books(router) == told


@pytest.mark.parametrize("filler", [0, 90])
async def test_a_peer_that_has_evicted_it_meanwhile(tmp_path: Path, filler: int) -> None:
    """All of it, or the end of it; the router has not heard of it yet."""
    async with indexed_cluster(tmp_path) as cluster:
        router = await cluster.start_router(local_prefill_tokens=1_000, placement=ROUND_ROBIN)
        holder = await cluster.start_worker("d0", num_blocks=16)
        await router.follows(holder)
        await ask(router)
        reader = await cluster.start_worker("d1", kv_peer_reads="always")
        await router.follows(holder, reader)
        holder.bus.loses = lambda subject: True
        if filler:
            await holder.answer(make_request("filler", prompt=filler, max_tokens=2))
        else:
            await clear(cluster, holder)
        await ask(router)
        assert outcomes(reader) == {"short" if filler else "absent": 1}
        told = await books(router)
        assert told.keys() == ({"peer", "evicted"} if filler else {"evicted"})
        assert sum(told.values()) == NUM_SHARED


async def test_computing_that_is_believed_to_be_faster(tmp_path: Path) -> None:
    async with indexed_cluster(tmp_path) as cluster:
        router = await cluster.start_router(local_prefill_tokens=1_000, placement=ROUND_ROBIN)
        holder = await cluster.start_worker("d0")
        await router.follows(holder)
        await ask(router)
        reader = await cluster.start_worker("d1", kv_peer_reads="auto")
        # Its engine takes microseconds, and by then it knows.
        for number in range(5):
            warming = make_request(f"w{number}", prompt=20 * (number + 1), max_tokens=1)
            await reader.answer(warming)
        await router.follows(holder, reader)
        await ask(router)
        assert outcomes(reader) == {}
        assert await books(router) == {"too_slow": NUM_SHARED}


async def test_the_peer_of_a_prefill_worker(tmp_path: Path) -> None:
    """The decode worker passes on what the prefill worker found."""
    async with indexed_cluster(tmp_path) as cluster:
        router = await cluster.start_router(
            local_prefill_tokens=64, placement=ROUND_ROBIN | {"disagg": "threshold"}
        )
        holder = await cluster.start_worker("d0", role="decode")
        prefill = await cluster.start_worker(
            "p0", role="prefill", kv_peer_reads="always", failpoints="fetch.read=flip"
        )
        await router.follows(holder, prefill)
        await ask(router)
        await clear(cluster, prefill)
        other = await cluster.start_worker("d1", role="decode")
        await router.follows(holder, prefill, other)
        answer = await ask(router)
        assert (answer.placement.prefill_worker, answer.placement.decode_worker) == ("p0", "d1")
        assert outcomes(prefill) == {"damaged": 1}
        assert await books(router) == {"evicted": NUM_SHARED}
