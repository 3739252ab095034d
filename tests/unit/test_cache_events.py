"""Cache events as they are merged for a reader that sleeps, and taken in parts of a bounded size."""

from __future__ import annotations

from collections.abc import Iterable

import pytest

from moonpool.ids import BlockHash
from moonpool.kv.events import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    CacheEvent,
    CacheEventLog,
    merge_cache_events,
)
from support.kv import make_chain


def stored(tokens: str, *, after: str = "") -> BlockStored:
    """The blocks of the chain `after + tokens` that follow `after`."""
    chain = make_chain(after + tokens)
    parent = chain[len(after) - 1] if after else None
    return BlockStored(hashes=tuple(chain[len(after) :]), parent_hash=parent)


def removed(*blocks: BlockHash) -> BlockRemoved:
    return BlockRemoved(hashes=blocks)


def parents(events: Iterable[CacheEvent]) -> dict[BlockHash, BlockHash | None]:
    """What can be found after these events, with its parent."""
    found: dict[BlockHash, BlockHash | None] = {}
    for event in events:
        match event:
            case AllBlocksCleared():
                found.clear()
            case BlockRemoved(hashes=hashes):
                for block in hashes:
                    del found[block]
            case BlockStored(hashes=hashes, parent_hash=parent):
                for block in hashes:
                    found[block] = parent
                    parent = block
    return found


def num_blocks(events: Iterable[CacheEvent]) -> int:
    return sum(0 if isinstance(event, AllBlocksCleared) else len(event.hashes) for event in events)


def test_merging_tells_the_net_change() -> None:
    a, b, c = make_chain("abc")
    assert merge_cache_events((), (removed(a),)) == (removed(a),)
    assert merge_cache_events((stored("abc"),), ()) == (stored("abc"),)
    assert merge_cache_events((stored("abc"),), (removed(c),)) == (stored("ab"),)
    assert merge_cache_events((removed(c, b),), (stored("bc", after="a"),)) == ()
    assert merge_cache_events((stored("ab"),), (stored("c", after="ab"),)) == (stored("abc"),)
    cleared = AllBlocksCleared()
    assert merge_cache_events((removed(a),), (cleared, stored("x"))) == (cleared, stored("x"))


def test_a_log_knows_whether_it_has_news() -> None:
    log = CacheEventLog()
    assert not log
    log.add((stored("ab"),))
    assert log
    log.add((removed(*reversed(make_chain("ab"))),))
    assert not log
    log.add((AllBlocksCleared(),))
    assert log
    log.take()
    assert not log


@pytest.mark.parametrize("max_blocks", range(1, 9))
def test_parts_hold_few_blocks_and_say_the_same(max_blocks: int) -> None:
    (b,) = make_chain("ab")[1:]
    before = (stored("ab"),)
    events = (removed(b), stored("xyz"), stored("qr", after="x"), stored("c", after="a"))
    log = CacheEventLog()
    log.add(events)
    assert log.num_blocks == num_blocks(events)
    parts = []
    while log:
        parts.append(log.take(max_blocks))
    sizes = [num_blocks(part) for part in parts]
    assert sizes[:-1] == [max_blocks] * (len(parts) - 1)
    assert 0 < sizes[-1] <= max_blocks
    flat = [event for part in parts for event in part]
    assert parents([*before, *flat]) == parents([*before, *events])


def test_a_clearing_goes_with_the_first_part_and_what_is_left_goes_on_merging() -> None:
    cleared = AllBlocksCleared()
    log = CacheEventLog()
    assert log.take(4) == ()
    log.add((cleared,))
    assert log.take(4) == (cleared,)
    log.add((cleared, stored("abc")))
    assert log.take(1) == (cleared, stored("a"))
    log.add((removed(make_chain("abc")[2]),))
    assert log.take(4) == (stored("b", after="a"),)
    assert not log
    log.add((removed(*make_chain("ab")), stored("x")))
    assert log.take(1) == (removed(*make_chain("a")),)
    # It was not told to have gone.
    log.add((stored("b", after="a"),))
    assert log.take() == (stored("x"),)
