"""A worker's publisher on a bus that a test holds up: merging, splitting, and a snapshot at any time."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass

import pytest

from moonpool.bus.memory import MemoryBroker, MemoryBus
from moonpool.bus.protocol import Bus
from moonpool.bus.subjects import Subjects
from moonpool.errors import InvalidRequestError
from moonpool.failpoints import Failpoints
from moonpool.ids import BlockHash, Incarnation, WorkerId, WorkerKey
from moonpool.kv.block_key import block_keys
from moonpool.kv.events import BlockRemoved, BlockStored
from moonpool.kv.prefix_index import PrefixIndex
from moonpool.kv.published_set import EventBatch
from moonpool.telemetry import names
from moonpool.telemetry.metrics import Metrics
from moonpool.wire.kv_events import decode_kv_events
from moonpool.worker.books import WORKER_METRICS, WorkerBooks
from moonpool.worker.kv_publisher import KvPublisher
from support.eventually import eventually
from support.kv import make_chain
from support.snapshots import load_snapshot

KEY = WorkerKey(WorkerId("d0"), Incarnation("a" * 16))
SUBJECTS = Subjects("test")


def stored(hashes: list[BlockHash], parent: BlockHash | None = None) -> BlockStored:
    return BlockStored(hashes=tuple(hashes), parent_hash=parent)


class NarrowBus(MemoryBus):
    """Takes no message."""

    async def publish(self, subject: str, data: bytes) -> bool:
        raise InvalidRequestError("too large")


@dataclass(slots=True)
class Stage:
    broker: MemoryBroker
    publisher: KvPublisher
    books: WorkerBooks
    heard: list[EventBatch]

    def num_batches(self, outcome: str) -> float:
        return self.books.metrics.value(names.KV_EVENT_BATCHES, outcome=outcome)

    async def settled(self) -> None:
        """All that can leave has left, and was heard."""
        for _ in range(20):
            await asyncio.sleep(0)

    async def until_heard(self, num_batches: int) -> None:
        await eventually(
            lambda: len(self.heard) == num_batches, timeout_s=5.0, what=f"{num_batches} batches"
        )

    def followed(self) -> PrefixIndex:
        """An index that has heard all that was heard."""
        index = PrefixIndex()
        index.join(KEY)
        for batch in self.heard:
            index.apply(KEY, batch)
        return index


@contextlib.asynccontextmanager
async def stage(
    *,
    is_up: bool = True,
    max_batch_blocks: int = 1_000,
    min_interval_s: float = 0.0,
    bus_type: type[MemoryBus] = MemoryBus,
    failpoints: str = "",
) -> AsyncIterator[Stage]:
    """A publisher that runs, and somebody who listens."""
    broker = MemoryBroker(is_up=is_up)
    books = WorkerBooks(Metrics(WORKER_METRICS))
    publisher = KvPublisher(
        KEY,
        books=books,
        failpoints=Failpoints.parse(failpoints, is_allowed=True),
        max_batch_blocks=max_batch_blocks,
        min_interval_s=min_interval_s,
    )
    heard: list[EventBatch] = []

    async def listen(bus: Bus) -> None:
        async for message in await bus.subscribe(SUBJECTS.all_kv_events):
            events = decode_kv_events(message.data)
            assert events.worker == KEY
            heard.append(events.batch)

    async with bus_type(broker) as bus, MemoryBus(broker) as ears, asyncio.TaskGroup() as tasks:
        running = [tasks.create_task(listen(ears)), tasks.create_task(publisher.run(bus, SUBJECTS))]
        await asyncio.sleep(0)
        yield Stage(broker, publisher, books, heard)
        for task in running:
            task.cancel()


async def test_changes_leave_as_they_come() -> None:
    chain = make_chain("abcd")
    async with stage() as s:
        s.publisher.take([stored(chain[:2])])
        await s.until_heard(1)
        s.publisher.take([stored(chain[2:], chain[1])])
        s.publisher.take([BlockRemoved(hashes=(chain[3],))])
        # Those two left as one: what is pending is a net change.
        await s.until_heard(2)
        assert s.publisher.head == s.heard[-1].head
        assert s.publisher.num_held(block_keys(chain)) == 3
        index = s.followed()
        assert index.match(block_keys(chain)) == {KEY: 3}
        assert not index.note_head(KEY, s.publisher.head)
        # What comes to nothing is no change.
        s.publisher.take([stored(chain[3:], chain[2])])
        s.publisher.take([BlockRemoved(hashes=(chain[3],))])
        await s.settled()
        assert len(s.heard) == 2
        assert s.num_batches("sent") == 2


async def test_while_the_broker_is_away_changes_merge() -> None:
    chain = make_chain("abcd")
    async with stage(is_up=False) as s:
        for end in range(1, 5):
            s.publisher.take([stored(chain[end - 1 : end], chain[end - 2] if end > 1 else None)])
            await s.settled()
        assert s.publisher.head.sequence == 0
        s.broker.start()
        await s.until_heard(1)
        assert s.heard[0].head.sequence == 1
        assert s.followed().match(block_keys(chain)) == {KEY: 4}
        assert s.num_batches("unsent") == 0


async def test_changes_in_quick_succession_leave_as_one() -> None:
    chain = make_chain("abcd")
    async with stage(min_interval_s=60.0) as s:
        s.publisher.take([stored(chain[:1])])
        await s.until_heard(1)
        s.publisher.take([stored(chain[1:2], chain[0])])
        s.publisher.take([stored(chain[2:], chain[1])])
        await s.settled()
        assert len(s.heard) == 1
        assert s.publisher.head == s.heard[0].head
        # What is looked up is the cache, not what has left.
        assert s.publisher.num_held(block_keys(chain)) == 4


async def test_a_snapshot_is_up_to_date_without_a_broker() -> None:
    chain = make_chain("abcd")
    async with stage(is_up=False) as s:
        s.publisher.take([stored(chain)])
        snapshot = await s.publisher.snapshot()
        assert snapshot.keys.tolist() == block_keys(chain).tolist()
        assert s.publisher.head == snapshot.head
        await s.settled()
        assert s.num_batches("unsent") == 1
        s.publisher.take([BlockRemoved(hashes=(chain[3],))])
        s.broker.start()
        await s.until_heard(1)
        # Whoever has the snapshot goes on from there; whoever has not sees the gap.
        index = PrefixIndex()
        index.join(KEY)
        assert index.apply(KEY, s.heard[0])
        assert not load_snapshot(index, KEY, snapshot)
        assert index.match(block_keys(chain)) == {KEY: 3}
        index.validate()


async def test_a_large_snapshot_is_made_in_turns_with_others_and_of_one_moment() -> None:
    chain = make_chain(range(20_000))
    async with stage(is_up=False) as s:
        s.publisher.take([stored(chain)])
        async with asyncio.timeout(5.0), asyncio.TaskGroup() as tasks:
            asked = tasks.create_task(s.publisher.snapshot())
            num_turns = 0
            while s.publisher.head.count < len(chain):
                await asyncio.sleep(0)
                num_turns += 1
            # A part of the change each.
            assert num_turns >= 20
            assert not asked.done()
            s.publisher.take([BlockRemoved(hashes=(chain[-1],))])
            assert s.publisher.num_held(block_keys(chain)) == len(chain) - 1
        snapshot = asked.result()
        assert snapshot.is_consistent()
        assert snapshot.head.count in (len(chain), len(chain) - 1)


async def test_a_large_change_leaves_in_parts_each_with_its_sequence() -> None:
    chain = make_chain("abcdefghij")
    async with stage(max_batch_blocks=3) as s:
        s.publisher.take([stored(chain)])
        await s.until_heard(4)
        assert [batch.num_keys for batch in s.heard] == [3, 3, 3, 1]
        assert [batch.head.sequence for batch in s.heard] == [1, 2, 3, 4]
        index = s.followed()
        assert index.match(block_keys(chain)) == {KEY: 10}
        assert index.head(KEY) == s.publisher.head
        # One part in the middle is lost: the rest is held, and a snapshot mends it.
        short = PrefixIndex()
        short.join(KEY)
        assert [short.apply(KEY, batch) for batch in (s.heard[0], s.heard[2], s.heard[3])] == [
            False,
            True,
            True,
        ]
        assert not load_snapshot(short, KEY, await s.publisher.snapshot())
        assert short.match(block_keys(chain)) == {KEY: 10}


@pytest.mark.parametrize("is_asked_meanwhile", [False, True])
async def test_between_the_parts_of_a_large_change_others_have_their_turn(
    is_asked_meanwhile: bool,
) -> None:
    chain = make_chain("abcdefghij")
    async with stage(max_batch_blocks=3) as s:
        s.publisher.take([stored(chain)])
        seen: list[int] = []
        async with asyncio.timeout(5.0):
            while (sequence := s.publisher.head.sequence) < 4:
                seen.append(sequence)
                if is_asked_meanwhile and sequence == 2:
                    assert (await s.publisher.snapshot()).head.count == 10
                await asyncio.sleep(0)
        assert set(seen) == ({0, 1, 2} if is_asked_meanwhile else {0, 1, 2, 3})
        await s.until_heard(4)
        assert s.followed().head(KEY) == s.publisher.head


@pytest.mark.parametrize("num_changes", [1, 3])
async def test_a_broker_that_takes_no_such_message_does_no_harm(num_changes: int) -> None:
    chain = make_chain("abc")
    async with stage(bus_type=NarrowBus) as s:
        for number in range(num_changes):
            s.publisher.take([stored(chain[number:][:1], chain[number - 1] if number else None)])
            await s.settled()
        assert s.num_batches("unsent") == num_changes
        assert (await s.publisher.snapshot()).head.count == num_changes


async def test_a_change_that_is_lost_on_purpose_is_missed_by_who_follows() -> None:
    chain = make_chain("abc")
    async with stage(failpoints="kv.publish=drop@2") as s:
        for number, block in enumerate(chain):
            s.publisher.take([stored([block], chain[number - 1] if number else None)])
            await s.settled()
        await s.until_heard(2)
        assert [batch.head.sequence for batch in s.heard] == [1, 3]
        assert s.followed().needs_snapshot(KEY)
        assert s.num_batches("sent") == 3
