"""Neighbours of a ring: what leaves is taken over, what is hot is copied, a directory may be away."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from moonpool.clock import ManualClock
from moonpool.ids import BlockHash, Incarnation, WorkerId, WorkerKey
from moonpool.store.directory import Directory, EmbeddedDirectory
from moonpool.store.redis_directory import RedisDirectory
from moonpool.tiering.copies import CopyBook, CopyConfig
from moonpool.tiering.protocol import PutRefusal
from moonpool.tiering.replicas import ReplicaConfig
from moonpool.tiering.store_record import RingView, StoreMember, StoreRecord
from moonpool.wire.store import PutAnswer, PutOffer
from moonpool_kvstore.neighbours import Neighbours
from support.eventually import eventually
from support.redis_server import RedisServer

_DEADLINE_S = 10.0
_BEAT_S = 0.01
Chain = tuple[BlockHash, ...]


def chain(number: int) -> Chain:
    return tuple(BlockHash(bytes([number, index]) + bytes(30)) for index in range(3))


class CountedDirectory(EmbeddedDirectory):
    """Knows how often it was read."""

    num_views = 0

    async def read(self) -> RingView | None:
        self.num_views += 1
        return await super().read()


class Store:
    """A node's neighbours over a set of chains that stands for its core."""

    def __init__(self, name: str, directory: Directory, clock: ManualClock) -> None:
        self.key = WorkerKey(WorkerId(name), Incarnation("1"))
        self.others: dict[WorkerKey, Store] = {}
        self.chains: set[Chain] = set()
        self.offers: list[PutOffer] = []
        #: More readings at the same time are refused.
        self.max_readings = 16
        self.num_readings = 0
        self.most_readings = 0
        self.num_refused = 0
        #: Readings end only while this is set.
        self.may_read = asyncio.Event()
        self.may_read.set()
        #: So many readings bring nothing.
        self.num_to_lose = 0
        #: For what there is no room.
        self.too_large: set[Chain] = set()
        self.neighbours = Neighbours(
            key=self.key,
            address=name,
            directory=directory,
            book=CopyBook(
                self.key.worker_id,
                CopyConfig(
                    block_bytes=1_000,
                    replicas=ReplicaConfig(bytes_per_s_of_a_copy=1_000.0),
                    ramp_s=1.0,
                    asked_s=1.0,
                    vain_s=0.8,
                ),
                tenant_of=lambda _: "acme",
                num_here=self._num_here,
                is_on_disk=lambda _: False,
            ),
            take=self._take,
            clock=clock,
            beat_s=_BEAT_S,
        )

    def _num_here(self, hashes: Chain) -> int:
        return len(hashes) if hashes in self.chains else 0

    async def _take(self, offer: PutOffer) -> PutAnswer:
        assert (offer.store, offer.tenant) == (self.key, "acme")
        self.offers.append(offer)
        if offer.hashes in self.chains:
            return PutAnswer(num_wanted_blocks=0)
        if offer.hashes in self.too_large:
            return PutAnswer(num_wanted_blocks=0, refusal=PutRefusal.NO_ROOM)
        if self.num_readings >= self.max_readings:
            self.num_refused += 1
            return PutAnswer(num_wanted_blocks=0, refusal=PutRefusal.TOO_MANY_PUTS)
        self.num_readings += 1
        self.most_readings = max(self.most_readings, self.num_readings)
        try:
            source = self.others[offer.source.key].neighbours
            source.note_lent(offer.hashes, self.key)
            await self.may_read.wait()
            # A reading takes more than one turn of the loop.
            await asyncio.sleep(0)
            if self.num_to_lose:
                self.num_to_lose -= 1
            else:
                self.chains.add(offer.hashes)
            source.note_returned(self.key)
        finally:
            self.num_readings -= 1
        return PutAnswer(num_wanted_blocks=len(offer.hashes))


@asynccontextmanager
async def two_stores(
    directory: Directory, clock: ManualClock
) -> AsyncIterator[tuple[Store, Store]]:
    first, second = Store("s0", directory, clock), Store("s1", directory, clock)
    first.others, second.others = {second.key: second}, {first.key: first}
    clock.advance(10.0)
    async with asyncio.timeout(_DEADLINE_S), asyncio.TaskGroup() as tasks:
        running = [tasks.create_task(store.neighbours.run()) for store in (first, second)]

        await eventually(
            lambda: first.neighbours.num_others == second.neighbours.num_others == 1,
            timeout_s=_DEADLINE_S,
            what="both have heard of each other",
        )
        yield first, second
        for task in running:
            task.cancel()


def give(store: Store, num_chains: int) -> set[Chain]:
    """Chains that have been put at this store."""
    chains = [chain(number) for number in range(num_chains)]
    for what in chains:
        store.chains.add(what)
        store.neighbours.note_put(what)
    return set(chains)


async def test_a_node_that_leaves_is_read_empty() -> None:
    clock = ManualClock()
    directory = EmbeddedDirectory(clock)
    async with two_stores(directory, clock) as (first, second):
        chains = give(first, 20)
        # It goes as soon as all has been read.
        handed = await first.neighbours.leave(timeout_s=15.0)
        assert second.chains == chains
        assert handed == {block_hash for what in chains for block_hash in what}
        assert {offer.source.key for offer in second.offers} == {first.key}
        assert {offer.source.address for offer in second.offers} == {"s0"}
        # The last one has nobody to leave anything to.
        assert await second.neighbours.leave(timeout_s=15.0) is None
    view = await directory.read()
    assert view is not None
    assert view.members == ()


async def test_a_node_that_leaves_goes_when_others_have_what_it_has() -> None:
    clock = ManualClock()
    async with two_stores(EmbeddedDirectory(clock), clock) as (first, second):
        second.chains = give(first, 100)
        await first.neighbours.leave(timeout_s=15.0)
        # They need not read it.
        assert len(second.offers) == 100
        assert second.most_readings == 0


async def test_a_node_that_leaves_waits_for_others_only_so_long() -> None:
    clock = ManualClock()
    async with two_stores(EmbeddedDirectory(clock), clock) as (first, second):
        # Nobody has room for it, and a worker is not one who takes it.
        give(first, 3)
        second.max_readings = 0
        async with asyncio.TaskGroup() as tasks:
            leaving = tasks.create_task(first.neighbours.leave(timeout_s=15.0))
            await eventually(
                lambda: second.num_refused > 3, timeout_s=_DEADLINE_S, what="it was refused"
            )
            worker = WorkerKey(WorkerId("w"), Incarnation("1"))
            first.neighbours.note_lent(chain(1), worker)
            first.neighbours.note_returned(worker)
            assert not leaving.done()
            clock.advance(2.0)
            assert await leaving == set()


async def test_what_was_lost_on_its_way_is_taken_again() -> None:
    clock = ManualClock()
    async with two_stores(EmbeddedDirectory(clock), clock) as (first, second):
        chains = give(first, 6)
        second.num_to_lose = 9
        await first.neighbours.leave(timeout_s=15.0)
        assert (second.num_to_lose, second.chains) == (0, chains)


async def test_a_node_that_leaves_waits_for_others_that_are_slow() -> None:
    clock = ManualClock()
    directory = CountedDirectory(clock)
    async with two_stores(directory, clock) as (first, second):
        chains = give(first, 10)
        second.may_read.clear()
        async with asyncio.TaskGroup() as tasks:
            leaving = tasks.create_task(first.neighbours.leave(timeout_s=15.0))
            await eventually(
                lambda: second.num_readings == 4, timeout_s=_DEADLINE_S, what="readings"
            )
            # Longer than anything is asked for without a sign of them, and they are heard of again.
            num_views = directory.num_views
            clock.advance(3.0)
            await eventually(
                lambda: directory.num_views > num_views + 4, timeout_s=_DEADLINE_S, what="beats"
            )
            assert not leaving.done()
            second.may_read.set()
        assert second.chains == chains


async def test_what_nobody_has_room_for_is_not_waited_for() -> None:
    clock = ManualClock()
    async with two_stores(EmbeddedDirectory(clock), clock) as (first, second):
        chains = give(first, 10)
        second.too_large = {chain(3), chain(5)}
        async with asyncio.TaskGroup() as tasks:
            leaving = tasks.create_task(first.neighbours.leave(timeout_s=15.0))
            await eventually(
                lambda: second.chains == chains - second.too_large,
                timeout_s=_DEADLINE_S,
                what="the others",
            )
            num_offers = len(second.offers)
            await eventually(
                lambda: len(second.offers) > num_offers + 4, timeout_s=_DEADLINE_S, what="tries"
            )
            assert not leaving.done()
            # Less than a chain is asked for without a sign.
            clock.advance(0.9)
            handed = await leaving
        assert handed == {block_hash for what in second.chains for block_hash in what}


async def test_others_that_leave_as_well_are_not_waited_for() -> None:
    clock = ManualClock()
    async with two_stores(EmbeddedDirectory(clock), clock) as stores:
        for store in stores:
            give(store, 3)
        async with asyncio.TaskGroup() as tasks:
            for store in stores:
                tasks.create_task(store.neighbours.leave(timeout_s=15.0))
        assert [store.offers for store in stores] == [[], []]


@pytest.mark.parametrize(("max_readings", "most"), [(16, 4), (2, 2)])
async def test_few_are_taken_at_a_time_and_what_was_refused_is_taken_later(
    max_readings: int, most: int
) -> None:
    clock = ManualClock()
    async with two_stores(EmbeddedDirectory(clock), clock) as (first, second):
        chains = give(first, 40)
        second.max_readings = max_readings
        second.may_read.clear()
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(first.neighbours.leave(timeout_s=15.0))
            await eventually(
                lambda: second.num_readings == most, timeout_s=_DEADLINE_S, what="readings"
            )
            second.may_read.set()
        assert second.chains == chains
        assert second.most_readings == most
        assert (second.num_refused > 0) == (max_readings == 2)


async def test_a_new_life_is_as_old_in_the_ring_as_the_one_that_it_replaces() -> None:
    clock = ManualClock()
    directory = EmbeddedDirectory(clock, life_time_s=5.0)
    store = Store("s0", directory, clock)
    old = StoreMember(
        key=WorkerKey(WorkerId("s0"), Incarnation("0")),
        address="s0",
        since_unix_s=clock.unix() - 100.0,
    )
    await directory.publish(StoreRecord(member=old))

    async def member() -> StoreMember | None:
        view = await directory.read()
        return view.members[0] if view is not None and view.members else None

    async def is_as_old() -> bool:
        found = await member()
        return found is not None and found.in_ring_since_unix_s == old.since_unix_s

    async def has_come() -> bool:
        found = await member()
        return found is not None and found.joined_unix_s is not None

    async with asyncio.timeout(_DEADLINE_S), asyncio.TaskGroup() as tasks:
        running = tasks.create_task(store.neighbours.run())
        await eventually(has_come, timeout_s=_DEADLINE_S, what="the new life")
        # The old one's record ends; the new one's is written again.
        await directory.withdraw(old.key)
        clock.advance(5.0)
        await eventually(is_as_old, timeout_s=_DEADLINE_S, what="it goes on")
        running.cancel()


async def test_what_is_hot_is_copied() -> None:
    clock = ManualClock()
    async with two_stores(EmbeddedDirectory(clock), clock) as stores:
        for _ in range(20):
            for store in stores:
                store.neighbours.note_lent(chain(1), None)
        await eventually(
            lambda: any(store.chains == {chain(1)} for store in stores),
            timeout_s=_DEADLINE_S,
            what="a copy",
        )


async def test_a_directory_that_never_comes_holds_nobody_up(tmp_path: Path) -> None:
    clock = ManualClock()
    async with RedisDirectory(RedisServer(tmp_path).url, cluster="test") as directory:
        store = Store("s0", directory, clock)
        async with asyncio.timeout(_DEADLINE_S), asyncio.TaskGroup() as tasks:
            running = tasks.create_task(store.neighbours.run())
            store.neighbours.note_lent(chain(1), None)
            await store.neighbours.leave(timeout_s=15.0)
            await eventually(
                lambda: directory.num_failed_calls > 1, timeout_s=_DEADLINE_S, what="two beats"
            )
            running.cancel()
        assert store.chains == set()
