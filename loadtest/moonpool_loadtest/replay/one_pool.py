"""One pool for everybody: how eviction policies compare, and how far each is from the best there is."""

from __future__ import annotations

import heapq
from collections.abc import Sequence

from moonpool.kv.block_cache import BlockCache
from moonpool.kv.eviction import EvictionName, EvictionPolicy, make_eviction
from moonpool_loadtest.replay.trace import TraceRequest, block_hashes


def make_evictions(num_blocks: int) -> dict[str, EvictionPolicy]:
    """One of each policy, for a cache of `num_blocks`."""
    return {name.value: make_eviction(name, num_blocks) for name in EvictionName}


def replay(requests: Sequence[TraceRequest], num_blocks: int, eviction: EvictionPolicy) -> int:
    """Blocks found in the product's own cache; requests come one at a time and hold what they use.

    A prompt larger than the pool keeps what fits of it.
    """
    cache = BlockCache(num_blocks, eviction)
    num_hits = 0
    for request in requests:
        hashes = block_hashes(request.block_ids[:num_blocks])
        match = cache.match_prefix(hashes)
        num_hits += match.num_blocks
        cache.acquire(match.block_ids)
        block_ids = match.block_ids + cache.allocate(len(hashes) - match.num_blocks)
        cache.insert(hashes, block_ids)
        cache.release(block_ids)
    return num_hits


def replay_belady(requests: Sequence[TraceRequest], num_blocks: int) -> int:
    """Hits of the cache that knows the future: what is used latest, or never, goes first.

    A block's next use is never later than that of a block below it, and of blocks with one next use the
    one that was seen first lies higher: so this is leaves first as well.
    """
    next_use: dict[int, int] = {}
    #: Heap of (-next use, -block id); entries that the block's next use has outrun are skipped.
    farthest: list[tuple[int, int]] = []
    num_hits = 0
    for request, uses in zip(requests, _next_uses(requests), strict=True):
        for block_id in request.block_ids:
            if block_id not in next_use:
                break
            num_hits += 1
        for block_id, use in zip(request.block_ids, uses, strict=True):
            next_use[block_id] = use
            heapq.heappush(farthest, (-use, -block_id))
        while len(next_use) > num_blocks:
            negative_use, negative_id = heapq.heappop(farthest)
            if next_use.get(-negative_id) == -negative_use:
                del next_use[-negative_id]
    return num_hits


def _next_uses(requests: Sequence[TraceRequest]) -> list[list[int]]:
    """Per request and block: the number of the next request that has this block, or their count."""
    upcoming: dict[int, int] = {}
    next_uses = []
    for number in reversed(range(len(requests))):
        block_ids = requests[number].block_ids
        next_uses.append([upcoming.get(block_id, len(requests)) for block_id in block_ids])
        upcoming.update(dict.fromkeys(block_ids, number))
    next_uses.reverse()
    return next_uses
