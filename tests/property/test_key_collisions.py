"""Blocks of different content under one key: what a worker publishes of them, and what a router believes.

A key is 64 bits of a hash, so this comes once in 2^64 pairs; here there are three keys for all.
"""

from __future__ import annotations

from itertools import takewhile

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from moonpool.ids import BlockHash, Incarnation, WorkerId, WorkerKey
from moonpool.kv.block_cache import BlockCache
from moonpool.kv.block_key import are_distinct, block_keys
from moonpool.kv.events import CacheEventLog
from moonpool.kv.prefix_index import PrefixIndex
from moonpool.kv.published_set import PublishedSet
from support.kv import hold_chain, make_chain

WORKER = WorkerKey(WorkerId("d0"), Incarnation("1"))
NUM_BLOCKS = 6

#: (what is asked next, whether its events are lost on their way)
steps = st.lists(st.tuples(st.text("abc", min_size=1, max_size=4), st.booleans()), max_size=40)


def crowded_chain(tokens: str) -> list[BlockHash]:
    """The chain of `tokens`: its hashes differ as ever, but there are three keys."""
    return [BlockHash(bytes([1 + one[8] % 3]) + bytes(7) + one[8:]) for one in make_chain(tokens)]


@given(steps=steps, num_blocks_per_batch=st.integers(1, 3))
def test_an_index_of_keys_follows_what_is_published_and_owners_serve_by_the_whole_hash(
    steps: list[tuple[str, bool]], num_blocks_per_batch: int
) -> None:
    cache, log = BlockCache(NUM_BLOCKS), CacheEventLog()
    published, index = PublishedSet(), PrefixIndex()
    index.join(WORKER)
    for tokens, is_lost in steps:
        chain = crowded_chain(tokens)
        held = {block_hash for block_hash, _ in cache.contents()}
        num_held = len(list(takewhile(held.__contains__, chain)))
        assert len(cache.match_prefix(chain).block_ids) == num_held
        cache.release(hold_chain(cache, chain))
        log.add(cache.take_events())
        while log:
            batch = published.apply(log.take(num_blocks_per_batch))
            published.validate()
            if batch is not None:
                assert are_distinct(np.concatenate((batch.removed_keys, batch.stored_keys)))
                if is_lost:
                    index.note_head(WORKER, batch.head)
                else:
                    index.apply(WORKER, batch)
        snapshot = published.snapshot()
        if index.needs_snapshot(WORKER):
            for _ in index.loading(WORKER, snapshot):
                pass
        index.validate()
        assert not index.needs_snapshot(WORKER)
        assert index.keys_of(WORKER).tolist() == sorted(snapshot.keys.tolist())
        # What is published is held. Of what is held, a block is missed whose key went with another.
        held_keys = block_keys([block_hash for block_hash, _ in cache.contents()])
        assert set(snapshot.keys.tolist()) <= set(held_keys.tolist())
