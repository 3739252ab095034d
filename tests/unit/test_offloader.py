"""What a worker offers to stores: when, to whom, and what it never does again."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from moonpool.ids import BlockHash, Incarnation, WorkerId, WorkerKey
from moonpool.inference.request import DEFAULT_TENANT
from moonpool.kv.events import AllBlocksCleared, BlockRemoved, BlockStored
from moonpool.tiering.breaker import BreakerState
from moonpool.tiering.homes import home_key, home_of
from moonpool.tiering.live_stores import StoreAnnounced
from moonpool.tiering.offloader import (
    BeginPut,
    Offloader,
    OffloaderConfig,
    PutOutcome,
)
from moonpool.tiering.protocol import PutRefusal
from support.kv import make_chain

QUIET_S = 0.25


def make_config(**settings: Any) -> OffloaderConfig:
    """One block is enough to be offered soon."""
    return OffloaderConfig(**{"min_blocks": 1, "quiet_s": QUIET_S, "max_wait_s": 2.0} | settings)


CONFIG = make_config(max_puts=4, max_puts_per_store=2)


class Driven:
    """The machine with a clock of its own, checked after every event."""

    def __init__(self, *stores: str, config: OffloaderConfig = CONFIG) -> None:
        self.machine = Offloader(config)
        self.now = 0.0
        self._sequence = 0
        self.machine.on_bus_changed(True, self.now)
        for name in stores:
            self.announce(name)

    def announce(self, name: str, life: str = "1", *, is_leaving: bool = False) -> None:
        self._sequence += 1
        announced = StoreAnnounced(
            key=WorkerKey(WorkerId(name), Incarnation(life)),
            address=f"{name}:1",
            sequence=self._sequence,
            valid_for_s=1e9,
            is_leaving=is_leaving,
        )
        self.machine.on_announced(announced, self.now)
        self.machine.validate()

    def store(self, chain: Sequence[BlockHash], start: int = 0) -> None:
        """The cache holds blocks [start, len(chain)) by now."""
        parent = chain[start - 1] if start else None
        event = BlockStored(hashes=tuple(chain[start:]), parent_hash=parent)
        self.machine.on_cache_events([event], self.now)
        self.machine.validate()

    def remove(self, *hashes: BlockHash) -> None:
        self.machine.on_cache_events([BlockRemoved(hashes=hashes)], self.now)
        self.machine.validate()

    def after(self, seconds: float) -> list[BeginPut]:
        """What is begun within the next seconds: everything that is due, when it is due."""
        until, begun = self.now + seconds, self.machine.tick(self.now)
        while (due_at := self.machine.next_due(self.now)) is not None and due_at <= until:
            self.now = max(self.now, due_at)
            begun += self.machine.tick(self.now)
            self.machine.validate()
        self.now = until
        return begun

    def answer(self, put: BeginPut, wanted: int, refusal: PutRefusal | None = None) -> PutOutcome:
        outcome = self.machine.on_answered(
            put.put_id, num_wanted_blocks=wanted, refusal=refusal, now=self.now
        )
        self.machine.validate()
        return outcome

    def read(self, put: BeginPut, lease_id: int = 1) -> None:
        """The store reads what it was offered."""
        self.machine.on_read_begun(lease_id, put.store.key, put.hashes)
        self.machine.validate()
        self.machine.on_read_ended(lease_id, self.now)
        self.machine.validate()

    def settle(self, put: BeginPut) -> None:
        """The store takes the chain and is known to hold it."""
        assert self.answer(put, len(put.hashes)) is PutOutcome.TAKEN
        self.read(put)
        (again,) = self.after(1.0)
        assert again.hashes == put.hashes
        assert self.answer(again, 0) is PutOutcome.HELD

    def fail(self, put: BeginPut) -> PutOutcome:
        outcome = self.machine.on_failed(put.put_id, self.now)
        self.machine.validate()
        return outcome


def chains(puts: Sequence[BeginPut]) -> list[tuple[BlockHash, ...]]:
    return [put.hashes for put in puts]


# -- when --


def test_a_chain_is_offered_after_a_quiet_time() -> None:
    d = Driven("s0")
    chain = make_chain("abcd")
    d.store(chain)
    assert d.after(QUIET_S - 0.01) == []
    (put,) = d.after(0.02)
    assert put.hashes == tuple(chain)
    assert (put.store.key.worker_id, put.store.address) == ("s0", "s0:1")
    assert put.tenant == DEFAULT_TENANT


def test_what_a_chain_grows_by_is_one_offer() -> None:
    d = Driven("s0")
    chain = make_chain("abcdefgh")
    d.store(chain[:3])
    for end in range(4, 9):
        assert d.after(0.1) == []
        d.store(chain[:end], start=end - 1)
    (put,) = d.after(5.0)
    assert put.hashes == tuple(chain)


def test_a_chain_that_goes_on_growing_does_not_wait_for_ever() -> None:
    d = Driven("s0")
    chain = make_chain(range(200))
    d.store(chain[:1])
    begun: list[BeginPut] = []
    for end in range(2, 60):
        begun += d.after(0.1)
        if begun:
            break
        d.store(chain[:end], start=end - 1)
    assert 1.9 <= d.now <= 2.2
    assert len(begun) == 1


def test_the_blocks_of_an_answer_wait_for_each_other() -> None:
    d = Driven("s0", config=make_config(min_blocks=4))
    chain = make_chain(range(40))
    d.store(chain[:10])
    (put,) = d.after(1.0)
    d.settle(put)
    lengths: list[int] = []
    for end in range(11, 41):
        d.store(chain[:end], start=end - 1)
        # Longer than a quiet time.
        for put in d.after(0.5):
            lengths.append(len(put.hashes))
            d.answer(put, 0)
    assert lengths == [14, 18, 22, 26, 30, 34, 38]


def test_a_few_blocks_are_offered_in_the_end() -> None:
    d = Driven("s0", config=make_config(min_blocks=4))
    d.store(make_chain("abc"))
    assert d.after(1.9) == []
    assert chains(d.after(0.2)) == [tuple(make_chain("abc"))]


def test_branches_are_offered_each() -> None:
    d = Driven("s0")
    first, second = make_chain("abcd"), make_chain("abxy")
    d.store(first)
    d.store(second, start=2)
    assert chains(d.after(1.0)) == [tuple(first), tuple(second)]


def test_the_tenant_is_that_of_the_first_block() -> None:
    d = Driven("s0")
    first, second = make_chain("abc"), make_chain("xyz")
    d.machine.note_root(first[0], "acme")
    d.store(first)
    d.store(second)
    assert [put.tenant for put in d.after(1.0)] == ["acme", DEFAULT_TENANT]


def test_roots_are_forgotten_in_the_end() -> None:
    d = Driven("s0", config=make_config(max_roots=2))
    roots = [make_chain([number])[0] for number in range(3)]
    for root in roots:
        d.machine.note_root(root, "acme")
    for number in range(3):
        d.store(make_chain([number]))
    tenants = {put.hashes[0]: put.tenant for put in d.after(1.0)}
    assert tenants[roots[0]] == DEFAULT_TENANT
    d.machine.validate()


# -- to whom --


def test_a_chain_goes_to_its_home() -> None:
    names = ("s0", "s1", "s2")
    d = Driven(*names, config=make_config(max_puts=64, max_puts_per_store=64))
    weights = {WorkerId(name): 1.0 for name in names}
    all_chains = [make_chain([number, 1, 2]) for number in range(30)]
    for chain in all_chains:
        d.store(chain)
    begun = {put.hashes: put.store.key.worker_id for put in d.after(1.0)}
    assert begun == {tuple(chain): home_of(weights, home_key(chain)) for chain in all_chains}
    assert len(set(begun.values())) == 3


def test_nothing_is_offered_without_a_store() -> None:
    d = Driven()
    d.store(make_chain("abc"))
    assert d.after(10.0) == []
    assert d.machine.num_waiting == 0
    # The first one is offered what is there.
    d.announce("s0")
    assert chains(d.after(1.0)) == [tuple(make_chain("abc"))]


def test_a_store_that_left_is_offered_nothing() -> None:
    d = Driven("s0")
    d.store(make_chain("abc"))
    d.announce("s0", is_leaving=True)
    assert d.after(10.0) == []
    assert d.machine.num_waiting == 0


# -- what is known --


def test_what_a_store_holds_is_not_offered_again() -> None:
    d = Driven("s0")
    chain = make_chain("abcdef")
    d.store(chain[:4])
    (put,) = d.after(1.0)
    d.settle(put)
    assert d.after(100.0) == []
    # It grows: the whole chain is offered, and the store says what it lacks.
    d.store(chain, start=4)
    (put,) = d.after(1.0)
    assert put.hashes == tuple(chain)
    d.settle(put)
    # A branch that ends within what is known to be there.
    d.remove(chain[5], chain[4])
    assert d.after(100.0) == []


def test_a_store_that_has_read_is_asked_again_until_it_wants_nothing() -> None:
    d = Driven("s0")
    d.store(make_chain("abcdef"))
    (put,) = d.after(1.0)
    for wanted in (4, 2):
        assert d.answer(put, wanted) is PutOutcome.TAKEN
        assert d.after(10.0) == []
        d.read(put, lease_id=wanted)
        (put,) = d.after(1.0)
    assert d.answer(put, 0) is PutOutcome.HELD
    assert d.after(100.0) == []


def test_a_store_is_not_asked_for_ever() -> None:
    d = Driven("s0")
    d.store(make_chain("abcdef"))
    num_asked = 0
    for lease_id in range(50):
        begun = d.after(1.0)
        if not begun:
            break
        num_asked += 1
        d.answer(begun[0], 1)
        d.read(begun[0], lease_id)
    assert num_asked == 1 + CONFIG.max_asks


def test_a_stream_may_come_and_go_before_the_answer() -> None:
    d = Driven("s0")
    d.store(make_chain("abc"))
    (put,) = d.after(1.0)
    d.read(put)
    assert d.machine.num_puts == 1
    assert d.answer(put, 3) is PutOutcome.TAKEN
    assert d.machine.num_puts == 0
    assert chains(d.after(1.0)) == [put.hashes]


def test_others_streams_are_no_answer() -> None:
    d = Driven("s0")
    chain = make_chain("abc")
    d.store(chain)
    (put,) = d.after(1.0)
    d.answer(put, 3)
    other = WorkerKey(WorkerId("d0"), Incarnation("1"))
    d.machine.on_read_begun(7, other, put.hashes)
    d.machine.on_read_begun(8, put.store.key, tuple(make_chain("xyz")))
    d.machine.on_read_ended(7, d.now)
    d.machine.on_read_ended(8, d.now)
    assert d.machine.num_puts == 1


def test_a_store_that_does_not_come_to_read_is_waited_for_only_so_long() -> None:
    d = Driven("s0")
    d.store(make_chain("abc"))
    (put,) = d.after(1.0)
    d.answer(put, 3)
    assert d.after(CONFIG.read_s - 0.1) == []
    assert chains(d.after(1.0)) == [put.hashes]


def test_what_has_left_the_cache_waits_no_more() -> None:
    d = Driven("s0")
    chain = make_chain("abcd")
    d.store(chain)
    d.remove(*reversed(chain))
    assert d.after(10.0) == []
    assert d.machine.num_missed_blocks == 4
    # The same blocks again: they are new.
    d.store(chain)
    assert chains(d.after(1.0)) == [tuple(chain)]


def test_a_tip_that_is_evicted_leaves_its_place_to_the_block_before_it() -> None:
    d = Driven("s0")
    chain = make_chain("abcd")
    d.store(chain)
    d.remove(chain[3], chain[2])
    (put,) = d.after(QUIET_S)
    assert put.hashes == tuple(chain[:2])
    assert d.machine.num_missed_blocks == 2


def test_what_a_store_holds_is_no_miss_when_it_is_evicted() -> None:
    d = Driven("s0")
    chain = make_chain("abcd")
    d.store(chain)
    (put,) = d.after(1.0)
    d.settle(put)
    d.remove(*reversed(chain))
    assert d.machine.num_missed_blocks == 0
    # Computed again, it is offered again: the store may have dropped it by now.
    d.store(chain)
    assert chains(d.after(1.0)) == [tuple(chain)]


def test_a_cleared_cache_has_nothing_to_offer() -> None:
    d = Driven("s0")
    d.store(make_chain("abcd"))
    d.machine.on_cache_events([AllBlocksCleared()], d.now)
    d.machine.validate()
    assert d.after(10.0) == []
    assert d.machine.num_missed_blocks == 0


def test_an_answer_may_come_when_the_blocks_have_gone() -> None:
    d = Driven("s0")
    chain = make_chain("abcd")
    d.store(chain)
    (put,) = d.after(1.0)
    d.remove(chain[3])
    assert d.answer(put, 0) is PutOutcome.HELD
    d.remove(chain[2], chain[1], chain[0])
    assert d.after(10.0) == []


# -- bounds --


def test_few_puts_are_under_way() -> None:
    d = Driven("s0", "s1", "s2")
    for number in range(40):
        d.store(make_chain([number, 1]))
    begun = d.after(5.0)
    assert len(begun) == CONFIG.max_puts
    num_by_store = [sum(put.store.key.worker_id == f"s{n}" for put in begun) for n in range(3)]
    assert max(num_by_store) <= CONFIG.max_puts_per_store
    done: list[tuple[BlockHash, ...]] = []
    while begun:
        put = begun.pop(0)
        d.answer(put, 0)
        done.append(put.hashes)
        begun += d.after(0.0)
        assert d.machine.num_puts <= CONFIG.max_puts
    assert len(set(done)) == len(done) == 40


def test_of_too_many_the_oldest_wait_behind_the_others() -> None:
    d = Driven("s0", config=make_config(max_fresh=3, max_puts=1, max_puts_per_store=1))
    d.store(make_chain("first"))
    (put,) = d.after(1.0)
    all_chains = [make_chain([number, 1]) for number in range(6)]
    for chain in all_chains:
        d.store(chain)
    assert d.after(1.0) == []
    d.answer(put, 0)
    done: list[tuple[BlockHash, ...]] = []
    while begun := d.after(1.0):
        (put,) = begun
        d.answer(put, 0)
        done.append(put.hashes)
    assert set(done[:3]) == {tuple(chain) for chain in all_chains[3:]}
    assert set(done[3:]) == {tuple(chain) for chain in all_chains[:3]}


def test_one_tick_does_not_go_through_everything() -> None:
    d = Driven("s0", config=make_config(max_puts=1_000, max_puts_per_store=1_000))
    all_chains = [make_chain(range(1_000 * n, 1_000 * n + 60)) for n in range(200)]
    d.machine.on_cache_events(
        [BlockStored(hashes=tuple(chain), parent_hash=None) for chain in all_chains], d.now
    )
    d.now = QUIET_S
    at_once = d.machine.tick(d.now)
    assert 0 < len(at_once) < len(all_chains)
    assert d.machine.next_due(d.now) == d.now
    rest = d.after(0.0)
    assert {*chains(at_once), *chains(rest)} == {tuple(chain) for chain in all_chains}


# -- stores that do not do well --


def test_a_chain_whose_put_failed_is_offered_once_more() -> None:
    d = Driven("s0")
    d.store(make_chain("abc"))
    (put,) = d.after(1.0)
    assert d.fail(put) is PutOutcome.FAILED
    assert d.after(CONFIG.retry_s - 0.01) == []
    (again,) = d.after(0.02)
    assert again.hashes == put.hashes
    d.fail(again)
    assert d.after(100.0) == []


def test_a_store_that_fails_again_and_again_is_left_alone() -> None:
    config = make_config(max_puts=3, max_puts_per_store=3, retry_s=0.1)
    d = Driven("s0", config=config)
    for number in range(10):
        d.store(make_chain([number, 1]))
    begun = d.after(0.3)
    assert len(begun) == 3
    for put in begun:
        d.fail(put)
    assert d.machine.breaker_states(d.now) == {"s0": BreakerState.OPEN}
    assert d.after(1.99) == []
    # One is let through.
    (probe,) = d.after(0.5)
    assert d.machine.breaker_states(d.now) == {"s0": BreakerState.HALF_OPEN}
    d.answer(probe, 0)
    assert d.machine.breaker_states(d.now) == {"s0": BreakerState.CLOSED}
    assert len(d.after(1.0)) == 3


def test_a_bad_store_does_not_keep_a_good_one_waiting() -> None:
    d = Driven("s0", "s1", config=make_config(max_puts=4, max_puts_per_store=2))
    weights = {WorkerId("s0"): 1.0, WorkerId("s1"): 1.0}
    all_chains = [make_chain([number, 1]) for number in range(30)]
    for chain in all_chains:
        d.store(chain)
    good = {tuple(c) for c in all_chains if home_of(weights, home_key(c)) == "s1"}
    done: set[tuple[BlockHash, ...]] = set()
    begun = d.after(1.0)
    while begun:
        put = begun.pop(0)
        if put.store.key.worker_id == "s1":
            d.answer(put, 0)
            done.add(put.hashes)
            # What s0 was offered is never answered.
            begun += d.after(0.0)
    assert done == good


def test_a_busy_store_is_asked_again() -> None:
    d = Driven("s0")
    d.store(make_chain("abc"))
    d.store(make_chain("xyz"))
    (first, second) = d.after(1.0)
    assert d.answer(first, 0, PutRefusal.TOO_MANY_PUTS) is PutOutcome.BUSY
    d.answer(second, 0)
    assert d.after(CONFIG.busy_s - 0.01) == []
    assert chains(d.after(0.02)) == [first.hashes]


@pytest.mark.parametrize(
    "refusal", [PutRefusal.OVER_QUOTA, PutRefusal.NO_ROOM, PutRefusal.DRAINING]
)
def test_a_refusal_is_accepted(refusal: PutRefusal) -> None:
    d = Driven("s0")
    d.store(make_chain("abc"))
    (put,) = d.after(1.0)
    assert d.answer(put, 0, refusal) is PutOutcome.REFUSED
    assert d.after(100.0) == []


# -- stores that come and go --


def test_a_store_that_comes_back_empty_is_filled_one_put_at_a_time() -> None:
    d = Driven("s0")
    all_chains = [make_chain([number, 1, 2]) for number in range(6)]
    for chain in all_chains:
        d.store(chain)
    begun = d.after(1.0)
    while begun:
        put = begun.pop(0)
        d.answer(put, 0)
        begun += d.after(1.0)
    assert d.after(100.0) == []
    d.announce("s0", life="2")
    refilled: list[tuple[BlockHash, ...]] = []
    while begun := d.after(1.0):
        (put,) = begun
        assert put.store.key.incarnation == "2"
        d.answer(put, 0)
        refilled.append(put.hashes)
    # What was stored last is evicted last.
    assert refilled == [tuple(chain) for chain in reversed(all_chains)]


def test_what_is_new_goes_before_what_is_offered_again() -> None:
    d = Driven(config=make_config(max_puts=1, max_puts_per_store=1))
    old = [make_chain([number, 1]) for number in range(3)]
    for chain in old:
        d.store(chain)
    d.announce("s0")
    (first,) = d.after(0.0)
    new = make_chain("new")
    d.store(new)
    assert d.after(1.0) == []
    done = [first.hashes]
    d.answer(first, 0)
    while begun := d.after(1.0):
        (put,) = begun
        d.answer(put, 0)
        done.append(put.hashes)
    assert done == [tuple(chain) for chain in (old[2], new, old[1], old[0])]


def test_an_answer_of_a_life_that_is_over_tells_nothing() -> None:
    d = Driven("s0")
    chain = make_chain("abc")
    d.store(chain)
    (put,) = d.after(1.0)
    d.announce("s0", life="2")
    assert d.answer(put, 0) is PutOutcome.HELD
    (again,) = d.after(1.0)
    assert again.store.key.incarnation == "2"
    d.fail(again)


def test_a_store_that_dies_leaves_its_chains_to_the_others() -> None:
    d = Driven("s0", "s1", config=make_config(max_puts=64, max_puts_per_store=64))
    all_chains = [make_chain([number, 1]) for number in range(20)]
    for chain in all_chains:
        d.store(chain)
    at_home = {put.hashes: put.store.key.worker_id for put in d.after(1.0)}
    for put_id in range(1, 21):
        d.machine.on_answered(put_id, num_wanted_blocks=0, refusal=None, now=d.now)
    d.announce("s1", is_leaving=True)
    moved: set[tuple[BlockHash, ...]] = set()
    while begun := d.after(1.0):
        (put,) = begun
        assert put.store.key.worker_id == "s0"
        d.answer(put, 0)
        moved.add(put.hashes)
    assert moved == {chain for chain, store in at_home.items() if store == "s1"}
