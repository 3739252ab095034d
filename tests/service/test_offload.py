"""A worker's offers to stores over real gRPC: found on the bus, asked in time, failures survived."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace

from moonpool.api.v1 import worker_pb2_grpc
from moonpool.bus.memory import MemoryBroker, MemoryBus
from moonpool.bus.subjects import Subjects
from moonpool.clock import SystemClock
from moonpool.errors import UnavailableError
from moonpool.handoff.events import (
    PrefixLeaseClosed,
    PrefixOpenReceived,
    RouterMessageReceived,
)
from moonpool.handoff.messages import (
    DecodeRequest,
    LeaseId,
    PrefixOpen,
    RouterKey,
    SourceRef,
)
from moonpool.ids import AttemptId, BlockHash, Incarnation, RequestId, WorkerId, WorkerKey
from moonpool.kv.block_hash import hash_blocks
from moonpool.kv.events import BlockStored
from moonpool.kv.layout import KvLayout, plan
from moonpool.kv.namespace_seeds import NamespaceSeeds
from moonpool.kv.region import KvRegion
from moonpool.rpc.channel import make_channel
from moonpool.rpc.store import store_stub
from moonpool.telemetry import names
from moonpool.telemetry.metrics import Metrics
from moonpool.tiering.breaker import BreakerConfig
from moonpool.tiering.offloader import OffloaderConfig
from moonpool.tiering.protocol import PutRefusal
from moonpool.transport.base import KvRead, ReadResult
from moonpool.worker.announcements import Announcements
from moonpool.worker.books import WORKER_METRICS, WorkerBooks
from moonpool.worker.offload import KvOffload
from moonpool.worker.peers import Peer, PeerDirectory
from moonpool.worker.reader_leases import ReaderLeases
from support.eventually import eventually
from support.fake_store import FakeStore, fake_store
from support.kv import SECRET, make_chain, make_model_namespace
from support.requests import make_request

KEY = WorkerKey(WorkerId("d0"), Incarnation("b" * 16))
SOURCE = SourceRef(key=KEY, address="127.0.0.1:7")
SUBJECTS = Subjects("test")
LAYOUT = KvLayout.block_major(
    num_blocks=4, num_layers=2, num_kv_heads=1, head_dim=8, dtype="float32"
)
#: Nothing that a test waits for takes long.
CONFIG = OffloaderConfig(
    min_blocks=1,
    quiet_s=0.02,
    max_wait_s=0.1,
    retry_s=0.05,
    ask_again_s=0.02,
    busy_s=0.05,
    # However long the failures take on a busy machine.
    breaker=BreakerConfig(within_s=60.0),
)
SEEDS = NamespaceSeeds(make_model_namespace(), SECRET)


class NoKv:
    """A KvPeer that nobody reads from."""

    region: KvRegion
    is_lost = False

    async def read(self, read: KvRead, *, timeout_s: float) -> ReadResult:
        raise AssertionError("nothing is read here")

    async def close(self) -> None:
        return


async def connect(source: SourceRef) -> Peer:
    channel = make_channel(source.address)
    stub = worker_pb2_grpc.WorkerStub(channel)  # type: ignore[no-untyped-call]  # generated
    return Peer(
        key=source.key,
        channel=channel,
        stub=stub,
        store_stub=store_stub(channel),
        prefixes=ReaderLeases(stub.ReadPrefixes, peer="h"),
        kv=NoKv(),
        plan=plan(LAYOUT, LAYOUT),
        transport="none",
    )


@dataclass(slots=True)
class Stage:
    offload: KvOffload
    bus: MemoryBus
    metrics: Metrics

    def store(self, chain: Sequence[BlockHash], start: int = 0) -> None:
        parent = chain[start - 1] if start else None
        self.offload.take([BlockStored(hashes=tuple(chain[start:]), parent_hash=parent)])

    def read(self, store: FakeStore, hashes: Sequence[BlockHash], number: int = 1) -> None:
        """A store's stream comes and goes."""
        open_ = PrefixOpen(
            attempt_id=AttemptId(RequestId("put"), number),
            reader=store.key,
            holder=KEY,
            namespace="n",
            secret_fingerprint="s",
            hashes=tuple(hashes),
            first=0,
        )
        self.offload.saw(PrefixOpenReceived(lease_id=LeaseId(number), open=open_))
        self.offload.saw(PrefixLeaseClosed(lease_id=LeaseId(number)))

    async def settled(self) -> None:
        """Whoever has something to do has done it."""
        for _ in range(20):
            await asyncio.sleep(0)

    def num_offers(self, outcome: str) -> float:
        return self.metrics.value(names.KV_OFFLOADS, outcome=outcome)

    async def until(self, outcome: str, number: int = 1) -> None:
        """So many offers, or more, have come to this."""
        await eventually(
            lambda: self.num_offers(outcome) >= number, timeout_s=5, what=f"{number} {outcome}"
        )


@asynccontextmanager
async def stage(config: OffloaderConfig = CONFIG) -> AsyncIterator[Stage]:
    """A worker's part that offers, without the rest of the worker."""
    broker, metrics = MemoryBroker(), Metrics(WORKER_METRICS)
    peers = PeerDirectory(connect)
    offload = KvOffload(
        source=SOURCE,
        peers=peers,
        rpc_key="key",
        books=WorkerBooks(metrics),
        clock=SystemClock(),
        namespace_seed=SEEDS,
        block_size=16,
        config=config,
        is_checked=True,
    )
    async with MemoryBus(broker) as bus, asyncio.TaskGroup() as tasks:
        announcements = Announcements(bus, SUBJECTS)
        announcements.add_listener(offload.on_announced)
        running = [
            tasks.create_task(peers.run()),
            tasks.create_task(offload.run(bus)),
            tasks.create_task(announcements.run()),
        ]
        staged = Stage(offload=offload, bus=bus, metrics=metrics)
        # Its subscription holds before anybody is announced.
        await staged.settled()
        try:
            yield staged
        finally:
            for task in running:
                task.cancel()


async def test_a_store_is_offered_what_the_cache_holds() -> None:
    chain = make_chain("abcdef")
    async with stage() as s, fake_store(s.bus, SUBJECTS) as store:
        store.num_wanted_blocks = 6
        s.store(chain)
        offer = await store.next()
        assert (offer.store, offer.source) == (store.key, SOURCE)
        assert (offer.tenant, offer.hashes) == ("default", tuple(chain))
        assert offer.deadline_s == CONFIG.read_s
        await s.until("taken")
        # It reads, and is asked whether it has all.
        store.num_wanted_blocks = 0
        s.read(store, chain)
        assert (await store.next()).hashes == tuple(chain)
        await s.until("held")
        assert s.metrics.value(names.KV_OFFLOAD_BLOCKS, outcome="taken") == 6
        s.offload.set_gauges()
        assert s.metrics.value(names.KV_OFFLOAD_CHAINS, state="waiting") == 0
        assert s.metrics.value(names.KV_OFFLOAD_CHAINS, state="put") == 0
        assert s.metrics.value(names.KV_OFFLOAD_BREAKER, store="store-0") == 0


async def test_the_store_is_told_whose_blocks_they_are() -> None:
    request = make_request("a", prompt=40, tenant="acme")
    hashes = hash_blocks(SEEDS(request), request.prompt_token_ids, 16)
    message = DecodeRequest(request=request, attempt=1, source=None, deadline_s=1.0)
    async with stage() as s, fake_store(s.bus, SUBJECTS) as store:
        s.offload.saw(RouterMessageReceived(router=RouterKey("r"), message=message))
        s.store(hashes)
        offer = await store.next()
        assert (offer.tenant, offer.hashes) == ("acme", tuple(hashes))


async def test_a_store_that_comes_later_is_offered_what_is_there() -> None:
    chain = make_chain("abc")
    async with stage() as s:
        s.store(chain)
        async with fake_store(s.bus, SUBJECTS) as store:
            assert (await store.next()).hashes == tuple(chain)


async def test_a_store_that_fails_is_tried_again_and_left_alone_in_the_end() -> None:
    async with stage() as s, fake_store(s.bus, SUBJECTS) as store:
        store.failure = UnavailableError("not now")
        for number in range(3):
            s.store(make_chain([number, 1, 2]))
        await s.until("failed", 3)
        s.offload.set_gauges()
        assert s.metrics.value(names.KV_OFFLOAD_BREAKER, store="store-0") == 1
        # After its time one is let through, and then all that is left.
        store.failure = None
        await s.until("held", 3)
        s.offload.set_gauges()
        assert s.metrics.value(names.KV_OFFLOAD_BREAKER, store="store-0") == 0


async def test_a_store_that_is_not_there_is_a_failure() -> None:
    async with stage() as s:
        async with fake_store(s.bus, SUBJECTS) as store:
            pass
        s.store(make_chain("abc"))
        await s.until("failed", CONFIG.max_attempts)
        await store.announce(is_leaving=True)


async def test_refusals_are_counted() -> None:
    async with stage() as s, fake_store(s.bus, SUBJECTS) as store:
        store.refusal = PutRefusal.OVER_QUOTA
        s.store(make_chain("abc"))
        await s.until("refused")
        store.refusal = PutRefusal.TOO_MANY_PUTS
        s.store(make_chain("xyz"))
        await s.until("busy")
        store.refusal = None
        await s.until("held")


async def test_nothing_is_offered_after_stop() -> None:
    at_once = replace(CONFIG, quiet_s=0.0)
    async with stage(at_once) as s, fake_store(s.bus, SUBJECTS) as store:
        s.store(make_chain("abc"))
        await store.next()
        await s.until("held")
        s.offload.stop()
        s.store(make_chain("xyz"))
        await s.settled()
        assert store.num_offers == 0
        s.offload.set_gauges()
        assert s.metrics.value(names.KV_OFFLOAD_CHAINS, state="waiting") == 1
        assert s.metrics.value(names.KV_OFFLOAD_CHAINS, state="put") == 0


async def test_it_ends_in_the_middle_of_a_put() -> None:
    async with stage() as s, fake_store(s.bus, SUBJECTS) as store:
        store.may_answer.clear()
        s.store(make_chain("abc"))
        await store.next()
