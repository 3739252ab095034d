from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest

from moonpool.ids import BlockHash
from moonpool.kv.block_cache import BlockCache
from moonpool.kv.block_key import block_key, block_keys, keys_digest
from moonpool.kv.events import AllBlocksCleared, BlockRemoved, BlockStored
from moonpool.kv.published_set import (
    EMPTY_HEAD,
    EventBatch,
    PublishedSet,
    SetHead,
    SetSnapshot,
)
from support.kv import hold, make_chain


@pytest.fixture
def published() -> Iterator[PublishedSet]:
    published = PublishedSet()
    yield published
    published.validate()


def stored(tokens: str, *, after: str = "") -> BlockStored:
    """The blocks of `tokens` behind those of `after`."""
    chain = make_chain(after + tokens)
    parent = chain[len(after) - 1] if after else None
    return BlockStored(hashes=tuple(chain[len(after) :]), parent_hash=parent)


def removed(tokens: str, keep: int = 0) -> BlockRemoved:
    return BlockRemoved(hashes=tuple(make_chain(tokens)[keep:]))


def keys(tokens: str) -> list[int]:
    return block_keys(make_chain(tokens)).tolist()


def batch_of(published: PublishedSet, *events: object) -> EventBatch:
    batch = published.apply(events)  # type: ignore[arg-type]  # any of the three
    assert batch is not None
    return batch


def test_a_key_is_the_first_eight_bytes_of_a_hash() -> None:
    block_hash = BlockHash(bytes(range(32)))
    assert block_key(block_hash) == 0x0706050403020100
    assert block_keys([block_hash, block_hash]).tolist() == [0x0706050403020100] * 2
    assert block_keys([]).tolist() == []


def test_no_block_has_the_key_zero() -> None:
    block_hash = BlockHash(bytes(8) + bytes(range(24)))
    assert block_key(block_hash) == 1
    assert block_keys([block_hash]).tolist() == [1]


def test_the_digest_is_pinned_and_sums_over_parts() -> None:
    chain = block_keys(make_chain("abcd"))
    # The first two outputs of splitmix64 from seed 0: key 0 is no key, but it shows the mix.
    assert keys_digest(np.zeros(1, np.uint64), tier=0) == 0xE220A8397B1DCDAF
    assert keys_digest(np.zeros(1, np.uint64), tier=1) == 0x6E789E6AA1B965F4
    parts = keys_digest(chain[:1]) + keys_digest(chain[1:])
    assert keys_digest(chain) == keys_digest(chain[::-1]) == parts % 2**64
    assert keys_digest(chain) != keys_digest(chain, tier=1)
    assert keys_digest(chain[:0]) == 0


def test_a_set_begins_empty_at_sequence_zero(published: PublishedSet) -> None:
    assert published.head == EMPTY_HEAD
    assert published.snapshot().keys.tolist() == []
    assert published.snapshot().head == EMPTY_HEAD


def test_a_batch_tells_what_was_stored_and_the_head_after_it(published: PublishedSet) -> None:
    batch = batch_of(published, stored("ab"), stored("xy", after="ab"))
    assert batch.stored_keys.tolist() == keys("abxy")
    assert (batch.removed_keys.tolist(), batch.is_cleared) == ([], False)
    assert batch.head == published.head
    assert (batch.head.sequence, batch.head.count) == (1, 4)
    assert batch.head.digest == keys_digest(batch.stored_keys)


def test_each_change_counts_one_on(published: PublishedSet) -> None:
    batch_of(published, stored("abc"))
    batch = batch_of(published, removed("abc", keep=1), stored("z", after="a"))
    assert sorted(batch.removed_keys.tolist()) == sorted(keys("abc")[1:])
    assert batch.stored_keys.tolist() == keys("az")[1:]
    assert batch.num_keys == 3
    assert (published.head.sequence, published.head.count) == (2, 2)
    assert published.head.digest == keys_digest(block_keys(make_chain("az")))


def test_what_changes_nothing_is_not_published(published: PublishedSet) -> None:
    batch_of(published, stored("ab"))
    head = published.head
    assert published.apply([]) is None
    assert published.apply([stored("ab")]) is None
    assert published.apply([removed("xyz")]) is None
    assert published.apply([stored("c", after="ab"), removed("abc", keep=2)]) is None
    assert published.apply([removed("ab", keep=1), stored("b", after="a")]) is None
    assert published.head == head


def test_clearing_forgets_what_came_before_it_only(published: PublishedSet) -> None:
    batch_of(published, stored("abc"))
    batch = batch_of(
        published, removed("abc", keep=2), AllBlocksCleared(), stored("ax"), stored("pq")
    )
    assert batch.is_cleared
    assert batch.removed_keys.tolist() == []
    assert batch.stored_keys.tolist() == keys("ax") + keys("pq")
    assert published.head.count == 4


def test_clearing_an_empty_set_is_no_change(published: PublishedSet) -> None:
    assert published.apply([AllBlocksCleared()]) is None
    batch = batch_of(published, AllBlocksCleared(), stored("a"))
    assert not batch.is_cleared


def test_a_snapshot_is_the_whole_set(published: PublishedSet) -> None:
    cache = BlockCache(6)
    cache.release(hold(cache, "abcd"))
    batch_of(published, *cache.take_events())
    cache.release(hold(cache, "abxyz"))
    batch_of(published, *cache.take_events())
    snapshot = published.snapshot()
    assert snapshot.head == published.head
    held = block_keys([block_hash for block_hash, _ in cache.contents()])
    assert sorted(snapshot.keys.tolist()) == sorted(held.tolist())


def test_a_snapshot_that_contradicts_itself_is_found_out(published: PublishedSet) -> None:
    batch_of(published, stored("abc"))
    whole = published.snapshot()
    assert whole.is_consistent()
    for other in (whole.keys[:2], whole.keys[[0, 1, 1]], whole.keys ^ np.uint64(4)):
        assert not replace(whole, keys=other).is_consistent()
    # The digest of each alone is right: twice the same key, and the key of no block.
    twice = np.array([5, 5], np.uint64)
    for keys_alone in (twice, np.zeros(1, np.uint64)):
        head = SetHead(sequence=1, count=len(keys_alone), digest=keys_digest(keys_alone))
        assert not SetSnapshot(head=head, keys=keys_alone).is_consistent()


def test_batches_and_snapshots_compare_by_value(published: PublishedSet) -> None:
    other = PublishedSet()
    first, same = batch_of(published, stored("ab")), batch_of(other, stored("ab"))
    assert first == same
    assert published.snapshot() == other.snapshot()
    second, another = batch_of(published, stored("x")), batch_of(other, stored("y"))
    assert second != another
    assert first != second
    assert published.snapshot() != other.snapshot()
    assert first != published.snapshot()


def test_what_is_published_cannot_be_changed(published: PublishedSet) -> None:
    batch = batch_of(published, stored("ab"))
    with pytest.raises(ValueError, match="read-only"):
        batch.stored_keys[0] = 1
    with pytest.raises(ValueError, match="read-only"):
        published.snapshot().keys[0] = 1
