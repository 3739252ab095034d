"""BlockCache: the one owner of a worker's blocks, and all that the core knows of pool and tree.

Every block is in exactly one of three states; the numbers sum to the total at all times:

    free         contents mean nothing
    evictable    findable by its hash, referenced by nobody; given up when somebody needs room
    referenced   held by at least one request, reservation, reader or read; findable or not

Life of a request's blocks:

    1. match_prefix(hashes)         what is already here
    2. can_allocate(n, keep=match)  before anything is taken: nobody waits while holding blocks
    3. acquire(match), allocate(n)
    4. insert(hashes, block_ids)    as blocks become full and final
    5. release(block_ids)           tails first; the findable ones stay until somebody needs room

Ids that are not the caller's to use are bugs, so they raise ValueError; no call that raises changes
anything. There is no clock: recency is a counter of releases.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

from moonpool.ids import BlockHash, BlockId
from moonpool.kv.block_pool import BlockPool
from moonpool.kv.events import CacheEvent, CacheEventLog
from moonpool.kv.eviction import EvictionPolicy, LruEviction
from moonpool.kv.radix_tree import RadixTree


class NoBlocksError(Exception):
    """An allocation does not fit: the caller has not asked whether it does."""

    def __init__(self, *, needed: int, available: int) -> None:
        super().__init__(f"{needed} blocks needed, {available} available")
        self.needed = needed
        self.available = available


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefixMatch:
    """The longest cached prefix of a chain. Holds no reference: acquire before anything else runs."""

    block_ids: tuple[BlockId, ...]

    @property
    def num_blocks(self) -> int:
        return len(self.block_ids)


@dataclass(frozen=True, slots=True, kw_only=True)
class InsertResult:
    """What stands in the cache for an inserted chain."""

    #: Per hash: the block that match_prefix finds, the caller's own or one that was there before.
    canonical_block_ids: tuple[BlockId, ...]
    #: How many blocks became findable.
    num_new: int


class BlockCache:
    """Blocks [0, num_blocks) with reference counts, findable by hash chain while they are cached.

    Args:
        num_blocks: Size of the pool.
        eviction: The order in which unreferenced leaves go; LRU if None. Belongs to this cache.
    """

    def __init__(self, num_blocks: int, eviction: EvictionPolicy | None = None) -> None:
        self._pool = BlockPool(num_blocks)
        self._events = CacheEventLog()
        self._eviction = eviction or LruEviction()
        self._tree = RadixTree(self._pool, self._eviction, self._events)
        #: Counts releases: what was released later was used later.
        self._tick = 0

    @property
    def num_total(self) -> int:
        return self._pool.num_total

    @property
    def num_free(self) -> int:
        return self._pool.num_free

    @property
    def num_evictable(self) -> int:
        """Cached blocks that nobody references. Each of them can be had by `allocate`."""
        return self._pool.num_idle

    @property
    def num_available(self) -> int:
        """Free and evictable blocks: what `allocate` can give."""
        return self._pool.num_free + self._pool.num_idle

    @property
    def num_referenced(self) -> int:
        return self._pool.num_referenced

    @property
    def num_cached(self) -> int:
        """Blocks that match_prefix can find, referenced or not."""
        return self._tree.num_blocks

    def ref_count(self, block_id: BlockId) -> int:
        return self._pool.ref_count(block_id)

    def is_cached(self, block_id: BlockId) -> bool:
        return block_id in self._tree

    def match_prefix(self, hashes: Sequence[BlockHash]) -> PrefixMatch:
        """The longest cached prefix of the chain. Takes no reference and changes nothing.

        O(nodes on the path) comparisons: a chain hash that agrees vouches for all before it.
        """
        return PrefixMatch(block_ids=tuple(self._tree.match_prefix(hashes)))

    def acquire(self, block_ids: Sequence[BlockId]) -> None:
        """Add one reference to each block: a matched prefix, or one that is shared.

        Raises:
            ValueError: a block is free or outside the pool.
        """
        self._pool.acquire(block_ids)
        self._eviction.on_found(block_ids)

    def release(self, block_ids: Sequence[BlockId]) -> None:
        """Drop one reference of each block, the last first.

        At zero a cached block becomes evictable, any other free.

        Raises:
            ValueError: a block has no reference to drop, or is outside the pool.
        """
        idle = self._pool.release(block_ids)
        self._tick += 1
        self._eviction.on_used(self._tree.cached(block_ids), self._tick)
        self._pool.free(self._tree.unlock(idle))

    def lend(self, block_ids: Sequence[BlockId]) -> None:
        """Add one reference to each cached block for a reader elsewhere; `take_back` drops it.

        Whoever reads has a copy of its own afterwards. To count that as a use of this one would keep
        both for long, and the pools together would hold less.

        Raises:
            ValueError: a block is free or outside the pool.
        """
        self._pool.acquire(block_ids)

    def take_back(self, block_ids: Sequence[BlockId]) -> None:
        """Drop one reference of each lent block; its place in the order of eviction stays.

        Raises:
            ValueError: a block has no reference to drop, or is outside the pool.
        """
        self._pool.free(self._tree.unlock(self._pool.release(block_ids)))

    def can_allocate(self, num_blocks: int, keep: Sequence[BlockId] = ()) -> bool:
        """Whether allocate(num_blocks) would succeed once `keep` (matched blocks) is acquired."""
        return num_blocks <= self.num_available - self._pool.count_idle(keep)

    def allocate(self, num_blocks: int) -> tuple[BlockId, ...]:
        """Take blocks, one reference each, evicting as few cached ones as needed. Contents undefined.

        Raises:
            NoBlocksError: fewer than `num_blocks` are free or evictable.
        """
        if num_blocks > self.num_available:
            raise NoBlocksError(needed=num_blocks, available=self.num_available)
        if num_blocks > self._pool.num_free:
            self._pool.free(self._tree.evict(num_blocks - self._pool.num_free))
        return self._pool.allocate(num_blocks)

    def insert(self, hashes: Sequence[BlockHash], block_ids: Sequence[BlockId]) -> InsertResult:
        """Make referenced blocks findable: `hashes` is a chain from its start, one block per hash.

        Where a hash is cached already, that block stays and the caller's own remains private to it:
        it is free when it is released. Inserting a chain again, or a longer one, is cheap.

        Raises:
            ValueError: lengths differ, or a block that would be added is not referenced or stands
                for another hash.
        """
        num_before = self._tree.num_blocks
        canonical = self._tree.insert(hashes, block_ids)
        return InsertResult(
            canonical_block_ids=tuple(canonical), num_new=self._tree.num_blocks - num_before
        )

    def forget_chain(self, first_hash: BlockHash) -> None:
        """Make every block unfindable whose chain begins with this hash.

        Referenced ones stay with their holders and are free when they are released.
        """
        self._pool.free(self._tree.forget(first_hash))

    def clear(self) -> None:
        """Forget every cached block that nobody references; they are free then."""
        self._pool.free(self._tree.evict(self._pool.num_idle))
        if self._tree.num_blocks == 0:
            self._events.on_cleared()

    def take_events(self) -> tuple[CacheEvent, ...]:
        """What can be found, or no longer can, since the last call: the net change, bounded."""
        return self._events.take()

    def contents(self) -> tuple[tuple[BlockHash, BlockId], ...]:
        """Every findable block with its hash: those that may go first, in the order of eviction's
        priority, then the referenced ones in order of hash. O(num_blocks); for exploring and tests.
        """

        def rank(item: tuple[BlockHash, BlockId]) -> tuple[bool, int, BlockHash]:
            is_idle = self._pool.is_idle(item[1])
            return (not is_idle, self._eviction.priority(item[1]) if is_idle else 0, item[0])

        return tuple(sorted(self._tree.items(), key=rank))

    def eviction_key(self) -> Hashable:
        """What decides, besides `contents`, who is evicted now or later; for exploring."""
        segments = tuple(self._eviction.segment(block_id) for _, block_id in self.contents())
        return (segments, self._eviction.key())

    def validate(self) -> None:
        """Check every invariant from first principles; raises AssertionError. O(num_blocks)."""
        self._pool.validate()
        self._tree.validate()
        num_evictable = 0
        for index in range(self.num_total):
            block_id = BlockId(index)
            is_cached = block_id in self._tree
            states = [
                self._pool.is_free(block_id) and not is_cached,
                self._pool.is_idle(block_id) and is_cached,
                self._pool.is_referenced(block_id),
            ]
            assert states.count(True) == 1, (block_id, states)
            num_evictable += states[1]
        assert num_evictable == self.num_evictable, (num_evictable, self.num_evictable)
        assert self.num_free + self.num_evictable + self.num_referenced == self.num_total
