"""StoreEngine over a real core and arena: when an offer is answered, and what is told of readers."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from moonpool.clock import SystemClock
from moonpool.core.protocol import (
    Command,
    FetchEnded,
    FetchReserved,
    LockPrefix,
    ReadEnded,
    Revoked,
    UnlockPrefix,
)
from moonpool.errors import UnavailableError
from moonpool.failpoints import Failpoints
from moonpool.handoff.events import AttemptAborted, HandoffEvent, PeerNamed
from moonpool.handoff.messages import SourceRef
from moonpool.ids import AttemptId, BlockHash, Incarnation, WorkerId, WorkerKey
from moonpool.kv.layout import KvLayout
from moonpool.memory.worker_memory import WorkerMemory
from moonpool.store.base import BlockLog
from moonpool.tiering.config import TenantQuota
from moonpool.tiering.protocol import PutRefusal
from moonpool.tiering.store_core import StoreCore
from moonpool.wire.engine_messages import TimedFrame
from moonpool.wire.store import PutAnswer, PutOffer
from moonpool_kvstore.store_engine import StoreEngine
from support.eventually import eventually
from support.segment_log import EVEN, open_log, write
from support.store import BLOCK_SIZE, chain, make_config

ME = WorkerKey(WorkerId("s0"), Incarnation("1"))
WORKER = WorkerKey(WorkerId("w0"), Incarnation("1"))
LAYOUT = KvLayout.block_major(
    num_blocks=8, num_layers=1, num_kv_heads=1, head_dim=2, dtype="float32", block_size=BLOCK_SIZE
)
_DEADLINE_S = 10.0
Chain = tuple[BlockHash, ...]


class Watched:
    """An engine, and all that it told. Readings end when the test says so."""

    def __init__(
        self, *, layout: KvLayout = LAYOUT, disk: BlockLog | None = None, **config: Any
    ) -> None:
        self.reserved: dict[Chain, AttemptId] = {}
        self.aborted: list[AttemptId] = []
        self.revoked: list[AttemptId] = []
        self.told: list[tuple[object, ...]] = []
        self.memory = WorkerMemory.create(layout)
        tenants = (TenantQuota(tenant="t"),)
        self.engine = StoreEngine(
            core=StoreCore(make_config(max_puts=2, tenants=tenants, **config)),
            memory=self.memory,
            disk=disk,
            clock=SystemClock(),
            failpoints=Failpoints.off(),
            on_frame=self._on_frame,
            on_event=self._on_event,
        )
        self.engine.watch(self)

    def offer(self, tokens: str, *, tenant: str = "", deadline_s: float = _DEADLINE_S) -> PutOffer:
        return PutOffer(
            store=ME,
            tenant=tenant,
            hashes=chain(tokens),
            source=SourceRef(key=WORKER, address="h:1"),
            deadline_s=deadline_s,
        )

    async def until_reserved(self, tokens: str) -> AttemptId:
        await eventually(
            lambda: chain(tokens) in self.reserved, timeout_s=_DEADLINE_S, what="a reading"
        )
        return self.reserved[chain(tokens)]

    async def do(self, *commands: Command) -> None:
        for command in commands:
            self.engine.send(command)
        # The frame comes in the loop's next turn.
        await asyncio.sleep(0)
        await asyncio.sleep(0)

    # -- ChainWatcher --

    def note_put(self, hashes: Chain) -> None:
        self.told.append(("put", hashes))

    def note_lent(self, hashes: Chain, reader: WorkerKey | None) -> None:
        self.told.append(("lent", hashes, reader))

    def note_returned(self, reader: WorkerKey) -> None:
        self.told.append(("returned", reader))

    # -- what the shell takes --

    def _on_frame(self, timed: TimedFrame) -> None:
        for reply in timed.frame.replies:
            if isinstance(reply, FetchReserved):
                self.reserved[reply.hashes] = reply.attempt_id
            elif isinstance(reply, Revoked):
                self.revoked.append(reply.attempt_id)

    def _on_event(self, event: HandoffEvent) -> None:
        if isinstance(event, AttemptAborted):
            self.aborted.append(event.attempt_id)
        else:
            assert isinstance(event, PeerNamed)


@asynccontextmanager
async def watched(**config: Any) -> AsyncIterator[Watched]:
    lab = Watched(**config)
    try:
        async with asyncio.timeout(_DEADLINE_S), asyncio.TaskGroup() as tasks:
            running = tasks.create_task(lab.engine.run())
            await lab.engine.wait_running()
            yield lab
            running.cancel()
    finally:
        lab.memory.close()


async def test_a_worker_is_answered_at_once_and_a_taker_at_the_end() -> None:
    async with watched() as lab:
        wanted = PutAnswer(num_wanted_blocks=2)
        assert await lab.engine.put(lab.offer("ab")) == wanted
        async with asyncio.TaskGroup() as tasks:
            taking = tasks.create_task(lab.engine.take(lab.offer("xy", tenant="t")))
            attempt_id = await lab.until_reserved("xy")
            assert await lab.engine.take(lab.offer("q")) == PutAnswer(
                num_wanted_blocks=0, refusal=PutRefusal.TOO_MANY_PUTS
            )
            assert not taking.done()
            await lab.do(FetchEnded(attempt_id=attempt_id, num_tokens=2 * BLOCK_SIZE))
            assert await taking == wanted
            # The core has heard of it.
            assert lab.engine.num_here(chain("xyz")) == 2
        assert lab.engine.tenant_of(chain("xy")[1]) == "t"
        # It has all of that.
        assert await lab.engine.take(lab.offer("xy")) == PutAnswer(num_wanted_blocks=0)


async def test_a_taker_is_answered_when_its_time_is_up_and_nothing_is_read() -> None:
    async with watched() as lab:
        async with asyncio.TaskGroup() as tasks:
            taking = tasks.create_task(lab.engine.take(lab.offer("ab", deadline_s=0.01)))
            attempt_id = await lab.until_reserved("ab")
            await eventually(lambda: bool(lab.aborted), timeout_s=_DEADLINE_S, what="the end")
            assert (lab.aborted, taking.done()) == ([attempt_id], False)
            await lab.do(ReadEnded(attempt_id=attempt_id))
            assert (await taking).refusal is None
        assert lab.engine.stats().num_expired_puts == 1


async def test_an_engine_that_runs_knows_all_that_lies_on_disk(tmp_path: Path) -> None:
    blocks = range(12)
    async with open_log(tmp_path / "ssd") as world:
        assert await write(world.log, *blocks) == tuple(blocks)
    async with (
        open_log(tmp_path / "ssd") as world,
        watched(layout=EVEN, disk=world.log, has_disk=True) as lab,
    ):
        # As it says to whoever asks first: the log tells it of each segment apart.
        assert lab.engine.stats().num_disk_blocks == len(blocks)


async def test_nobody_waits_for_an_engine_that_has_stopped() -> None:
    async with asyncio.TaskGroup() as tasks:
        async with watched() as lab:
            taking = tasks.create_task(lab.engine.take(lab.offer("ab")))
            await lab.until_reserved("ab")
        assert await taking == PutAnswer(num_wanted_blocks=2)
    with pytest.raises(UnavailableError):
        await lab.engine.take(lab.offer("ab"))


async def test_what_readers_are_lent_is_told_and_who_has_gone() -> None:
    async with watched() as lab:
        await lab.engine.put(lab.offer("ab"))
        attempt_id = await lab.until_reserved("ab")
        await lab.do(FetchEnded(attempt_id=attempt_id, num_tokens=2 * BLOCK_SIZE))
        assert lab.told == [("put", chain("ab"))]
        lab.told.clear()
        await lab.do(LockPrefix(read_id=1, hashes=chain("abc"), reader=WORKER))
        assert lab.told == [("lent", chain("ab"), WORKER)]
        await lab.do(UnlockPrefix(read_id=1), UnlockPrefix(read_id=1))
        assert lab.told[1:] == [("returned", WORKER)]
        lab.told.clear()
        # Gone before it was answered: it was lent nothing.
        await lab.do(
            LockPrefix(read_id=2, hashes=chain("ab"), reader=WORKER), UnlockPrefix(read_id=2)
        )
        assert lab.told == []


async def test_an_offer_that_is_late_is_counted_once() -> None:
    """Its reader gives up on it when the core does, as for a chain of a neighbour."""
    async with watched(put_timeout_s=0.05) as lab, asyncio.TaskGroup() as tasks:
        loop = asyncio.get_running_loop()
        tasks.create_task(lab.engine.take(lab.offer("ab", deadline_s=0.05)))
        attempt_id = await lab.until_reserved("ab")
        began = loop.time()
        await eventually(
            lambda: loop.time() > began + 0.1, timeout_s=_DEADLINE_S, what="both are late"
        )
        assert (lab.revoked, lab.aborted) == ([attempt_id], [])
        assert lab.engine.stats().num_expired_puts == 1
        await lab.do(ReadEnded(attempt_id=attempt_id))
