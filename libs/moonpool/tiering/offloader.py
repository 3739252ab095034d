"""Offloader: which chains of a worker's cache are offered to which store, and when. Without IO.

What it is: the events of the worker's own cache, the announcements of stores, the answers to puts and the
stores' reading go in; puts to begin come out. A store that wants something of an offered chain says so, and
reads it from the worker, under a lock that its lease holds (handoff/fetch_holder.py): nothing here keeps a
block from being evicted, and what is gone by then is a miss.

Rules
- A chain is the blocks from the start to a tip. What it grows by is one offer as long as no `quiet_s` lie
  between, and at most for `max_wait_s`: the chunks of a prompt. Fewer than `min_blocks` always wait so
  long: the blocks of an answer come one by one.
- A chain goes to its home (tiering/homes.py), whole: the store knows what of it it lacks. Once it has read,
  it is asked again: when it wants nothing more it holds the chain, which is not offered to it again, for as
  long as it stays in the cache.
- At most `max_puts` puts are under way, their reading included, `max_puts_per_store` to one store; one that
  fails again and again is left alone (tiering/breaker.py), one that is busy for `busy_s`.
- Nothing waits but tips of cached chains: what leaves the cache waits no more and is known no more. A tip
  that is evicted while it waits leaves its place to the block before it.
- When a store has come or gone, homes have changed: all that is cached waits again, behind whatever is new,
  one put at a time. So a store that comes back empty is filled from the workers' caches.

Life of a tip

    state      event                                                   next state
    -          its blocks are stored                                   -> FRESH, due after a quiet time
    FRESH      the chain grows: the new tip takes its place            -> (forgotten)
    FRESH      due, the home holds it                                  -> (forgotten)
    FRESH      due, the home may be asked              BeginPut        -> PUT
    FRESH      too many wait                                           -> STALE
    PUT        nothing is wanted, or it is refused                     -> (forgotten)
    PUT        something is wanted                                     -> READ
    PUT        failed the first time, or the store is busy             -> FRESH, due after a pause
    READ       the store's lease has ended, or does not come           -> FRESH, due after a pause
    -          a store has come or gone                                -> STALE
    STALE      nothing else is due or under way        BeginPut        -> PUT

What it deliberately does not do: it pins nothing, and never says what a store should drop.
"""

from __future__ import annotations

import enum
import math
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from operator import itemgetter

from moonpool.ids import BlockHash, WorkerId, WorkerKey
from moonpool.inference.request import DEFAULT_TENANT
from moonpool.kv.events import AllBlocksCleared, BlockRemoved, BlockStored, CacheEvent
from moonpool.tiering.breaker import Breaker, BreakerConfig, BreakerState
from moonpool.tiering.cached_chains import CachedChains
from moonpool.tiering.homes import HOME_BLOCKS, home_key, home_of
from moonpool.tiering.live_stores import LiveStores, StoreAnnounced, StoreNode
from moonpool.tiering.protocol import PutRefusal

#: Blocks that one tick goes through on its way to the starts of chains: a millisecond's work. What is due
#: beyond that is looked at in the next tick, which is due at once.
_BLOCKS_PER_TICK = 8_192


@dataclass(frozen=True, slots=True, kw_only=True)
class OffloaderConfig:
    """Validated in config/; here only asserted."""

    #: A chain that has grown by this many blocks is offered when it has not grown for `quiet_s`.
    min_blocks: int = 8
    quiet_s: float = 0.1
    #: Any other one is offered so long after its first new block.
    max_wait_s: float = 2.0
    max_puts: int = 4
    max_puts_per_store: int = 2
    #: Puts of one chain that may fail before it is given up.
    max_attempts: int = 2
    #: Before a chain whose put failed is offered again.
    retry_s: float = 1.0
    #: Times that a store is asked again whether it holds a chain that it has read; then it is given up.
    max_asks: int = 4
    #: Between the end of its reading and that.
    ask_again_s: float = 0.25
    #: How long a store may take to read what it wants.
    read_s: float = 20.0
    #: How long a store that is busy is left alone.
    busy_s: float = 0.5
    #: Fresh tips; more of them wait with the stale ones.
    max_fresh: int = 1_024
    #: First blocks whose tenant is remembered.
    max_roots: int = 65_536
    #: Until a store that has joined has its whole share of the chains.
    ramp_s: float = 60.0
    #: Blocks of a chain's beginning that decide its home; see homes.HOME_BLOCKS.
    home_blocks: int = HOME_BLOCKS
    breaker: BreakerConfig = field(default_factory=BreakerConfig)

    def __post_init__(self) -> None:
        assert 0.0 <= self.quiet_s <= self.max_wait_s, self
        assert 1 <= self.max_puts_per_store <= self.max_puts, self
        assert min(self.max_attempts, self.max_asks, self.max_fresh, self.max_roots) >= 1, self
        assert self.home_blocks >= 1, self
        assert self.min_blocks >= 1, self
        assert min(self.retry_s, self.read_s, self.busy_s, self.ramp_s) > 0.0, self


@dataclass(frozen=True, slots=True, kw_only=True)
class BeginPut:
    """Offer this chain to this store; on_answered or on_failed must follow, once."""

    put_id: int
    store: StoreNode
    tenant: str
    #: From its start.
    hashes: tuple[BlockHash, ...]


class PutOutcome(enum.StrEnum):
    """What came of an offer. Label of a metric."""

    #: The store reads what it lacks.
    TAKEN = "taken"
    #: Nothing is wanted: it lies there.
    HELD = "held"
    #: The store would not.
    REFUSED = "refused"
    #: It would not at this moment.
    BUSY = "busy"
    #: No answer, or not in time, or not as it should be.
    FAILED = "failed"


@dataclass(slots=True, kw_only=True)
class _Fresh:
    since: float
    due_at: float
    #: Blocks by which the chain has grown since.
    num_blocks: int = 0
    num_failures: int = 0
    num_asks: int = 0
    #: Of the chain; None until it is looked for.
    home_key: BlockHash | None = None


@dataclass(slots=True, kw_only=True)
class _Put:
    store: WorkerKey
    hashes: tuple[BlockHash, ...]
    num_failures: int
    num_asks: int
    #: The store's lease, once it is there.
    lease_id: int | None = None
    #: It has come and gone.
    has_read: bool = False
    #: When its reading ends at the latest; None: not answered yet.
    read_until: float | None = None

    @property
    def tip(self) -> BlockHash:
        return self.hashes[-1]


@dataclass(slots=True, kw_only=True)
class _Store:
    node: StoreNode
    breaker: Breaker
    #: Cached blocks that it is known to hold; the beginnings of all these chains are among them.
    held: set[BlockHash] = field(default_factory=set)
    num_puts: int = 0
    busy_until: float = -math.inf


class Offloader:
    """See the file's head."""

    def __init__(self, config: OffloaderConfig | None = None) -> None:
        self._config = config or OffloaderConfig()
        self._live = LiveStores(ramp_s=self._config.ramp_s)
        self._stores: dict[WorkerId, _Store] = {}
        self._cached = CachedChains()
        self._fresh: dict[BlockHash, _Fresh] = {}
        #: Looked at in this order.
        self._stale: OrderedDict[BlockHash, None] = OrderedDict()
        self._stale_due_at = -math.inf
        self._puts: dict[int, _Put] = {}
        self._num_begun = 0
        #: What the tick under way may still go through.
        self._num_blocks_left = 0
        self._num_missed_blocks = 0
        self._tenants: OrderedDict[BlockHash, str] = OrderedDict()

    # -- what happens --

    def note_root(self, root: BlockHash, tenant: str) -> None:
        """Chains that begin with this block are this tenant's."""
        self._tenants[root] = tenant
        self._tenants.move_to_end(root)
        if len(self._tenants) > self._config.max_roots:
            self._tenants.popitem(last=False)

    def on_cache_events(self, events: Iterable[CacheEvent], now: float) -> None:
        """The worker's cache has changed."""
        for event in events:
            match event:
                case BlockStored(hashes=hashes, parent_hash=parent_hash):
                    self._on_stored(hashes, parent_hash, now)
                case BlockRemoved(hashes=hashes):
                    for block_hash in hashes:
                        self._forget(block_hash)
                case AllBlocksCleared():
                    self._cached.clear()
                    self._fresh.clear()
                    self._stale.clear()
                    for store in self._stores.values():
                        store.held.clear()

    def on_announced(self, announced: StoreAnnounced, now: float) -> bool:
        """A store was heard on the bus; whether stores have come or gone by that."""
        if not self._live.on_announced(announced, now):
            return False
        self._meet_stores()
        return True

    def on_bus_changed(self, is_there: bool, now: float) -> None:
        """The bus has come or gone."""
        self._live.on_bus_changed(is_there, now)

    def on_answered(
        self, put_id: int, *, num_wanted_blocks: int, refusal: PutRefusal | None, now: float
    ) -> PutOutcome:
        """The store says how many blocks it is going to read, or why it wants none."""
        put = self._puts[put_id]
        store = self._store_of(put)
        if store is not None:
            store.breaker.succeeded(now)
        if refusal is PutRefusal.TOO_MANY_PUTS:
            if store is not None:
                store.busy_until = now + self._config.busy_s
            self._end(put_id)
            self._wait_again(put, now + self._config.busy_s, now)
            return PutOutcome.BUSY
        if refusal is not None:
            self._end(put_id)
            return PutOutcome.REFUSED
        if not num_wanted_blocks:
            if store is not None:
                store.held.update(block for block in put.hashes if block in self._cached)
            self._end(put_id)
            return PutOutcome.HELD
        if put.has_read:
            self._on_read(put_id, now)
        else:
            put.read_until = now + self._config.read_s
        return PutOutcome.TAKEN

    def on_failed(self, put_id: int, now: float) -> PutOutcome:
        """The store did not answer, or not in time, or not as it should."""
        put = self._puts[put_id]
        store = self._store_of(put)
        if store is not None:
            store.breaker.failed(now)
        self._end(put_id)
        put.num_failures += 1
        if put.num_failures < self._config.max_attempts:
            self._wait_again(put, now + self._config.retry_s, now)
        return PutOutcome.FAILED

    def on_read_begun(self, lease_id: int, reader: WorkerKey, hashes: Sequence[BlockHash]) -> None:
        """Somebody reads a chain here, perhaps a store what it was offered; it may precede its answer."""
        for put in self._puts.values():
            if (
                put.store == reader
                and put.lease_id is None
                and 0 < len(hashes) <= len(put.hashes)
                and put.hashes[len(hashes) - 1] == hashes[-1]
            ):
                put.lease_id = lease_id
                return

    def on_read_ended(self, lease_id: int, now: float) -> None:
        """That lease has ended, whoever ended it. May come twice."""
        for put_id, put in self._puts.items():
            if put.lease_id == lease_id:
                if put.read_until is not None:
                    self._on_read(put_id, now)
                else:
                    put.has_read = True
                return

    # -- what is due --

    def tick(self, now: float) -> list[BeginPut]:
        """The puts to begin now. Call after every event and at `next_due`; too often does nothing."""
        if self._live.expire(now):
            self._meet_stores()
        for put_id, put in tuple(self._puts.items()):
            if put.read_until is not None and put.read_until <= now:
                self._on_read(put_id, now)
        effects: list[BeginPut] = []
        if not self._stores:
            return effects
        self._num_blocks_left = _BLOCKS_PER_TICK
        due = [(fresh.due_at, tip) for tip, fresh in self._fresh.items() if fresh.due_at <= now]
        weights = self._live.weights(now) if due or self._stale else {}
        for _, tip in sorted(due, key=itemgetter(0)):
            if len(self._puts) >= self._config.max_puts or self._num_blocks_left <= 0:
                break
            fresh = self._fresh[tip]
            if fresh.home_key is None:
                fresh.home_key = home_key(self._chain(tip), self._config.home_blocks)
            store = self._store(weights, fresh.home_key)
            if tip in store.held:
                del self._fresh[tip]
            elif self._ready_at(store, now) <= now:
                del self._fresh[tip]
                effects.append(self._begin(store, self._chain(tip), fresh, now))
        self._tick_stale(effects, weights, now)
        return effects

    def next_due(self, now: float) -> float | None:
        """When `tick` has something to do next, if nothing happens before. Call after `tick(now)`."""
        times = [fresh.due_at for fresh in self._fresh.values() if fresh.due_at > now]
        is_kept_waiting = len(times) < len(self._fresh)
        if is_kept_waiting and self._num_blocks_left <= 0:
            times.append(now)
        if is_kept_waiting and len(self._puts) < self._config.max_puts:
            times += [
                ready_at
                for store in self._stores.values()
                if now < (ready_at := self._ready_at(store, now)) < math.inf
            ]
        if self._stale and not self._puts:
            times.append(max(self._stale_due_at, now))
        times += [put.read_until for put in self._puts.values() if put.read_until is not None]
        expires_at = self._live.next_due()
        if expires_at is not None:
            times.append(expires_at)
        return min(times, default=None)

    # -- what is known --

    @property
    def num_waiting(self) -> int:
        """Tips that wait to be offered."""
        return len(self._fresh) + len(self._stale)

    @property
    def num_puts(self) -> int:
        """Puts under way, their reading included."""
        return len(self._puts)

    @property
    def num_missed_blocks(self) -> int:
        """Blocks that left the cache, while there were stores, before one was known to hold them."""
        return self._num_missed_blocks

    def breaker_states(self, now: float) -> dict[WorkerId, BreakerState]:
        """By live store."""
        return {store_id: store.breaker.state(now) for store_id, store in self._stores.items()}

    def validate(self) -> None:
        """Check every invariant; raises AssertionError. O(blocks)."""
        self._live.validate()
        config = self._config
        assert len(self._fresh) <= config.max_fresh
        assert len(self._puts) <= config.max_puts
        assert len(self._tenants) <= config.max_roots
        assert not self._fresh.keys() & self._stale.keys()
        self._cached.validate()
        cached = self._cached.blocks()
        assert self._fresh.keys() <= cached
        assert self._stale.keys() <= cached
        assert {store.node for store in self._stores.values()} == set(self._live.nodes.values())
        assert self._stores or not (self._fresh or self._stale)
        for store in self._stores.values():
            store.breaker.validate()
            assert store.held <= cached, store.node
            own = [put for put in self._puts.values() if put.store == store.node.key]
            assert store.num_puts == len(own) <= config.max_puts_per_store, store.node
            assert not any(put.has_read and put.read_until is not None for put in own), own
            for block_hash in store.held:
                parent = self._cached.parent(block_hash)
                assert parent is None or parent in store.held, store.node

    # -- the cache --

    def _on_stored(
        self, hashes: Sequence[BlockHash], parent_hash: BlockHash | None, now: float
    ) -> None:
        tip = self._cached.add(hashes, parent_hash)
        if tip is None or not self._stores:
            return
        since, num_blocks = now, len(hashes)
        if parent_hash is not None:
            self._stale.pop(parent_hash, None)
            before = self._fresh.pop(parent_hash, None)
            if before is not None:
                since, num_blocks = before.since, before.num_blocks + num_blocks
        config = self._config
        due_at = since + config.max_wait_s
        if num_blocks >= config.min_blocks:
            due_at = min(due_at, now + config.quiet_s)
        self._add_fresh(tip, _Fresh(since=since, due_at=max(due_at, now), num_blocks=num_blocks))

    def _forget(self, block_hash: BlockHash) -> None:
        """It has left the cache. Its place is its parent's, if that is still there."""
        if block_hash not in self._cached:
            return
        parent = self._cached.remove(block_hash)
        is_held = False
        for store in self._stores.values():
            is_held |= block_hash in store.held
            store.held.discard(block_hash)
        if self._stores and not is_held:
            self._num_missed_blocks += 1
        fresh = self._fresh.pop(block_hash, None)
        is_stale = block_hash in self._stale
        if is_stale:
            del self._stale[block_hash]
        if parent is None or parent in self._fresh:
            return
        if fresh is not None:
            fresh.home_key = None
            self._add_fresh(parent, fresh)
        elif is_stale:
            self._stale[parent] = None

    def _chain(self, tip: BlockHash) -> tuple[BlockHash, ...]:
        """From its start."""
        hashes = self._cached.chain(tip)
        self._num_blocks_left -= len(hashes)
        return hashes

    # -- waiting --

    def _add_fresh(self, tip: BlockHash, fresh: _Fresh) -> None:
        self._stale.pop(tip, None)
        self._fresh[tip] = fresh
        if len(self._fresh) > self._config.max_fresh:
            oldest = next(iter(self._fresh))
            del self._fresh[oldest]
            self._stale[oldest] = None

    def _wait_again(self, put: _Put, due_at: float, now: float) -> None:
        tip = put.tip
        if self._stores and tip in self._cached and tip not in self._fresh:
            fresh = _Fresh(
                since=now,
                due_at=due_at,
                num_failures=put.num_failures,
                num_asks=put.num_asks,
            )
            self._add_fresh(tip, fresh)

    def _meet_stores(self) -> None:
        """Stores have come or gone: homes are others, and whoever is new is known to hold nothing."""
        nodes = self._live.nodes
        for store_id, store in tuple(self._stores.items()):
            node = nodes.get(store_id)
            if node is None or node.key != store.node.key:
                del self._stores[store_id]
            else:
                store.node = node
        for store_id, node in nodes.items():
            if store_id not in self._stores:
                self._stores[store_id] = _Store(node=node, breaker=Breaker(self._config.breaker))
        self._stale.clear()
        if not self._stores:
            self._fresh.clear()
            return
        # What was stored last is evicted last.
        for tip in self._cached.latest_leaves():
            if tip not in self._fresh:
                self._stale[tip] = None

    def _tick_stale(
        self, effects: list[BeginPut], weights: dict[WorkerId, float], now: float
    ) -> None:
        """One put at a time, when there is nothing else to do."""
        if now < self._stale_due_at:
            return
        while self._stale and not self._puts and self._num_blocks_left > 0:
            tip, _ = self._stale.popitem(last=False)
            chain = self._chain(tip)
            store = self._store(weights, home_key(chain, self._config.home_blocks))
            if tip in store.held:
                continue
            if self._ready_at(store, now) > now:
                # The next one may be at home elsewhere.
                self._stale[tip] = None
                self._stale_due_at = now + self._config.busy_s
                return
            effects.append(self._begin(store, chain, _Fresh(since=now, due_at=now), now))

    # -- puts --

    def _store(self, weights: dict[WorkerId, float], key: BlockHash) -> _Store:
        store_id = home_of(weights, key)
        assert store_id is not None, "only called while there are stores"
        return self._stores[store_id]

    def _ready_at(self, store: _Store, now: float) -> float:
        """When it may be offered something; infinite: not before a put has ended."""
        if store.num_puts >= self._config.max_puts_per_store:
            return math.inf
        if not store.breaker.is_allowed(now):
            due_at = store.breaker.next_due()
            return max(due_at, store.busy_until) if due_at is not None else math.inf
        return max(store.busy_until, now)

    def _begin(
        self, store: _Store, chain: tuple[BlockHash, ...], fresh: _Fresh, now: float
    ) -> BeginPut:
        self._num_begun += 1
        store.breaker.begin(now)
        store.num_puts += 1
        self._puts[self._num_begun] = _Put(
            store=store.node.key,
            hashes=chain,
            num_failures=fresh.num_failures,
            num_asks=fresh.num_asks,
        )
        return BeginPut(
            put_id=self._num_begun,
            store=store.node,
            tenant=self._tenants.get(chain[0], DEFAULT_TENANT),
            hashes=chain,
        )

    def _on_read(self, put_id: int, now: float) -> None:
        """The store has read what it wanted, or does not come."""
        put = self._puts[put_id]
        self._end(put_id)
        put.num_asks += 1
        if put.num_asks <= self._config.max_asks:
            self._wait_again(put, now + self._config.ask_again_s, now)

    def _end(self, put_id: int) -> None:
        put = self._puts.pop(put_id)
        store = self._store_of(put)
        if store is not None:
            store.num_puts -= 1

    def _store_of(self, put: _Put) -> _Store | None:
        """The store if that incarnation still lives."""
        store = self._stores.get(put.store.worker_id)
        return store if store is not None and store.node.key == put.store else None
