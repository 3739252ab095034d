"""Whatever caches, stores and answers do: few puts, of what is there, to who lives; in the end all lies at home.

A cache grows and shrinks as a tree, stores come, go and are born again empty, answers are late, wrong or
missing. Stores here are sets of hashes, which take what they were offered if it is still in the cache then.
When everything is well for a while, every cached chain lies at its home, and nothing waits any more.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field

from hypothesis import given, settings
from hypothesis import strategies as st

from moonpool.ids import BlockHash, Incarnation, WorkerId, WorkerKey
from moonpool.kv.events import CacheEventLog
from moonpool.tiering.homes import home_key, home_of
from moonpool.tiering.live_stores import StoreAnnounced
from moonpool.tiering.offloader import BeginPut, Offloader, OffloaderConfig
from moonpool.tiering.protocol import PutRefusal
from support.kv import make_chain

CHAINS = [
    *(make_chain(text) for text in ("abcdefgh", "abcdxyz", "abq", "stuvw", "stz", "m")),
    make_chain(range(1_000, 1_090)),
    make_chain([*range(1_000, 1_070), *range(30)]),
]
NAMES = ("s0", "s1", "s2")
CONFIG = OffloaderConfig(
    min_blocks=3,
    quiet_s=0.2,
    max_wait_s=1.0,
    max_puts=3,
    max_puts_per_store=2,
    max_fresh=4,
    max_roots=3,
    read_s=3.0,
    ramp_s=5.0,
)

seeds = st.integers(0, 2**32 - 1)


@dataclass(slots=True)
class Store:
    key: WorkerKey
    holds: set[BlockHash] = field(default_factory=set)


@dataclass(slots=True)
class World:
    """The machine, and what is true."""

    rng: random.Random
    machine: Offloader = field(default_factory=lambda: Offloader(CONFIG))
    now: float = 0.0
    #: The cache: hash to parent.
    held: dict[BlockHash, BlockHash | None] = field(default_factory=dict)
    log: CacheEventLog = field(default_factory=CacheEventLog)
    stores: dict[str, Store] = field(default_factory=dict)
    num_lives: int = 0
    sequence: int = 0
    #: Begun, and not answered.
    asked: dict[int, BeginPut] = field(default_factory=dict)
    #: Answered with something that is wanted, and not read.
    reading: list[BeginPut] = field(default_factory=list)
    #: Streams that are open.
    streams: list[tuple[int, BeginPut]] = field(default_factory=list)
    num_streams: int = 0
    #: Stores answer as they should, and read all that they want.
    is_well: bool = False

    # -- the cache --

    def grow(self) -> None:
        chain = self.rng.choice(CHAINS)
        parent: BlockHash | None = None
        for block in chain[: self.rng.randint(1, len(chain))]:
            if block not in self.held:
                self.held[block] = parent
                self.log.on_stored([block], parent)
            parent = block

    def shrink(self) -> None:
        for _ in range(self.rng.randint(1, 30)):
            parents = set(self.held.values())
            leaves = [block for block in self.held if block not in parents]
            if leaves:
                block = self.rng.choice(leaves)
                del self.held[block]
                self.log.on_removed([block])

    def clear(self) -> None:
        self.held.clear()
        self.log.on_cleared()

    def tell_cache(self) -> None:
        self.machine.on_cache_events(self.log.take(), self.now)

    # -- stores --

    def announce(self) -> None:
        name = self.rng.choice(NAMES)
        store = self.stores.get(name)
        if store is None or self.rng.random() < 0.3:
            self.num_lives += 1
            key = WorkerKey(WorkerId(name), Incarnation(str(self.num_lives)))
            store = self.stores[name] = Store(key=key)
        self._announce(store.key, is_leaving=False)

    def leave(self) -> None:
        if self.stores:
            name = self.rng.choice(sorted(self.stores))
            self._announce(self.stores.pop(name).key, is_leaving=True)

    def _announce(self, key: WorkerKey, *, is_leaving: bool) -> None:
        self.sequence += 1
        self.machine.on_announced(
            StoreAnnounced(
                key=key,
                address=f"{key.worker_id}:1",
                sequence=self.sequence,
                valid_for_s=1e9,
                is_leaving=is_leaving,
            ),
            self.now,
        )

    def store_of(self, put: BeginPut) -> Store | None:
        store = self.stores.get(put.store.key.worker_id)
        return store if store is not None and store.key == put.store.key else None

    # -- puts --

    def answer(self) -> None:
        if not self.asked:
            return
        put_id = self.rng.choice(sorted(self.asked))
        put = self.asked.pop(put_id)
        store, machine = self.store_of(put), self.machine
        chance = 1.0 if self.is_well else self.rng.random()
        if store is None or chance < 0.2:
            machine.on_failed(put_id, self.now)
        elif chance < 0.4:
            refusal = self.rng.choice(tuple(PutRefusal))
            machine.on_answered(put_id, num_wanted_blocks=0, refusal=refusal, now=self.now)
        else:
            num_wanted_blocks = sum(block not in store.holds for block in put.hashes)
            if num_wanted_blocks and self.rng.random() < 0.2:
                # It is faster than its answer.
                self.open_stream(put)
                self.close_stream()
            elif num_wanted_blocks:
                self.reading.append(put)
            machine.on_answered(
                put_id, num_wanted_blocks=num_wanted_blocks, refusal=None, now=self.now
            )

    def read(self) -> None:
        if self.reading:
            self.open_stream(self.reading.pop(self.rng.randrange(len(self.reading))))

    def open_stream(self, put: BeginPut) -> None:
        self.num_streams += 1
        end = len(put.hashes)
        if not self.is_well and self.rng.random() < 0.3:
            end = self.rng.randint(1, end)
        self.streams.append((self.num_streams, put))
        self.machine.on_read_begun(self.num_streams, put.store.key, put.hashes[:end])
        store = self.store_of(put)
        for block in put.hashes[:end]:
            # Too late is a miss.
            if store is None or block not in self.held:
                break
            store.holds.add(block)

    def close_stream(self) -> None:
        if self.streams:
            lease_id, _ = self.streams.pop()
            self.machine.on_read_ended(lease_id, self.now)

    # -- time --

    def tick(self) -> None:
        machine = self.machine
        for effect in machine.tick(self.now):
            assert effect.put_id not in self.asked
            self.asked[effect.put_id] = effect
            store = self.stores[effect.store.key.worker_id]
            assert store.key == effect.store.key
            parent: BlockHash | None = None
            for block in effect.hashes:
                assert self.held[block] == parent
                parent = block
        assert machine.num_puts <= CONFIG.max_puts
        assert machine.num_waiting <= len(self.held)
        # Done twice, it does nothing.
        assert machine.tick(self.now) == []
        machine.validate()

    def homes(self) -> dict[BlockHash, str]:
        """By tip, where its chain belongs when all stores have their whole shares."""
        weights = dict.fromkeys(map(WorkerId, self.stores), 1.0)
        parents = set(self.held.values())
        homes: dict[BlockHash, str] = {}
        for tip in self.held:
            if tip in parents:
                continue
            chain = [tip]
            while (parent := self.held[chain[-1]]) is not None:
                chain.append(parent)
            home = home_of(weights, home_key(chain[::-1]))
            assert home is not None
            homes[tip] = home
        return homes


def walk(world: World, num_steps: int) -> None:
    rng = world.rng
    actions = (
        [world.grow] * 5
        + [world.shrink, world.announce, world.read, world.read, world.close_stream]
        + [world.answer] * 4
    )
    for _ in range(num_steps):
        if rng.random() < 0.03:
            rng.choice((world.clear, world.leave))()
        rng.choice(actions)()
        if world.log and rng.random() < 0.7:
            world.tell_cache()
        world.machine.validate()
        world.now += rng.choice((0.0, 0.01, 0.1, 0.3, 2.0))
        if not world.log:
            world.tick()


@given(seed=seeds)
@settings(max_examples=50)
def test_whatever_happens_all_lies_at_home_in_the_end(seed: int) -> None:
    world = World(rng=random.Random(seed))
    world.machine.on_bus_changed(True, 0.0)
    walk(world, 100)
    world.tell_cache()
    world.grow()
    world.tell_cache()
    world.now += 1_000.0
    if not world.stores:
        world.announce()
        world.now += 1_000.0
    # Stores that come back are offered everything once more; from here on all is well.
    world.is_well = True
    world.num_lives += 1
    for name, store in world.stores.items():
        key = WorkerKey(WorkerId(name), Incarnation(str(world.num_lives)))
        store.key, store.holds = key, set()
        world._announce(key, is_leaving=False)
    for _ in range(2_000):
        world.tick()
        while world.asked or world.reading or world.streams:
            world.answer()
            world.read()
            world.close_stream()
            world.tick()
        if not (world.machine.num_waiting or world.machine.num_puts):
            break
        due_at = world.machine.next_due(world.now)
        assert due_at is not None, world.machine.num_waiting
        world.now = max(world.now, due_at)
    assert world.machine.num_waiting == world.machine.num_puts == 0
    for tip, home in world.homes().items():
        assert tip in world.stores[home].holds
    world.machine.validate()
