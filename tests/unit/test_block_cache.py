from __future__ import annotations

from collections.abc import Iterator

import pytest

from moonpool.ids import BlockId
from moonpool.kv.block_cache import BlockCache, NoBlocksError
from moonpool.kv.events import AllBlocksCleared, BlockRemoved, BlockStored
from support.kv import hold, make_chain


@pytest.fixture
def cache() -> Iterator[BlockCache]:
    cache = BlockCache(8)
    yield cache
    cache.validate()


def found(cache: BlockCache, tokens: str) -> int:
    """How many blocks of a chain are cached."""
    return cache.match_prefix(make_chain(tokens)).num_blocks


def numbers(cache: BlockCache) -> tuple[int, int, int]:
    return cache.num_free, cache.num_evictable, cache.num_referenced


def test_every_block_is_free_evictable_or_referenced(cache: BlockCache) -> None:
    assert numbers(cache) == (8, 0, 0)
    blocks = hold(cache, "abc")
    assert numbers(cache) == (5, 0, 3)
    private = cache.allocate(2)
    assert numbers(cache) == (3, 0, 5)
    cache.release(blocks + private)
    assert numbers(cache) == (5, 3, 0)
    assert cache.num_available == cache.num_total == 8


def test_a_longer_chain_finds_the_prefix_it_shares(cache: BlockCache) -> None:
    blocks = hold(cache, "abcd")
    assert cache.match_prefix(make_chain("abxy")).block_ids == blocks[:2]
    assert cache.match_prefix(make_chain("abcdef")).block_ids == blocks
    assert cache.match_prefix(make_chain("xbcd")).block_ids == ()
    assert cache.match_prefix([]).block_ids == ()


def test_matching_changes_nothing(cache: BlockCache) -> None:
    cache.release(hold(cache, "ab"))
    cache.release(hold(cache, "xy"))
    assert found(cache, "ab") == 2
    cache.allocate(5)
    assert (found(cache, "ab"), found(cache, "xy")) == (1, 2)


def test_shared_blocks_count_references(cache: BlockCache) -> None:
    first = hold(cache, "abc")
    second = hold(cache, "abd")
    assert first[:2] == second[:2]
    assert [cache.ref_count(block_id) for block_id in second] == [2, 2, 1]
    cache.release(first)
    assert numbers(cache) == (4, 1, 3)


def test_a_forgotten_chain_takes_all_that_stands_on_it_along(cache: BlockCache) -> None:
    cache.release(hold(cache, "abc"))
    held = hold(cache, "abx")
    cache.release(hold(cache, "y"))
    cache.take_events()
    cache.forget_chain(make_chain("a")[0])
    assert (found(cache, "abc"), found(cache, "abx"), found(cache, "y")) == (0, 0, 1)
    assert numbers(cache) == (4, 1, 3)
    (removed,) = cache.take_events()
    assert isinstance(removed, BlockRemoved)
    assert set(removed.hashes) == {*make_chain("abc"), *make_chain("abx")}
    # Whoever holds blocks of it may make them findable again.
    cache.insert(make_chain("abx"), held)
    assert found(cache, "abx") == 3
    cache.forget_chain(make_chain("z")[0])
    cache.allocate(5)
    cache.release(held)


def test_blocks_come_back_in_the_order_they_were_freed_from(cache: BlockCache) -> None:
    blocks = cache.allocate(4)
    assert blocks == (0, 1, 2, 3)
    cache.release(blocks)
    assert cache.allocate(4) == blocks


def test_eviction_takes_tails_of_the_least_recently_used_leaf(cache: BlockCache) -> None:
    cache.release(hold(cache, "abcd"))
    cache.release(hold(cache, "axy"))
    cache.allocate(3)
    assert (found(cache, "abcd"), found(cache, "axy")) == (3, 3)
    cache.allocate(1)
    assert (found(cache, "abcd"), found(cache, "axy")) == (2, 3)
    cache.allocate(3)
    assert (found(cache, "abcd"), found(cache, "axy")) == (1, 1)


def test_using_the_head_of_a_run_does_not_keep_its_tail(cache: BlockCache) -> None:
    cache.release(hold(cache, "abcd"))
    cache.release(hold(cache, "xy"))
    head = cache.match_prefix(make_chain("ab")).block_ids
    cache.acquire(head)
    cache.release(head)
    cache.allocate(6)
    assert (found(cache, "abcd"), found(cache, "xy")) == (2, 0)


def test_using_a_chain_again_makes_it_the_last_to_go(cache: BlockCache) -> None:
    cache.release(hold(cache, "ab"))
    cache.release(hold(cache, "xy"))
    cache.release(hold(cache, "ab"))
    cache.allocate(6)
    assert (found(cache, "ab"), found(cache, "xy")) == (2, 0)
    cache.validate()
    cache.allocate(2)
    assert found(cache, "ab") == 0


def test_referenced_blocks_are_never_evicted(cache: BlockCache) -> None:
    hold(cache, "abc")
    cache.release(hold(cache, "abcde"))
    assert not cache.can_allocate(6)
    with pytest.raises(NoBlocksError) as caught:
        cache.allocate(6)
    assert (caught.value.needed, caught.value.available) == (6, 5)
    assert numbers(cache) == (3, 2, 3)
    cache.allocate(5)
    assert found(cache, "abcde") == 3


def test_blocks_to_keep_are_not_available(cache: BlockCache) -> None:
    cache.release(hold(cache, "abcdef"))
    match = cache.match_prefix(make_chain("abcd")).block_ids
    assert cache.can_allocate(4, keep=match)
    assert not cache.can_allocate(5, keep=match)
    cache.acquire(match)
    cache.allocate(4)
    assert found(cache, "abcdef") == 4


def test_a_block_that_is_cached_already_stays_and_ours_is_private(cache: BlockCache) -> None:
    first = hold(cache, "ab")
    second = cache.allocate(3)
    result = cache.insert(make_chain("abc"), second)
    assert (result.canonical_block_ids, result.num_new) == ((*first, second[2]), 1)
    assert cache.match_prefix(make_chain("abc")).block_ids == (*first, second[2])
    assert [cache.is_cached(block_id) for block_id in second] == [False, False, True]
    cache.release(second)
    assert numbers(cache) == (5, 1, 2)


def test_inserting_again_changes_nothing(cache: BlockCache) -> None:
    blocks = hold(cache, "abc")
    cache.take_events()
    result = cache.insert(make_chain("abc"), blocks)
    assert (result.canonical_block_ids, result.num_new) == (blocks, 0)
    assert cache.take_events() == ()


def test_a_canonical_block_can_go_before_what_hangs_below_it(cache: BlockCache) -> None:
    """A request with private copies of a prefix does not pin that prefix: all available is available."""
    first = hold(cache, "ab")
    second = cache.allocate(4)
    cache.insert(make_chain("abcd"), second)
    cache.release(first)
    assert numbers(cache) == (2, 2, 4)
    cache.validate()
    cache.take_events()
    assert len(cache.allocate(4)) == 4
    assert found(cache, "abcd") == 0
    a, b, c, d = make_chain("abcd")
    (removed,) = cache.take_events()
    assert isinstance(removed, BlockRemoved)
    assert set(removed.hashes) == {a, b, c, d}
    # The holder still has its blocks, and can make the whole chain findable again.
    assert cache.insert([a, b, c, d], second).num_new == 4
    cache.release(second)
    assert numbers(cache) == (0, 4, 4)


def test_the_head_of_a_split_run_can_still_go(cache: BlockCache) -> None:
    cache.release(hold(cache, "abcd"))
    private = cache.allocate(3)
    cache.insert(make_chain("abx"), private)
    cache.validate()
    assert numbers(cache) == (1, 4, 3)
    cache.allocate(5)
    assert found(cache, "abx") == 0
    cache.release(private)
    assert numbers(cache) == (3, 0, 5)


def test_clear_keeps_what_is_referenced(cache: BlockCache) -> None:
    held = hold(cache, "ab")
    cache.release(hold(cache, "abcd"))
    cache.clear()
    assert numbers(cache) == (6, 0, 2)
    assert found(cache, "abcd") == 2
    cache.release(held)
    cache.clear()
    assert numbers(cache) == (8, 0, 0)


def test_events_tell_the_net_change(cache: BlockCache) -> None:
    a, b, c = make_chain("abc")
    _, x = make_chain("ax")
    cache.release(hold(cache, "abc"))
    hold(cache, "ax")
    assert cache.take_events() == (
        BlockStored(hashes=(a, b, c), parent_hash=None),
        BlockStored(hashes=(x,), parent_hash=a),
    )
    cache.allocate(6)
    assert cache.take_events() == (BlockRemoved(hashes=(c, b)),)
    assert cache.take_events() == ()


def test_what_came_and_went_between_two_takes_was_never_there(cache: BlockCache) -> None:
    cache.release(hold(cache, "abc"))
    cache.release(cache.allocate(8))
    assert cache.take_events() == ()


def test_clearing_everything_is_one_event(cache: BlockCache) -> None:
    cache.release(hold(cache, "abc"))
    cache.take_events()
    cache.clear()
    hold(cache, "x")
    assert cache.take_events() == (
        AllBlocksCleared(),
        BlockStored(hashes=tuple(make_chain("x")), parent_hash=None),
    )


def test_illegal_moves_raise_and_change_nothing(cache: BlockCache) -> None:
    held = hold(cache, "ab")
    cache.release(hold(cache, "abc"))
    before = numbers(cache)
    free, idle = BlockId(7), cache.match_prefix(make_chain("abc")).block_ids[2]
    x, y = make_chain("xy")
    with pytest.raises(ValueError, match="free"):
        cache.acquire((idle, free))
    with pytest.raises(ValueError, match="unreferenced"):
        cache.release((idle, *held))
    with pytest.raises(ValueError, match="unreferenced"):
        cache.release((held[0], held[0]))
    for outside in (-1, 8):
        with pytest.raises(ValueError, match="outside"):
            cache.acquire((held[0], BlockId(outside)))
        with pytest.raises(ValueError, match="outside"):
            cache.release((BlockId(outside), held[0]))
    with pytest.raises(ValueError, match="hashes"):
        cache.insert([x, y], held[:1])
    with pytest.raises(ValueError, match="not referenced"):
        cache.insert([x], [free])
    with pytest.raises(ValueError, match="another hash"):
        cache.insert([x], held[:1])
    with pytest.raises(ValueError, match="twice"):
        cache.insert([x, y], [held[0], held[0]])
    with pytest.raises(ValueError, match="-1"):
        cache.allocate(-1)
    assert numbers(cache) == before
    assert [cache.ref_count(block_id) for block_id in (*held, idle)] == [1, 1, 0]
    assert found(cache, "abc") == 3
    assert found(cache, "xy") == 0
