"""Stores by their announcements: who lives, who has gone, who was replaced."""

from __future__ import annotations

from moonpool.ids import Incarnation, WorkerId, WorkerKey
from moonpool.tiering.homes import MIN_WEIGHT
from moonpool.tiering.live_stores import LiveStores, StoreAnnounced, StoreNode


def announced(
    name: str = "s0",
    life: str = "1",
    *,
    sequence: int = 1,
    address: str = "h:1",
    is_leaving: bool = False,
) -> StoreAnnounced:
    return StoreAnnounced(
        key=WorkerKey(WorkerId(name), Incarnation(life)),
        address=address,
        sequence=sequence,
        valid_for_s=4.0,
        is_leaving=is_leaving,
    )


def node(name: str = "s0", life: str = "1", address: str = "h:1") -> StoreNode:
    return StoreNode(key=WorkerKey(WorkerId(name), Incarnation(life)), address=address)


def make_stores() -> LiveStores:
    stores = LiveStores(ramp_s=10.0)
    stores.on_bus_changed(True, 0.0)
    return stores


def test_a_store_lives_while_it_is_heard() -> None:
    stores = make_stores()
    assert stores.on_announced(announced(), 0.0)
    assert not stores.on_announced(announced(sequence=2), 1.0)
    assert stores.nodes == {"s0": node()}
    assert stores.next_due() == 5.0
    assert not stores.expire(4.9)
    assert stores.expire(5.0)
    assert stores.nodes == {}
    assert stores.next_due() is None
    stores.validate()


def test_nobody_is_lost_with_the_bus() -> None:
    stores = make_stores()
    stores.on_announced(announced(), 0.0)
    stores.on_bus_changed(False, 1.0)
    assert stores.next_due() is None
    assert not stores.expire(100.0)
    # When it is back, everyone has a full time to be heard.
    stores.on_bus_changed(True, 100.0)
    assert not stores.expire(103.0)
    assert stores.expire(104.0)


def test_who_leaves_is_gone_at_once() -> None:
    stores = make_stores()
    stores.on_announced(announced(), 0.0)
    assert stores.on_announced(announced(sequence=2, is_leaving=True), 1.0)
    assert stores.nodes == {}
    assert not stores.on_announced(announced(sequence=3, is_leaving=True), 2.0)
    assert stores.nodes == {}


def test_a_replaced_life_is_not_accepted_again() -> None:
    stores = make_stores()
    stores.on_announced(announced(life="1", sequence=7), 0.0)
    assert stores.on_announced(announced(life="2", sequence=1, address="h:2"), 1.0)
    assert not stores.on_announced(announced(life="1", sequence=8), 2.0)
    assert stores.nodes == {"s0": node(life="2", address="h:2")}
    stores.validate()


def test_what_is_late_is_dropped() -> None:
    stores = make_stores()
    stores.on_announced(announced(sequence=5, address="h:5"), 0.0)
    assert not stores.on_announced(announced(sequence=4, address="h:4"), 1.0)
    assert stores.nodes == {"s0": node(address="h:5")}
    assert stores.on_announced(announced(sequence=6, address="h:6"), 1.0)
    assert stores.nodes == {"s0": node(address="h:6")}


def test_weights_grow_from_when_a_store_was_first_heard() -> None:
    stores = make_stores()
    stores.on_announced(announced("s0"), 0.0)
    stores.on_announced(announced("s1"), 8.0)
    assert stores.weights(8.0) == {"s0": 0.8, "s1": MIN_WEIGHT}
    # Another life of it goes on where the last one was.
    stores.on_announced(announced("s0", life="2"), 9.0)
    assert stores.weights(13.0) == {"s0": 1.0, "s1": 0.5}
