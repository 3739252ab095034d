"""Stores in a router's fleet: named to whoever prefills, counted apart, and never asked to compute."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from moonpool.config.schema import PlacementSettings
from moonpool.handoff.messages import DecodeRequest, PeerPrefix, PrefillRequest
from moonpool.inference.generation import TokenPrompt
from moonpool.inference.output import FinishReason
from moonpool.kv.block_hash import hash_blocks
from moonpool.kv.events import BlockStored
from moonpool.kv.namespace_seeds import NamespaceSeeds
from moonpool.routing.config import PolicyName
from moonpool.routing.worker_view import WorkerRole
from moonpool.rpc.cache import fetch_cache_stats
from moonpool.rpc.explanation import fetch_explanation
from moonpool.telemetry import names
from support.eventually import eventually
from support.fake_worker import FakeWorker, fake_worker
from support.requests import make_request
from support.router import Answered, RouterUnderTest, ask, router

#: Six full blocks and a bit; longer than the router's threshold of 32.
TOKENS = tuple(range(9, 109))
PROMPT = TokenPrompt(token_ids=TOKENS)
NUM_STORED = 96


def publish(r: RouterUnderTest, worker: FakeWorker) -> None:
    """It holds the prompt's full blocks."""
    seeds = NamespaceSeeds(worker.hello.namespace, r.cluster.secret.value)
    hashes = hash_blocks(seeds(make_request("any")), TOKENS, 16)
    worker.published.apply([BlockStored(hashes=tuple(hashes), parent_hash=None)])


async def until_indexed(r: RouterUnderTest, num_blocks: int) -> None:
    async def is_indexed() -> bool:
        stats = await fetch_cache_stats(r.client.address, key=None, deadline_s=5)
        return stats.num_indexed_blocks == num_blocks

    await eventually(is_indexed, timeout_s=5, what=f"{num_blocks} blocks are in the index")


async def holds(r: RouterUnderTest, store: FakeWorker) -> PeerPrefix:
    """The store publishes the prompt, and the router has heard of it."""
    publish(r, store)
    await store.announce()
    await until_indexed(r, NUM_STORED // 16)
    return PeerPrefix(
        key=store.key,
        address=store.hello.grpc_address,
        num_tokens=NUM_STORED,
        is_store=True,
    )


async def begin(
    r: RouterUnderTest, decode: FakeWorker
) -> tuple[asyncio.Task[Answered], DecodeRequest]:
    asking = asyncio.create_task(r.client.generate(ask(PROMPT, max_tokens=1)))
    return asking, await decode.next(DecodeRequest)


async def finish(
    asking: asyncio.Task[Answered],
    command: DecodeRequest,
    decode: FakeWorker,
    cached: int,
    peer: int,
    held: int | None = None,
) -> Answered:
    """`held`: what the worker found its peer to hold, if that was less than it was told."""
    decode.tokens(
        command,
        0,
        [65],
        finish=FinishReason.LENGTH,
        num_cached_tokens=cached,
        num_peer_tokens=peer,
        num_peer_held_tokens=held,
    )
    return await asking


@pytest.mark.parametrize("policy", [policy.value for policy in PolicyName])
async def test_a_prefix_that_only_a_store_holds_is_read_there(tmp_path: Path, policy: str) -> None:
    placement = PlacementSettings.model_validate({"mode": policy})
    async with (
        router(tmp_path, placement=placement) as r,
        fake_worker(r.cluster, r.bus) as decode,
        fake_worker(r.cluster, r.bus, "store-0", role=WorkerRole.STORE) as store,
    ):
        await r.ready(2)
        peer = await holds(r, store)
        asking, command = await begin(r, decode)
        assert (command.source, command.peer) == (None, peer)
        answered = await finish(asking, command, decode, NUM_STORED, NUM_STORED)
        assert answered.done is not None
        assert answered.done.usage.num_cached_tokens_by_source == {
            "device": 0, "peer": 0, "store": NUM_STORED,
        }  # fmt: skip
        session = await store.joined()
        assert session.messages.empty()

        (placed,) = await fetch_explanation(
            r.client.address, answered.done.request_id, key=None, deadline_s=5
        )
        assert placed.plan.peer is not None
        assert (placed.plan.peer.key, placed.plan.peer.is_store) == (store.key, True)
        assert [c.key for c in placed.decode.candidates] == [decode.key]

        stats = await fetch_cache_stats(r.client.address, key=None, deadline_s=5)
        assert stats.total.num_store_tokens == stats.total.num_found_tokens == NUM_STORED
        assert r.metric(names.CACHED_TOKENS, model="tiny", source="store") == NUM_STORED
        assert r.metric(names.CACHED_TOKENS, model="tiny", source="peer") == 0
        (told,) = (worker for worker in stats.workers if worker.role is WorkerRole.STORE)
        assert (told.worker_id, told.num_published_blocks) == ("store-0", NUM_STORED // 16)
        assert told.counts.num_requests == 0


async def test_a_prefill_worker_is_told_the_store(tmp_path: Path) -> None:
    async with (
        router(tmp_path) as r,
        fake_worker(r.cluster, r.bus) as decode,
        fake_worker(r.cluster, r.bus, "prefill-0", role=WorkerRole.PREFILL) as prefill,
        fake_worker(r.cluster, r.bus, "store-0", role=WorkerRole.STORE) as store,
    ):
        await r.ready(3)
        peer = await holds(r, store)
        asking, command = await begin(r, decode)
        assert command.source is not None
        assert command.source.key == prefill.key
        assert command.peer is None
        assert (await prefill.next(PrefillRequest)).peer == peer
        answered = await finish(asking, command, decode, NUM_STORED, 64)
        assert answered.done is not None
        assert answered.done.usage.num_cached_tokens_by_source == {
            "device": 32, "peer": 0, "store": 64,
        }  # fmt: skip


async def test_a_store_that_is_lost_in_the_middle_costs_a_recompute(tmp_path: Path) -> None:
    async with (
        router(tmp_path) as r,
        fake_worker(r.cluster, r.bus) as decode,
        fake_worker(r.cluster, r.bus, "store-0", role=WorkerRole.STORE) as store,
    ):
        await r.ready(2)
        peer = await holds(r, store)
        asking, command = await begin(r, decode)
        assert command.peer == peer
        await store.stop()
        # Its blocks are forgotten, and nothing else happens.
        await until_indexed(r, 0)
        answered = await finish(asking, command, decode, 0, 0, held=0)
        assert answered.done is not None
        assert answered.token_ids == [65]
        assert answered.done.placement.num_attempts == 1
        asking, command = await begin(r, decode)
        assert command.peer is None
        await finish(asking, command, decode, 0, 0)
        stats = await fetch_cache_stats(r.client.address, key=None, deadline_s=5)
        # The first time it was lost while it was read, the second nobody was believed to hold it.
        assert stats.total.num_store_tokens == stats.total.num_recomputed_held_tokens == 0
        assert stats.total.num_evicted_tokens == 2 * NUM_STORED


async def test_after_a_death_the_peer_of_the_attempt_that_computed_is_told_of(
    tmp_path: Path,
) -> None:
    async with (
        router(tmp_path) as r,
        fake_worker(r.cluster, r.bus) as first,
        fake_worker(r.cluster, r.bus, "store-0", role=WorkerRole.STORE) as store,
    ):
        await r.ready(2)
        await holds(r, store)
        asking = asyncio.create_task(r.client.generate(ask(PROMPT, max_tokens=2)))
        command = await first.next(DecodeRequest)
        # A third of it came in time, and a third was no longer there.
        first.tokens(
            command, 0, [65], num_cached_tokens=32, num_peer_tokens=32, num_peer_held_tokens=64
        )
        async with fake_worker(r.cluster, r.bus, "decode-1") as second:
            await r.ready(3)
            await first.stop()
            replay = await second.next(DecodeRequest)
            assert replay.peer is not None
            second.tokens(
                replay,
                1,
                [66],
                finish=FinishReason.LENGTH,
                num_cached_tokens=NUM_STORED,
                num_peer_tokens=NUM_STORED,
            )
            await asking
            total = (await fetch_cache_stats(r.client.address, key=None, deadline_s=5)).total
            assert (total.num_store_tokens, total.num_too_slow_tokens) == (32, 32)
            assert total.num_evicted_tokens == 32
            assert r.metric(names.PREDICTED_HIT_TOKENS, model="tiny") == total.num_predicted_tokens
            held = {"model": "tiny", "reason": "too_slow"}
            assert r.metric(names.RECOMPUTED_HELD_TOKENS, **held) == 32


async def test_stores_alone_serve_nobody(tmp_path: Path) -> None:
    async with (
        router(tmp_path) as r,
        fake_worker(r.cluster, r.bus, "store-0", role=WorkerRole.STORE) as store,
    ):
        await r.ready()
        status = await r.client.status()
        assert status.not_ready_because == "Stores have joined, but no worker yet."
        (shown,) = status.workers
        assert (shown.worker_id, shown.role, shown.state) == ("store-0", WorkerRole.STORE, "up")
        assert not await r.client.is_serving()
        async with fake_worker(r.cluster, r.bus):
            await r.ready(2)
            assert await r.client.is_serving()
        assert (await store.joined()).messages.empty()
