"""Whatever is lost, doubled, overtaken or restarted: the index ends at what the workers hold.

Workers change their sets; what they say goes through the wire's bytes and lies in a pile from which a test
delivers it in any order, twice, or never; snapshots are answered late or not at all. In the end each worker
announces once more, questions are answered, and the index must hold the truth.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from moonpool.dispatch.index_follower import AskSnapshot, IndexFollower, IndexFollowerConfig
from moonpool.ids import BlockHash, Incarnation, WorkerId, WorkerKey
from moonpool.kv.events import AllBlocksCleared, BlockRemoved, BlockStored, CacheEventLog
from moonpool.kv.prefix_index import PrefixIndex
from moonpool.kv.published_set import EventBatch, PublishedSet, SetHead
from moonpool.routing.worker_view import WorkerInfo, WorkerRole
from moonpool.wire.kv_events import (
    decode_kv_events,
    encode_kv_events,
    snapshot_from_pb,
    snapshot_to_pb,
)
from support.kv import make_chain
from support.snapshots import answer

NUM_WORKERS = 2
CHAINS = [make_chain(text) for text in ("abcdef", "abcxyz", "qrstuv", "mn")]


@dataclass(slots=True)
class Worker:
    """A cache as a tree, its log and its published set."""

    key: WorkerKey
    held: dict[BlockHash, BlockHash | None] = field(default_factory=dict)
    log: CacheEventLog = field(default_factory=CacheEventLog)
    published: PublishedSet = field(default_factory=PublishedSet)

    def store(self, rng: random.Random) -> None:
        chain = rng.choice(CHAINS)
        parent: BlockHash | None = None
        for block in chain[: rng.randint(1, len(chain))]:
            if block not in self.held:
                self.held[block] = parent
                self.log.on_stored([block], parent)
            parent = block

    def remove(self, rng: random.Random) -> None:
        parents = set(self.held.values())
        leaves = [block for block in self.held if block not in parents]
        if leaves:
            block = rng.choice(leaves)
            del self.held[block]
            self.log.on_removed([block])

    def clear(self) -> None:
        self.held.clear()
        self.log.on_cleared()

    def publish(self) -> EventBatch | None:
        return self.published.apply(self.log.take())


class World:
    """A router's follower, its workers, and what is on its way between them."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.now = 0.0
        self.follower = IndexFollower(PrefixIndex(), IndexFollowerConfig())
        self.follower.on_bus_changed(True)
        self.num_incarnations = 0
        self.workers = [self.start(number) for number in range(NUM_WORKERS)]
        #: Messages on their way: to be delivered, or not.
        self.pile: list[tuple[WorkerKey, bytes | SetHead]] = []
        self.asked: list[AskSnapshot] = []

    def start(self, number: int) -> Worker:
        self.num_incarnations += 1
        key = WorkerKey(WorkerId(f"w{number}"), Incarnation(f"{self.num_incarnations:016x}"))
        info = WorkerInfo(key=key, role=WorkerRole.BOTH, address=f"10.0.0.{number}:1")
        self.follower.on_joined(info, self.now)
        return Worker(key=key)

    def worker(self, key: WorkerKey) -> Worker | None:
        return next((worker for worker in self.workers if worker.key == key), None)

    # -- steps --

    def change(self) -> None:
        worker = self.rng.choice(self.workers)
        self.rng.choice([lambda: worker.store(self.rng)] * 3 + [lambda: worker.remove(self.rng)])()

    def clear(self) -> None:
        self.rng.choice(self.workers).clear()

    def publish(self) -> None:
        worker = self.rng.choice(self.workers)
        batch = worker.publish()
        if batch is not None:
            self.pile.append((worker.key, encode_kv_events(worker.key, batch)))

    def announce(self) -> None:
        worker = self.rng.choice(self.workers)
        self.pile.append((worker.key, worker.published.head))

    def deliver(self) -> None:
        if self.pile:
            self._deliver(self.pile.pop(0))

    def duplicate(self) -> None:
        """It comes, and is on its way a second time."""
        if self.pile:
            message = self.pile[0]
            self.pile.append(message)
            self._deliver(message)

    def deliver_any(self) -> None:
        """Out of turn, and perhaps once more later."""
        if self.pile:
            message = self.rng.choice(self.pile)
            if self.rng.random() < 0.5:
                self.pile.remove(message)
            self._deliver(message)

    def lose(self) -> None:
        if self.pile:
            self.pile.pop(self.rng.randrange(len(self.pile)))

    def pass_time(self) -> None:
        self.now += self.rng.choice([0.0, 0.05, 0.3, 2.0])
        self.asked += self.follower.tick(self.now)

    def answer(self) -> None:
        if not self.asked:
            return
        ask = self.asked.pop(self.rng.randrange(len(self.asked)))
        worker = self.worker(ask.key)
        if worker is None or self.rng.random() < 0.3:
            self.follower.on_not_answered(ask.key, self.now)
            return
        # Taken now; what has happened by the time that it comes lies in the pile.
        snapshot = snapshot_from_pb(snapshot_to_pb(worker.published.snapshot(), part_blocks=3))
        for _ in range(self.rng.randint(0, 3)):
            self.rng.choice([self.change, self.publish, self.deliver, self.lose])()
        answer(self.follower, ask.key, snapshot, self.now)

    def restart(self) -> None:
        number = self.rng.randrange(NUM_WORKERS)
        self.follower.on_lost(self.workers[number].key)
        self.asked = [ask for ask in self.asked if ask.key != self.workers[number].key]
        self.workers[number] = self.start(number)

    def cut(self) -> None:
        """The router's stream to a worker is cut, and stands again."""
        worker = self.rng.choice(self.workers)
        self.follower.on_lost(worker.key)
        self.asked = [ask for ask in self.asked if ask.key != worker.key]
        info = WorkerInfo(key=worker.key, role=WorkerRole.BOTH, address="10.0.0.9:1")
        self.follower.on_joined(info, self.now)

    def lose_bus(self) -> None:
        self.follower.on_bus_changed(False)
        self.pile.clear()

    def regain_bus(self) -> None:
        self.follower.on_bus_changed(True)

    # -- the end --

    def settle(self) -> None:
        """All is quiet: announcements arrive, questions are answered."""
        self.follower.on_bus_changed(True)
        for worker in self.workers:
            worker.publish()
        for _ in range(20):
            for worker in self.workers:
                self.follower.on_head(worker.key, worker.published.head, self.now)
            self.now += 1.0
            self.asked += self.follower.tick(self.now)
            asked, self.asked = self.asked, []
            for ask in asked:
                asked_worker = self.worker(ask.key)
                assert asked_worker is not None, ask
                answer(self.follower, ask.key, asked_worker.published.snapshot(), self.now)
            if self.follower.next_due() is None:
                return
        raise AssertionError("questions without end")

    def check(self) -> None:
        self.follower.validate()
        index = self.follower.index
        assert set(index.workers) == {worker.key for worker in self.workers}
        for worker in self.workers:
            truth = np.sort(worker.published.snapshot().keys)
            assert len(truth) == len(worker.held)
            assert np.array_equal(index.keys_of(worker.key), truth), worker.key

    def _deliver(self, message: tuple[WorkerKey, bytes | SetHead]) -> None:
        key, what = message
        if isinstance(what, SetHead):
            self.follower.on_head(key, what, self.now)
        else:
            events = decode_kv_events(what)
            assert events.worker == key
            self.follower.on_batch(key, events.batch, self.now)


STEPS: dict[Callable[[World], None], int] = {
    World.change: 12,
    World.publish: 8,
    World.deliver: 8,
    World.pass_time: 6,
    World.answer: 6,
    World.announce: 4,
    World.deliver_any: 3,
    World.duplicate: 2,
    World.lose: 2,
    World.clear: 1,
    World.restart: 1,
    World.cut: 1,
    World.lose_bus: 1,
    World.regain_bus: 1,
}


@given(st.integers(0, 2**32), st.integers(0, 120))
@settings(max_examples=60)
def test_the_index_ends_at_the_truth(seed: int, num_steps: int) -> None:
    world = World(random.Random(seed))
    steps = world.rng.choices(list(STEPS), weights=list(STEPS.values()), k=num_steps)
    for number, step in enumerate(steps):
        step(world)
        if number % 8 == 0:
            world.follower.validate()
    world.settle()
    world.check()
    # Nobody is asked again while all is well.
    assert world.follower.tick(world.now + 1_000.0) == []


def test_the_events_of_a_worker_are_of_all_kinds() -> None:
    worker = Worker(key=WorkerKey(WorkerId("w"), Incarnation("0" * 16)))
    rng = random.Random(0)
    kinds: set[type] = set()
    for _ in range(50):
        worker.store(rng)
        kinds |= {type(event) for event in worker.log.take()}
        worker.remove(rng)
        kinds |= {type(event) for event in worker.log.take()}
    worker.clear()
    kinds |= {type(event) for event in worker.log.take()}
    assert kinds == {BlockStored, BlockRemoved, AllBlocksCleared}
