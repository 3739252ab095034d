"""A node that leaves, and others with cores of their own: what is handed over, and that it ends.

All nodes have cores of any size. What a taker is lent it reads at once, and a disk brings at once what it is
asked for.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace

from hypothesis import example, given, settings
from hypothesis import strategies as st

from moonpool.core.protocol import (
    FetchEnded,
    FetchReserved,
    LockPrefix,
    PrefixLocked,
    UnlockPrefix,
)
from moonpool.ids import BlockHash, Incarnation, WorkerId, WorkerKey
from moonpool.tiering.copies import CopyBook, CopyConfig, TakeChain
from moonpool.tiering.homes import home_key, homes_of
from moonpool.tiering.protocol import Pin, PinKind, Put, PutAnswered, PutRefusal
from moonpool.tiering.store_core import StoreCore
from moonpool.tiering.store_record import RingView, StoreMember
from support.store import BLOCK_SIZE, attempt, found, loaded, make_config

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


class Node:
    """A store's book and its core."""

    def __init__(self, store_id: WorkerId, num_blocks: int, *, has_disk: bool = False) -> None:
        config = {"has_disk": has_disk, "max_hard_pin_share": 1.0, "is_checked": False}
        self.core = StoreCore(make_config(num_blocks, **config))
        self.book = CopyBook(
            store_id,
            CONFIG,
            tenant_of=self.core.tenant_of,
            num_here=self.core.num_here,
            is_on_disk=self.core.is_on_disk,
        )
        self.num_moved_blocks = 0
        self._num_begun = 0

    def pin(self, hashes: Chain) -> None:
        """Put it here, and let nothing take its room."""
        self.put(hashes, 0.0, lambda hashes: len(hashes))
        self.core.handle(Pin(pin_id=1, kind=PinKind.HARD, hashes=hashes, ttl_s=1e9), 0.0)
        self.core.take_frame()

    def put(self, hashes: Chain, now: float, lend: Callable[[Chain], int]) -> PutRefusal | None:
        """Offer a chain, whose reading ends with what is lent of it."""
        self._num_begun += 1
        attempt_id = attempt(self._num_begun)
        self.core.handle(Put(attempt_id=attempt_id, tenant="", hashes=hashes), now)
        answer, *reserved = self.core.take_frame().replies
        assert isinstance(answer, PutAnswered), answer
        if reserved:
            (reading,) = reserved
            assert isinstance(reading, FetchReserved), reading
            num_tokens = lend(reading.hashes) * BLOCK_SIZE
            self.core.handle(FetchEnded(attempt_id=attempt_id, num_tokens=num_tokens), now)
            self.core.take_frame()
        self.num_moved_blocks += answer.num_wanted_blocks
        return answer.refusal

    def lend(self, hashes: Chain, now: float) -> int:
        """How many leading blocks of it a reader is lent, for a moment."""
        self._num_begun += 1
        read_id = self._num_begun
        self.core.handle(LockPrefix(read_id=read_id, hashes=hashes), now)
        while True:
            frame = self.core.take_frame()
            for work in frame.disk_work:
                self.core.handle(loaded(work), now)
            locked = [reply for reply in frame.replies if isinstance(reply, PrefixLocked)]
            if locked:
                break
            assert frame.disk_work, frame
        (reply,) = locked
        self.core.handle(UnlockPrefix(read_id=read_id), now)
        self.core.take_frame()
        return len(reply.block_ids)

    def has(self, hashes: Chain) -> bool:
        return self.core.num_here(hashes) == len(hashes)


class Ring:
    """A node that leaves with these chains, the latest first, and the others.

    Args:
        rooms: Blocks of each of the others.
        arena: Of the node that leaves, which has all chains on its disk; None: it has them in memory.
    """

    def __init__(
        self, chains: Sequence[Chain], rooms: Sequence[int], *, arena: int | None = None
    ) -> None:
        self.now = 1_000.0
        self.chains = chains
        self.takers = {
            (store_id := WorkerId(f"s{number}")): Node(store_id, room)
            for number, room in enumerate(rooms)
        }
        num_blocks = sum(map(len, chains)) + 1 if arena is None else arena
        self.leaver = Node(LEAVER, num_blocks, has_disk=arena is not None)
        self.nodes = {LEAVER: self.leaver} | self.takers
        self.members = {
            store_id: StoreMember(
                key=WorkerKey(store_id, Incarnation("1")), address=store_id, since_unix_s=0.0
            )
            for store_id in self.nodes
        }
        self.hear()
        for what in reversed(chains):
            if arena is None:
                self.leaver.put(what, self.now, lambda hashes: len(hashes))
            else:
                self.leaver.core.handle(found(what), self.now)
            self.leaver.book.note_kept(what)
        self.leaver.book.leave()
        self.members[LEAVER] = replace(self.members[LEAVER], is_draining=True)

    def hear(self) -> None:
        view = RingView.of(
            node.book.record(self.members[store_id], self.now, self.now)
            for store_id, node in self.nodes.items()
        )
        for node in self.nodes.values():
            node.book.on_view(view, self.now)
            node.book.validate()

    def beat(self) -> None:
        """Everyone tells and hears, and takes what it is asked to take."""
        self.now += BEAT_S
        self.hear()
        for store_id, taker in self.takers.items():
            while takes := taker.book.takes(self.now):
                for take in takes:
                    self.take(store_id, taker, take)
                taker.book.validate()

    def take(self, store_id: WorkerId, taker: Node, take: TakeChain) -> None:
        def lend(hashes: Chain) -> int:
            num_lent = self.leaver.lend(hashes, self.now)
            self.leaver.book.note_lent(hashes[:num_lent], self.now, reader=store_id)
            self.leaver.book.note_returned(store_id, self.now)
            return num_lent

        refusal = taker.put(take.hashes, self.now, lend)
        taker.book.on_taken(take, self.now, refusal=refusal)

    def run(self) -> float:
        """Until the node has left: how long it took."""
        begun_at = self.now
        while not self.leaver.book.is_left(self.now):
            self.beat()
            assert self.now < begun_at + 120.0, "it does not end"
        for node in self.nodes.values():
            node.core.validate()
        return self.now - begun_at

    def handed(self) -> list[Chain]:
        return [what for what in self.chains if self.leaver.book.handed >= set(what)]


@given(num_blocks=st.integers(1, 30), rooms=st.lists(st.integers(0, 30), min_size=1, max_size=4))
def test_a_chain_comes_to_the_first_of_its_homes_that_has_room_for_it(
    num_blocks: int, rooms: list[int]
) -> None:
    what = chain(1, num_blocks)
    ring = Ring([what], [room + 10 for room in rooms])
    for taker in ring.takers.values():
        taker.pin(chain(1_000_000, 10))
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


sizes = st.lists(st.sampled_from([1, 5, 40, 100, 700, 4_000]), max_size=8)


@settings(max_examples=30)
@given(
    num_blocks=sizes,
    rooms=st.lists(st.sampled_from([1, 20, 50, 200, 1_000, 5_000]), min_size=1, max_size=3),
)
@example(num_blocks=[100, 100], rooms=[50])
@example(num_blocks=[4_000, *[200] * 5], rooms=[1_000])
def test_it_ends_whatever_there_is_room_for(num_blocks: list[int], rooms: list[int]) -> None:
    chains = [chain(number, size) for number, size in enumerate(num_blocks)]
    ring = Ring(chains, rooms)
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
    ring = Ring(chains, rooms)
    ring.run()
    holders = Counter(what for what in chains for taker in ring.takers.values() if taker.has(what))
    # What is said to lie elsewhere does, but for what came there first.
    lost = [what for what in ring.handed() if not holders[what]]
    assert len(lost) <= CONFIG.max_takes * len(rooms)
    if len(rooms) == 1 and 5 * num_chains <= rooms[0]:
        assert not lost


@settings(max_examples=40)
@given(
    num_blocks=st.lists(st.integers(1, 60), min_size=1, max_size=12),
    arena=st.integers(1, 60),
    num_takers=st.integers(1, 2),
)
def test_what_lies_on_disk_only_is_handed_over_as_far_as_it_can_be_lent(
    num_blocks: list[int], arena: int, num_takers: int
) -> None:
    chains = [chain(number, size) for number, size in enumerate(num_blocks)]
    ring = Ring(chains, [sum(num_blocks)] * num_takers, arena=arena)
    ring.run()
    # A reader is lent no more than the arena holds at a time.
    assert ring.handed() == [what for what in chains if len(what) <= arena]
    for what in chains:
        assert any(taker.has(what[:arena]) for taker in ring.takers.values())
