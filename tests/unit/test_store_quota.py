"""StoreCore: quotas of tenants, and pins."""

from __future__ import annotations

from moonpool.core.protocol import ClearCache, FetchEnded
from moonpool.tiering.config import TenantQuota
from moonpool.tiering.protocol import (
    Pin,
    PinKind,
    Pinned,
    PutAnswered,
    PutRefusal,
    StoreFrame,
    TenantUse,
    Unpin,
)
from moonpool.tiering.shares import tenant_tag
from support.store import Store, attempt, chain, found, make_frame, removed


def _num_wanted(frame: StoreFrame) -> int:
    answer = frame.replies[0]
    assert isinstance(answer, PutAnswered)
    return answer.num_wanted_blocks


def _refusal(frame: StoreFrame) -> PutRefusal | None:
    answer = frame.replies[0]
    assert isinstance(answer, PutAnswered)
    return answer.refusal


def _pin(store: Store, pin_id: int, tokens: str, kind: PinKind, ttl_s: float = 60.0) -> StoreFrame:
    return store.say(Pin(pin_id=pin_id, kind=kind, hashes=chain(tokens), ttl_s=ttl_s))


def _pinned(pin_id: int, num_blocks: int) -> Pinned:
    return Pinned(pin_id=pin_id, num_blocks=num_blocks)


# -- quotas --


def test_a_flood_takes_nothing_below_anothers_floor() -> None:
    store = Store(tenants=(TenantQuota(tenant="t", floor_blocks=3),))
    store.put("abcde", tenant="t")
    for tokens in ("fghi", "jklm", "nopq", "rstu"):
        store.put(tokens, tenant="flood")
    # What was above the floor has gone, the tail first.
    assert store.get("abcde") == 3
    assert store.core.stats(0.0).tenants == (
        TenantUse(tenant="", num_blocks=5, floor_blocks=0, max_blocks=None),
        TenantUse(tenant="t", num_blocks=3, floor_blocks=3, max_blocks=None),
    )


def test_a_put_that_only_anothers_floor_could_make_room_for_is_refused() -> None:
    store = Store(num_blocks=4, tenants=(TenantQuota(tenant="t", floor_blocks=4),))
    store.put("abcd", tenant="t")
    assert _refusal(store.offer("x", 1, tenant="flood")) is PutRefusal.NO_ROOM
    # The tenant itself may give up its own.
    assert _num_wanted(store.offer("xy", 2, tenant="t")) == 2


def test_what_nobody_has_reserved_belongs_to_whoever_uses_it() -> None:
    store = Store(tenants=(TenantQuota(tenant="t", floor_blocks=2),))
    store.put("abcdefgh", tenant="t")
    store.put("xyz", tenant="u")
    assert store.get("abcdefgh") == 5
    assert store.get("xyz") == 3


def test_on_whose_account_a_block_is_kept() -> None:
    store = Store(num_blocks=4, has_disk=True, tenants=(TenantQuota(tenant="t"),))
    store.put("ab", tenant="t")
    store.put("xy", tenant="u")
    assert [store.core.tenant_of(h) for h in (*chain("ab"), *chain("xy"))] == ["t", "t", "", ""]
    assert store.core.tenant_of(chain("q")[0]) == ""
    # What is put for the answer is on the same account.
    store.put("mn", tenant=store.core.tenant_of(chain("xy")[1]))
    assert store.core.tenant_of(chain("mn")[1]) == ""
    store.say(found(chain("d")))
    assert store.core.tenant_of(chain("d")[0]) == ""


def test_a_floor_that_is_not_used_is_not_kept_empty() -> None:
    store = Store(tenants=(TenantQuota(tenant="t", floor_blocks=6),))
    store.put("abcdefgh", tenant="u")
    assert store.get("abcdefgh") == 8
    store.put("stuvwx", tenant="t")
    assert store.get("stuvwx") == 6


def test_a_tenant_holds_no_more_than_its_limit() -> None:
    store = Store(tenants=(TenantQuota(tenant="t", max_blocks=3),))
    store.put("ab", tenant="t")
    frame = store.offer("wxyz", 1, tenant="t")
    # Two of its own go, though others' blocks are free.
    assert _num_wanted(frame) == 3
    assert frame.cache_events == (removed("ab", 0),)
    assert _refusal(store.offer("q", 2, tenant="t")) is PutRefusal.OVER_QUOTA
    assert _num_wanted(store.offer("q", 3, tenant="u")) == 1


def test_what_the_scan_found_becomes_its_tenants_when_that_offers_it() -> None:
    store = Store(has_disk=True, tenants=(TenantQuota(tenant="t", floor_blocks=2),))
    store.say(found(chain("ab")))
    store.get("ab")
    assert store.core.stats(0.0).tenants[1].num_blocks == 0
    assert _num_wanted(store.offer("ab", 1, tenant="t")) == 0
    assert store.core.stats(0.0).tenants[1].num_blocks == 2
    store.put("lmnopqrs", tenant="flood")
    assert store.core.stats(0.0).tenants[1].num_blocks == 2


def test_what_the_scan_found_is_whose_it_was() -> None:
    quotas = (TenantQuota(tenant="t", floor_blocks=2), TenantQuota(tenant="u"))
    store = Store(has_disk=True, tenants=quotas)
    assert tenant_tag(store.core.tenant_of(chain("a")[0])) == 0
    for tenant in ("t", "stranger"):
        store.say(found(chain("ab"), tenant))
    assert store.core.tenant_of(chain("ab")[1]) == "t"
    store.get("ab")
    assert [use.num_blocks for use in store.core.stats(0.0).tenants] == [0, 2, 0]
    store.say(found(chain("xy"), "stranger"))
    assert store.core.tenant_of(chain("x")[0]) == ""


def test_blocks_that_are_read_count_and_go_back_when_nothing_comes() -> None:
    store = Store(tenants=(TenantQuota(tenant="t", max_blocks=4),))
    store.offer("abc", 1, tenant="t")
    assert store.core.stats(0.0).tenants[1].num_blocks == 3
    store.say(FetchEnded(attempt_id=attempt(1), num_tokens=0))
    assert store.core.stats(0.0).tenants[1].num_blocks == 0


# -- pins --


def test_a_hard_pin_keeps_a_block_and_holds_no_reference() -> None:
    store = Store(num_blocks=4, max_hard_pin_share=0.5)
    store.put("ab")
    assert _pin(store, 1, "abx", PinKind.HARD) == make_frame(_pinned(1, 2), total=4, cached=2)
    assert store.core.ledger().is_quiet
    assert _num_wanted(store.offer("wxyz", 1)) == 2
    store.say(FetchEnded(attempt_id=attempt(1), num_tokens=0))
    store.say(Unpin(pin_id=1), Unpin(pin_id=1))
    assert _num_wanted(store.offer("wxyz", 2)) == 4


def test_only_a_part_of_the_arena_may_be_pinned_hard() -> None:
    store = Store(num_blocks=4, max_hard_pin_share=0.5)
    store.put("abcd")
    assert _pin(store, 1, "abcd", PinKind.HARD).replies == (_pinned(1, 2),)
    assert _pin(store, 2, "ab", PinKind.HARD).replies == (_pinned(2, 2),)
    assert store.core.stats(0.0).num_pinned_blocks == 2
    # One pin has ended, the other holds.
    store.say(Unpin(pin_id=1))
    assert _num_wanted(store.offer("wxyz", 1)) == 2


def test_a_soft_pin_goes_last() -> None:
    store = Store(num_blocks=4)
    store.put("ab")
    store.put("xy")
    _pin(store, 1, "ab", PinKind.SOFT)
    assert store.offer("cd", 1).cache_events == (removed("xy", 0),)
    assert store.offer("e", 2).cache_events == (removed("ab", 1),)


def test_pins_end_by_themselves() -> None:
    store = Store(num_blocks=4)
    store.put("ab")
    _pin(store, 1, "ab", PinKind.HARD, ttl_s=5.0)
    _pin(store, 2, "ab", PinKind.SOFT, ttl_s=9.0)
    assert store.core.next_due() == 5.0
    store.wait(5.0)
    assert store.core.next_due() == 9.0
    assert _num_wanted(store.offer("wxyz", 1)) == 4
    store.wait(4.0)
    # Only the put has an end.
    assert store.core.next_due() == 35.0
    assert store.core.stats(store.now).num_pinned_blocks == 0


def test_a_pin_number_that_comes_twice_is_one_pin() -> None:
    store = Store()
    store.put("ab")
    _pin(store, 1, "a", PinKind.HARD)
    assert _pin(store, 1, "ab", PinKind.HARD).replies == ()


def test_pins_are_bounded() -> None:
    store = Store(is_checked=False)
    store.put("a")
    for pin_id in range(4_096):
        _pin(store, pin_id, "a", PinKind.SOFT)
    assert _pin(store, 5_000, "a", PinKind.SOFT).replies == (_pinned(5_000, 0),)
    store.say(Unpin(pin_id=7))
    assert _pin(store, 5_001, "a", PinKind.SOFT).replies == (_pinned(5_001, 1),)
    store.say(*(Unpin(pin_id=pin_id) for pin_id in range(4_096)))
    store.core.validate()
    assert store.core.stats(0.0).num_pinned_blocks == 1


def test_nothing_here_is_nothing_pinned() -> None:
    store = Store()
    assert _pin(store, 1, "ab", PinKind.SOFT).replies == (_pinned(1, 0),)
    assert store.core.next_due() is None


def test_what_lies_on_disk_is_pinned_for_when_it_comes() -> None:
    store = Store(num_blocks=4, has_disk=True)
    store.say(found(chain("ab")))
    assert _pin(store, 1, "ab", PinKind.HARD).replies == (_pinned(1, 2),)
    assert store.get("ab") == 2
    assert _num_wanted(store.offer("wxyz", 1)) == 2


def test_clearing_ends_all_pins() -> None:
    store = Store(num_blocks=4)
    store.put("abcd")
    _pin(store, 1, "ab", PinKind.HARD)
    store.say(ClearCache())
    assert store.core.ledger().num_free == 4
    assert store.core.stats(0.0).num_pinned_blocks == 0
