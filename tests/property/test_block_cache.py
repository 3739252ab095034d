"""BlockCache against a dict of cached blocks that is searched in full for every decision."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from moonpool.ids import BlockHash, BlockId
from moonpool.kv.block_cache import BlockCache, NoBlocksError
from moonpool.kv.events import AllBlocksCleared, BlockRemoved, BlockStored
from moonpool.kv.eviction import EvictionName, make_eviction
from support.kv import make_chain

NUM_BLOCKS = 10
#: Few chains that part at different depths: prefixes are shared, runs split, the pool is too small.
texts = st.sampled_from(["a", "aa", "aaaa", "aaaaaa", "aab", "aabb", "aaba", "abba", "ab", "bbbb"])


@dataclass(slots=True)
class Cached:
    block_id: BlockId
    parent: BlockHash | None
    last_used: int = 0
    #: Aged LFU: the clock then, and how often it was found, at most 4 times.
    used_at: int = 0
    num_finds: int = 0
    #: S3-FIFO: it is in the small segment.
    is_small: bool = True


@dataclass(slots=True)
class Holder:
    text: str
    block_ids: list[BlockId]
    #: Holds blocks of another; its own chain is not inserted.
    is_reader: bool = False
    #: Holds a cached prefix for somebody elsewhere.
    is_lent: bool = False


@dataclass(slots=True)
class Model:
    """The rules of the cache, written down without a thought for speed."""

    cached: dict[BlockHash, Cached] = field(default_factory=dict)
    refs: Counter[BlockId] = field(default_factory=Counter)
    tick: int = 0
    eviction: EvictionName = EvictionName.LRU
    #: S3-FIFO: what was evicted from the small segment. Never so many here that one is forgotten.
    ghosts: set[BlockHash] = field(default_factory=set)
    #: Aged LFU: how often what is gone was found. Never so many here that one is forgotten.
    finds_of_gone: dict[BlockHash, int] = field(default_factory=dict)
    num_stored: int = 0

    def match(self, chain: Sequence[BlockHash]) -> list[BlockId]:
        matched = []
        for block_hash in chain:
            if block_hash not in self.cached:
                break
            matched.append(self.cached[block_hash].block_id)
        return matched

    def insert(self, chain: Sequence[BlockHash], block_ids: Sequence[BlockId]) -> None:
        parent: BlockHash | None = None
        for block_hash, block_id in zip(chain, block_ids, strict=True):
            if block_hash not in self.cached:
                is_small = block_hash not in self.ghosts
                self.ghosts.discard(block_hash)
                num_finds = min(self.finds_of_gone.pop(block_hash, -1) + 1, 4)
                self.num_stored += 1
                self.cached[block_hash] = Cached(
                    block_id, parent, is_small=is_small, num_finds=num_finds
                )
            parent = block_hash

    def acquire(self, block_ids: Sequence[BlockId]) -> None:
        self.refs.update(block_ids)
        for entry in self.cached.values():
            is_found = entry.block_id in block_ids
            entry.is_small &= not is_found
            entry.num_finds = min(entry.num_finds + is_found, 4)

    def remove(self, block_hash: BlockHash) -> None:
        entry = self.cached.pop(block_hash)
        self.finds_of_gone[block_hash] = entry.num_finds
        if entry.is_small:
            self.ghosts.add(block_hash)

    def release(self, block_ids: Sequence[BlockId]) -> None:
        self.tick += 1
        self.refs.subtract(block_ids)
        for entry in self.cached.values():
            if entry.block_id in block_ids:
                entry.last_used = self.tick
                entry.used_at = self.tick + self.num_stored

    @property
    def idle(self) -> set[BlockHash]:
        return {h for h, entry in self.cached.items() if not self.refs[entry.block_id]}

    @property
    def num_free(self) -> int:
        held = {block_id for block_id, count in self.refs.items() if count}
        return NUM_BLOCKS - len(held | {entry.block_id for entry in self.cached.values()})

    def next_victim(self, is_gone: Callable[[BlockId], bool]) -> BlockHash | None:
        """The least recently used idle block without cached children; None if all have some.

        With S3-FIFO from the segment whose turn it is, if it has one. With aged LFU several may be worth
        the same: then the one that went.
        """
        parents = {entry.parent for entry in self.cached.values()}
        leaves = self.idle - parents
        is_small_due = False
        if self.eviction is EvictionName.S3_FIFO:
            is_small_due = sum(e.is_small for e in self.cached.values()) > NUM_BLOCKS // 10
            leaves = {h for h in leaves if self.cached[h].is_small is is_small_due} or leaves
        if self.eviction is EvictionName.LFU_AGED:
            entries = self.cached
            return min(
                leaves,
                key=lambda h: (
                    entries[h].used_at + NUM_BLOCKS * entries[h].num_finds,
                    not is_gone(entries[h].block_id),
                ),
                default=None,
            )
        return min(leaves, key=lambda h: self.cached[h].last_used, default=None)

    def descendants(self, block_hash: BlockHash) -> set[BlockHash]:
        below = {block_hash}
        while more := {h for h, e in self.cached.items() if e.parent in below} - below:
            below |= more
        return below


class BlockCacheMachine(RuleBasedStateMachine):
    eviction = EvictionName.LRU

    def __init__(self) -> None:
        super().__init__()
        self.cache = BlockCache(NUM_BLOCKS, make_eviction(self.eviction, NUM_BLOCKS))
        self.model = Model(eviction=self.eviction)
        self.holders: list[Holder] = []
        #: What a listener to the events believes: hash -> parent.
        self.heard: dict[BlockHash, BlockHash | None] = {}

    def _allocate(self, num_blocks: int) -> tuple[BlockId, ...] | None:
        """Allocate in both; the model follows the cache where a branch had to be cut."""
        model, cache = self.model, self.cache
        can = num_blocks <= model.num_free + len(model.idle)
        assert cache.can_allocate(num_blocks) == can
        if not can:
            with pytest.raises(NoBlocksError) as caught:
                cache.allocate(num_blocks)
            assert caught.value.needed == num_blocks
            assert caught.value.available == model.num_free + len(model.idle)
            return None
        block_ids = cache.allocate(num_blocks)
        while model.num_free < num_blocks:
            victim = model.next_victim(
                lambda block_id: block_id in block_ids or not cache.is_cached(block_id)
            )
            if victim is not None:
                model.remove(victim)
                continue
            gone = {h for h, e in model.cached.items() if not cache.is_cached(e.block_id)}
            gone |= {h for h, e in model.cached.items() if e.block_id in block_ids}
            assert gone & model.idle
            assert gone == set().union(*map(model.descendants, gone))
            for block_hash in gone:
                model.remove(block_hash)
        model.refs.update(block_ids)
        return block_ids

    @rule(text=texts, is_matching=st.booleans(), num_inserted=st.integers(0, 6))
    def start(self, text: str, is_matching: bool, num_inserted: int) -> None:
        """A request comes; one that does not match computes private copies."""
        chain = make_chain(text)
        matched = list(self.cache.match_prefix(chain).block_ids)
        assert matched == self.model.match(chain)
        if not is_matching:
            matched = []
        num_new = len(chain) - len(matched)
        fits = self.cache.can_allocate(num_new, keep=matched)
        self.cache.acquire(matched)
        self.model.acquire(matched)
        block_ids = self._allocate(num_new)
        assert (block_ids is not None) == fits
        if block_ids is None:
            self.cache.release(matched)
            self.model.release(matched)
            return
        self.holders.append(Holder(text, [*matched, *block_ids]))
        self._insert(self.holders[-1], num_inserted)

    def _insert(self, holder: Holder, num_blocks: int) -> None:
        chain, block_ids = make_chain(holder.text)[:num_blocks], holder.block_ids[:num_blocks]
        num_before = len(self.model.cached)
        result = self.cache.insert(chain, block_ids)
        self.model.insert(chain, block_ids)
        assert list(result.canonical_block_ids) == self.model.match(chain)
        assert result.num_new == len(self.model.cached) - num_before

    @precondition(lambda self: self.holders)
    @rule(data=st.data(), letter=st.sampled_from("ab"))
    def grow(self, data: st.DataObject, letter: str) -> None:
        holder = data.draw(st.sampled_from(self.holders))
        if holder.is_lent:
            return
        block_ids = self._allocate(1)
        if block_ids is None:
            return
        holder.block_ids += block_ids
        if not holder.is_reader:
            holder.text += letter
            self._insert(holder, len(holder.block_ids))

    @precondition(lambda self: self.holders)
    @rule(data=st.data())
    def fork(self, data: st.DataObject) -> None:
        """A reader locks some blocks of a request, not always from the chain's start."""
        holder = data.draw(st.sampled_from(self.holders))
        if not holder.block_ids:
            return
        start = data.draw(st.integers(0, len(holder.block_ids) - 1))
        locked = holder.block_ids[start:]
        self.cache.acquire(locked)
        self.model.acquire(locked)
        self.holders.append(Holder(holder.text, locked, is_reader=True))

    @rule(text=texts)
    def lend(self, text: str) -> None:
        """A peer reads what is cached of a chain."""
        matched = self.cache.match_prefix(make_chain(text)).block_ids
        self.cache.lend(matched)
        self.model.refs.update(matched)
        self.holders.append(Holder(text, list(matched), is_lent=True))

    @precondition(lambda self: self.holders)
    @rule(data=st.data())
    def end(self, data: st.DataObject) -> None:
        holder = self.holders.pop(data.draw(st.integers(0, len(self.holders) - 1)))
        if holder.is_lent:
            self.cache.take_back(holder.block_ids)
            self.model.refs.subtract(holder.block_ids)
        else:
            self.cache.release(holder.block_ids)
            self.model.release(holder.block_ids)

    @rule()
    def clear(self) -> None:
        self.cache.clear()
        for block_hash in self.model.idle:
            for gone in self.model.descendants(block_hash):
                if gone in self.model.cached:
                    self.model.remove(gone)

    @rule(text=texts)
    def forget(self, text: str) -> None:
        first_hash = make_chain(text)[0]
        self.cache.forget_chain(first_hash)
        for gone in self.model.descendants(first_hash):
            if gone in self.model.cached:
                self.model.remove(gone)

    @rule()
    def listen(self) -> None:
        for event in self.cache.take_events():
            match event:
                case BlockStored(hashes=hashes, parent_hash=parent):
                    assert parent is None or parent in self.heard
                    for block_hash in hashes:
                        assert block_hash not in self.heard
                        self.heard[block_hash] = parent
                        parent = block_hash
                case BlockRemoved(hashes=hashes):
                    for block_hash in hashes:
                        del self.heard[block_hash]
                case AllBlocksCleared():
                    self.heard.clear()
        assert self.heard == {h: entry.parent for h, entry in self.model.cached.items()}

    @invariant()
    def agrees_with_the_model(self) -> None:
        cache, model = self.cache, self.model
        cache.validate()
        assert cache.num_free == model.num_free
        assert cache.num_evictable == len(model.idle)
        assert cache.num_available == model.num_free + len(model.idle)
        assert cache.num_referenced == sum(count > 0 for count in model.refs.values())
        assert cache.num_cached == len(model.cached)
        for entry in model.cached.values():
            assert cache.is_cached(entry.block_id)
        for holder in self.holders:
            chain = make_chain(holder.text)
            assert list(cache.match_prefix(chain).block_ids) == model.match(chain)

    def teardown(self) -> None:
        for holder in self.holders:
            self.cache.release(holder.block_ids)
        self.cache.validate()
        assert self.cache.num_referenced == 0
        self.cache.clear()
        assert self.cache.num_free == NUM_BLOCKS
        self.cache.validate()


class S3FifoMachine(BlockCacheMachine):
    eviction = EvictionName.S3_FIFO


class AgedLfuMachine(BlockCacheMachine):
    eviction = EvictionName.LFU_AGED


TestBlockCache = BlockCacheMachine.TestCase
TestS3Fifo = S3FifoMachine.TestCase
TestAgedLfu = AgedLfuMachine.TestCase
TestBlockCache.settings = settings(max_examples=60, stateful_step_count=40)
TestS3Fifo.settings = settings(max_examples=60, stateful_step_count=40)
TestAgedLfu.settings = settings(max_examples=30, stateful_step_count=40)
