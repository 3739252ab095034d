"""What a node that leaves asks for: by whose word it is handed over, and when it is left."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from moonpool.ids import BlockHash, Incarnation, WorkerId, WorkerKey
from moonpool.tiering.handover import Handover
from moonpool.tiering.homes import home_key, home_of
from moonpool.tiering.store_record import (
    MAX_COPIES,
    MAX_COPY_BLOCKS,
    ChainCopy,
    CopyKind,
    RingView,
    StoreMember,
    StoreRecord,
)

ME, ONE, OTHER = WorkerId("s0"), WorkerId("s1"), WorkerId("s2")
ASKED_S, UNHEARD_S = 5.0, 10.0
Chain = tuple[BlockHash, ...]


def chain(number: int, num_blocks: int = 3) -> Chain:
    return tuple(
        BlockHash(number.to_bytes(16, "little") + index.to_bytes(16, "little"))
        for index in range(num_blocks)
    )


def chain_of(home: WorkerId, number: int = 0) -> Chain:
    """A chain, one of many, whose home of the two others this is."""
    homes = {ONE: 1.0, OTHER: 1.0}
    found = [what for what in map(chain, range(200)) if home_of(homes, home_key(what)) == home]
    return found[number]


def member(store_id: WorkerId, *, is_draining: bool = False) -> StoreMember:
    return StoreMember(
        key=WorkerKey(store_id, Incarnation("1")),
        address="h:1",
        since_unix_s=0.0,
        is_draining=is_draining,
    )


class Leaver:
    """A node that leaves, among ONE and OTHER."""

    def __init__(self) -> None:
        self.now = 100.0
        #: Leading blocks that lie here, if not all.
        self.num_here: dict[Chain, int] = {}
        self.on_disk: set[Chain] = set()
        self.weights = {ONE: 1.0, OTHER: 1.0}
        self.handover = Handover(
            asked_s=ASKED_S,
            unheard_s=UNHEARD_S,
            max_blocks=4_096,
            num_here=lambda hashes: self.num_here.get(hashes, len(hashes)),
            is_on_disk=self.on_disk.__contains__,
        )

    def ask(self) -> dict[Chain, tuple[WorkerId, ...]]:
        asked = self.handover.asks(self.weights, self.now)
        self.handover.validate()
        return {one.chain: one.takers for one in asked}

    def hear(
        self,
        *taken: Chain,
        declined: tuple[Chain, ...] = (),
        of: WorkerId = ONE,
        is_heard: bool = True,
    ) -> None:
        """A view: this node's own record as it is, if that was heard, and what another one says."""
        copies = tuple(
            ChainCopy(kind=CopyKind.MOVE, tenant="", hashes=what, takers=takers)
            for what, takers in self.ask().items()
        )
        own = StoreRecord(member=member(ME, is_draining=True), copies=copies if is_heard else ())
        told = StoreRecord(
            member=member(of),
            taken=tuple(what[-1] for what in taken),
            declined=tuple(what[-1] for what in declined),
        )
        self.handover.on_view(RingView.of([own, told]), ME, self.now)
        self.handover.validate()

    @property
    def is_over(self) -> bool:
        return self.handover.is_over(self.now)

    def handed(self) -> set[BlockHash]:
        return set(self.handover.handed)


@pytest.fixture
def leaver() -> Iterator[Leaver]:
    leaver = Leaver()
    yield leaver
    leaver.handover.validate()


def test_it_is_over_when_all_is_handed_over(leaver: Leaver) -> None:
    assert leaver.is_over
    first, second = chain_of(ONE), chain_of(ONE, 1)
    for what in (first, second):
        leaver.handover.note(what)
    assert not leaver.is_over
    leaver.hear()
    leaver.hear(first)
    assert (leaver.is_over, leaver.handed()) == (False, set(first))
    leaver.hear(second)
    assert (leaver.is_over, leaver.handed()) == (True, {*first, *second})


def test_time_runs_from_when_it_was_heard(leaver: Leaver) -> None:
    leaver.handover.note(chain_of(ONE))
    leaver.hear(is_heard=False)
    leaver.now += UNHEARD_S - 1.0
    leaver.hear()
    leaver.now += ASKED_S - 0.1
    assert not leaver.is_over
    leaver.hear()
    leaver.now += 0.2
    assert (leaver.is_over, leaver.handed()) == (True, set())


def test_a_directory_that_does_not_hear_is_not_waited_for_for_ever(leaver: Leaver) -> None:
    leaver.handover.note(chain_of(ONE))
    leaver.hear(is_heard=False)
    leaver.now += UNHEARD_S - 0.1
    assert not leaver.is_over
    leaver.now += 0.2
    assert leaver.is_over


def test_a_sign_of_a_taker_is_one_for_all_that_it_is_asked_for(leaver: Leaver) -> None:
    of_one = [chain_of(ONE, number) for number in range(4)]
    of_other = chain_of(OTHER)
    for what in (*of_one, of_other):
        leaver.handover.note(what)
    leaver.hear()
    # Each of these takes nearly all the time that there is.
    for sign in range(3):
        leaver.now += ASKED_S - 0.1
        if sign == 0:
            leaver.handover.on_lent(ONE, leaver.now)
        elif sign == 1:
            leaver.handover.on_returned(ONE, leaver.now)
        else:
            leaver.hear(of_one[0])
        assert not leaver.is_over
    assert leaver.ask().keys() == {*of_one[1:], of_other}
    # The other one never came, and gets what room there is.
    leaver.hear(*of_one[1:])
    assert (leaver.is_over, set(leaver.ask())) == (True, {of_other})
    leaver.hear(of_other, of=OTHER)
    assert leaver.handed() == {block_hash for what in (*of_one, of_other) for block_hash in what}


def test_nothing_is_given_up_while_its_taker_reads(leaver: Leaver) -> None:
    leaver.handover.note(chain_of(ONE))
    leaver.hear()
    leaver.handover.on_lent(ONE, leaver.now)
    leaver.now += 10 * ASKED_S
    assert not leaver.is_over
    leaver.handover.on_returned(ONE, leaver.now)
    leaver.now += ASKED_S
    assert leaver.is_over
    # Whoever read before anything was noted is no taker.
    leaver.handover.on_returned(ONE, leaver.now)


def test_what_lies_here_is_asked_for_and_nothing_twice(leaver: Leaver) -> None:
    whole, part, gone = chain(1), chain(2), chain(3)
    leaver.num_here = {part: 2, gone: 0}
    for what in (gone, part, part[:1], whole[:2], whole):
        leaver.handover.note(what)
    assert list(leaver.ask()) == [whole, part[:1], part[:2]]
    leaver.hear(part[:2], of=leaver.ask()[part[:2]][0])
    leaver.handover.note(part[:1])
    assert part[:2] not in leaver.ask()


def test_a_taker_stays_while_it_is_there(leaver: Leaver) -> None:
    what = chain_of(ONE)
    leaver.handover.note(what)
    leaver.hear()
    leaver.weights = {ONE: 1e-9, OTHER: 1.0}
    assert leaver.ask() == {what: (ONE,)}
    leaver.now += ASKED_S
    assert leaver.is_over
    # The next one has its own time.
    leaver.weights = {OTHER: 1.0}
    assert (leaver.ask(), leaver.is_over) == ({what: (OTHER,)}, False)
    leaver.now += ASKED_S
    assert leaver.is_over
    leaver.weights = {}
    assert (leaver.ask(), leaver.is_over) == ({what: ()}, True)


def test_what_nobody_comes_for_makes_room(leaver: Leaver) -> None:
    chains = [chain(number) for number in range(MAX_COPIES + 5)]
    for what in reversed(chains):
        leaver.handover.note(what)
    leaver.hear()
    assert list(leaver.ask()) == chains[:MAX_COPIES]
    leaver.now += ASKED_S
    assert list(leaver.ask()) == [*chains[MAX_COPIES:], *chains[: MAX_COPIES - 5]]
    leaver.hear()
    assert not leaver.is_over
    leaver.now += ASKED_S
    assert leaver.is_over


def test_what_loses_its_end_is_asked_for_as_far_as_it_lies_here(leaver: Leaver) -> None:
    what = chain_of(ONE)
    leaver.handover.note(what)
    leaver.hear()
    # Its taker has the others, and reads for the last one in vain.
    leaver.num_here[what] = 2
    assert leaver.ask() == {what[:2]: (ONE,)}
    leaver.hear(what[:2])
    assert (leaver.is_over, leaver.handed()) == (True, set(what[:2]))


def test_what_loses_its_end_makes_room(leaver: Leaver) -> None:
    small, large = chain(1, 1), chain(2, MAX_COPY_BLOCKS)
    leaver.handover.note(large)
    leaver.hear()
    leaver.handover.note(small)
    assert list(leaver.ask()) == [large]
    leaver.num_here[large] = MAX_COPY_BLOCKS - 1
    assert list(leaver.ask()) == [large[:-1], small]


def test_what_loses_its_end_gets_no_more_time(leaver: Leaver) -> None:
    what = chain_of(ONE)
    leaver.handover.note(what)
    leaver.hear()
    leaver.now += ASKED_S - 0.1
    leaver.num_here[what] = 2
    leaver.hear()
    assert not leaver.is_over
    leaver.now += 0.2
    assert leaver.is_over
    assert list(leaver.ask()) == [what[:2]]


def test_what_is_lost_is_asked_for_again_when_it_comes_again(leaver: Leaver) -> None:
    what = chain_of(ONE)
    leaver.handover.note(what)
    leaver.hear()
    leaver.num_here[what] = 0
    assert (leaver.ask(), leaver.is_over) == ({}, True)
    del leaver.num_here[what]
    leaver.handover.note(what)
    assert not leaver.is_over
    assert leaver.ask() == {what: (ONE,)}


def test_what_is_left_of_chains_that_begin_alike_is_asked_for_once(leaver: Leaver) -> None:
    stem = chain(1, 2)
    ends = [(*stem, *chain(number)) for number in range(2, 5)]
    for what in ends:
        leaver.handover.note(what)
    assert list(leaver.ask()) == ends[::-1]
    # Another one covers it,
    leaver.num_here[ends[0]] = 2
    assert list(leaver.ask()) == ends[:0:-1]
    # it is all that lies here of several,
    leaver.num_here[ends[1]] = leaver.num_here[ends[2]] = 2
    assert list(leaver.ask()) == [stem]
    # or it was handed over with another one.
    ((taker,),) = leaver.ask().values()
    whole = (*stem, *chain(5))
    leaver.handover.note(whole)
    leaver.hear(stem, of=taker)
    assert list(leaver.ask()) == [whole]
    leaver.num_here[whole] = 2
    assert (leaver.ask(), leaver.is_over) == ({}, True)


def test_what_is_declined_is_asked_of_the_next_one_and_then_left(leaver: Leaver) -> None:
    what = chain_of(ONE)
    leaver.handover.note(what)
    leaver.hear()
    # Nobody declines for another.
    leaver.hear(declined=(what,), of=OTHER)
    assert leaver.ask() == {what: (ONE,)}
    leaver.now += ASKED_S - 0.1
    leaver.hear(declined=(what,))
    leaver.now += 0.2
    assert (leaver.is_over, leaver.ask()) == (False, {what: (OTHER,)})
    # It has its own time, and is not asked twice.
    leaver.now += ASKED_S - 0.1
    leaver.hear(declined=(what,))
    assert (leaver.is_over, leaver.ask()) == (False, {what: (OTHER,)})
    leaver.hear(declined=(what,), of=OTHER)
    assert (leaver.ask(), leaver.is_over, leaver.handed()) == ({what: ()}, True, set())
    # Somebody new may have room for it.
    leaver.weights[WorkerId("s3")] = 1.0
    assert (leaver.ask(), leaver.is_over) == ({what: (WorkerId("s3"),)}, False)
    # Or one that had none by now.
    leaver.hear(what)
    assert (leaver.is_over, leaver.handed()) == (True, set(what))


def test_a_taker_that_declines_is_there_all_the_same(leaver: Leaver) -> None:
    large, small = chain_of(ONE), chain_of(ONE, 1)
    leaver.weights = {ONE: 1.0}
    leaver.handover.note(small)
    leaver.handover.note(large)
    leaver.hear()
    leaver.now += ASKED_S - 0.1
    leaver.hear(declined=(large,))
    assert leaver.ask() == {large: (), small: (ONE,)}
    leaver.now += ASKED_S - 0.1
    assert (leaver.is_over, list(leaver.ask())) == (False, [small, large])
    leaver.now += 0.2
    assert leaver.is_over


def test_what_all_decline_makes_room(leaver: Leaver) -> None:
    large, small = chain(1, MAX_COPY_BLOCKS), chain(2)
    leaver.handover.note(large)
    leaver.hear()
    leaver.handover.note(small)
    for _ in range(2):
        ((taker,),) = leaver.ask().values()
        leaver.hear(declined=(large,), of=taker)
    leaver.ask()
    assert list(leaver.ask()) == [small]


def test_who_declined_the_whole_of_a_chain_may_have_room_for_what_is_left_of_it(
    leaver: Leaver,
) -> None:
    what = chain_of(ONE)
    leaver.handover.note(what)
    leaver.hear()
    leaver.hear(declined=(what,))
    leaver.weights = {ONE: 1.0}
    assert leaver.ask() == {what: ()}
    leaver.num_here[what] = 2
    assert leaver.ask() == {what[:2]: (ONE,)}


def test_of_a_chain_that_no_record_holds_its_beginning_is_asked_for(leaver: Leaver) -> None:
    what = chain(1, MAX_COPY_BLOCKS + 10)
    leaver.handover.note(what)
    assert list(leaver.ask()) == [what[:MAX_COPY_BLOCKS]]


def test_what_lies_on_disk_is_asked_for_after_all_others(leaver: Leaver) -> None:
    first, second, third, last = (chain(number, MAX_COPY_BLOCKS // 4) for number in range(4))
    leaver.on_disk.update((first, third))
    for what in (first, second, third):
        leaver.handover.note(what)
    assert list(leaver.ask()) == [second, third, first]
    # There is room for one more.
    small, memory, disk = chain(4), chain(5, 5), chain(6, 5)
    leaver.on_disk.add(disk)
    for what in (small, memory, disk, last):
        leaver.handover.note(what)
    assert list(leaver.ask()) == [second, third, first, last]
    leaver.hear(last, of=leaver.ask()[last][0])
    assert list(leaver.ask()) == [second, third, first, memory, small, disk]
    for what, (taker,) in leaver.ask().items():
        assert not leaver.is_over
        leaver.hear(what, of=taker)
    assert leaver.is_over


def test_what_was_on_disk_and_has_gone_before_its_turn_is_passed_over(leaver: Leaver) -> None:
    large, gone = chain(1, MAX_COPY_BLOCKS), chain(2)
    leaver.on_disk.add(gone)
    leaver.handover.note(large)
    leaver.ask()
    leaver.handover.note(gone)
    assert list(leaver.ask()) == [large]
    leaver.num_here[gone] = 0
    ((taker,),) = leaver.ask().values()
    leaver.hear(large, of=taker)
    assert (leaver.ask(), leaver.is_over) == ({}, True)
