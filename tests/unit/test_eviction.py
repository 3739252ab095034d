"""S3-FIFO and aged LFU through a cache, ghosts and bounds, and the queue that all policies share."""

from __future__ import annotations

import copy
import random

from moonpool.core.config import CoreConfig
from moonpool.core.core import Core
from moonpool.ids import BlockHash
from moonpool.kv.block_cache import BlockCache
from moonpool.kv.eviction import EvictionName, make_eviction
from moonpool.kv.leaf_queue import LeafQueue
from support.core_cases import chain, decode_here
from support.core_cluster import Worker, tenant_seed
from support.kv import make_chain
from support.requests import make_request


def make_cache(num_blocks: int = 20, eviction: EvictionName = EvictionName.S3_FIFO) -> BlockCache:
    """With S3-FIFO small holds two blocks of twenty."""
    return BlockCache(num_blocks, make_eviction(eviction, num_blocks))


def use(cache: BlockCache, text: str) -> int:
    """One request comes and goes; how many blocks it found."""
    hashes = make_chain(text)
    match = cache.match_prefix(hashes)
    cache.acquire(match.block_ids)
    block_ids = match.block_ids + cache.allocate(len(hashes) - match.num_blocks)
    cache.insert(hashes, block_ids)
    cache.release(block_ids)
    cache.validate()
    return match.num_blocks


def num_found(cache: BlockCache, text: str) -> int:
    return cache.match_prefix(make_chain(text)).num_blocks


def test_a_scan_does_not_push_out_what_is_used_again() -> None:
    lru, s3 = BlockCache(20), make_cache()
    for cache in (lru, s3):
        use(cache, "aaaaa")
        use(cache, "aaaaa")
        for letter in "bcdefghij":
            use(cache, letter * 5)
    assert (num_found(lru, "aaaaa"), num_found(s3, "aaaaa")) == (0, 5)


def test_what_comes_again_after_it_went_is_kept() -> None:
    cache = make_cache()
    for letter in "abcdefg":
        use(cache, letter * 5)
    assert num_found(cache, "aaaaa") == 0
    # It is a ghost: its second coming is to main.
    use(cache, "aaaaa")
    for letter in "hijklmn":
        use(cache, letter * 5)
    assert num_found(cache, "aaaaa") == 5


def test_ghosts_are_forgotten_in_time() -> None:
    cache = make_cache()
    texts = [chr(1000 + number) for number in range(120)]
    for text in texts[:100]:
        use(cache, text)
    policy = make_eviction(EvictionName.S3_FIFO, 20)
    assert len(cache.eviction_key()[1]) == 3 * 20
    assert policy.key() == ()
    # The first of all is no ghost any more; one that went later is, and comes to main.
    assert [use(cache, texts[0]), use(cache, texts[70])] == [0, 0]
    for text in texts[100:]:
        use(cache, text)
    assert [num_found(cache, texts[0]), num_found(cache, texts[70])] == [0, 1]


def test_main_loses_blocks_when_small_has_no_more_than_its_share() -> None:
    cache = make_cache()
    for letter in "abcd":
        use(cache, letter * 5)
        use(cache, letter * 5)
    assert cache.num_free == 0
    use(cache, "xy")
    # All of small is in use as long as it is within its share: the oldest of main went, tail first.
    assert [num_found(cache, letter * 5) for letter in "abcd"] == [3, 5, 5, 5]
    use(cache, "z")
    assert [num_found(cache, text) for text in ("aaaaa", "xy", "z")] == [2, 2, 1]
    use(cache, "w")
    assert [num_found(cache, text) for text in ("aaaaa", "xy", "z", "w")] == [2, 1, 1, 1]


def test_segments_are_part_of_a_cores_key() -> None:
    """Two caches that hold the same, one of them used twice: what they will evict differs."""
    config = CoreConfig(num_blocks=16, block_size=4, eviction=EvictionName.S3_FIFO, is_checked=True)
    once, twice = Worker(config), Worker(config)
    request = make_request("r1", prompt=9, max_tokens=1)
    for worker in (once, twice):
        worker.run_until_idle(decode_here(request))
    assert once.core.key() == twice.core.key()
    twice.run_until_idle(decode_here(request, attempt=2))
    # Attempts that were seen apart, which are forgotten after a while.
    for worker in (once, twice):
        worker.step(now=100.0)
    assert once.core.key() != twice.core.key()
    fork = twice.core.fork()
    assert fork.key() == twice.core.key()
    assert chain(request, 2)


def test_a_fork_of_a_cache_evicts_alike() -> None:
    cache = make_cache()
    rng = random.Random(5)
    texts = ["".join(rng.choices("abc", k=rng.randint(1, 7))) for _ in range(60)]
    for text in texts[:30]:
        use(cache, text)
    fork = copy.deepcopy(cache)
    for text in texts[30:]:
        assert use(cache, text) == use(fork, text)
    assert cache.contents() == fork.contents()
    assert cache.eviction_key() == fork.eviction_key()


def test_aged_lfu_is_lru_until_something_is_found() -> None:
    lru, aged = BlockCache(20), make_cache(eviction=EvictionName.LFU_AGED)
    for cache in (lru, aged):
        for letter in "abcdefg":
            use(cache, letter * 5)
    assert [num_found(cache, letter * 5) for cache in (lru, aged) for letter in "abcdefg"] == (
        [0, 0, 0, 5, 5, 5, 5] * 2
    )


def test_a_find_is_worth_the_pool_and_ages() -> None:
    cache = make_cache(eviction=EvictionName.LFU_AGED)
    use(cache, "aaaaa")
    use(cache, "aaaaa")
    # By LRU these four would have pushed it out.
    for letter in "bcde":
        use(cache, letter * 5)
    assert num_found(cache, "aaaaa") == 5
    # Nobody has asked for it since.
    for letter in "fghij":
        use(cache, letter * 5)
    assert num_found(cache, "aaaaa") == 0


def test_what_was_found_often_is_remembered_when_it_has_gone() -> None:
    cache = make_cache(eviction=EvictionName.LFU_AGED)
    for _ in range(3):
        use(cache, "aaaaa")
    for letter in "bcdefghijk":
        use(cache, letter * 5)
    assert num_found(cache, "aaaaa") == 0
    # It comes again with what it had, and one more.
    use(cache, "aaaaa")
    for letter in "lmnopqrs":
        use(cache, letter * 5)
    assert num_found(cache, "aaaaa") == 5


def test_a_beginning_that_many_share_outlives_their_ends() -> None:
    cache = make_cache(eviction=EvictionName.LFU_AGED)
    for letter in "bcdefghijklmnopqrstuvwxyz":
        use(cache, "aaa" + letter * 3)
    assert num_found(cache, "aaa") == 3


def test_a_fork_of_an_aged_cache_evicts_alike() -> None:
    cache = make_cache(eviction=EvictionName.LFU_AGED)
    rng = random.Random(5)
    texts = ["".join(rng.choices("abc", k=rng.randint(1, 7))) for _ in range(60)]
    for text in texts[:30]:
        use(cache, text)
    fork = copy.deepcopy(cache)
    assert cache.eviction_key() == fork.eviction_key()
    for text in texts[30:]:
        assert use(cache, text) == use(fork, text)
    assert cache.contents() == fork.contents()
    assert cache.eviction_key() == fork.eviction_key()


def test_a_core_takes_the_policy_of_its_configuration() -> None:
    for name in EvictionName:
        core = Core(CoreConfig(num_blocks=8, eviction=name), tenant_seed)
        core.validate()


def test_the_queue_keeps_each_leaf_in_one_place_and_stays_small() -> None:
    queue: LeafQueue[BlockHash] = LeafQueue(2)
    leaves = make_chain("abcdefghij")
    rng = random.Random(1)
    model: dict[BlockHash, tuple[int, int, int]] = {}
    for number in range(2000):
        leaf = rng.choice(leaves)
        match rng.randrange(4):
            case 0:
                queue.drop(leaf)
                model.pop(leaf, None)
            case 1:
                segment = rng.randrange(2)
                there = [(p, n, leaf) for leaf, (s, p, n) in model.items() if s == segment]
                found = queue.pop(segment)
                assert found == ((min(there)[0], min(there)[2]) if there else None)
                if found is not None:
                    del model[found[1]]
            case _:
                place = (rng.randrange(2), rng.randrange(5), number)
                queue.put(leaf, place[0], place[1])
                model[leaf] = place
        queue.validate()
        assert set(queue) == set(model)
        for segment in range(2):
            priorities = [p for s, p, _ in model.values() if s == segment]
            assert queue.first_priority(segment) == min(priorities, default=None)
        assert all(queue.segment(leaf) == place[0] for leaf, place in model.items())
