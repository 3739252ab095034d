"""The holder's side of a prefix read: events in, the whole list of effects out."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest

from moonpool.core.protocol import LockPrefix, PrefixLocked, UnlockPrefix
from moonpool.handoff.config import FetchConfig
from moonpool.handoff.effects import (
    EndPrefixLease,
    SendCommand,
    SendOnPrefixLease,
    StagePrefix,
)
from moonpool.handoff.events import (
    CoreFrameReceived,
    HoldEvent,
    PrefixDelayed,
    PrefixLeaseClosed,
    PrefixOpenReceived,
)
from moonpool.handoff.fetch_holder import PrefixHolds
from moonpool.handoff.messages import (
    LeaseId,
    PrefixFailed,
    PrefixOpen,
    PrefixOpened,
    PrefixRefusal,
    PrefixStaging,
)
from moonpool.ids import (
    AttemptId,
    BlockHash,
    BlockId,
    Incarnation,
    RequestId,
    WorkerId,
    WorkerKey,
)

HOLDER = WorkerKey(WorkerId("h"), Incarnation("1"))
READER = WorkerKey(WorkerId("r"), Incarnation("1"))
A = AttemptId(RequestId("a"), 1)
HASHES = tuple(BlockHash(bytes([n]) * 32) for n in range(4))
OPEN = PrefixOpen(
    attempt_id=A,
    reader=READER,
    holder=HOLDER,
    namespace="n",
    secret_fingerprint="s",
    hashes=HASHES,
    first=1,
)


class Holder:
    """The machine, checked after every event; at most 3 locks, 2 for one reader."""

    def __init__(self) -> None:
        self.machine = PrefixHolds(
            key=HOLDER,
            namespace="n",
            secret_fingerprint="s",
            config=FetchConfig(max_locks=3, max_locks_per_reader=2),
        )
        self.now = 0.0

    def __call__(self, event: HoldEvent) -> list[object]:
        effects = self.machine.handle(event, self.now)
        self.machine.validate()
        return list(effects)

    def at(self, now: float) -> list[object]:
        self.now = now
        effects = self.machine.tick(now)
        self.machine.validate()
        return list(effects)

    def open(self, lease: int = 1, open_: PrefixOpen = OPEN) -> list[object]:
        return self(PrefixOpenReceived(lease_id=LeaseId(lease), open=open_))

    def locked(self, *blocks: int, lease: int = 1) -> list[object]:
        reply = PrefixLocked(read_id=lease, block_ids=tuple(map(BlockId, blocks)))
        return self(CoreFrameReceived(step=0, replies=(reply,)))

    def closed(self, lease: int = 1) -> list[object]:
        return self(PrefixLeaseClosed(lease_id=LeaseId(lease)))


def lock(lease: int = 1, reader: WorkerKey = READER) -> SendCommand:
    return SendCommand(command=LockPrefix(read_id=lease, hashes=HASHES, reader=reader))


def unlock(lease: int = 1) -> SendCommand:
    return SendCommand(command=UnlockPrefix(read_id=lease))


def told(*blocks: int) -> SendOnPrefixLease:
    message = PrefixOpened(attempt_id=A, block_ids=tuple(map(BlockId, blocks)))
    return SendOnPrefixLease(lease_id=LeaseId(1), message=message)


def failed(reason: PrefixRefusal, message: str, lease: int = 1) -> list[object]:
    words = PrefixFailed(attempt_id=A, reason=reason, message=message)
    return [
        SendOnPrefixLease(lease_id=LeaseId(lease), message=words),
        EndPrefixLease(lease_id=LeaseId(lease)),
    ]


@pytest.fixture
def h() -> Iterator[Holder]:
    holder = Holder()
    yield holder
    holder.machine.validate()


def test_the_life_of_a_lock(h: Holder) -> None:
    assert h.open() == [lock()]
    # The chain is locked from its start; the reader is told of what it wants.
    assert h.locked(7, 5, 9) == [told(5, 9)]
    assert not h.machine.is_quiet
    assert h.closed() == [unlock()]
    assert h.machine.is_quiet


def test_what_will_be_wanted_is_staged_and_nothing_is_locked(h: Holder) -> None:
    ahead = replace(OPEN, first=len(HASHES))
    assert h.open(open_=ahead) == [
        StagePrefix(hashes=HASHES),
        told(),
        EndPrefixLease(lease_id=LeaseId(1)),
    ]
    assert h.machine.is_quiet
    # Not for whoever may not read here.
    assert h.open(2, replace(ahead, namespace="other"))[0] != StagePrefix(hashes=HASHES)


def delayed(num_ready: int, num_blocks: int) -> PrefixDelayed:
    return PrefixDelayed(lease_id=LeaseId(1), num_ready_blocks=num_ready, num_blocks=num_blocks)


@pytest.mark.parametrize(
    ("num_ready", "num_blocks", "told_ready", "told_blocks"),
    [(3, 4, 2, 3), (1, 4, 0, 3), (0, 2, 0, 1)],
)
def test_a_reader_is_told_of_the_disk_that_its_blocks_come_from(
    h: Holder, num_ready: int, num_blocks: int, told_ready: int, told_blocks: int
) -> None:
    h.open()
    # Counted from the first block that it wants.
    staging = PrefixStaging(attempt_id=A, num_ready_blocks=told_ready, num_blocks=told_blocks)
    assert h(delayed(num_ready, num_blocks)) == [
        SendOnPrefixLease(lease_id=LeaseId(1), message=staging)
    ]
    assert h.locked(7, 5) == [told(5)]


def test_who_wants_nothing_of_what_is_loaded_is_told_nothing_of_a_disk(h: Holder) -> None:
    h.open()
    assert h(delayed(0, 1)) == []
    h.locked(7, 5)
    assert h(delayed(0, 4)) == []
    h.closed()
    assert h(delayed(0, 4)) == []


@pytest.mark.parametrize("blocks", [(), (7,)])
def test_nothing_that_is_wanted_is_held(h: Holder, blocks: tuple[int, ...]) -> None:
    h.open()
    assert h.locked(*blocks) == [told(), EndPrefixLease(lease_id=LeaseId(1)), unlock()]
    assert h.machine.is_quiet


def test_the_reader_goes_before_the_core_answers(h: Holder) -> None:
    h.open()
    assert h.closed() == [unlock()]
    assert h.locked(7, 5) == []
    assert h.closed() == []


@pytest.mark.parametrize(
    ("open_", "reason", "message"),
    [
        (
            replace(OPEN, holder=READER),
            PrefixRefusal.WRONG_INCARNATION,
            "This is h@1, not r@1.",
        ),
        (
            replace(OPEN, secret_fingerprint="t", namespace="m"),
            PrefixRefusal.WRONG_SECRET,
            "r@1 has another cluster secret (fingerprint t != s).",
        ),
        (
            replace(OPEN, namespace="m"),
            PrefixRefusal.WRONG_NAMESPACE,
            "r@1 and h@1 do not compute the same KV.",
        ),
    ],
)
def test_who_may_not_read_is_told_why(
    h: Holder, open_: PrefixOpen, reason: PrefixRefusal, message: str
) -> None:
    assert h.open(open_=open_) == failed(reason, message)
    assert h.machine.is_quiet
    # The lease was ended here: its end is not told, and would be nothing.
    assert h.closed() == []


def test_locks_are_bounded_for_a_reader_and_in_all(h: Holder) -> None:
    other = WorkerKey(WorkerId("o"), Incarnation("1"))
    third = WorkerKey(WorkerId("p"), Incarnation("1"))
    assert h.open(1) == [lock(1)]
    assert h.open(2) == [lock(2)]
    assert h.open(3) == failed(
        PrefixRefusal.TOO_MANY_LOCKS, "2 prefixes are locked here for r@1.", lease=3
    )
    assert h.open(4, replace(OPEN, reader=other)) == [lock(4, other)]
    assert h.open(5, replace(OPEN, reader=third)) == failed(
        PrefixRefusal.TOO_MANY_LOCKS, "3 prefixes are locked here.", lease=5
    )
    h.closed(1)
    assert h.open(6) == [lock(6)]


def test_the_core_does_not_answer(h: Holder) -> None:
    h.open()
    assert h.machine.next_wakeup() == 2.0
    assert h.at(1.9) == []
    words = "The engine did not answer in 2 s."
    assert h.at(2.0) == [*failed(PrefixRefusal.BUSY, words), unlock()]
    assert h.locked(7, 5) == []
    assert h.machine.is_quiet


def test_a_reader_has_its_time(h: Holder) -> None:
    h.open()
    h.now = 1.0
    h.locked(7, 5)
    assert h.machine.next_wakeup() == 31.0
    assert h.at(31.0) == [*failed(PrefixRefusal.EXPIRED, "A reader has 30 s."), unlock()]
    assert h.machine.is_quiet


def test_a_fork_is_independent(h: Holder) -> None:
    h.open()
    fork = h.machine.fork()
    assert fork.key() == h.machine.key()
    h.closed()
    assert fork.key() != h.machine.key()
    fork.validate()
