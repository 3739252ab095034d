"""StoreCore: puts. Command in, whole frame out."""

from __future__ import annotations

import pytest

from moonpool.core.protocol import (
    Abort,
    BlocksFetched,
    ClearCache,
    Drain,
    FetchEnded,
    PrefixLocked,
    ReadEnded,
    Revoked,
)
from moonpool.kv.events import AllBlocksCleared
from moonpool.tiering.protocol import (
    NOT_IN_ARENA,
    DiskDropped,
    Put,
    PutAnswered,
    PutRefusal,
)
from support.store import (
    BLOCK_SIZE,
    Store,
    attempt,
    chain,
    ids,
    make_frame,
    removed,
    reserved,
    stored,
)


def _answered(number: int, num_wanted: int, refusal: PutRefusal | None = None) -> PutAnswered:
    return PutAnswered(attempt_id=attempt(number), num_wanted_blocks=num_wanted, refusal=refusal)


def _fetched(number: int, num_blocks: int) -> BlocksFetched:
    return BlocksFetched(attempt_id=attempt(number), num_tokens=num_blocks * BLOCK_SIZE)


def _ended(number: int, num_blocks: int) -> FetchEnded:
    return FetchEnded(attempt_id=attempt(number), num_tokens=num_blocks * BLOCK_SIZE)


def test_a_put_is_read_published_as_it_comes_and_kept() -> None:
    store = Store()
    assert store.offer("abc", 1) == make_frame(
        _answered(1, 3), reserved(1, "abc", 0, ids(0, 1, 2)), referenced=3, reserved=1
    )
    assert store.say(_fetched(1, 1)) == make_frame(events=(stored("a"),), referenced=3, reserved=1)
    assert store.say(_ended(1, 3)) == make_frame(events=(stored("abc", 1),), cached=3)
    assert store.core.ledger().is_quiet


def test_what_lies_here_is_not_read_again() -> None:
    store = Store()
    store.put("ab")
    assert store.offer("abcd", 1) == make_frame(
        _answered(1, 2), reserved(1, "abcd", 2, ids(0, 1, 2, 3)), referenced=4, reserved=1
    )
    store.say(_ended(1, 4))
    assert store.offer("abc", 2) == make_frame(_answered(2, 0), cached=4)


def test_what_is_on_its_way_is_not_read_twice() -> None:
    store = Store()
    store.offer("ab", 1)
    assert store.offer("ab", 2) == make_frame(_answered(2, 0), referenced=2, reserved=1)
    block_ids = (NOT_IN_ARENA, NOT_IN_ARENA, *ids(2))
    assert store.offer("abc", 3) == make_frame(
        _answered(3, 1), reserved(3, "abc", 2, block_ids), referenced=3, reserved=2
    )
    store.say(_ended(3, 3), _ended(1, 2))
    assert store.get("abc") == 3


def test_what_a_put_left_out_is_wanted_by_the_next_one() -> None:
    store = Store()
    store.offer("abcd", 1)
    assert store.say(_ended(1, 1)) == make_frame(events=(stored("a"),), cached=1)
    assert store.offer("abcd", 2).replies[0] == _answered(2, 3)


def test_a_put_that_brings_nothing_leaves_nothing() -> None:
    store = Store()
    store.offer("abcd", 1)
    assert store.say(_ended(1, 0)) == make_frame()


def test_a_hole_is_filled_without_reading_what_is_behind_it() -> None:
    store = Store(has_disk=True)
    store.put_to_disk("abcd")
    store.drop_from_host()
    assert store.say(DiskDropped(hashes=chain("abcd")[1:2])).cache_events == (removed("ab", 1),)
    frame = store.offer("abcde", 1)
    assert frame.replies == (
        _answered(1, 1),
        reserved(1, "ab", 1, (NOT_IN_ARENA, *frame.replies[1].block_ids[1:])),
    )
    store.say(_ended(1, 2))
    assert store.get("abcde") == 4


def test_an_aborted_put_holds_its_blocks_until_its_reads_have_ended() -> None:
    store = Store()
    store.offer("abc", 1)
    store.say(_fetched(1, 1))
    assert store.say(Abort(attempt_id=attempt(1))) == make_frame(referenced=3, quarantined=1)
    assert store.say(_fetched(1, 2)) == make_frame(referenced=3, quarantined=1)
    # Another worker's copy goes into other blocks.
    assert store.offer("abc", 2).replies[1] == reserved(2, "abc", 1, ids(0, 3, 4))
    assert store.say(ReadEnded(attempt_id=attempt(1))) == make_frame(referenced=3, reserved=1)
    assert store.say(_ended(2, 3)).ledger.is_quiet
    assert store.say(Abort(attempt_id=attempt(2)), ReadEnded(attempt_id=attempt(2))) == (
        make_frame(cached=3)
    )


def test_a_put_that_ends_while_it_is_aborted_is_over() -> None:
    store = Store()
    store.offer("ab", 1)
    store.say(Abort(attempt_id=attempt(1)))
    assert store.say(_ended(1, 2)) == make_frame()


def test_a_put_that_takes_too_long_is_revoked() -> None:
    store = Store(put_timeout_s=30.0)
    store.offer("ab", 1)
    store.now = 10.0
    store.offer("xy", 2)
    assert store.core.next_due() == 30.0
    assert store.wait(20.0) == make_frame(
        Revoked(attempt_id=attempt(1)), referenced=4, reserved=1, quarantined=1
    )
    assert store.core.next_due() == 40.0
    store.say(ReadEnded(attempt_id=attempt(1)), _ended(2, 2))
    assert store.core.stats(store.now).num_expired_puts == 1
    assert store.core.ledger().is_quiet


def test_the_oldest_idle_blocks_go_tails_first() -> None:
    store = Store(num_blocks=4)
    store.put("ab")
    store.put("xy")
    store.put("ab")
    assert store.offer("cd", 1).cache_events == (removed("xy", 0),)
    store.say(_ended(1, 2))
    assert store.offer("e", 2).cache_events == (removed("ab", 1),)


def test_a_put_takes_what_there_is_room_for() -> None:
    store = Store(num_blocks=4)
    store.put("ab")
    store.lock("ab", 1)
    frame = store.offer("wxyz", 1)
    assert frame == make_frame(
        _answered(1, 2),
        reserved(1, "wx", 0, ids(2, 3)),
        total=4,
        referenced=4,
        reserved=1,
        locks=1,
    )
    assert store.offer("q", 2) == make_frame(
        _answered(2, 0, PutRefusal.NO_ROOM), total=4, referenced=4, reserved=1, locks=1
    )


def test_a_put_keeps_the_beginning_that_it_goes_on_from() -> None:
    store = Store(num_blocks=4)
    store.put("ab")
    store.offer("abcd", 1)
    assert store.offer("x", 2).replies == (_answered(2, 0, PutRefusal.NO_ROOM),)
    store.say(_ended(1, 4))
    assert store.get("abcd") == 4


def test_puts_are_bounded_in_all_for_a_tenant_and_in_length() -> None:
    store = Store(max_puts=2, max_puts_per_tenant=1, max_put_blocks=2)
    assert store.offer("abc", 1, tenant="t").replies[0] == _answered(1, 2)
    refused = _answered(2, 0, PutRefusal.TOO_MANY_PUTS)
    assert store.offer("x", 2, tenant="t").replies == (refused,)
    assert store.offer("x", 3, tenant="u").replies[0] == _answered(3, 1)
    assert store.offer("y", 4, tenant="v").replies == (_answered(4, 0, PutRefusal.TOO_MANY_PUTS),)
    # What needs nothing is answered all the same.
    assert store.offer("ab", 5, tenant="t").replies == (_answered(5, 0),)
    counts = dict(store.core.stats(0.0).num_refused_puts)
    assert counts[PutRefusal.TOO_MANY_PUTS] == 2


def test_an_offer_that_comes_twice_is_one() -> None:
    store = Store()
    store.offer("ab", 1)
    assert store.offer("ab", 1) == make_frame(referenced=2, reserved=1)
    store.say(Abort(attempt_id=attempt(1)))
    assert store.offer("ab", 1) == make_frame(referenced=2, quarantined=1)


def test_an_empty_chain_is_here() -> None:
    store = Store()
    assert store.offer("", 1) == make_frame(_answered(1, 0))


@pytest.mark.parametrize("num_tokens", [-5, 0, BLOCK_SIZE - 1])
def test_less_than_a_block_is_nothing(num_tokens: int) -> None:
    store = Store()
    store.offer("ab", 1)
    assert store.say(FetchEnded(attempt_id=attempt(1), num_tokens=num_tokens)) == make_frame()


def test_more_than_was_asked_for_is_what_was_asked_for() -> None:
    store = Store()
    store.offer("ab", 1)
    assert store.say(_ended(1, 9)) == make_frame(events=(stored("ab"),), cached=2)


def test_commands_about_what_is_unknown_change_nothing() -> None:
    store = Store()
    assert (
        store.say(
            _fetched(7, 1),
            _ended(7, 1),
            ReadEnded(attempt_id=attempt(7)),
            Abort(attempt_id=attempt(7)),
        )
        == make_frame()
    )


def test_a_draining_store_takes_and_lends_nothing_new_and_ends_what_it_has() -> None:
    store = Store()
    store.put("ab")
    store.offer("abc", 1)
    store.say(Drain())
    assert store.offer("x", 2).replies == (_answered(2, 0, PutRefusal.DRAINING),)
    assert store.lock("ab", 1).replies == (PrefixLocked(read_id=1, block_ids=()),)
    store.unlock(1)
    assert store.say(_ended(1, 3)).ledger.is_quiet


def test_a_drain_that_hands_back_revokes_what_is_read() -> None:
    store = Store()
    store.offer("ab", 1)
    assert store.say(Drain(hand_back=True)) == make_frame(
        Revoked(attempt_id=attempt(1)), referenced=2, quarantined=1
    )
    assert store.say(ReadEnded(attempt_id=attempt(1))).ledger.is_quiet


def test_clearing_forgets_what_nobody_references() -> None:
    store = Store()
    store.put("ab")
    store.offer("abc", 1)
    store.put("xy")
    assert store.say(ClearCache()) == make_frame(
        events=(AllBlocksCleared(), stored("ab")), referenced=3, reserved=1
    )
    store.say(_ended(1, 3))
    assert store.say(ClearCache()) == make_frame(events=(AllBlocksCleared(),))


def test_eviction_starts_at_the_high_water_mark() -> None:
    store = Store(num_blocks=10, high_water=0.8, evict_share=0.1)
    store.put("abcdefgh")
    frame = store.offer("x", 1)
    # 9 of 10 are in use, more than 8: it goes on until 3 are free.
    assert frame.cache_events == (removed("abcdefgh", 6),)
    assert frame.ledger.num_free == 3


def test_a_put_of_400_blocks_is_one_frame() -> None:
    store = Store(num_blocks=500, is_checked=False)
    hashes = chain("".join(map(chr, range(400))))
    frame = store.say(Put(attempt_id=attempt(1), tenant="default", hashes=hashes))
    assert frame.replies[0] == _answered(1, 400)
    assert store.say(_ended(1, 400)).cache_events[0].hashes == hashes
