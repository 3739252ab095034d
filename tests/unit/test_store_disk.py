"""StoreCore: what is written to disk, and when it is not."""

from __future__ import annotations

import pytest

from moonpool.core.protocol import ClearCache
from moonpool.kv.events import AllBlocksCleared
from moonpool.tiering.breaker import BreakerConfig, BreakerState
from moonpool.tiering.config import DiskAdmission
from moonpool.tiering.protocol import (
    BlocksWritten,
    ClearDisk,
    DiskDropped,
    Pin,
    PinKind,
    WriteBlocks,
)
from support.kv import make_chain
from support.store import (
    BLOCK_BYTES,
    Store,
    chain,
    found,
    ids,
    make_frame,
    removed,
    stored,
    written,
)

_DAY_S = 86_400.0


def _write(write_id: int, tokens: str, *block_ids: int, first: int = 0) -> WriteBlocks:
    hashes = chain(tokens)
    blocks = tuple(zip(hashes[first:], ids(*block_ids), strict=True))
    return WriteBlocks(write_id=write_id, blocks=blocks, parents=(None, *hashes)[first:-1])


def _budget(num_blocks: float) -> int:
    """Bytes a day of which so many blocks can be written at a time."""
    return int(num_blocks * BLOCK_BYTES * 12)


def test_what_a_put_brings_is_written_and_held_meanwhile() -> None:
    store = Store(has_disk=True)
    frame = store.put("abc")
    assert frame == make_frame(
        work=(_write(1, "abc", 0, 1, 2),), events=(stored("abc"),), referenced=3
    )
    assert not store.core.is_on_disk(chain("a"))
    assert store.say(written(frame.disk_work[0])) == make_frame(cached=3)
    assert store.core.stats(0.0).num_disk_blocks == 3
    assert store.core.is_on_disk(chain("abc"))
    assert not store.core.is_on_disk(chain("abcd"))
    # Here already: neither written again nor published again.
    assert store.put("abc").disk_work == ()
    assert store.get("abc") == 3


def test_without_a_disk_nothing_is_written() -> None:
    store = Store(has_disk=False)
    assert store.put("abc").disk_work == ()


def test_writes_are_bounded_in_size_and_number() -> None:
    store = Store(has_disk=True, max_write_blocks=2, max_writes=2)
    frame = store.put("abcdef")
    assert frame.disk_work == (_write(1, "ab", 0, 1), _write(2, "abcd", 2, 3, first=2))
    assert frame.ledger.num_referenced == 4
    frame = store.say(written(frame.disk_work[1]))
    assert frame.disk_work == (_write(3, "abcdef", 4, 5, first=4),)


def test_a_block_that_waits_to_be_written_is_not_held() -> None:
    store = Store(num_blocks=4, has_disk=True, max_write_blocks=2, max_writes=1)
    frame = store.put("abcd")
    assert store.offer("x", 1).cache_events == (removed("abcd", 3),)
    assert store.say(written(frame.disk_work[0])).disk_work == (_write(2, "abc", 2, first=2),)


def test_a_disk_that_hangs_has_no_more_to_write_than_the_arena_holds() -> None:
    store = Store(num_blocks=4, has_disk=True, max_write_blocks=1, max_writes=1)
    (write,) = store.put("a").disk_work
    for tokens in ("bc", "de", "fg", "hi", "jk"):
        assert store.put(tokens).disk_work == ()
    stats = store.core.stats(0.0)
    # The one that is being written, and 4 that wait.
    assert (stats.num_unwritten_blocks, stats.num_unadmitted_blocks) == (5, 6)
    # Of these none is here any more.
    assert store.say(written(write)).disk_work == ()
    assert store.core.stats(0.0).num_unwritten_blocks == 0


def test_a_failed_write_is_counted_and_changes_nothing_else() -> None:
    store = Store(has_disk=True)
    (write,) = store.put("abc").disk_work
    assert isinstance(write, WriteBlocks)
    kept = BlocksWritten(write_id=write.write_id, hashes=chain("a"))
    assert store.say(kept) == make_frame(cached=3)
    assert store.say(kept) == make_frame(cached=3)
    stats = store.core.stats(0.0)
    assert (stats.num_written_blocks, stats.num_failed_write_blocks) == (1, 2)
    assert stats.num_disk_blocks == 1
    # When it is used again it is a candidate again.
    frame = store.lock("abc", 1)
    assert frame.disk_work == (_write(2, "abc", 1, 2, first=1),)


def test_what_a_write_is_said_to_have_kept_beside_its_blocks_is_ignored() -> None:
    store = Store(has_disk=True)
    store.put("ab")
    store.say(BlocksWritten(write_id=1, hashes=chain("abxy")))
    assert store.core.stats(0.0).num_disk_blocks == 2


def test_failing_writes_stop_and_are_tried_again() -> None:
    store = Store(
        num_blocks=8,
        has_disk=True,
        max_writes=1,
        disk_breaker=BreakerConfig(num_failures=2, within_s=10.0, open_s=2.0),
    )
    for tokens in ("a", "b"):
        (write,) = store.put(tokens).disk_work
        assert isinstance(write, WriteBlocks)
        store.say(BlocksWritten(write_id=write.write_id, hashes=()))
    assert store.core.stats(0.0).disk_writes is BreakerState.OPEN
    assert store.put("c").disk_work == ()
    assert store.core.next_due() == 2.0
    (probe,) = store.wait(2.0).disk_work
    assert probe == _write(3, "c", 2)
    assert store.core.next_due() is None
    store.say(written(probe))
    assert store.core.stats(store.now).disk_writes is BreakerState.CLOSED


def test_what_is_in_host_and_leaves_the_disk_stays_published() -> None:
    store = Store(num_blocks=4, has_disk=True)
    store.put_to_disk("ab")
    assert store.say(DiskDropped(hashes=chain("ab"))) == make_frame(total=4, cached=2)
    assert store.offer("wxyz", 1).cache_events == (removed("ab", 0),)
    assert store.core.stats(0.0).num_reclaimed_blocks == 2


def test_a_damaged_block_was_not_reclaimed() -> None:
    store = Store(has_disk=True)
    store.say(written(store.put("abc").disk_work[0]))
    store.say(DiskDropped(hashes=chain("abc")[2:], is_damaged=True))
    stats = store.core.stats(0.0)
    assert (stats.num_disk_blocks, stats.num_reclaimed_blocks) == (2, 0)


def test_what_is_on_disk_and_leaves_host_stays_published_until_it_leaves_that_too() -> None:
    store = Store(num_blocks=4, has_disk=True)
    store.put_to_disk("ab")
    assert store.offer("wxyz", 1).cache_events == ()
    assert store.say(DiskDropped(hashes=chain("ab")[1:])).cache_events == (removed("ab", 1),)
    assert store.say(DiskDropped(hashes=chain("ab")[1:])).cache_events == ()


def test_what_the_scan_finds_twice_or_finds_here_is_published_once() -> None:
    store = Store(has_disk=True)
    store.put("ab")
    frame = store.say(found(chain("abc") + chain("c")))
    assert [event.hashes for event in frame.cache_events] == [chain("abc")[2:] + chain("c")]
    assert store.core.stats(0.0).num_disk_blocks == 4


def test_clearing_drops_what_is_on_disk_too() -> None:
    store = Store(has_disk=True)
    store.put_to_disk("ab")
    store.drop_from_host()
    store.put_to_disk("x")
    frame = store.say(ClearCache())
    assert frame == make_frame(work=(ClearDisk(),), events=(AllBlocksCleared(),))
    assert store.get("ab") == 0


@pytest.mark.parametrize("kept", ["", "a", "ab"])
def test_what_is_being_written_outlives_a_clearing_in_memory_only(kept: str) -> None:
    """As every block that is referenced. That it is not on disk, whatever the log says, is no failure."""
    store = Store(has_disk=True, disk_breaker=BreakerConfig(num_failures=1))
    store.put_to_disk("x")
    (write,) = store.put("ab").disk_work
    assert isinstance(write, WriteBlocks)
    frame = store.say(ClearCache())
    assert frame == make_frame(
        work=(ClearDisk(),), events=(AllBlocksCleared(), stored("ab")), referenced=2
    )
    frame = store.say(BlocksWritten(write_id=write.write_id, hashes=chain(kept)))
    assert frame == make_frame(cached=2)
    stats = store.core.stats(0.0)
    assert (stats.num_disk_blocks, stats.num_failed_write_blocks) == (0, 0)
    assert stats.disk_writes is BreakerState.CLOSED
    # It is a candidate again when it is used again.
    assert store.lock("ab", 1).disk_work == (_write(3, "ab", 1, 2),)


def test_clearing_costs_no_more_for_what_is_on_disk() -> None:
    """What is told does not grow with it."""
    store = Store(has_disk=True)
    store.say(found(make_chain(range(10_000))))
    frame = store.say(ClearCache())
    assert frame == make_frame(work=(ClearDisk(),), events=(AllBlocksCleared(),))


def test_the_second_hit_is_written() -> None:
    store = Store(has_disk=True, admission=DiskAdmission.SECOND_HIT)
    assert store.put("abc").disk_work == ()
    assert store.put("abcd").disk_work == ()
    # Only what was asked for again, not what stands behind it.
    assert store.lock("ab", 1).disk_work == (_write(1, "ab", 0, 1),)
    assert store.core.stats(0.0).num_unadmitted_blocks == 7


def test_nothing_is_written_behind_what_is_not() -> None:
    store = Store(num_blocks=4, has_disk=True, admission=DiskAdmission.SECOND_HIT)
    store.put("abc")
    store.put("xy")
    # The tail has gone and comes again, at its second hit: its beginning has been seen once.
    assert store.put("abc").disk_work == ()
    assert store.lock("abc", 1).disk_work == (_write(1, "abc", 0, 1, 3),)


def test_a_put_writes_what_could_not_be_written_before() -> None:
    store = Store(has_disk=True)
    store.put("ab")
    store.say(BlocksWritten(write_id=1, hashes=()))
    assert store.put("abc").disk_work == (_write(2, "abc", 0, 1, 2),)


def test_a_write_is_no_use_of_what_it_writes() -> None:
    store = Store(num_blocks=4, has_disk=True)
    writes = [store.put(tokens).disk_work[0] for tokens in ("ab", "xy")]
    store.say(*map(written, reversed(writes)))
    store.offer("12", 1)
    assert store.lock("xy", 1).disk_work == ()
    assert store.lock("ab", 2).disk_work == ()
    assert store.core.stats(0.0).num_short_gets == 1


def test_what_was_lost_and_comes_again_has_been_seen_twice() -> None:
    store = Store(has_disk=True, admission=DiskAdmission.SECOND_HIT)
    store.put("abc")
    store.drop_from_host()
    assert len(store.put("abc").disk_work) == 1


def test_what_is_pinned_or_was_asked_for_again_is_written_once_more_before_it_goes() -> None:
    store = Store(num_blocks=16, has_disk=True, write_budget_bytes_per_day=_budget(16))
    store.put_to_disk("abcdefgh")
    store.put_to_disk("xy")
    store.get("ab")
    store.get("a")
    store.say(Pin(pin_id=1, kind=PinKind.SOFT, hashes=chain("xy"), ttl_s=60.0))
    hashes = chain("abcdefgh") + chain("xy")
    assert store.core.keep_on_disk(hashes, 9, 0.0) == chain("xy") + chain("ab")
    assert store.core.stats(0.0).write_budget_bytes == 2 * BLOCK_BYTES
    # No more than half of them, nor than the budget allows, nor than there is room for: only what is written
    # is on the budget.
    assert store.core.keep_on_disk(hashes, 0, 0.0) == ()
    assert store.core.stats(0.0).write_budget_bytes == 2 * BLOCK_BYTES
    assert store.core.keep_on_disk(chain("xy"), 9, 0.0) == chain("x")
    assert store.core.keep_on_disk((), 9, 0.0) == ()
    assert store.core.keep_on_disk(hashes, 9, 0.0) == chain("x")
    assert store.core.keep_on_disk(hashes, 9, 0.0) == ()


def test_nothing_is_written_beyond_the_budget() -> None:
    store = Store(has_disk=True, admission=DiskAdmission.ALL, write_budget_bytes_per_day=_budget(2))
    assert store.put("abc").disk_work == (_write(1, "ab", 0, 1),)
    store.say(BlocksWritten(write_id=1, hashes=chain("ab")))
    assert store.put("xy").disk_work == ()
    assert store.core.stats(0.0).write_budget_bytes == 0
    assert store.core.stats(0.0).write_budget_max_bytes == 2 * BLOCK_BYTES
    # It fills in a day by what is not in the bucket, and the bucket holds no more than it does.
    store.wait(_DAY_S / 10)
    assert store.core.stats(store.now).write_budget_bytes == 2 * BLOCK_BYTES
    assert store.put("z").disk_work != ()


def test_the_less_is_left_of_the_budget_the_more_often_a_block_must_have_been_seen() -> None:
    store = Store(
        num_blocks=16,
        has_disk=True,
        admission=DiskAdmission.BUDGET,
        write_budget_bytes_per_day=_budget(8),
    )
    store.put_to_disk("abcde")
    assert store.core.stats(0.0).write_budget_bytes == 3 * BLOCK_BYTES
    # Below a half: at the second hit.
    assert store.put("xyz").disk_work == ()
    frame = store.lock("xy", 1)
    assert frame.disk_work == (_write(2, "xy", 5, 6),)
    store.say(written(frame.disk_work[0]))
    # Below a quarter: at the third.
    assert store.lock("xyz", 2).disk_work == ()
    assert store.lock("xyz", 3).disk_work == (_write(3, "xyz", 7, first=2),)
