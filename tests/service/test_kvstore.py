"""A store node over real gRPC, its arena, its log on disk; workers with engines in threads."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import itertools
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from moonpool.bus.memory import MemoryBus
from moonpool.bus.nats import NatsBus
from moonpool.clock import ManualClock
from moonpool.config.secret import load_or_create_secret
from moonpool.core.protocol import Refused, RefuseReason, TokensReady
from moonpool.errors import ConfigError, FailedPreconditionError, InvalidRequestError
from moonpool.handoff.messages import PrefixOpen, PrefixOpened, PrefixStaging, SourceRef
from moonpool.ids import AttemptId, BlockHash, Incarnation, RequestId, WorkerKey
from moonpool.inference.request import InferenceRequest
from moonpool.kv.block_hash import hash_blocks
from moonpool.kv.namespace_seeds import NamespaceSeeds
from moonpool.routing.worker_view import WorkerRole
from moonpool.rpc.admin import clear_cache
from moonpool.rpc.channel import open_channel
from moonpool.rpc.metadata import call_metadata
from moonpool.rpc.store import pin_blocks, unpin_blocks
from moonpool.store.segment_files import SegmentFiles
from moonpool.store.segment_log import SegmentLog
from moonpool.telemetry import names
from moonpool.tiering.protocol import PinKind, PutRefusal
from moonpool.wire.store import PinChain, PutAnswer, StoreReport, UnpinChain
from moonpool.worker.compatibility import handoff_fingerprint
from moonpool_kvstore.service import OpenLog
from support.eventually import eventually
from support.leases import read_lease
from support.nats_server import nats_server
from support.requests import make_request
from support.router_client import RouterClient
from support.segment_log import FaultyFiles, flip
from support.stores import RunningStore, running_store, store_config
from support.thread_engine import LayerGate, ThreadEngines
from support.tiny_llama import TinyLlama, write_tiny_llama
from support.worker_pair import Workers, expected_answer, fake_workers
from support.workers import RunningWorker, running_worker, worker_config

#: 12 blocks and a bit; the next turn of the same chat.
FIRST = make_request("r1", prompt=range(200), max_tokens=3, ignore_eos=True)
SECOND = make_request("r2", prompt=[*range(192), *range(7, 40)], max_tokens=5, ignore_eos=True)
NUM_SHARED = 192
NUM_BLOCKS = 12


class World:
    """Workers and stores of one cluster. Made by `world`."""

    def __init__(self, path: Path, workers: Workers, stack: AsyncExitStack) -> None:
        self.path = path
        self._workers = workers
        self._stack = stack
        self._started: dict[RunningStore, AsyncExitStack] = {}

    async def store(
        self,
        store_id: str = "store-0",
        *,
        model: Path | None = None,
        open_log: OpenLog | None = None,
        **settings: Any,
    ) -> RunningStore:
        config = store_config(self.path, model or self.path / "model", store_id, **settings)
        stack = await self._stack.enter_async_context(AsyncExitStack())
        bus = MemoryBus(self._workers.broker)
        store = await stack.enter_async_context(running_store(config, bus, open_log=open_log))
        self._started[store] = stack
        return store

    async def stop(self, store: RunningStore) -> None:
        await self._started.pop(store).aclose()

    async def worker(self, worker_id: str, **settings: Any) -> tuple[RunningWorker, RouterClient]:
        """A worker that offers nothing by itself, and reads whenever a peer is named."""
        return await self._workers.start(
            worker_id, **{"kv_offload": False, "kv_peer_reads": "always"} | settings
        )

    async def stop_worker(self, worker: RunningWorker) -> None:
        await self._workers.stop(worker)

    def chain(
        self, store: RunningStore, request: InferenceRequest = FIRST
    ) -> tuple[BlockHash, ...]:
        """The first blocks of a request, as everyone in the cluster names them."""
        secret = load_or_create_secret(self.path)
        seed = NamespaceSeeds(store.service.shell.hello.namespace, secret.value)(request)
        return tuple(hash_blocks(seed, request.prompt_token_ids[:NUM_SHARED], 16))

    async def check_quiet(self) -> None:
        for store in self._started:
            await store.until_quiet()


@contextlib.asynccontextmanager
async def world(path: Path) -> AsyncIterator[World]:
    """On exit nobody may hold anything."""
    async with fake_workers(path) as workers, AsyncExitStack() as stack:
        world = World(path, workers, stack)
        yield world
        await world.check_quiet()


async def answer(client: RouterClient, request: InferenceRequest, **options: Any) -> TokensReady:
    """Have it answered, as it must be; the first report."""
    client.decode(request, **options)
    assert await client.answer(request) == expected_answer(request)
    first = await client.until(request, TokensReady)
    assert isinstance(first, TokensReady)
    return first


async def put(world: World, store: RunningStore, worker_id: str = "w0") -> None:
    """A worker computes FIRST, the store takes it, the worker goes."""
    worker, client = await world.worker(worker_id)
    await answer(client, FIRST)
    answered = await store.offer(world.chain(store), client.source)
    assert answered == PutAnswer(num_wanted_blocks=NUM_BLOCKS)
    await store.until_quiet()
    await world.stop_worker(worker)


async def restarted(world: World, ssd: Path, **settings: Any) -> RunningStore:
    """A store that has FIRST on its disk and nothing in memory."""
    store = await world.store(ssd_dir=ssd)
    await put(world, store)
    await report_when(store, "it is on disk", num_disk_blocks=NUM_BLOCKS)
    await world.stop(store)
    return await world.store(ssd_dir=ssd, **settings)


def faulty(disks: list[FaultyFiles]) -> OpenLog:
    """Logs whose disks a test can break: each is added to the list. Their time stands still."""

    def wrap_files(files: SegmentFiles) -> SegmentFiles:
        disks.append(FaultyFiles(files))
        return disks[-1]

    async def open_log(path: Path, **settings: Any) -> SegmentLog:
        clock = ManualClock()
        return await SegmentLog.open(path, **settings | {"clock": clock, "wrap_files": wrap_files})

    return open_log


def config_error(error: BaseException) -> ConfigError:
    """Why a node did not start."""
    while isinstance(error, ExceptionGroup):
        (error,) = error.exceptions
    assert isinstance(error, ConfigError)
    return error


async def report_when(store: RunningStore, what: str, **counts: int) -> StoreReport:
    """The report, once these counts are so."""
    reports: list[StoreReport] = []

    async def is_so() -> bool:
        reports.append(await store.report())
        stats = reports[-1].stats
        return all(getattr(stats, name) == count for name, count in counts.items())

    await eventually(is_so, timeout_s=10.0, what=what)
    return reports[-1]


@pytest.mark.parametrize("transport", ["shm", "grpc"])
async def test_what_a_worker_computed_outlives_it(tmp_path: Path, transport: str) -> None:
    only = {"transports": (transport,), "is_transport_strict": True}
    async with world(tmp_path) as cluster:
        store = await cluster.store(**only)
        await put(cluster, store)
        report = await report_when(
            store, "it is here", num_host_blocks=NUM_BLOCKS, num_put_blocks=NUM_BLOCKS, num_puts=1
        )
        assert (report.disk, report.problem) == (None, "")
        assert store.service.shell.kv.head.count == NUM_BLOCKS
        _, reader = await cluster.worker("r0", **only)
        first = await answer(reader, SECOND, peer=store.peer(NUM_SHARED))
        assert (first.num_cached_tokens, first.num_peer_tokens) == (NUM_SHARED, NUM_SHARED)
        # Nothing of it is wanted again.
        assert await store.offer(cluster.chain(store), reader.source) == PutAnswer(
            num_wanted_blocks=0
        )
        stats = (await store.report()).stats
        assert (stats.num_gets, stats.num_hit_host_blocks, stats.num_known_puts) == (
            1,
            NUM_BLOCKS,
            1,
        )


async def test_what_lies_on_disk_outlives_the_store(tmp_path: Path) -> None:
    ssd = tmp_path / "ssd"
    ssd.mkdir()
    settings: dict[str, Any] = {
        "ssd_dir": ssd,
        "ssd_write_bytes_per_day": 12 * 2**20,
        "tenants": ({"tenant": "default", "floor_bytes": 1024},),
    }
    async with world(tmp_path) as cluster:
        store = await cluster.store(**settings)
        await put(cluster, store)
        report = await report_when(store, "it is on disk", num_disk_blocks=NUM_BLOCKS)
        assert report.disk is not None
        assert report.disk.written_bytes >= NUM_BLOCKS * report.block_bytes
        budget_bytes = report.stats.write_budget_bytes
        assert budget_bytes is not None
        await cluster.stop(store)

        again = await cluster.store(**settings)
        assert again.key != store.key
        report = await report_when(
            again, "it is found", num_disk_blocks=NUM_BLOCKS, num_host_blocks=0
        )
        assert again.service.shell.kv.head.count == NUM_BLOCKS
        # What was written counts for a day, whoever was restarted meanwhile.
        max_bytes = report.stats.write_budget_max_bytes
        assert max_bytes is not None
        assert budget_bytes <= (report.stats.write_budget_bytes or 0) < max_bytes
        _, reader = await cluster.worker("r0")
        first = await answer(reader, SECOND, peer=again.peer(NUM_SHARED))
        assert first.num_peer_tokens == NUM_SHARED
        stats = (await again.report()).stats
        assert (stats.num_hit_disk_blocks, stats.num_loaded_blocks) == (NUM_BLOCKS, NUM_BLOCKS)
        # It is still its tenant's.
        assert [(use.tenant, use.num_blocks) for use in stats.tenants] == [
            ("", 0),
            ("default", NUM_BLOCKS),
        ]
        text = again.service.render_metrics().decode()
        for line in (
            'moonpool_store_hit_blocks_total{tier="disk"} 12.0',
            'moonpool_store_gets_total{outcome="found"} 1.0',
            'moonpool_store_loaded_blocks_total{outcome="ok"} 12.0',
            'moonpool_store_blocks{tier="disk"} 12.0',
            'moonpool_store_blocks{tier="host"} 12.0',
            'moonpool_store_breaker{access="reads"} 0.0',
            "moonpool_store_disk_up 1.0",
        ):
            assert line in text, text


async def test_flipped_bytes_on_disk_are_misses(tmp_path: Path) -> None:
    """Of blocks alone: the scan believes their footers, and only their digests tell."""
    ssd = tmp_path / "ssd"
    ssd.mkdir()
    async with world(tmp_path) as cluster:
        store = await cluster.store(ssd_dir=ssd)
        await put(cluster, store)
        await report_when(store, "it is on disk", num_disk_blocks=NUM_BLOCKS)
        await cluster.stop(store)
        (segment,) = ssd.glob("store-0/*/segment-*")
        block_bytes = store.service.shell.hello.regions[0].layout.block_bytes
        slot_bytes = segment.stat().st_size // NUM_BLOCKS
        num_sound = NUM_BLOCKS // 2
        for slot in range(num_sound, NUM_BLOCKS):
            flip(segment, slot * slot_bytes + block_bytes * slot // NUM_BLOCKS)

        again = await cluster.store(ssd_dir=ssd)
        await report_when(again, "it is found", num_disk_blocks=NUM_BLOCKS)
        _, reader = await cluster.worker("r0")
        first = await answer(reader, SECOND, peer=again.peer(NUM_SHARED))
        assert first.num_peer_tokens == num_sound * 16
        await report_when(
            again,
            "they are dropped",
            num_bad_blocks=NUM_BLOCKS - num_sound,
            num_disk_blocks=num_sound,
        )


async def test_clearing_leaves_nothing_on_disk(tmp_path: Path) -> None:
    ssd = tmp_path / "ssd"
    ssd.mkdir()
    async with world(tmp_path) as cluster:
        store = await cluster.store(ssd_dir=ssd)
        await put(cluster, store)
        await report_when(store, "it is on disk", num_disk_blocks=NUM_BLOCKS)
        await store.until_quiet()
        await clear_cache(store.address, key=store.rpc_key, deadline_s=5.0)
        await report_when(store, "it is forgotten", num_disk_blocks=0, num_host_blocks=0)
        await eventually(
            lambda: not list(ssd.glob("store-0/*/segment-*")), timeout_s=10.0, what="it is gone"
        )
        await eventually(
            lambda: store.service.shell.kv.head.count == 0, timeout_s=10.0, what="it is withdrawn"
        )
        # And what comes later is kept again.
        await put(cluster, store, "w1")
        await report_when(store, "it is on disk", num_disk_blocks=NUM_BLOCKS)


@pytest.mark.parametrize("obstacle", ["missing", "a file", "open to others"])
async def test_without_its_disk_a_store_serves_from_memory(tmp_path: Path, obstacle: str) -> None:
    ssd = tmp_path / "ssd"
    if obstacle == "a file":
        ssd.write_text("mine")
    elif obstacle == "open to others":
        (ssd / "store-0").mkdir(parents=True)
        (ssd / "store-0").chmod(0o755)
    async with world(tmp_path) as cluster:
        store = await cluster.store(ssd_dir=ssd)
        assert store.running.facts["ssd"] == "off"
        report = await store.report()
        assert report.disk is None
        assert str(ssd) in report.problem
        await put(cluster, store)
        assert store.service.metrics.value(names.STORE_DISK_UP) == 0
        with pytest.raises(ExceptionGroup) as caught:
            await cluster.store("store-0", ssd_dir=ssd, is_ssd_strict=True)
        assert str(ssd) in config_error(caught.value).message


async def test_a_disk_that_fails_takes_nothing_from_memory(tmp_path: Path) -> None:
    """Full at first, then reads give errors: misses, said and counted; what can be read is read."""
    ssd = tmp_path / "ssd"
    ssd.mkdir()
    disks: list[FaultyFiles] = []
    open_log = faulty(disks)
    async with world(tmp_path) as cluster:
        store = await cluster.store(ssd_dir=ssd, open_log=open_log)
        (disk,) = disks
        disk.failures["pwritev"] = OSError(errno.ENOSPC, "no space")
        await put(cluster, store)
        report = await report_when(
            store, "nothing could be written", num_failed_write_blocks=NUM_BLOCKS, num_disk_blocks=0
        )
        assert "No space left on device" in report.problem
        store.service.render_metrics()
        assert store.service.metrics.value(names.STORE_DISK_UP) == 0
        _, reader = await cluster.worker("r0")
        assert (await answer(reader, SECOND, peer=store.peer(NUM_SHARED))).num_peer_tokens > 0


async def test_a_disk_that_gives_errors_is_a_miss(tmp_path: Path) -> None:
    ssd = tmp_path / "ssd"
    ssd.mkdir()
    disks: list[FaultyFiles] = []
    open_log = faulty(disks)
    async with world(tmp_path) as cluster:
        store = await cluster.store(ssd_dir=ssd)
        await put(cluster, store)
        await report_when(store, "it is on disk", num_disk_blocks=NUM_BLOCKS)
        await cluster.stop(store)
        again = await cluster.store(ssd_dir=ssd, open_log=open_log)
        await report_when(again, "it is found", num_disk_blocks=NUM_BLOCKS)
        disks[0].failures["preadv"] = OSError(errno.EIO, "I/O error")
        _, reader = await cluster.worker("r0")
        assert (await answer(reader, SECOND, peer=again.peer(NUM_SHARED))).num_peer_tokens == 0
        stats = (await again.report()).stats
        assert (stats.num_hit_disk_blocks, stats.num_loaded_blocks) == (0, 0)
        assert stats.num_failed_load_blocks > 0


async def test_two_stores_never_share_a_directory(tmp_path: Path) -> None:
    ssd = tmp_path / "ssd"
    ssd.mkdir()
    async with world(tmp_path) as cluster:
        await cluster.store(ssd_dir=ssd)
        twin = await cluster.store(ssd_dir=ssd)
        assert "another store node uses it" in (await twin.report()).problem
        other = await cluster.store("store-1", ssd_dir=ssd)
        assert (await other.report()).problem == ""


async def test_offers_that_make_no_sense(tmp_path: Path) -> None:
    async with world(tmp_path) as cluster:
        store = await cluster.store()
        _, client = await cluster.worker("w0")
        await answer(client, FIRST)
        chain = cluster.chain(store)
        other = WorkerKey(store.key.worker_id, Incarnation("0" * 16))
        with pytest.raises(FailedPreconditionError, match="This is store-0"):
            await store.offer(chain, client.source, store=other)
        with pytest.raises(InvalidRequestError, match="tenant"):
            await store.offer(chain, client.source, tenant="")
        assert (await store.report()).stats.num_puts == 0


async def test_what_is_pinned_stays(tmp_path: Path) -> None:
    async with world(tmp_path) as cluster:
        store = await cluster.store()
        await put(cluster, store)
        chain = cluster.chain(store)
        metadata = call_metadata(key=store.rpc_key)
        pin = PinChain(store=store.key, kind=PinKind.HARD, hashes=chain, ttl_s=60.0)
        async with open_channel(store.address) as channel:
            answer = await pin_blocks(channel, pin, metadata=metadata, timeout_s=5.0)
            assert answer.num_blocks == NUM_BLOCKS
            other = replace(pin, hashes=(chain[1],))
            assert (
                await pin_blocks(channel, other, metadata=metadata, timeout_s=5.0)
            ).num_blocks == 1
            assert (await store.report()).stats.num_pinned_blocks == NUM_BLOCKS
            ghost = WorkerKey(store.key.worker_id, Incarnation("0" * 16))
            with pytest.raises(FailedPreconditionError, match="This is store-0"):
                await pin_blocks(
                    channel, replace(pin, store=ghost), metadata=metadata, timeout_s=5.0
                )
            unpin = UnpinChain(store=store.key, pin_id=answer.pin_id)
            for _ in range(2):
                await unpin_blocks(channel, unpin, metadata=metadata, timeout_s=5.0)
            await report_when(store, "only the other pin is left", num_pinned_blocks=1)


async def test_sources_that_fail(tmp_path: Path) -> None:
    """Not there, another life, nothing held: what was reserved is free again, and the next may offer."""
    async with world(tmp_path) as cluster:
        store = await cluster.store()
        _, client = await cluster.worker("w0")
        source = client.source
        ghost = SourceRef(
            key=WorkerKey(source.key.worker_id, Incarnation("0" * 16)), address=source.address
        )
        nobody = SourceRef(key=source.key, address="127.0.0.1:1")
        for bad in (ghost, nobody, source):
            answered = await store.offer(cluster.chain(store), bad)
            assert answered.num_wanted_blocks == NUM_BLOCKS
            await store.until_quiet()
        await answer(client, FIRST)
        await store.offer(cluster.chain(store), source)
        await report_when(store, "it is here", num_host_blocks=NUM_BLOCKS)


@pytest.mark.parametrize("fault", ["flip", "drop", "delay:5000"])
async def test_reads_that_suffer(tmp_path: Path, fault: str) -> None:
    """What was not verified in time is not there; the store goes on."""
    async with world(tmp_path) as cluster:
        store = await cluster.store(failpoints=f"fetch.read={fault}@1")
        _, client = await cluster.worker("w0")
        await answer(client, FIRST)
        await store.offer(cluster.chain(store), client.source, deadline_s=0.3)
        await store.until_quiet()
        assert (await store.report()).stats.num_host_blocks == 0
        await store.offer(cluster.chain(store), client.source)
        await report_when(store, "it is here", num_host_blocks=NUM_BLOCKS)


async def test_a_slow_disk_costs_a_reader_a_second_at_most(tmp_path: Path) -> None:
    ssd = tmp_path / "ssd"
    ssd.mkdir()
    async with world(tmp_path) as cluster:
        slow = await restarted(cluster, ssd, failpoints="store.load=delay:5000")
        _, reader = await cluster.worker("r0")
        first = await answer(reader, SECOND, peer=slow.peer(NUM_SHARED))
        assert first.num_peer_tokens == 0
        # What was loaded for nobody is there for the next.
        await report_when(slow, "it is loaded", num_host_blocks=NUM_BLOCKS, num_short_gets=1)


async def test_a_reader_is_told_at_once_that_it_has_to_wait_for_a_disk(tmp_path: Path) -> None:
    ssd = tmp_path / "ssd"
    ssd.mkdir()
    async with world(tmp_path) as cluster:
        store = await restarted(cluster, ssd, failpoints="store.load=delay:300@1")
        worker, _ = await cluster.worker("r0")
        node, secret = worker.service, load_or_create_secret(tmp_path)
        peer = await node.shell.peers.get(SourceRef(key=store.key, address=store.address))
        wanted = PrefixOpen(
            attempt_id=AttemptId(RequestId("r"), 1),
            reader=worker.service.shell.hello.worker,
            holder=store.key,
            namespace=handoff_fingerprint(store.service.shell.hello.namespace, secret.value),
            secret_fingerprint=secret.fingerprint,
            hashes=cluster.chain(store),
            first=2,
        )
        said = []
        async with asyncio.timeout(5.0):
            async for message in read_lease(peer.prefixes, wanted, node.shell.tasks):
                said.append(message)
                if isinstance(message, PrefixOpened):
                    break
        staging, opened = said
        assert staging == PrefixStaging(
            attempt_id=wanted.attempt_id, num_ready_blocks=0, num_blocks=NUM_BLOCKS - 2
        )
        assert isinstance(opened, PrefixOpened)
        assert len(opened.block_ids) == NUM_BLOCKS - 2


async def test_a_disk_is_read_while_a_request_waits_for_its_turn(tmp_path: Path) -> None:
    ssd = tmp_path / "ssd"
    ssd.mkdir()
    gate = LayerGate([1])
    async with world(tmp_path) as cluster:
        store = await restarted(cluster, ssd)
        _, reader = await cluster.worker("r0", gate=gate)
        # Its step lasts as long as the gate is closed.
        other = make_request("other", prompt=range(1_000, 1_150), max_tokens=3)
        reader.decode(other)
        await eventually(lambda: gate.is_reached, timeout_s=5.0, what="it computes")
        reader.decode(SECOND, peer=store.peer(NUM_SHARED))
        await report_when(store, "it is loaded", num_host_blocks=NUM_BLOCKS, num_gets=0)
        gate.open()
        await reader.answer(other)
        assert await reader.answer(SECOND) == expected_answer(SECOND)
        await report_when(
            store, "it is read", num_hit_host_blocks=NUM_BLOCKS, num_hit_disk_blocks=0
        )


async def test_a_store_takes_no_request(tmp_path: Path) -> None:
    async with world(tmp_path) as cluster:
        store = await cluster.store()
        async with store.router() as router:
            assert router.hello is not None
            assert router.hello.role is WorkerRole.STORE
            router.decode(FIRST)
            refused = await router.until(FIRST, Refused)
            assert isinstance(refused, Refused)
            assert refused.reason is RefuseReason.NEVER_FITS
            router.prefill(SECOND)
            refused = await router.until(SECOND, Refused)
            assert isinstance(refused, Refused)


async def test_a_store_that_drains_takes_and_lends_nothing(tmp_path: Path) -> None:
    async with world(tmp_path) as cluster:
        store = await cluster.store()
        await put(cluster, store)
        _, client = await cluster.worker("w1")
        await answer(client, FIRST)
        store.service.shell.begin_drain()
        refused = PutAnswer(num_wanted_blocks=0, refusal=PutRefusal.DRAINING)
        assert await store.offer(cluster.chain(store), client.source) == refused
        _, reader = await cluster.worker("r0")
        assert (await answer(reader, SECOND, peer=store.peer(NUM_SHARED))).num_peer_tokens == 0


async def test_workers_offer_what_they_compute_over_a_real_broker(tmp_path: Path) -> None:
    """And a worker that begins with nothing reads it from the store."""
    model = tmp_path / "model"
    again = make_request("r3", prompt=SECOND.prompt_token_ids, max_tokens=5, ignore_eos=True)
    async with fake_workers(tmp_path), AsyncExitStack() as stack:
        broker = stack.enter_context(nats_server(tmp_path))
        numbers = itertools.count()

        def bus() -> NatsBus:
            return NatsBus(broker.url, name=f"test {next(numbers)}")

        store = await stack.enter_async_context(running_store(store_config(tmp_path, model), bus()))

        async def worker(worker_id: str) -> RouterClient:
            config = worker_config(
                tmp_path, model, worker_id, kv_peer_reads="always", kv_offload=True
            )
            running = await stack.enter_async_context(
                running_worker(config, bus(), start_engine=ThreadEngines())
            )
            return await stack.enter_async_context(running.router())

        client = await worker("w0")
        await answer(client, FIRST)
        await report_when(store, "it was offered and taken", num_host_blocks=NUM_BLOCKS)
        await answer(client, SECOND)
        await report_when(store, "what is new was taken", num_host_blocks=NUM_BLOCKS + 2)
        reader = await worker("w1")
        first = await answer(reader, again, peer=store.peer(NUM_SHARED))
        assert first.num_peer_tokens == NUM_SHARED
        await store.until_quiet()


async def test_a_store_without_room_for_two_blocks_does_not_start(tmp_path: Path) -> None:
    model = write_tiny_llama(tmp_path / "large", TinyLlama(num_layers=32, head_dim=64))
    async with world(tmp_path) as cluster:
        with pytest.raises(ExceptionGroup) as caught:
            await cluster.store(model=model)
        assert "allowed is at least two blocks" in config_error(caught.value).message
