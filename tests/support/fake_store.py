"""A store that a test plays by hand: real gRPC for puts, announced on a bus, nothing behind."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from moonpool.api.v1 import store_pb2, store_pb2_grpc
from moonpool.bus.protocol import Bus
from moonpool.bus.subjects import Subjects
from moonpool.core.protocol import BlockLedger
from moonpool.errors import MoonpoolError
from moonpool.ids import Incarnation, WorkerId, WorkerKey
from moonpool.routing.worker_view import WorkerRole
from moonpool.rpc.server import RpcServer
from moonpool.tiering.protocol import PutRefusal
from moonpool.wire.control import Announce, encode_announce
from moonpool.wire.store import PutAnswer, PutOffer, put_answer_to_pb, put_offer_from_pb
from moonpool.wire.worker import LoadReport

_WAIT_S = 10.0
_SERVICE = store_pb2.DESCRIPTOR.services_by_name["Store"].full_name


class FakeStore(store_pb2_grpc.StoreServicer):
    """Use `fake_store(...)`. Offers wait in `next`; the answer to the next ones is what was set."""

    def __init__(self, key: WorkerKey, bus: Bus, subjects: Subjects) -> None:
        self.key = key
        self.address = ""
        self._bus = bus
        self._subjects = subjects
        self._sequence = 0
        self._offers: asyncio.Queue[PutOffer] = asyncio.Queue()
        #: Blocks that it wants of the next offers.
        self.num_wanted_blocks = 0
        self.refusal: PutRefusal | None = None
        #: Raised instead of an answer.
        self.failure: MoonpoolError | None = None
        #: Answers wait for it.
        self.may_answer = asyncio.Event()
        self.may_answer.set()
        self.server: RpcServer | None = None

    async def announce(self, *, is_leaving: bool = False) -> None:
        self._sequence += 1
        ledger = BlockLedger(num_total=100, num_free=100, num_cached=0, num_referenced=0)
        announce = Announce(
            worker=self.key,
            role=WorkerRole.STORE,
            grpc_address=self.address,
            model="tiny",
            sequence=self._sequence,
            load=LoadReport(ledger=ledger),
            valid_for_s=60.0,
            is_leaving=is_leaving,
        )
        await self._bus.publish(
            self._subjects.announce(self.key.worker_id), encode_announce(announce)
        )

    async def next(self) -> PutOffer:
        """The next offer."""
        async with asyncio.timeout(_WAIT_S):
            return await self._offers.get()

    @property
    def num_offers(self) -> int:
        """Offers that nobody has looked at."""
        return self._offers.qsize()

    async def Put(self, request: Any, context: Any) -> Any:  # noqa: N802 - the schema's name
        self._offers.put_nowait(put_offer_from_pb(request))
        await self.may_answer.wait()
        if self.failure is not None:
            raise self.failure
        wanted = 0 if self.refusal is not None else self.num_wanted_blocks
        return put_answer_to_pb(PutAnswer(num_wanted_blocks=wanted, refusal=self.refusal))

    async def start(self, rpc_key: str) -> None:
        self.server = RpcServer(key=rpc_key)
        self.server.add(store_pb2_grpc.add_StoreServicer_to_server, self, _SERVICE)
        await self.server.start()
        self.address = self.server.address


@asynccontextmanager
async def fake_store(
    bus: Bus,
    subjects: Subjects,
    store_id: str = "store-0",
    *,
    incarnation: str = "a" * 16,
    rpc_key: str = "key",
) -> AsyncIterator[FakeStore]:
    """A store that listens and has announced itself once."""
    key = WorkerKey(WorkerId(store_id), Incarnation(incarnation))
    store = FakeStore(key, bus, subjects)
    await store.start(rpc_key)
    try:
        await store.announce()
        yield store
    finally:
        assert store.server is not None
        await store.server.stop(grace_s=0)
