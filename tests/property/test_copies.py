"""Copies between store nodes: a ring of naive stores that beat, read, join and leave."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moonpool.ids import BlockHash, Incarnation, WorkerId, WorkerKey
from moonpool.tiering.copies import CopyBook, CopyConfig, TakeChain
from moonpool.tiering.homes import home_key, homes_of
from moonpool.tiering.protocol import PutRefusal
from moonpool.tiering.replicas import ReplicaConfig
from moonpool.tiering.store_record import (
    MAX_COPIES,
    MAX_COPY_BLOCKS,
    CopyKind,
    RingView,
    StoreMember,
    StoreRecord,
)

CONFIG = CopyConfig(
    block_bytes=100,
    replicas=ReplicaConfig(bytes_per_s_of_a_copy=1_000.0, max_copies=3, half_life_s=10.0),
    ramp_s=60.0,
    asked_s=5.0,
    retake_s=30.0,
)
Chain = tuple[BlockHash, ...]


def tenant_of(block_hash: BlockHash) -> str:
    return f"tenant-{block_hash[0] % 3}"


def in_memory(_: Chain) -> bool:
    return False


def make_book(store: str, num_here: Callable[[Chain], int] = len) -> CopyBook:
    return CopyBook(
        WorkerId(store), CONFIG, tenant_of=tenant_of, num_here=num_here, is_on_disk=in_memory
    )


def chain(number: int, num_blocks: int = 3) -> Chain:
    return tuple(
        BlockHash(number.to_bytes(16, "little") + index.to_bytes(16, "little"))
        for index in range(num_blocks)
    )


class Ring:
    """Stores that keep whole chains in a set and do at once what they are told."""

    def __init__(self, *names: str) -> None:
        self.now = 1_000.0
        self.members: dict[WorkerId, StoreMember] = {}
        self.books: dict[WorkerId, CopyBook] = {}
        self.chains: dict[WorkerId, set[Chain]] = {}
        #: What was taken and has not come, or only in part.
        self.lacks: dict[WorkerId, set[Chain]] = {}
        for name in names:
            self.join(name, since_unix_s=0.0)

    def join(self, name: str, *, since_unix_s: float) -> None:
        store_id = WorkerId(name)
        self.members[store_id] = StoreMember(
            key=WorkerKey(store_id, Incarnation("1")), address=name, since_unix_s=since_unix_s
        )
        lacks = self.lacks[store_id] = set[Chain]()
        self.books[store_id] = make_book(name, lambda what: 0 if what in lacks else len(what))
        self.chains[store_id] = set()

    def leave(self, name: str) -> CopyBook:
        store_id = WorkerId(name)
        self.books[store_id].leave()
        self.members[store_id] = replace(self.members[store_id], is_draining=True)
        return self.books[store_id]

    def record(self, name: str) -> StoreRecord:
        return self.books[WorkerId(name)].record(self.members[WorkerId(name)], self.now, self.now)

    def home(self, what: Chain) -> WorkerId:
        return homes_of(dict.fromkeys(self.members, 1.0), home_key(what), 1)[0]

    def beat(self, seconds: float = 1.0) -> list[TakeChain]:
        """Everyone tells, hears, and takes; what was taken in all."""
        self.now += seconds
        view = RingView.of(
            book.record(self.members[store_id], self.now, self.now)
            for store_id, book in self.books.items()
        )
        taken = []
        for store_id, book in self.books.items():
            book.on_view(view, self.now)
            while takes := book.takes(self.now):
                for take in takes:
                    assert take.source.worker_id != store_id
                    if take.hashes in self.chains[take.source.worker_id]:
                        self.chains[store_id].add(take.hashes)
                        self.lacks[store_id].discard(take.hashes)
                        source = self.books[take.source.worker_id]
                        source.note_lent(take.hashes, self.now, reader=store_id)
                        source.note_returned(store_id, self.now)
                    if take.hashes not in self.chains[store_id]:
                        self.lacks[store_id].add(take.hashes)
                    book.on_taken(take, self.now, refusal=None)
                taken += takes
            book.validate()
        return taken

    def holders(self, what: Chain) -> set[WorkerId]:
        return {store_id for store_id, chains in self.chains.items() if what in chains}


@given(num_stores=st.integers(2, 5), num_chains=st.integers(0, 150))
def test_what_a_leaving_node_holds_comes_to_its_new_homes(num_stores: int, num_chains: int) -> None:
    ring = Ring(*(f"s{number}" for number in range(num_stores)))
    leaver = WorkerId("s0")
    held = [chain(number) for number in range(num_chains)]
    ring.beat()
    ring.chains[leaver].update(held)
    for what in held:
        # It has grown since: only the whole of it is asked for.
        ring.books[leaver].note_kept(what[:2])
        ring.books[leaver].note_kept(what)
    ring.leave("s0")
    num_beats = 0
    while not ring.books[leaver].is_left(ring.now):
        ring.beat()
        num_beats += 1
        assert num_beats < 60
    del ring.members[leaver]
    for what in held:
        assert ring.home(what) in ring.holders(what)
    assert ring.books[leaver].handed == {block_hash for what in held for block_hash in what}
    assert ring.books[leaver].takes(ring.now) == []


@given(num_chains=st.integers(0, MAX_COPIES), num_stores=st.integers(1, 4))
def test_what_is_read_moves_to_a_node_that_has_joined(num_chains: int, num_stores: int) -> None:
    ring = Ring(*(f"s{number}" for number in range(num_stores)))
    ring.beat()
    held = [chain(number) for number in range(num_chains)]
    unread = [chain(1_000 + number) for number in range(20)]
    for what in (*held, *unread):
        ring.chains[ring.home(what)].add(what)
    ring.join("new", since_unix_s=0.0)
    ring.beat()
    for what in held:
        (holder,) = ring.holders(what)
        ring.books[holder].note_lent(what, ring.now)
    for _ in range(3):
        ring.beat()
    for what in held:
        assert ring.home(what) in ring.holders(what)
    assert all(len(ring.holders(what)) == 1 for what in unread)
    # What has come is not taken again while it is still read at the old place.
    assert ring.beat() == []


@given(num_reads=st.integers(0, 60), num_stores=st.integers(1, 5))
def test_hot_chains_get_copies_where_everybody_expects_them(
    num_reads: int, num_stores: int
) -> None:
    ring = Ring(*(f"s{number}" for number in range(num_stores)))
    ring.beat()
    hot = chain(7)
    home = ring.home(hot)
    ring.chains[home].add(hot)
    for _ in range(num_reads):
        ring.books[home].note_lent(hot, ring.now)
    ring.beat(0.0)
    bytes_per_s = num_reads * 300 * 0.0693
    wanted = min(max(-int(-bytes_per_s // 1_000), 1), 3)
    ranked = homes_of(dict.fromkeys(ring.members, 1.0), home_key(hot), wanted)
    assert ring.holders(hot) == set(ranked)


def test_reads_of_copies_count_for_the_home_and_are_not_moved_back() -> None:
    ring = Ring("s0", "s1", "s2")
    ring.beat()
    hot = chain(7)
    home = ring.home(hot)
    ring.chains[home].add(hot)
    for _ in range(60):
        ring.books[home].note_lent(hot, ring.now)
    ring.beat()
    copies = ring.holders(hot) - {home}
    assert len(copies) == 1
    # Readers go to the copy only: the home goes on asking for it, and nobody moves it home.
    (copy,) = copies
    for _ in range(40):
        ring.beat()
        for _ in range(5):
            ring.books[copy].note_lent(hot, ring.now)
        (ask,) = ring.books[home].record(ring.members[home], ring.now, ring.now).copies
        assert (ask.kind, ask.takers) == (CopyKind.REPLICA, (copy,))
        assert ring.books[copy].record(ring.members[copy], ring.now, ring.now).copies == ()
    # Then nobody reads it any more.
    for _ in range(100):
        ring.beat()
    assert ring.books[home].record(ring.members[home], ring.now, ring.now).copies == ()


def test_a_node_that_has_just_come_is_asked_for_little() -> None:
    ring = Ring("old")
    ring.beat()
    held = [chain(number) for number in range(MAX_COPIES)]
    ring.chains[WorkerId("old")].update(held)
    ring.join("new", since_unix_s=ring.now)
    ring.beat(0.0)
    for what in held:
        ring.books[WorkerId("old")].note_lent(what, ring.now)
    ring.beat()
    early = len(ring.chains[WorkerId("new")])
    assert early < len(held) // 4
    for _ in range(60):
        for what in held:
            ring.books[WorkerId("old")].note_lent(what, ring.now)
        ring.beat()
    assert len(ring.chains[WorkerId("new")]) > len(held) // 4


def test_only_a_few_are_taken_at_a_time_and_asks_fit_a_record() -> None:
    ring = Ring("s0", "s1")
    ring.beat()
    held = [chain(number, num_blocks=300) for number in range(100)]
    leaver = ring.books[WorkerId("s0")]
    for what in held:
        leaver.note_kept(what)
        leaver.validate()
    ring.leave("s0")
    # What was kept last is asked for first.
    record = ring.record("s0")
    assert [copy.hashes for copy in record.copies] == held[: -1 - MAX_COPY_BLOCKS // 300 : -1]
    taker = ring.books[WorkerId("s1")]
    taker.on_view(RingView.of([record]), ring.now)
    takes = taker.takes(ring.now)
    assert len(takes) == CONFIG.max_takes
    # However long they take.
    assert taker.takes(ring.now + 100.0) == []
    taker.on_taken(takes[0], ring.now, refusal=None)
    assert len(taker.takes(ring.now)) == 1
    taker.validate()


def test_what_was_refused_is_offered_again_at_the_next_view() -> None:
    ring = Ring("s0", "s1")
    ring.beat()
    leaver, taker = ring.books[WorkerId("s0")], ring.books[WorkerId("s1")]
    lacks = ring.lacks[WorkerId("s1")]
    held = [chain(number) for number in range(6)]
    for what in held:
        leaver.note_kept(what)
    ring.leave("s0")
    view = RingView.of([ring.record("s0")])
    taker.on_view(view, ring.now)
    first, *others = taker.takes(ring.now)
    lacks.add(first.hashes)
    assert not taker.on_taken(first, ring.now, refusal=PutRefusal.TOO_MANY_PUTS)
    taker.validate()
    # Others may be let in: these come before it.
    others += taker.takes(ring.now)
    for take in others:
        taker.on_taken(take, ring.now, refusal=None)
    others += taker.takes(ring.now)
    assert sorted(take.hashes for take in (first, *others)) == sorted(held)
    assert taker.takes(ring.now) == []
    taker.validate()
    taker.on_taken(others[-1], ring.now, refusal=None)
    taker.on_view(view, ring.now)
    assert taker.takes(ring.now + 1.0) == [first]
    taker.validate()
    # What was taken is not.
    lacks.clear()
    assert taker.on_taken(first, ring.now, refusal=None)
    taker.on_view(view, ring.now)
    assert taker.takes(ring.now + 2.0) == []


def test_what_a_leaving_node_asks_for_is_taken_until_all_of_it_lies_there() -> None:
    ring = Ring("s0", "s1")
    ring.beat()
    leaver, taker = ring.books[WorkerId("s0")], ring.books[WorkerId("s1")]
    lacks = ring.lacks[WorkerId("s1")]
    member = ring.members[WorkerId("s0")]

    def takes(*, is_draining: bool, asks: bool = True) -> list[TakeChain]:
        ring.now += 0.1
        record = leaver.record(replace(member, is_draining=is_draining), ring.now, ring.now)
        taker.on_view(RingView.of([record if asks else StoreRecord(member=member)]), ring.now)
        taken = taker.takes(ring.now)
        taker.validate()
        return taken

    # It is taken as whatever is read at the wrong place, and comes only in part.
    what = next(what for what in map(chain, range(100)) if ring.home(what) == "s1")
    leaver.note_lent(what, ring.now)
    (moved,) = takes(is_draining=False)
    lacks.add(what)
    assert not taker.on_taken(moved, ring.now, refusal=None)
    assert takes(is_draining=False) == []
    # For its source leaves there is no later.
    leaver.leave()
    for num_left in (2, 1, 0):
        (take,) = takes(is_draining=True)
        assert take == replace(moved, is_source_leaving=True)
        if not num_left:
            lacks.clear()
        assert taker.on_taken(take, ring.now, refusal=None) == (not num_left)
        assert taker.takes(ring.now) == []
    for _ in range(3):
        assert takes(is_draining=True) == []
    # What lies there is forgotten with the ask.
    assert takes(is_draining=True, asks=False) == []
    assert takes(is_draining=True) == [take]


def test_who_has_what_a_leaving_node_asks_for_tells_it() -> None:
    ring = Ring("s0", "s1", "s2")
    ring.beat()
    leaver = ring.books[WorkerId("s0")]
    what = chain(1)
    leaver.note_kept(what)
    ring.leave("s0")
    asking = ring.record("s0")
    ((to_take,),) = [copy.takers for copy in asking.copies]
    for store_id in (*sorted(ring.books.keys() - {WorkerId("s0"), to_take}), to_take):
        assert (leaver.num_asked, leaver.is_left(ring.now)) == (1, False)
        taker, member = ring.books[to_take], ring.members[store_id]
        taker.on_view(RingView.of([asking]), ring.now)
        for take in taker.takes(ring.now):
            taker.on_taken(take, ring.now, refusal=None)
        taker.validate()
        told = taker.record(ring.members[to_take], ring.now, ring.now)
        assert told.taken == (what[-1],)
        # Nobody says it for another.
        leaver.on_view(RingView.of([asking, replace(told, member=member)]), ring.now)
        leaver.validate()
    assert (leaver.num_asked, leaver.is_left(ring.now)) == (0, True)
    assert leaver.handed == set(what)
    taker.on_view(RingView.of([StoreRecord(member=asking.member)]), ring.now)
    assert taker.record(ring.members[to_take], ring.now, ring.now).taken == ()


def test_that_it_was_read_is_no_word_of_having_it() -> None:
    ring = Ring("s0", "s1")
    ring.beat()
    leaver = ring.books[WorkerId("s0")]
    what = chain(1)
    leaver.note_kept(what)
    ring.leave("s0")
    assert [copy.hashes for copy in ring.record("s0").copies] == [what]
    for reader in ("worker", "s1"):
        leaver.note_lent(what, ring.now, reader=WorkerId(reader))
        leaver.note_returned(WorkerId(reader), ring.now)
        assert [copy.hashes for copy in ring.record("s0").copies] == [what]
        leaver.validate()
    assert not leaver.is_left(ring.now)
    assert leaver.handed == set()


def test_what_comes_while_a_node_leaves_is_asked_for_too_and_what_is_read_is_not() -> None:
    ring = Ring("s0", "s1")
    ring.beat()
    leaver = ring.leave("s0")
    leaver.note_kept(chain(1))
    leaver.note_lent(chain(2), ring.now)
    assert [copy.hashes for copy in ring.record("s0").copies] == [chain(1)]


def test_others_that_are_away_for_a_moment_are_not_forgotten() -> None:
    ring = Ring("s0", "s1")
    ring.beat()
    book = ring.books[WorkerId("s0")]
    book.on_view(RingView.of([StoreRecord(member=ring.members[WorkerId("s0")])]), ring.now)
    book.note_kept(chain(1))
    ring.beat()
    ring.leave("s0")
    assert [copy.hashes for copy in ring.record("s0").copies] == [chain(1)]


def test_a_restart_moves_nothing() -> None:
    ring = Ring("s0", "s1")
    ring.beat()
    old = StoreRecord(member=ring.members[WorkerId("s1")])
    ring.members[WorkerId("s1")] = StoreMember(
        key=WorkerKey(WorkerId("s1"), Incarnation("2")), address="s1", since_unix_s=ring.now
    )
    for with_old in (True, False):
        view = RingView.of(StoreRecord(member=member) for member in ring.members.values())
        if with_old:
            view = RingView.of([*view.records, old])
            (ring.members[WorkerId("s1")],) = view.members[1:]
        for store_id, book in ring.books.items():
            book.on_view(view, ring.now)
            for number in range(100):
                if ring.home(chain(number)) == store_id:
                    book.note_lent(chain(number), ring.now)
            assert book.record(ring.members[store_id], ring.now, ring.now).copies == ()
        ring.now += 5.0


def test_a_copy_is_on_the_account_that_its_chain_is_kept_on() -> None:
    ring = Ring("s0", "s1")
    ring.beat()
    for kind in (CopyKind.REPLICA, CopyKind.MOVE):
        for number in range(6):
            for store_id in ring.books:
                is_home = ring.home(chain(number)) == store_id
                for _ in range(60 if kind is CopyKind.REPLICA else 1):
                    if is_home == (kind is CopyKind.REPLICA):
                        ring.books[store_id].note_lent(chain(number), ring.now)
    view = RingView.of(
        book.record(ring.members[store_id], ring.now, ring.now)
        for store_id, book in ring.books.items()
    )
    copies = [copy for record in view.records for copy in record.copies]
    assert {copy.kind for copy in copies} == set(CopyKind)
    for copy in copies:
        assert copy.tenant == tenant_of(copy.hashes[-1])
    for book in ring.books.values():
        book.on_view(view, ring.now)
        for take in book.takes(ring.now):
            assert take.tenant == tenant_of(take.hashes[-1])


def test_without_neighbours_nothing_is_remembered() -> None:
    ring = Ring("s0")
    ring.beat()
    book = ring.books[WorkerId("s0")]
    for number in range(20):
        book.note_kept(chain(number))
        book.note_lent(chain(number), ring.now)
    ring.join("s1", since_unix_s=0.0)
    ring.beat()
    for _ in range(10):
        book.note_lent(chain(50), ring.now)
    record = book.record(ring.members[WorkerId("s0")], ring.now, ring.now)
    assert {home_key(chain(50))} == {reads.home_hash for reads in record.reads}
    book.leave()
    record = book.record(ring.members[WorkerId("s0")], ring.now, ring.now)
    assert [copy.hashes for copy in record.copies] == [chain(50)]


def test_a_record_takes_no_more_chains_than_it_holds() -> None:
    """Of each chain that is asked for one block is looked up: so it is known how many were built."""
    looked_up: list[BlockHash] = []

    def look_up(block_hash: BlockHash) -> str:
        looked_up.append(block_hash)
        return ""

    ring = Ring("s0", "s1")
    members = RingView.of(StoreRecord(member=member) for member in ring.members.values())
    for is_leaving in (False, True):
        for num_blocks, most in ((3, MAX_COPIES), (200, MAX_COPY_BLOCKS // 200)):
            book = CopyBook(
                WorkerId("s0"), CONFIG, tenant_of=look_up, num_here=len, is_on_disk=in_memory
            )
            book.on_view(members, ring.now)
            for number in range(300):
                book.note_lent(chain(number, num_blocks=num_blocks), ring.now)
            if is_leaving:
                book.leave()
            looked_up.clear()
            record = book.record(ring.members[WorkerId("s0")], ring.now, ring.now)
            assert len(looked_up) == len(record.copies) == most
            book.validate()


def test_without_a_view_nothing_is_asked_and_nothing_is_taken() -> None:
    book = make_book("s0")
    member = StoreMember(
        key=WorkerKey(WorkerId("s0"), Incarnation("1")), address="s0", since_unix_s=0.0
    )
    for _ in range(100):
        book.note_lent(chain(1), 0.0)
    assert book.record(member, 0.0, 0.0).copies == ()
    assert book.takes(0.0) == []


class Taking:
    """s1, of which a node that leaves asks this: what it tells of it, and the next try."""

    def __init__(self, *chains: Chain) -> None:
        self.ring = Ring("s0", "s1")
        self.ring.beat()
        self.num_here = dict.fromkeys(chains, 0)
        self.book = CopyBook(
            WorkerId("s1"),
            CONFIG,
            tenant_of=tenant_of,
            num_here=lambda what: self.num_here.get(what, len(what)),
            is_on_disk=in_memory,
        )
        leaver = self.ring.leave("s0")
        for what in reversed(chains):
            leaver.note_kept(what)
        self.asking = self.ring.record("s0")

    def told(self) -> StoreRecord:
        return self.book.record(self.ring.members[WorkerId("s1")], self.ring.now, self.ring.now)

    def takes(self, seconds: float = 0.0) -> list[TakeChain]:
        """What is begun when the next view comes."""
        self.ring.now += seconds
        self.book.on_view(RingView.of([self.asking]), self.ring.now)
        self.book.validate()
        return self.book.takes(self.ring.now)

    def end(self, take: TakeChain, *, num_here: int = 0, refusal: PutRefusal | None = None) -> bool:
        self.num_here[take.hashes] = num_here
        is_waited_for = self.book.on_taken(take, self.ring.now, refusal=refusal)
        self.book.validate()
        return is_waited_for


@pytest.mark.parametrize("refusal", [None, PutRefusal.NO_ROOM, PutRefusal.OVER_QUOTA])
def test_what_does_not_come_is_declined_after_a_while(refusal: PutRefusal | None) -> None:
    what = chain(1, num_blocks=5)
    taking = Taking(what)
    (take,) = taking.takes()
    assert not taking.end(take, refusal=refusal)
    (take,) = taking.takes(CONFIG.vain_s - 0.1)
    # A part of it has come: the next one is read at once,
    assert not taking.end(take, num_here=3)
    (take,) = taking.book.takes(taking.ring.now)
    # and nothing more comes for a whole while, however often it is tried.
    for seconds in (0.0, CONFIG.vain_s - 0.1):
        assert not taking.end(take, num_here=3 if seconds else 2, refusal=refusal)
        assert taking.book.takes(taking.ring.now) == []
        (take,) = taking.takes(CONFIG.vain_s - 0.1 if not seconds else 0.1)
    assert taking.told().declined == ()
    assert taking.end(take, num_here=3, refusal=refusal)
    assert (taking.told().declined, taking.told().taken) == ((what[-1],), ())
    assert taking.takes(10.0) == []
    # A worker has brought it.
    taking.num_here[what] = 5
    assert taking.takes() == []
    assert (taking.told().declined, taking.told().taken) == ((), (what[-1],))


def test_what_waits_for_others_is_not_declined() -> None:
    stem = chain(1, num_blocks=2)
    first, second = (*stem, *chain(2)), (*stem, *chain(3))
    taking = Taking(first, second)
    takes = {take.hashes: take for take in taking.takes()}
    # It is not wanted, since the other one brings what they have in common.
    assert not taking.end(takes[second])
    for _ in range(5):
        (take,) = taking.takes(CONFIG.vain_s)
        assert not taking.end(take)
    assert not taking.end(takes[first], num_here=2)
    # Or there are too many of workers.
    for _ in range(5):
        for take in taking.takes(CONFIG.vain_s):
            assert not taking.end(
                take, num_here=2 if take.hashes == first else 0, refusal=PutRefusal.TOO_MANY_PUTS
            )
    assert taking.told().declined == ()


def test_when_the_first_has_gone_again_the_others_of_its_account_are_declined() -> None:
    one, other = (
        [what for what in map(chain, range(30)) if tenant_of(what[-1]) == f"tenant-{number}"]
        for number in range(2)
    )
    taking = Taking(*one[:6], other[0])
    takes = taking.takes()
    assert [take.hashes for take in takes] == one[:4]
    for take in takes:
        assert taking.end(take, num_here=3)
    taking.num_here[one[0]] = 2
    assert [take.hashes for take in taking.takes()] == [other[0]]
    assert set(taking.told().declined) == {one[4][-1], one[5][-1]}
    assert set(taking.told().taken) == {what[-1] for what in one[:4]}
