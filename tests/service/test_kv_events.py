"""What workers' caches hold, followed by a router over a real broker: whatever gets lost on the way."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path

import pytest

from moonpool.core.protocol import Refused, RefuseReason
from moonpool.core.step import StepPlan
from moonpool.errors import FailedPreconditionError
from moonpool.ids import Incarnation, WorkerKey
from moonpool.rpc.admin import clear_cache, fetch_snapshot
from moonpool.telemetry import names
from support.eventually import eventually
from support.indexed_cluster import IndexedWorker, indexed_cluster
from support.lossy_bus import lose_nothing
from support.requests import make_request
from support.thread_engine import LayerGate
from support.worker_pair import fake_workers


async def published(worker: IndexedWorker) -> None:
    """What the cache holds by now has left for the broker."""
    kv = worker.worker.service.shell.kv
    num_cached = await worker.num_cached()
    await eventually(
        lambda: kv.head.count == num_cached, timeout_s=5.0, what="all blocks are published"
    )


def is_of_kv(subject: str) -> bool:
    return ".kv." in subject


async def test_a_router_follows_what_its_workers_hold(tmp_path: Path) -> None:
    async with indexed_cluster(tmp_path) as cluster:
        router = await cluster.start_router()
        first = await cluster.start_worker("d0", num_blocks=16)
        second = await cluster.start_worker("d1", num_blocks=16)
        await first.answer(make_request("a", prompt=100, max_tokens=30, ignore_eos=True))
        await second.answer(make_request("b", prompt=40, max_tokens=4, ignore_eos=True))
        await router.follows(first, second)
        assert await first.num_cached() == (100 + 29) // 16
        # More than the pool holds: blocks go, and the index hears of it.
        await first.answer(make_request("c", prompt=200, max_tokens=2))
        await router.follows(first, second)
        assert await first.num_cached() > 12
        text = router.render_metrics()
        assert f'moonpool_index_blocks{{worker="d0"}} {await first.num_cached()}.0' in text
        assert router.metric(names.INDEX_BATCHES, outcome="read") > 3
        assert router.metric(names.INDEX_GAPS) == 0
        assert router.metric(names.INDEX_MISMATCHES) == 0
        assert first.metric(names.KV_EVENT_BATCHES, outcome="sent") > 1

        # Forgetting is heard of as well.
        await clear_cache(first.worker.address, key=cluster.rpc_key, deadline_s=5.0)
        await eventually(
            lambda: first.worker.service.shell.load().ledger.num_cached == 0,
            timeout_s=5.0,
            what="the cache is cleared",
        )
        await router.follows(first, second)
        assert await first.num_cached() == 0


async def test_a_lost_change_is_noticed_and_made_up_for(tmp_path: Path) -> None:
    async with indexed_cluster(tmp_path) as cluster:
        router = await cluster.start_router()
        worker = await cluster.start_worker()
        await worker.answer(make_request("a", prompt=50, max_tokens=2))
        await router.follows(worker)
        num_snapshots = router.metric(names.INDEX_SNAPSHOTS, outcome="loaded")
        worker.bus.loses = is_of_kv
        await worker.answer(make_request("b", prompt=50, max_tokens=2))
        await eventually(
            lambda: worker.bus.num_lost > 0, timeout_s=5.0, what="a change was lost on its way"
        )
        await published(worker)
        worker.bus.loses = lose_nothing
        # No change follows: the next announcement tells.
        await router.follows(worker)
        assert router.metric(names.INDEX_GAPS) == 1
        assert router.metric(names.INDEX_SNAPSHOTS, outcome="loaded") == num_snapshots + 1


async def test_a_new_incarnation_starts_from_nothing(tmp_path: Path) -> None:
    async with indexed_cluster(tmp_path) as cluster:
        router = await cluster.start_router()
        other = await cluster.start_worker("d1")
        before = await cluster.start_worker("d0")
        request = make_request("a", prompt=80, max_tokens=2)
        await other.answer(request)
        await before.answer(request)
        await router.follows(before, other)
        await before.stop()
        after = await cluster.start_worker("d0")
        await router.follows(after, other)
        assert await after.num_cached() == 0
        await after.answer(request)
        await router.follows(after, other)
        assert before.key != after.key


async def test_an_outage_of_the_broker_ends_in_one_change(tmp_path: Path) -> None:
    async with indexed_cluster(tmp_path) as cluster:
        router = await cluster.start_router()
        worker = await cluster.start_worker(num_blocks=32)
        await worker.answer(make_request("a", prompt=50, max_tokens=2))
        await router.follows(worker)
        head = worker.worker.service.shell.kv.head
        cluster.nats.kill()
        await eventually(lambda: not worker.bus.is_connected, timeout_s=5.0, what="it is gone")
        for name in "bcdefgh":
            await worker.answer(make_request(name, prompt=100, max_tokens=2))
        assert worker.worker.service.shell.kv.head == head
        cluster.nats.start()
        await eventually(
            lambda: worker.worker.service.shell.kv.head != head, timeout_s=5.0, what="it is back"
        )
        assert worker.worker.service.shell.kv.head.sequence == head.sequence + 1
        await router.follows(worker)


async def test_a_late_router_learns_what_is_there(tmp_path: Path) -> None:
    async with indexed_cluster(tmp_path) as cluster:
        worker = await cluster.start_worker()
        await worker.answer(make_request("a", prompt=90, max_tokens=2))
        await published(worker)
        router = await cluster.start_router()
        await router.follows(worker)
        assert router.metric(names.INDEX_BATCHES, outcome="read") == 0
        assert router.metric(names.INDEX_SNAPSHOTS, outcome="loaded") == 1
        assert router.metric(names.INDEX_GAPS) == 0


async def test_under_load_and_loss_the_index_ends_at_the_truth(tmp_path: Path) -> None:
    rng = random.Random(7)
    async with indexed_cluster(tmp_path) as cluster:
        # A small pool: blocks come and go with every request.
        workers = [await cluster.start_worker(name, num_blocks=24) for name in ("d0", "d1")]
        for worker in workers:
            worker.bus.loses = lambda subject: is_of_kv(subject) and rng.random() < 0.5

        async def load(worker: IndexedWorker) -> None:
            for number in range(12):
                prompt = [rng.randrange(3), *range(rng.randrange(16, 200))]
                await worker.answer(make_request(f"r{number}", prompt=prompt, max_tokens=20))

        async with asyncio.TaskGroup() as tasks:
            for worker in workers:
                tasks.create_task(load(worker))
            # It comes, and asks for snapshots, while everything moves.
            router = await cluster.start_router()
        await router.follows(*workers)
        assert all(worker.bus.num_lost > 0 for worker in workers)
        assert router.metric(names.INDEX_MISMATCHES) == 0


async def test_blocks_of_two_tenants_never_meet(tmp_path: Path) -> None:
    async with indexed_cluster(tmp_path) as cluster:
        router = await cluster.start_router()
        worker = await cluster.start_worker()
        by_tenant = {
            tenant: make_request(tenant, prompt=range(64), max_tokens=2, tenant=tenant)
            for tenant in ("a", "b", "c")
        }
        await worker.answer(by_tenant["a"], by_tenant["b"])
        await router.follows(worker)
        assert await worker.num_cached() == 2 * (64 // 16)
        # The router computes the worker's keys, and no tenant sees another's.
        matcher = router.matcher(worker)
        assert matcher(by_tenant["a"]) == matcher(by_tenant["b"]) == {worker.key: 48}
        assert matcher(by_tenant["c"]) == {}


async def test_a_snapshot_is_of_the_incarnation_that_was_meant(tmp_path: Path) -> None:
    async with indexed_cluster(tmp_path) as cluster:
        worker = await cluster.start_worker()
        await worker.answer(make_request("a", prompt=90, max_tokens=2))
        address, key = worker.worker.address, cluster.rpc_key
        snapshot = await fetch_snapshot(address, worker.key, key=key, deadline_s=5.0)
        assert len(snapshot.keys) == snapshot.head.count == await worker.num_cached()
        other = WorkerKey(worker.key.worker_id, Incarnation("0" * 16))
        with pytest.raises(FailedPreconditionError, match="This is"):
            await fetch_snapshot(address, other, key=key, deadline_s=5.0)


class LaterGate:
    """Lets steps pass until it is armed; then it is a LayerGate."""

    def __init__(self, layer: int) -> None:
        self.inner = LayerGate([layer])
        self.is_armed = False

    def __call__(self, plan: StepPlan, layer: int) -> None:
        if self.is_armed:
            self.inner(plan, layer)


async def test_a_decode_without_room_is_refused_during_a_long_step(tmp_path: Path) -> None:
    gate = LaterGate(2)
    async with fake_workers(tmp_path) as workers:
        worker, router = await workers.start("d0", gate=gate, num_blocks=16)
        common = range(160)
        first = make_request("first", prompt=common, max_tokens=2)
        router.decode(first)
        await router.answer(first)
        await worker.until_quiet()
        gate.is_armed = True
        long_step = make_request("long", prompt=range(176), max_tokens=2)
        router.decode(long_step)
        await eventually(lambda: gate.inner.is_reached, timeout_s=5.0, what="a step is under way")
        # 11 blocks are held, 5 could be had, and 10 of each request need not be had: they are cached.
        fits = make_request("fits", prompt=[*common, *range(500, 580)], max_tokens=2)
        too_large = make_request("large", prompt=[*common, *range(600, 690)], max_tokens=2)
        router.decode(fits, source=router.source)
        router.decode(too_large, source=router.source)
        # The core hears nothing before the gate opens: this is the service's own answer.
        refused = await router.until(too_large, Refused)
        assert isinstance(refused, Refused)
        assert refused.reason is RefuseReason.NO_BLOCKS
        assert not any(
            report.message.attempt_id.request_id == fits.request_id for report in router.reports
        )
        router.abort(fits)
        gate.inner.open()
        await router.answer(long_step)
