"""StoreCore: gets from HOST and from DISK. Command in, whole frame out."""

from __future__ import annotations

from moonpool.core.protocol import Drain, PrefixLocked
from moonpool.ids import BlockId
from moonpool.kv.events import BlockRemoved
from moonpool.kv.eviction import EvictionName
from moonpool.tiering.breaker import BreakerConfig, BreakerState
from moonpool.tiering.protocol import (
    NOT_IN_ARENA,
    BlocksLoaded,
    DiskDropped,
    DropBlocks,
    LoadBlocks,
    PrefixLoading,
    PutAnswered,
    StageBlocks,
    StoreFrame,
)
from support.store import (
    Store,
    attempt,
    chain,
    found,
    ids,
    loaded,
    make_frame,
    removed,
    reserved,
)


def _locked(read_id: int, *block_ids: int) -> PrefixLocked:
    return PrefixLocked(read_id=read_id, block_ids=ids(*block_ids))


def _loading(read_id: int, num_ready: int, num_blocks: int) -> PrefixLoading:
    return PrefixLoading(read_id=read_id, num_ready_blocks=num_ready, num_blocks=num_blocks)


def _load(load_id: int, tokens: str, first: int, *block_ids: int) -> LoadBlocks:
    """The blocks from the `first` on of a chain."""
    blocks = tuple(zip(chain(tokens)[first:], ids(*block_ids), strict=True))
    return LoadBlocks(load_id=load_id, blocks=blocks)


def _restarted(tokens: str, num_blocks: int = 8, **changes: object) -> Store:
    """A store that found this chain on its disk."""
    store = Store(num_blocks, has_disk=True, **changes)
    store.say(found(chain(tokens)))
    return store


def _loads(frame: StoreFrame) -> list[LoadBlocks]:
    return [work for work in frame.disk_work if isinstance(work, LoadBlocks)]


def test_a_get_from_host_is_told_at_once() -> None:
    store = Store()
    store.put("abc")
    assert store.lock("abx", 1) == make_frame(_locked(1, 0, 1), cached=1, referenced=2, locks=1)
    assert store.unlock(1) == make_frame(cached=3)


def test_a_get_of_nothing_is_told_so() -> None:
    store = Store()
    assert store.lock("ab", 1) == make_frame(_locked(1), locks=1)
    assert store.lock("ab", 1) == make_frame(locks=1)
    assert store.unlock(1) == make_frame()
    assert store.unlock(1) == make_frame()
    assert store.core.stats(0.0).num_missed_gets == 1


def test_what_the_scan_found_is_published_and_loaded_when_it_is_wanted() -> None:
    store = Store(has_disk=True)
    frame = store.say(found(chain("abc")))
    assert [event.hashes for event in frame.cache_events] == [chain("abc")]
    # Nothing of it is ready, and the reader is told so before the disk is asked.
    assert store.lock("abc", 1) == make_frame(
        _loading(1, 0, 3), work=(_load(1, "abc", 0, 0, 1, 2),), referenced=3, locks=1
    )
    assert store.say(BlocksLoaded(load_id=1, num_blocks=3)) == make_frame(
        _locked(1, 0, 1, 2), referenced=3, locks=1
    )
    assert store.unlock(1) == make_frame(cached=3)
    assert store.lock("abc", 2).replies == (_locked(2, 0, 1, 2),)
    stats = store.core.stats(0.0)
    assert (stats.num_hit_disk_blocks, stats.num_hit_host_blocks) == (3, 3)


def test_only_what_lies_on_disk_alone_is_loaded() -> None:
    store = _restarted("abcd")
    assert store.get("ab") == 2
    frame = store.lock("abcd", 1)
    assert frame.replies == (_loading(1, 2, 4),)
    assert frame.disk_work == (_load(2, "abcd", 2, 2, 3),)
    assert store.say(BlocksLoaded(load_id=2, num_blocks=2)).replies == (_locked(1, 0, 1, 2, 3),)


def test_a_long_run_is_loaded_in_pieces_and_told_when_all_are_here() -> None:
    store = _restarted("abcde", max_load_blocks=2)
    frame = store.lock("abcde", 1)
    assert [len(load.blocks) for load in _loads(frame)] == [2, 2, 1]
    first, second, third = _loads(frame)
    assert store.say(loaded(third), loaded(first)).replies == ()
    assert store.say(loaded(second)).replies == (_locked(1, 0, 1, 2, 3, 4),)


def _stage(store: Store, tokens: str) -> StoreFrame:
    return store.say(StageBlocks(hashes=chain(tokens)))


def test_what_will_be_wanted_is_loaded_for_nobody_yet() -> None:
    store = _restarted("abc", 16)
    frame = _stage(store, "abcd")
    assert frame == make_frame(work=(_load(1, "abc", 0, 0, 1, 2),), total=16, referenced=3)
    # Twice is once, and a get joins what is under way.
    assert _stage(store, "abcd") == make_frame(total=16, referenced=3)
    assert store.lock("abc", 1).replies == (_loading(1, 0, 3),)
    (load,) = _loads(frame)
    assert store.say(loaded(load)).replies == (_locked(1, 0, 1, 2),)
    store.unlock(1)
    # All of it is in memory: there is nothing to do, and nothing is counted.
    assert _stage(store, "abcd") == make_frame(total=16, cached=3)
    assert store.core.stats(0.0).num_gets == 1


def test_what_is_loaded_ahead_fills_a_part_of_the_arena_until_it_is_asked_for() -> None:
    store = Store(16, has_disk=True)
    for tokens in ("abcd", "efgh"):
        store.say(found(chain(tokens)))
    (load,) = _loads(_stage(store, "abcd"))
    store.say(loaded(load))
    assert _loads(_stage(store, "efgh")) == []
    assert store.get("abcd") == 4
    (load,) = _loads(_stage(store, "efgh"))
    assert len(load.blocks) == 4
    store.say(loaded(load))
    assert _loads(_stage(store, "abcd")) == []
    # What was pushed out by others is asked for no more.
    store.drop_from_host()
    assert len(_loads(_stage(store, "abcd"))) == 1


def test_nothing_is_loaded_ahead_while_a_reader_waits_for_the_disk() -> None:
    store = _restarted("abc", 16)
    store.say(found(chain("xyz")))
    (load,) = _loads(store.lock("abc", 1))
    assert _loads(_stage(store, "xyz")) == []
    store.say(loaded(load))
    assert len(_loads(_stage(store, "xyz"))) == 1


def test_what_is_loaded_ahead_leaves_room_in_the_disks_queue() -> None:
    store = _restarted("abcdef", 64, max_loading_blocks=8)
    store.say(found(chain("uvwxyz")))
    (load,) = _loads(_stage(store, "abcdef"))
    assert len(load.blocks) == 4
    assert store.lock("uvwx", 1).replies == (_loading(1, 0, 4),)


def test_loading_ahead_is_no_use_of_its_own() -> None:
    """A chain that is read once lies where it lies when it was loaded by whoever read it."""
    once, ahead = (_restarted("abc", 16, eviction=EvictionName.S3_FIFO) for _ in range(2))
    for store in (once, ahead):
        if store is ahead:
            (load,) = _loads(_stage(store, "abc"))
            store.say(loaded(load))
            assert store.get("abc") == 3
        else:
            (load,) = _loads(store.lock("abc", 1))
            store.say(loaded(load))
            store.unlock(1)
        # A scan: what was read once goes first, before what was put after it.
        store.put("nopqrstuvwxyz")
        store.put("N")
    assert once.get("abc") == ahead.get("abc")


def test_a_store_that_drains_stages_nothing() -> None:
    store = _restarted("abc")
    store.say(Drain(hand_back=True))
    assert store.say(StageBlocks(hashes=chain("abc"))) == make_frame()


def test_two_gets_wait_for_one_load() -> None:
    store = _restarted("abc")
    (load,) = _loads(store.lock("abc", 1))
    assert store.lock("abx", 2) == make_frame(_loading(2, 0, 2), referenced=3, locks=2)
    assert store.say(loaded(load)).replies == (_locked(1, 0, 1, 2), _locked(2, 0, 1))


def test_a_get_that_leaves_during_the_load_leaves_what_it_brings() -> None:
    store = _restarted("abc")
    (load,) = _loads(store.lock("abc", 1))
    assert store.unlock(1) == make_frame(referenced=3)
    assert store.say(loaded(load)) == make_frame(cached=3)
    assert store.lock("abc", 2).replies == (_locked(2, 0, 1, 2),)


def test_what_is_being_loaded_is_not_wanted_of_a_put() -> None:
    store = _restarted("ab")
    (load,) = _loads(store.lock("ab", 1))
    store.say(DiskDropped(hashes=chain("ab")))
    answer = PutAnswered(attempt_id=attempt(1), num_wanted_blocks=0)
    assert store.offer("ab", 1).replies == (answer,)
    assert store.say(loaded(load)).cache_events != ()
    assert store.get("ab") == 2


def test_a_load_that_fails_is_told_as_far_as_it_came() -> None:
    store = _restarted("abcd")
    (load,) = _loads(store.lock("abcd", 1))
    assert store.say(loaded(load, 1)) == make_frame(_locked(1, 0), referenced=1, locks=1)
    stats = store.core.stats(0.0)
    assert (stats.num_loaded_blocks, stats.num_failed_load_blocks) == (1, 3)
    assert stats.num_short_gets == 1
    # Nothing else has changed: they are believed to be there, and tried again.
    assert len(_loads(store.lock("abcd", 2))[0].blocks) == 3


def test_the_run_ends_at_the_first_of_several_failures() -> None:
    store = _restarted("abcdef", max_load_blocks=2)
    first, second, third = _loads(store.lock("abcdef", 1))
    assert store.say(loaded(third, 1)).replies == ()
    assert store.say(loaded(second, 0)).replies == ()
    assert store.say(loaded(first)).replies == (_locked(1, 0, 1),)


def test_a_bad_record_is_dropped_and_withdrawn() -> None:
    store = _restarted("abc")
    (load,) = _loads(store.lock("abc", 1))
    bad = chain("ab")[1:]
    frame = store.say(BlocksLoaded(load_id=load.load_id, num_blocks=1, bad_hashes=bad))
    assert frame == make_frame(
        _locked(1, 0),
        work=(DropBlocks(hashes=bad),),
        events=(BlockRemoved(hashes=bad),),
        referenced=1,
        locks=1,
    )
    stats = store.core.stats(0.0)
    assert (stats.num_bad_blocks, stats.num_failed_load_blocks) == (1, 0)
    # The next put brings it again, and what is behind it is of use.
    frame = store.offer("abc", 1)
    assert frame.replies[1] == reserved(1, "ab", 1, ids(0, 1))


def test_a_load_that_nobody_knows_changes_nothing() -> None:
    store = Store(has_disk=True)
    assert store.say(BlocksLoaded(load_id=7, num_blocks=3, bad_hashes=chain("a"))) == make_frame()


def test_there_is_no_more_loaded_than_there_is_room_for() -> None:
    store = _restarted("abcdef", num_blocks=4)
    store.put("x")
    store.lock("x", 1)
    (load,) = _loads(store.lock("abcdef", 2))
    assert len(load.blocks) == 3
    frame = store.say(loaded(load))
    assert len(frame.replies[0].block_ids) == 3
    assert store.core.stats(0.0).num_short_gets == 1
    # Without any room there is what lies in HOST.
    assert store.lock("abcdef", 3).replies == (
        PrefixLocked(read_id=3, block_ids=tuple(BlockId(b) for _, b in load.blocks)),
    )


def test_there_is_no_more_loaded_at_a_time_than_may_be() -> None:
    store = _restarted("abcdef", max_loading_blocks=4)
    (load,) = _loads(store.lock("abcdef", 1))
    assert len(load.blocks) == 4
    store.say(loaded(load))
    assert store.get("abcdef") == 6


def test_what_is_loaded_pushes_out_what_is_older_and_that_stays_published_if_it_is_on_disk() -> (
    None
):
    store = Store(num_blocks=2, has_disk=True)
    store.put_to_disk("ab")
    store.put_to_disk("xy")
    assert store.get("ab") == 2
    assert store.core.take_frame().cache_events == ()
    stats = store.core.stats(0.0)
    assert (stats.num_evicted_blocks, stats.num_demoted_blocks) == (4, 4)


def test_what_was_asked_for_again_outlives_what_was_only_put_again() -> None:
    store = Store(eviction=EvictionName.S3_FIFO)
    store.put("ab")
    store.get("ab")
    store.put("xy")
    store.put("xy")
    assert store.offer("123456", 1).cache_events == (removed("xy", 0),)


def test_a_get_that_has_waited_long_enough_is_told_what_has_come() -> None:
    store = _restarted("abcd", max_load_blocks=2, load_patience_s=1.0)
    first, second = _loads(store.lock("abcd", 1))
    store.say(loaded(first))
    assert store.core.next_due() == 1.0
    assert store.wait(1.0) == make_frame(_locked(1, 0, 1), referenced=4, locks=1)
    assert store.core.next_due() is None
    # The rest comes for whoever asks next.
    store.say(loaded(second))
    assert store.lock("abcd", 2).replies == (_locked(2, 0, 1, 2, 3),)
    assert store.core.stats(store.now).disk_reads is BreakerState.CLOSED


def test_a_disk_that_brings_nothing_in_time_is_left_alone_and_probed() -> None:
    store = _restarted(
        "abcdefgh", max_load_blocks=2, disk_breaker=BreakerConfig(num_failures=2, within_s=10.0)
    )
    loads = _loads(store.lock("ab", 1)) + _loads(store.lock("abcd", 2))
    store.wait(1.0)
    assert store.core.stats(store.now).disk_reads is BreakerState.OPEN
    frame = store.lock("abcdef", 3)
    assert frame.replies == (_locked(3),)
    assert frame.disk_work == ()
    # What comes after all is used, and proves nothing.
    store.say(*map(loaded, loads))
    assert store.lock("abcdef", 4).replies == (_locked(4, 0, 1, 2, 3),)
    store.wait(2.0)
    assert store.core.stats(store.now).disk_reads is BreakerState.HALF_OPEN
    (probe,) = _loads(store.lock("abcdefgh", 5))
    assert store.lock("abcdefgh", 6).disk_work == ()
    store.say(loaded(probe))
    assert store.core.stats(store.now).disk_reads is BreakerState.CLOSED
    assert len(_loads(store.lock("abcdefgh", 7))) == 1


def test_a_disk_that_brings_everything_late_is_left_alone() -> None:
    store = _restarted("ab", disk_breaker=BreakerConfig(num_failures=2, within_s=10.0))
    for read_id, tokens in ((1, "a"), (2, "ab")):
        (load,) = _loads(store.lock(tokens, read_id))
        store.wait(1.0)
        store.now += 0.5
        store.say(loaded(load))
    assert store.core.stats(store.now).disk_reads is BreakerState.OPEN


def test_what_lies_on_a_disk_that_cannot_be_read_is_wanted_of_a_put() -> None:
    store = _restarted("abc", disk_breaker=BreakerConfig(num_failures=1))
    assert store.offer("abcd", 1).replies[1] == reserved(
        1, "abcd", 3, (NOT_IN_ARENA, NOT_IN_ARENA, NOT_IN_ARENA, *ids(0))
    )
    (load,) = _loads(store.lock("abc", 1))
    store.say(loaded(load, 0))
    frame = store.put("abc")
    assert frame.cache_events == ()
    assert store.get("abc") == 3
    assert store.core.stats(store.now).num_disk_blocks == 3


def test_failing_reads_open_the_breaker_of_reads_alone() -> None:
    store = _restarted("abc", disk_breaker=BreakerConfig(num_failures=2, within_s=10.0))
    for read_id in (1, 2):
        (load,) = _loads(store.lock("abc", read_id))
        store.say(loaded(load, 0))
    assert store.lock("abc", 3).replies == (_locked(3),)
    stats = store.core.stats(store.now)
    assert (stats.disk_reads, stats.disk_writes) == (BreakerState.OPEN, BreakerState.CLOSED)
    assert store.put("xy").disk_work != ()
