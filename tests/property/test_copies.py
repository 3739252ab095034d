"""Copies between store nodes: a ring of naive stores that beat, read, join and leave."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from moonpool.ids import BlockHash, Incarnation, WorkerId, WorkerKey
from moonpool.tiering.copies import CopyBook, CopyConfig, TakeChain
from moonpool.tiering.homes import home_key, homes_of
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
        for name in names:
            self.join(name, since_unix_s=0.0)

    def join(self, name: str, *, since_unix_s: float) -> None:
        store_id = WorkerId(name)
        self.members[store_id] = StoreMember(
            key=WorkerKey(store_id, Incarnation("1")), address=name, since_unix_s=since_unix_s
        )
        self.books[store_id] = CopyBook(store_id, CONFIG)
        self.chains[store_id] = set()

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
            book.on_view(view)
            while takes := book.takes(self.now):
                for take in takes:
                    assert take.source.worker_id != store_id
                    if take.hashes in self.chains[take.source.worker_id]:
                        self.chains[store_id].add(take.hashes)
                        self.books[take.source.worker_id].note_lent(take.hashes, self.now)
                    book.on_taken()
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
    ring.books[leaver].leave()
    num_beats = 0
    while not ring.books[leaver].is_left(ring.now):
        ring.beat()
        num_beats += 1
        assert num_beats < 60
    del ring.members[leaver]
    for what in held:
        assert ring.home(what) in ring.holders(what)
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
    for what in (*held, chain(999, num_blocks=MAX_COPY_BLOCKS + 1)):
        leaver.note_kept(what)
        leaver.validate()
    leaver.leave()
    # What was kept last is asked for first.
    record = leaver.record(ring.members[WorkerId("s0")], ring.now, ring.now)
    assert [copy.hashes for copy in record.copies] == held[: -1 - MAX_COPY_BLOCKS // 300 : -1]
    taker = ring.books[WorkerId("s1")]
    taker.on_view(RingView.of([record]))
    assert len(taker.takes(ring.now)) == CONFIG.max_takes
    assert taker.takes(ring.now) == []
    taker.on_taken()
    assert len(taker.takes(ring.now)) == 1


def test_what_was_kept_long_ago_is_forgotten() -> None:
    members = Ring("s0", "s1").members
    view = RingView.of(StoreRecord(member=member) for member in members.values())
    for too_long, kept in ((False, [chain(2), chain(4), chain(3)]), (True, [])):
        book = CopyBook(WorkerId("s0"), replace(CONFIG, max_recent_blocks=10))
        book.on_view(view)
        for number in (1, 2, 3, 4, 2):
            book.note_kept(chain(number))
            book.validate()
        if too_long:
            book.note_kept(chain(9, num_blocks=11))
        book.leave()
        book.validate()
        record = book.record(members[WorkerId("s0")], 0.0, 1_000.0)
        assert [copy.hashes for copy in record.copies] == kept


def test_without_a_view_nothing_is_asked_and_nothing_is_taken() -> None:
    book = CopyBook(WorkerId("s0"), CONFIG)
    member = StoreMember(
        key=WorkerKey(WorkerId("s0"), Incarnation("1")), address="s0", since_unix_s=0.0
    )
    for _ in range(100):
        book.note_lent(chain(1), 0.0)
    assert book.record(member, 0.0, 0.0).copies == ()
    assert book.takes(0.0) == []
