"""A node that leaves, and others with cores of their own: what is handed over, and that it ends.

Takers are real cores of any size, with blocks that are pinned; the node that leaves has all that it asks for.
What a taker is lent it reads at once.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from hypothesis import example, given
from hypothesis import strategies as st

from moonpool.core.protocol import FetchEnded, FetchReserved
from moonpool.ids import BlockHash, Incarnation, WorkerId, WorkerKey
from moonpool.tiering.copies import CopyBook, CopyConfig, TakeChain
from moonpool.tiering.homes import home_key, homes_of
from moonpool.tiering.protocol import Pin, PinKind, Put, PutAnswered, PutRefusal
from moonpool.tiering.store_core import StoreCore
from moonpool.tiering.store_record import RingView, StoreMember
from support.store import attempt, make_config

CONFIG = CopyConfig(block_bytes=1, asked_s=5.0, vain_s=2.0)
#: Of records, while a node leaves.
BEAT_S = 0.25
LEAVER = WorkerId("leaver")
Chain = tuple[BlockHash, ...]


def chain(number: int, num_blocks: int) -> Chain:
    return tuple(
        BlockHash(number.to_bytes(16, "little") + index.to_bytes(16, "little"))
        for index in range(num_blocks)
    )


class Taker:
    """A node that stays."""

    def __init__(self, store_id: WorkerId, num_blocks: int, num_pinned: int = 0) -> None:
        self.core = StoreCore(make_config(num_blocks, max_hard_pin_share=1.0, is_checked=False))
        self.book = CopyBook(
            store_id,
            CONFIG,
            tenant_of=self.core.tenant_of,
            num_here=self.core.num_here,
            is_on_disk=self.core.is_on_disk,
        )
        self.num_puts = 0
        self.num_moved_blocks = 0
        pinned = chain(1_000_000, num_pinned)
        if pinned:
            self.put(pinned, 0.0)
            self.core.handle(Pin(pin_id=1, kind=PinKind.HARD, hashes=pinned, ttl_s=1e9), 0.0)
            self.core.take_frame()

    def put(self, hashes: Chain, now: float) -> tuple[PutRefusal | None, FetchReserved | None]:
        """Offer a chain to this node's core, which reads what it wants of it."""
        self.num_puts += 1
        attempt_id = attempt(self.num_puts)
        self.core.handle(Put(attempt_id=attempt_id, tenant="", hashes=hashes), now)
        answer, *reserved = self.core.take_frame().replies
        assert isinstance(answer, PutAnswered), answer
        if not reserved:
            return answer.refusal, None
        (reading,) = reserved
        assert isinstance(reading, FetchReserved), reading
        self.core.handle(FetchEnded(attempt_id=attempt_id, num_tokens=reading.num_tokens), now)
        self.core.take_frame()
        self.num_moved_blocks += answer.num_wanted_blocks
        return answer.refusal, reading

    def has(self, hashes: Chain) -> bool:
        return self.core.num_here(hashes) == len(hashes)


class Ring:
    """A node that leaves with these chains, the latest first, and the others."""

    def __init__(self, chains: Sequence[Chain], takers: Sequence[tuple[int, int]]) -> None:
        self.now = 1_000.0
        self.chains = chains
        self.takers = {
            (store_id := WorkerId(f"s{number}")): Taker(store_id, num_blocks, num_pinned)
            for number, (num_blocks, num_pinned) in enumerate(takers)
        }
        self.leaver = CopyBook(
            LEAVER, CONFIG, tenant_of=lambda _: "", num_here=len, is_on_disk=lambda _: False
        )
        self.books = {LEAVER: self.leaver} | {
            store_id: taker.book for store_id, taker in self.takers.items()
        }
        self.members = {
            store_id: StoreMember(
                key=WorkerKey(store_id, Incarnation("1")), address=store_id, since_unix_s=0.0
            )
            for store_id in self.books
        }
        self.hear()
        for what in reversed(chains):
            self.leaver.note_kept(what)
        self.leaver.leave()
        self.members[LEAVER] = replace(self.members[LEAVER], is_draining=True)

    def hear(self) -> None:
        view = RingView.of(
            book.record(self.members[store_id], self.now, self.now)
            for store_id, book in self.books.items()
        )
        for book in self.books.values():
            book.on_view(view, self.now)
            book.validate()

    def beat(self) -> None:
        """Everyone tells and hears, and takes what it is asked to take."""
        self.now += BEAT_S
        self.hear()
        for store_id, taker in self.takers.items():
            while takes := taker.book.takes(self.now):
                for take in takes:
                    self.take(store_id, taker, take)
                taker.book.validate()

    def take(self, store_id: WorkerId, taker: Taker, take: TakeChain) -> None:
        refusal, reading = taker.put(take.hashes, self.now)
        if reading is not None:
            self.leaver.note_lent(reading.hashes, self.now, reader=store_id)
            self.leaver.note_returned(store_id, self.now)
        taker.book.on_taken(take, self.now, refusal=refusal)

    def run(self) -> float:
        """Until the node has left: how long it took."""
        begun_at = self.now
        while not self.leaver.is_left(self.now):
            self.beat()
            assert self.now < begun_at + 120.0, "it does not end"
        for taker in self.takers.values():
            taker.core.validate()
        return self.now - begun_at

    def handed(self) -> list[Chain]:
        return [what for what in self.chains if self.leaver.handed >= set(what)]


@given(num_blocks=st.integers(1, 30), rooms=st.lists(st.integers(0, 30), min_size=1, max_size=4))
def test_a_chain_comes_to_the_first_of_its_homes_that_has_room_for_it(
    num_blocks: int, rooms: list[int]
) -> None:
    what = chain(1, num_blocks)
    ring = Ring([what], [(room + 10, 10) for room in rooms])
    seconds = ring.run()
    homes = homes_of(dict.fromkeys(ring.takers, 1.0), home_key(what), len(ring.takers))
    num_small = 0
    for home in homes:
        if rooms[int(home[1:])] >= num_blocks:
            assert ring.handed() == [what]
            assert ring.takers[home].has(what)
            break
        num_small += 1
    else:
        assert ring.handed() == []
    # Each of the others is tried for as long as its word takes.
    assert seconds <= num_small * (CONFIG.vain_s + 3 * BEAT_S) + 4 * BEAT_S


sizes = st.lists(st.sampled_from([1, 2, 5, 40, 100, 700, 4_000]), max_size=12)


@given(
    num_blocks=sizes,
    rooms=st.lists(st.sampled_from([1, 20, 50, 200, 1_000, 5_000]), min_size=1, max_size=3),
)
@example(num_blocks=[100, 100], rooms=[50])
@example(num_blocks=[4_000, *[200] * 10], rooms=[1_000])
def test_it_ends_whatever_there_is_room_for(num_blocks: list[int], rooms: list[int]) -> None:
    chains = [chain(number, size) for number, size in enumerate(num_blocks)]
    ring = Ring(chains, [(room, 0) for room in rooms])
    # A windowful after the other; what does not fit is tried by one after the other, all of a window together.
    num_windows = 1 + sum(num_blocks) // 4_096 * 2
    seconds = ring.run()
    assert seconds <= num_windows * len(rooms) * (CONFIG.vain_s + 3 * BEAT_S) + 4 * BEAT_S
    # Nobody reads over and over what it cannot keep.
    num_tries = CONFIG.vain_s / BEAT_S + 2
    for taker in ring.takers.values():
        assert taker.num_moved_blocks <= num_tries * sum(num_blocks)
    if sum(num_blocks) <= min(rooms):
        assert ring.handed() == chains


@given(num_chains=st.integers(1, 30), rooms=st.lists(st.integers(5, 60), min_size=1, max_size=3))
def test_what_is_worth_less_pushes_out_little_of_what_is_worth_more(
    num_chains: int, rooms: list[int]
) -> None:
    chains = [chain(number, 5) for number in range(num_chains)]
    ring = Ring(chains, [(room, 0) for room in rooms])
    ring.run()
    holders = Counter(what for what in chains for taker in ring.takers.values() if taker.has(what))
    # What is said to lie elsewhere does, but for what came there first.
    lost = [what for what in ring.handed() if not holders[what]]
    assert len(lost) <= CONFIG.max_takes * len(rooms)
    if 5 * num_chains <= sum(room // 5 * 5 for room in rooms) // len(rooms) and len(rooms) == 1:
        assert not lost
