"""HostTier: the blocks of a store's arena, found by hash, and which of them goes next.

    free         contents mean nothing
    idle         findable, referenced by nobody: evicted when there is need, unless it is pinned hard
    referenced   held by a put, a get, a load or a write; findable or not (yet)

It differs from a worker's cache (kv/block_cache.py) in one thing: any block may be here without those before
it in its chain, which may lie on disk only. So blocks are found one by one, not by a tree.

Rules
- A chain's tail goes before its beginning: whoever uses a block uses all before it at the same time, and of
  blocks that were used last at the same time the deeper one goes first.
- A put, a get and a load are uses. A write is none: it tells nothing of who wants the block.
- A get is more: what is found again is worth keeping (`EvictionPolicy.on_found`). A put of what lies here
  is not that: one request offers its growing chain many times.
- Whose blocks may go for whom: tiering/shares.py. Blocks that are pinned softly go when nothing else may.

O(1) a block, O(log blocks) where the order of eviction is concerned.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

from moonpool.ids import BlockHash, BlockId
from moonpool.kv.block_pool import BlockPool
from moonpool.kv.eviction import EvictionPolicy
from moonpool.kv.leaf_queue import LeafQueue
from moonpool.tiering.pins import Pins
from moonpool.tiering.protocol import PinKind
from moonpool.tiering.shares import COMMON, Share, Shares

#: No chain is longer.
_MAX_DEPTH = 1 << 24


@dataclass(frozen=True, slots=True, kw_only=True)
class Allocation:
    """Blocks for somebody, one reference each, and what had to go for them."""

    block_ids: tuple[BlockId, ...]
    evicted: tuple[BlockHash, ...]


class HostTier:
    """See the file's head.

    Args:
        eviction: Belongs to this tier.
        shares: Its books are written here.
        pins: Whoever changes them calls `pins_changed`.
    """

    def __init__(
        self, *, num_blocks: int, eviction: EvictionPolicy, shares: Shares, pins: Pins
    ) -> None:
        self._pool = BlockPool(num_blocks)
        self._eviction = eviction
        self._shares = shares
        self._pins = pins
        self._block_by_hash: dict[BlockHash, BlockId] = {}
        #: By block id; None: not findable.
        self._hash_by_block: list[BlockHash | None] = [None] * num_blocks
        #: By block id: its place in its chain, if it is findable.
        self._depths = [0] * num_blocks
        #: By block id: whose it is, if it is not free.
        self._owners = [COMMON] * num_blocks
        #: By share: what may be evicted, in the policy's segments and one for blocks that are pinned softly.
        self._pinned_segment = eviction.num_segments
        self._queues: list[LeafQueue[BlockId]] = [
            LeafQueue(eviction.num_segments + 1) for _ in range(len(shares))
        ]
        #: Counts releases: what was released later was used later.
        self._tick = 0

    # -- finding --

    def __len__(self) -> int:
        """Findable blocks."""
        return len(self._block_by_hash)

    def __contains__(self, block_hash: BlockHash) -> bool:
        return block_hash in self._block_by_hash

    def hashes(self) -> list[BlockHash]:
        """Of all blocks that can be found."""
        return list(self._block_by_hash)

    def find(self, block_hash: BlockHash) -> BlockId | None:
        return self._block_by_hash.get(block_hash)

    def owner(self, block_hash: BlockHash) -> Share:
        """Whose a findable block is."""
        return self._owners[self._block_by_hash[block_hash]]

    @property
    def num_total(self) -> int:
        return self._pool.num_total

    @property
    def num_free(self) -> int:
        return self._pool.num_free

    @property
    def num_idle(self) -> int:
        return self._pool.num_idle

    @property
    def num_referenced(self) -> int:
        return self._pool.num_referenced

    def num_available(self, share: Share) -> int:
        """How many blocks `allocate` can give to this share."""
        num_available = self._shares.num_available(share, self._pool.num_free)
        num_allowed = self._shares.num_allowed(share)
        return num_available if num_allowed is None else min(num_available, num_allowed)

    # -- holding --

    def acquire(self, block_ids: Sequence[BlockId], *, is_found: bool = False) -> None:
        """Add one reference to each. `is_found`: somebody has asked for them and uses their contents."""
        is_idle = self._pool.is_idle
        idle = [block_id for block_id in block_ids if is_idle(block_id)]
        self._pool.acquire(block_ids)
        for block_id in idle:
            self._dequeue(block_id)
        if is_found:
            self._eviction.on_found(self._findable(block_ids))

    def release(self, block_ids: Sequence[BlockId], *, is_use: bool = True) -> None:
        """Drop one reference of each. `is_use`: they have been used until now."""
        idle = self._pool.release(block_ids)
        if is_use:
            self._tick += 1
            self._eviction.on_used(self._findable(block_ids), self._tick)
        self._let_go(idle)

    def allocate(self, num_blocks: int, share: Share) -> Allocation:
        """Take blocks for a share, one reference each; at most `num_available(share)`."""
        assert num_blocks <= self.num_available(share), (num_blocks, share)
        evicted: list[BlockHash] = []
        num_over = self._shares.num_over(share, num_blocks)
        if num_over:
            evicted += self._evict(num_over, share, (share,))
        num_short = num_blocks - self._pool.num_free
        if num_short > 0:
            evicted += self._evict(num_short, share, range(len(self._shares)))
        block_ids = self._pool.allocate(num_blocks)
        for block_id in block_ids:
            self._owners[block_id] = share
        self._shares.num_used[share] += num_blocks
        return Allocation(block_ids=block_ids, evicted=tuple(evicted))

    def insert(
        self, hashes: Sequence[BlockHash], block_ids: Sequence[BlockId], depths: Sequence[int]
    ) -> list[int]:
        """Make referenced blocks findable; returns the positions of those that are now.

        Where a hash is findable already its block stays, and the caller's own remains private to it.
        """
        positions: list[int] = []
        for position, block_hash in enumerate(hashes):
            if block_hash in self._block_by_hash:
                continue
            block_id = block_ids[position]
            assert self._hash_by_block[block_id] is None, block_id
            self._block_by_hash[block_hash] = block_id
            self._hash_by_block[block_id] = block_hash
            self._depths[block_id] = depths[position]
            positions.append(position)
        self._eviction.on_stored([block_ids[p] for p in positions], [hashes[p] for p in positions])
        return positions

    def adopt(self, block_ids: Sequence[BlockId], share: Share) -> None:
        """These blocks belong to this share: it has become known, since only it knows their hashes."""
        owners, shares = self._owners, self._shares
        for block_id in block_ids:
            owner = owners[block_id]
            if owner == share:
                continue
            is_idle = self._pool.is_idle(block_id)
            if is_idle:
                self._dequeue(block_id)
            shares.num_used[owner] -= 1
            shares.num_used[share] += 1
            owners[block_id] = share
            if is_idle:
                self._enqueue(block_id)

    # -- letting go --

    def evict_spare(self, num_blocks: int) -> list[BlockHash]:
        """Evict up to so many blocks that are above everybody's floor; what has gone."""
        return self._evict(num_blocks, None, range(len(self._shares)))

    def clear(self) -> list[BlockHash]:
        """Forget every idle block, pinned ones too, the newest first; what has gone."""
        block_ids = [b for b in reversed(self._block_by_hash.values()) if self._pool.is_idle(b)]
        for block_id in block_ids:
            self._dequeue(block_id)
        return self._forget(block_ids)

    def pins_changed(self, hashes: Sequence[BlockHash]) -> None:
        """Pins on these blocks have begun or ended."""
        for block_hash in hashes:
            block_id = self._block_by_hash.get(block_hash)
            if block_id is not None and self._pool.is_idle(block_id):
                self._dequeue(block_id)
                self._enqueue(block_id)

    def _findable(self, block_ids: Sequence[BlockId]) -> list[BlockId]:
        hash_by_block = self._hash_by_block
        return [block_id for block_id in block_ids if hash_by_block[block_id] is not None]

    def _let_go(self, idle: Sequence[BlockId]) -> None:
        """These have lost their last reference."""
        private: list[BlockId] = []
        for block_id in idle:
            if self._hash_by_block[block_id] is None:
                private.append(block_id)
                self._shares.num_used[self._owners[block_id]] -= 1
            else:
                self._enqueue(block_id)
        self._pool.free(private)

    def _enqueue(self, block_id: BlockId) -> None:
        segment = self._eviction.segment(block_id)
        if self._pins:
            block_hash = self._hash_by_block[block_id]
            assert block_hash is not None, block_id
            kind = self._pins.kind(block_hash)
            if kind is PinKind.HARD:
                return
            if kind is PinKind.SOFT:
                segment = self._pinned_segment
        share = self._owners[block_id]
        priority = self._eviction.priority(block_id) * _MAX_DEPTH - self._depths[block_id]
        self._queues[share].put(block_id, segment, priority)
        self._shares.num_evictable[share] += 1

    def _dequeue(self, block_id: BlockId) -> None:
        """Take an idle block out of its queue; it may be pinned, and in none."""
        share = self._owners[block_id]
        queue = self._queues[share]
        if block_id in queue:
            queue.drop(block_id)
            self._shares.num_evictable[share] -= 1

    def _evict(
        self, num_blocks: int, asker: Share | None, shares: Sequence[int]
    ) -> list[BlockHash]:
        """Evict up to so many blocks of these shares, as far as they may lose any to the asker."""
        gone: list[BlockHash] = []
        while len(gone) < num_blocks:
            turn = self._eviction.turn()
            num_wanted = min(num_blocks - len(gone), turn.num_blocks)
            block_ids: list[BlockId] = []
            for segment in (*turn.segments, self._pinned_segment):
                block_ids = self._take(num_wanted, segment, asker, shares)
                if block_ids:
                    break
            if not block_ids:
                break
            gone += self._forget(block_ids)
        return gone

    def _take(
        self, num_blocks: int, segment: int, asker: Share | None, shares: Sequence[int]
    ) -> list[BlockId]:
        """Take up to so many blocks out of a segment of these shares' queues, in order of priority."""
        books = self._shares
        heads: list[tuple[int, int]] = []
        for share in shares:
            priority = self._queues[share].first_priority(segment)
            if priority is not None:
                heads.append((priority, share))
        heapq.heapify(heads)
        taken: list[BlockId] = []
        num_taken = [0] * len(books)
        while heads and len(taken) < num_blocks:
            share = heads[0][1]
            # What was taken here is not yet off the books.
            if not books.may_lose(share, asker, num_taken[share]):
                heapq.heappop(heads)
                continue
            queue = self._queues[share]
            found = queue.pop(segment)
            assert found is not None, (share, segment)
            taken.append(found[1])
            num_taken[share] += 1
            priority = queue.first_priority(segment)
            if priority is None:
                heapq.heappop(heads)
            else:
                heapq.heapreplace(heads, (priority, share))
        for share in shares:
            books.num_evictable[share] -= num_taken[share]
        return taken

    def _forget(self, block_ids: Sequence[BlockId]) -> list[BlockHash]:
        """Free idle blocks that are in no queue; their hashes."""
        hashes: list[BlockHash] = []
        for block_id in block_ids:
            block_hash = self._hash_by_block[block_id]
            assert block_hash is not None, block_id
            del self._block_by_hash[block_hash]
            self._hash_by_block[block_id] = None
            self._shares.num_used[self._owners[block_id]] -= 1
            hashes.append(block_hash)
        self._eviction.on_removed(block_ids, hashes)
        self._pool.free(block_ids)
        return hashes

    # -- checking --

    def ref_count(self, block_id: BlockId) -> int:
        return self._pool.ref_count(block_id)

    def validate(self) -> None:
        """Raise AssertionError if any invariant is broken. O(blocks)."""
        self._pool.validate()
        shares = self._shares
        num_used = [0] * len(shares)
        num_evictable = [0] * len(shares)
        for found_hash, block_id in self._block_by_hash.items():
            assert self._hash_by_block[block_id] == found_hash, block_id
        num_findable = sum(block_hash is not None for block_hash in self._hash_by_block)
        assert num_findable == len(self._block_by_hash), num_findable
        for index, block_hash in enumerate(self._hash_by_block):
            block_id = BlockId(index)
            share = self._owners[block_id]
            is_idle = self._pool.is_idle(block_id)
            is_free = self._pool.is_free(block_id)
            num_used[share] += not is_free
            assert not is_free or block_hash is None, f"free block {block_id} is findable"
            assert not is_idle or block_hash is not None, f"idle block {block_id} is not findable"
            kind = self._pins.kind(block_hash) if block_hash is not None else None
            is_evictable = is_idle and kind is not PinKind.HARD
            num_evictable[share] += is_evictable
            for other, queue in enumerate(self._queues):
                assert (block_id in queue) == (is_evictable and other == share), block_id
            if is_evictable:
                segment = self._eviction.segment(block_id)
                if kind is PinKind.SOFT:
                    segment = self._pinned_segment
                assert self._queues[share].segment(block_id) == segment, block_id
        assert num_used == shares.num_used, (num_used, shares.num_used)
        assert num_evictable == shares.num_evictable, (num_evictable, shares.num_evictable)
        for queue in self._queues:
            queue.validate()
