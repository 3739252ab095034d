"""Neighbours of a ring: what leaves is taken over, what is hot is copied, a directory may be away."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from moonpool.clock import ManualClock
from moonpool.ids import BlockHash, Incarnation, WorkerId, WorkerKey
from moonpool.store.directory import Directory, EmbeddedDirectory
from moonpool.store.redis_directory import RedisDirectory
from moonpool.tiering.copies import CopyBook, CopyConfig
from moonpool.tiering.replicas import ReplicaConfig
from moonpool.wire.store import PutAnswer, PutOffer
from moonpool_kvstore.neighbours import Neighbours
from support.eventually import eventually
from support.redis_server import RedisServer

_DEADLINE_S = 10.0
_BEAT_S = 0.01
Chain = tuple[BlockHash, ...]


def chain(number: int) -> Chain:
    return tuple(BlockHash(bytes([number, index]) + bytes(30)) for index in range(3))


class Store:
    """A node's neighbours over a set of chains that stands for its core."""

    def __init__(self, name: str, directory: Directory, clock: ManualClock) -> None:
        self.key = WorkerKey(WorkerId(name), Incarnation("1"))
        self.chains: set[Chain] = set()
        self.offers: list[PutOffer] = []
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
                ),
            ),
            put=self._put,
            clock=clock,
            beat_s=_BEAT_S,
        )

    async def _put(self, offer: PutOffer) -> PutAnswer:
        assert offer.store == self.key
        self.offers.append(offer)
        is_new = offer.hashes not in self.chains
        self.chains.add(offer.hashes)
        return PutAnswer(num_wanted_blocks=len(offer.hashes) if is_new else 0)


@asynccontextmanager
async def two_stores(
    directory: Directory, clock: ManualClock
) -> AsyncIterator[tuple[Store, Store]]:
    first, second = Store("s0", directory, clock), Store("s1", directory, clock)
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


async def test_a_node_that_leaves_is_read_empty() -> None:
    clock = ManualClock()
    directory = EmbeddedDirectory(clock)
    async with two_stores(directory, clock) as (first, second):
        chains = [chain(number) for number in range(20)]
        for what in chains:
            first.chains.add(what)
            first.neighbours.note_put(what)

        async with asyncio.TaskGroup() as tasks:
            leaving = tasks.create_task(first.neighbours.leave())
            await eventually(
                lambda: second.chains == set(chains), timeout_s=_DEADLINE_S, what="all is taken"
            )
            assert not leaving.done()
            # Each was asked for long enough.
            clock.advance(2.0)
        assert {offer.source.key for offer in second.offers} == {first.key}
        assert {offer.source.address for offer in second.offers} == {"s0"}
        # The last one has nobody to leave anything to.
        await second.neighbours.leave()
    view = await directory.read()
    assert view is not None
    assert view.members == ()


async def test_what_is_hot_is_copied() -> None:
    clock = ManualClock()
    async with two_stores(EmbeddedDirectory(clock), clock) as stores:
        for _ in range(20):
            for store in stores:
                store.neighbours.note_lent(chain(1))
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
            store.neighbours.note_lent(chain(1))
            await store.neighbours.leave()
            await eventually(
                lambda: directory.num_failed_calls > 1, timeout_s=_DEADLINE_S, what="two beats"
            )
            running.cancel()
        assert store.chains == set()
