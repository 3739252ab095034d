"""The reader's side of a prefix read: events in, the whole list of effects out."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest

from moonpool.core.protocol import (
    BlocksFetched,
    FetchEnded,
    FetchReserved,
    HandBackReason,
    HandedBack,
    PrefillStarted,
    ReadEnded,
    Refused,
    RefuseReason,
    Reply,
    Revoked,
)
from moonpool.handoff.config import FetchConfig, FetchMode, HandoffConfig
from moonpool.handoff.effects import (
    CloseStream,
    FetchOutcome,
    OpenStream,
    RecordFetch,
    SendCommand,
    StartRead,
    StopReads,
    TellAhead,
)
from moonpool.handoff.events import (
    AttemptAborted,
    CoreFrameReceived,
    FetchEvent,
    HolderMessageReceived,
    PeerNamed,
    ReadDone,
    ReadId,
    StreamBroken,
)
from moonpool.handoff.fetch_reader import FetchReads
from moonpool.handoff.messages import (
    HolderMessage,
    PeerPrefix,
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
from moonpool.latency.costs import PrefillCost
from support.requests import make_request

HOLDER = WorkerKey(WorkerId("h"), Incarnation("1"))
READER = WorkerKey(WorkerId("r"), Incarnation("1"))
A = AttemptId(RequestId("a"), 1)
#: 6 blocks of 4 tokens; the reader has the first.
PEER = PeerPrefix(key=HOLDER, address="h:1", num_tokens=24)
HASHES = tuple(BlockHash(bytes([n]) * 32) for n in range(6))
TARGETS = tuple(BlockId(n) for n in range(6))
RESERVED = FetchReserved(
    attempt_id=A, num_cached_tokens=4, num_tokens=24, block_ids=TARGETS, hashes=HASHES
)
OPEN = OpenStream(
    attempt_id=A,
    source=PEER.ref,
    open=PrefixOpen(
        attempt_id=A,
        reader=READER,
        holder=HOLDER,
        namespace="n",
        secret_fingerprint="s",
        hashes=HASHES,
        first=1,
    ),
)
CLOSE = CloseStream(attempt_id=A)
STOP = StopReads(attempt_id=A)
READ_ENDED = SendCommand(command=ReadEnded(attempt_id=A))
#: A token takes 1 s to compute: 20 of them 20 s.
COST = PrefillCost(base_s=0.0, per_token_s=1.0, per_work_s=0.0, max_step_tokens=1_000)


class Reader:
    """The machine, checked after every event. Blocks of 1 MB, pieces of 2, two pieces at once."""

    def __init__(self, mode: FetchMode = FetchMode.AUTO, cost: PrefillCost | None = COST) -> None:
        self.machine = FetchReads(
            key=READER,
            namespace="n",
            secret_fingerprint="s",
            config=HandoffConfig(num_layers=2, block_size=4),
            fetch=FetchConfig(mode=mode, block_bytes=1_000_000, span_bytes=2_000_000, max_reads=2),
            hash_chain=lambda _: (*HASHES, BlockHash(b"behind what the peer has".ljust(32))),
        )
        self.machine.chooser.prefill_cost = cost
        self.now = 0.0

    def __call__(self, event: FetchEvent) -> list[object]:
        effects = self.machine.handle(event, self.now)
        self.machine.validate()
        return list(effects)

    def at(self, now: float) -> list[object]:
        self.now = now
        effects = self.machine.tick(now)
        self.machine.validate()
        return list(effects)

    def core(self, *replies: Reply) -> list[object]:
        return self(CoreFrameReceived(step=1, replies=replies))

    def named(self) -> list[object]:
        return self(PeerNamed(attempt_id=A, peer=PEER))

    def reserve(self) -> list[object]:
        self.named()
        return self.core(RESERVED)

    def holder(self, message: HolderMessage) -> list[object]:
        return self(HolderMessageReceived(message=message))

    def open(self, num_blocks: int = 5) -> list[object]:
        self.reserve()
        return self.holder(opened(num_blocks))

    def done(self, number: int, *bad: int, is_ok: bool = True) -> list[object]:
        return self(ReadDone(read_id=ReadId(A, number), is_ok=is_ok, bad_indices=bad))


def opened(num_blocks: int) -> PrefixOpened:
    """The holder's blocks 31, 32 .. stand for blocks 1, 2 .. of the chain."""
    blocks = range(1, 1 + num_blocks)
    return PrefixOpened(
        attempt_id=A,
        block_ids=tuple(BlockId(30 + block) for block in blocks),
        digests=b"".join(bytes([block] * 2) for block in blocks),
    )


def start_read(number: int, *blocks: int) -> StartRead:
    return StartRead(
        read_id=ReadId(A, number),
        source=PEER.ref,
        source_block_ids=tuple(BlockId(30 + block) for block in blocks),
        target_block_ids=tuple(TARGETS[block] for block in blocks),
        first_layer=0,
        end_layer=2,
        digests=tuple(bytes([block] * 2) for block in blocks),
        is_prefix=True,
    )


def fetched(num_tokens: int) -> SendCommand:
    return SendCommand(command=BlocksFetched(attempt_id=A, num_tokens=num_tokens))


def ended(num_tokens: int) -> SendCommand:
    return SendCommand(command=FetchEnded(attempt_id=A, num_tokens=num_tokens))


def record(
    outcome: FetchOutcome,
    num_blocks: int = 0,
    elapsed_s: float = 0.0,
    message: str = "",
    held: int | None = None,
) -> RecordFetch:
    is_asked = outcome is not FetchOutcome.RECOMPUTE
    return RecordFetch(
        attempt_id=A,
        holder=HOLDER,
        outcome=outcome,
        num_wanted_blocks=5,
        num_blocks=num_blocks,
        num_held_tokens=held,
        elapsed_s=elapsed_s,
        predicted_s=0.007 if is_asked else 0.0,
        recompute_s=20.0 if is_asked else 0.0,
        message=message,
    )


@pytest.fixture
def r() -> Iterator[Reader]:
    reader = Reader()
    yield reader
    reader.machine.validate()


def test_the_life_of_a_fetch(r: Reader) -> None:
    assert r.named() == []
    assert r.core(RESERVED) == [OPEN]
    assert r.holder(opened(5)) == [start_read(0, 1, 2), start_read(1, 3, 4)]
    r.now = 0.01
    # Pieces may end in any order; what counts is the prefix.
    assert r.done(1) == [start_read(2, 5)]
    assert r.done(0) == [fetched(20)]
    assert r.done(2) == [CLOSE, ended(24), record(FetchOutcome.WHOLE, 5, 0.01)]
    assert r.machine.is_quiet


def test_a_peer_that_holds_less_is_read_as_far_as_it_goes(r: Reader) -> None:
    assert r.open(num_blocks=1) == [start_read(0, 1)]
    r.now = 0.01
    assert r.done(0) == [CLOSE, ended(8), record(FetchOutcome.SHORT, 1, 0.01, held=8)]


def test_a_peer_that_holds_nothing(r: Reader) -> None:
    assert r.open(num_blocks=0) == [CLOSE, ended(4), record(FetchOutcome.ABSENT, held=4)]
    assert r.machine.is_quiet


def test_a_refusal_is_kept_for_the_log_and_the_peer_is_left_alone(r: Reader) -> None:
    r.reserve()
    failed = PrefixFailed(attempt_id=A, reason=PrefixRefusal.WRONG_NAMESPACE, message="other")
    # It is not the worker that was believed to hold it.
    end = [CLOSE, ended(4), record(FetchOutcome.REFUSED, message="other", held=4)]
    assert r.holder(failed) == end
    assert r.reserve() == [ended(4), record(FetchOutcome.RECOMPUTE)]
    assert r.machine.worth_asking(PEER, r.now) is None
    r.now = 1.0
    assert r.reserve() == [OPEN]
    # The second time it is left alone for longer.
    assert r.holder(failed) == end
    assert r.machine.worth_asking(PEER, 2.5) is None
    assert r.machine.worth_asking(PEER, 3.0) == PEER


@pytest.mark.parametrize(
    "reason", [PrefixRefusal.TOO_MANY_LOCKS, PrefixRefusal.BUSY, PrefixRefusal.EXPIRED]
)
def test_a_peer_that_is_busy_is_left_alone_no_longer_each_time(
    r: Reader, reason: PrefixRefusal
) -> None:
    failed = PrefixFailed(attempt_id=A, reason=reason, message="busy")
    for at in range(8):
        r.now = float(at)
        assert r.reserve() == [OPEN]
        assert r.holder(failed) == [CLOSE, ended(4), record(FetchOutcome.REFUSED, message="busy")]
        assert r.machine.worth_asking(PEER, r.now + 0.9) is None


def test_a_bad_block_ends_it_before_that_block(r: Reader) -> None:
    r.open()
    assert r.done(0, 1) == [fetched(8)]
    # What was under way is waited for; nothing more is asked for.
    assert r.done(1) == [CLOSE, ended(8), record(FetchOutcome.DAMAGED, 1, held=8)]


def test_a_read_that_fails_ends_it_with_what_came(r: Reader) -> None:
    r.open()
    assert r.done(0) == [start_read(2, 5), fetched(12)]
    assert r.done(1, is_ok=False) == []
    assert r.done(2) == [CLOSE, ended(12), record(FetchOutcome.LOST, 2, held=12)]


def test_a_stream_that_cannot_be_opened(r: Reader) -> None:
    r.reserve()
    assert r(StreamBroken(attempt_id=A)) == [ended(4), record(FetchOutcome.LOST, held=4)]
    assert r.machine.is_quiet


def test_a_stream_that_breaks_while_it_is_read(r: Reader) -> None:
    r.open()
    assert r(StreamBroken(attempt_id=A)) == [STOP]
    assert r.done(0) == [fetched(12)]
    assert r.done(1, is_ok=False) == [ended(12), record(FetchOutcome.LOST, 2, held=12)]


@pytest.mark.parametrize(
    "message",
    [
        opened(6),
        PrefixOpened(attempt_id=A, block_ids=(BlockId(1), BlockId(2)), digests=b"odd"),
    ],
)
def test_what_cannot_be_meant_for_this_request(r: Reader, message: PrefixOpened) -> None:
    r.reserve()
    assert r.holder(message) == [CLOSE, ended(4), record(FetchOutcome.LOST, held=4)]


def test_a_second_lock_is_not_trusted(r: Reader) -> None:
    r.open()
    assert r.holder(opened(5)) == [STOP]
    assert r.done(0) == [fetched(12)]
    assert r.done(1, is_ok=False)[1] == ended(12)


def test_computing_is_faster() -> None:
    r = Reader(cost=PrefillCost(base_s=1e-6, per_token_s=0, per_work_s=0, max_step_tokens=100))
    assert r.machine.worth_asking(PEER, r.now) is None
    assert r.reserve() == [ended(4), record(FetchOutcome.RECOMPUTE)]
    assert r.machine.is_quiet


def test_never_and_always() -> None:
    assert Reader(FetchMode.NEVER).machine.worth_asking(PEER, 0.0) is None
    cheap = PrefillCost(base_s=1e-6, per_token_s=0, per_work_s=0, max_step_tokens=100)
    r = Reader(FetchMode.ALWAYS, cost=cheap)
    assert r.machine.worth_asking(PEER, 0.0) == PEER
    assert r.reserve() == [OPEN]


def test_nobody_reads_from_itself(r: Reader) -> None:
    own = PeerPrefix(key=READER, address="r:1", num_tokens=24)
    assert r.machine.worth_asking(own, 0.0) is None


# -- time --


def test_the_first_piece_has_its_time(r: Reader) -> None:
    r.open()
    assert r.machine.next_wakeup() == 5.0  # a quarter of what computing takes
    assert r.at(4.9) == []
    assert r.at(5.0) == [STOP]
    assert r.machine.next_wakeup() is None
    assert r.done(0, is_ok=False) == []
    assert r.done(1, is_ok=False) == [CLOSE, ended(4), record(FetchOutcome.SLOW, 0, 5.0)]


def test_of_a_slow_peer_it_is_known_what_it_locked(r: Reader) -> None:
    assert r.open(num_blocks=3) == [start_read(0, 1, 2), start_read(1, 3)]
    r.now = 4.0
    assert r.done(0) == [fetched(12)]
    assert r.at(16.0) == [STOP]
    # It held blocks 1 to 3, of which two came in time: what it lacked beyond them was not slow.
    end = r.done(1, is_ok=False)
    assert end == [CLOSE, ended(12), record(FetchOutcome.SLOW, 2, 16.0, held=16)]


def test_a_holder_that_ends_the_lease_had_what_it_locked(r: Reader) -> None:
    r.open(num_blocks=2)
    failed = PrefixFailed(attempt_id=A, reason=PrefixRefusal.EXPIRED, message="late")
    assert r.holder(failed) == [STOP]
    end = record(FetchOutcome.REFUSED, message="late", held=12)
    assert r.done(0, is_ok=False) == [CLOSE, ended(4), end]


def test_a_holder_that_does_not_answer(r: Reader) -> None:
    r.reserve()
    assert r.at(5.0) == [CLOSE, ended(4), record(FetchOutcome.SLOW, 0, 5.0)]
    # After that it is not asked, until a probe is due, and a probe has little time.
    assert r.reserve() == [ended(4), record(FetchOutcome.RECOMPUTE)]
    r.now = 1_000.0
    assert r.reserve() == [OPEN]
    assert r.machine.next_wakeup() == pytest.approx(1_000.0 + 0.04 * 20.0)


def test_a_pace_that_is_too_slow_ends_it_at_once(r: Reader) -> None:
    r.open()
    r.now = 4.0
    # 2 MB in 4 s: 6 s for the other 3, where computing 12 tokens takes 12 s.
    assert r.done(0) == [start_read(2, 5), fetched(12)]
    # The next piece may take three times as long as this one did.
    assert r.machine.next_wakeup() == 16.0
    r.machine.chooser.prefill_cost = PrefillCost(
        base_s=0.0, per_token_s=0.1, per_work_s=0.0, max_step_tokens=1_000
    )
    assert r.done(1) == [STOP, fetched(20)]
    assert r.done(2, is_ok=False) == [CLOSE, ended(20), record(FetchOutcome.SLOW, 4, 4.0)]


@pytest.mark.parametrize("mode", [FetchMode.AUTO, FetchMode.ALWAYS])
def test_a_pace_is_judged_however_long_computing_takes_but_for_who_always_reads(
    mode: FetchMode,
) -> None:
    # 20 tokens take 40 s, which is longer than a holder waits.
    r = Reader(mode, PrefillCost(base_s=0.0, per_token_s=2.0, per_work_s=0.0, max_step_tokens=99))
    r.open()
    # 20 s for 2 blocks: the other 3 would take 30 s, and 24 s to compute.
    r.now = 20.0
    goes_on = start_read(2, 5) if mode is FetchMode.ALWAYS else STOP
    assert r.done(0) == [goes_on, fetched(12)]


def test_a_peer_that_stands_still_is_waited_for_in_proportion_to_what_is_left(r: Reader) -> None:
    r.open()
    r.now = 0.01
    # 2 MB in 10 ms, which promises the next ones in as much; but computing the rest takes 12 s.
    assert r.done(0) == [start_read(2, 5), fetched(12)]
    assert r.machine.next_wakeup() == pytest.approx(0.01 + 0.04 * 12.0)
    assert r.at(0.49) == [STOP]


def test_computing_would_be_done_by_now(r: Reader) -> None:
    r.open()
    r.now = 4.9
    r.done(0)
    r.now = 10.0
    r.done(1)
    assert r.machine.next_wakeup() == 20.0
    assert r.at(20.0) == [STOP]
    assert r.done(2, is_ok=False) == [CLOSE, ended(20), record(FetchOutcome.SLOW, 4, 20.0)]


def test_what_nobody_can_predict_goes_on_while_pieces_come() -> None:
    r = Reader(cost=None)
    r.open()
    assert r.machine.next_wakeup() == 0.5
    r.now = 0.4
    r.done(0)
    assert r.machine.next_wakeup() == 0.9
    r.now = 0.8
    r.done(1)
    assert r.machine.next_wakeup() == 1.3
    assert r.at(1.3) == [STOP]


# -- who waits for its turn --


STORE = replace(PEER, is_store=True)


def named_by_a_request(r: Reader, peer: PeerPrefix = STORE) -> list[object]:
    return r(PeerNamed(attempt_id=A, peer=peer, request=make_request("a", prompt=range(30))))


def test_who_waits_for_its_turn_tells_its_peer_what_it_will_want(r: Reader) -> None:
    assert named_by_a_request(r) == []
    assert r.machine.next_wakeup() == 0.02
    assert r.at(0.01) == []
    assert isinstance(OPEN.open, PrefixOpen)
    ahead = TellAhead(source=PEER.ref, open=replace(OPEN.open, first=len(HASHES)))
    assert r.at(0.02) == [ahead]
    # Once.
    assert r.machine.next_wakeup() is None
    assert r.core(RESERVED) == [OPEN]


def test_nobody_tells_ahead_what_it_will_not_read_from() -> None:
    r = Reader(FetchMode.NEVER)
    named_by_a_request(r)
    assert r.at(0.02) == []
    r = Reader()
    named_by_a_request(r, PEER)  # a worker has no disk
    assert r.machine.next_wakeup() is None
    r = Reader()
    r.reserve()
    r(StreamBroken(attempt_id=A))
    named_by_a_request(r)
    assert r.at(0.02) == []  # it is left alone
    r = Reader()
    let_the_disk_down(r)
    named_by_a_request(r)
    assert r.at(5.1) == []


def test_whose_turn_it_is_tells_nothing_ahead(r: Reader) -> None:
    named_by_a_request(r)
    assert r.core(RESERVED) == [OPEN]
    assert r.at(0.02) == []


def test_who_ends_while_it_waits_tells_nothing(r: Reader) -> None:
    named_by_a_request(r)
    r(AttemptAborted(attempt_id=A))
    assert r.machine.next_wakeup() is None
    assert r.at(0.02) == []


# -- a holder that has some of it on disk only --


def staging(num_ready: int, num_blocks: int = 5) -> PrefixStaging:
    return PrefixStaging(attempt_id=A, num_ready_blocks=num_ready, num_blocks=num_blocks)


def open_for(num_blocks: int) -> OpenStream:
    """The lease on what is ready."""
    assert isinstance(OPEN.open, PrefixOpen)
    return replace(OPEN, open=replace(OPEN.open, hashes=HASHES[: 1 + num_blocks]))


def let_the_disk_down(r: Reader) -> None:
    """Nothing comes from it in 5 s, a quarter of what computing takes."""
    r.reserve()
    r.holder(staging(0))
    r.at(r.now + 5.0)
    assert r.machine.is_quiet


def test_a_disk_of_which_nothing_is_known_is_waited_for(r: Reader) -> None:
    r.reserve()
    r.now = 0.5
    assert r.holder(staging(2)) == []
    assert r.machine.next_wakeup() == 5.5
    r.now = 1.0
    assert r.holder(opened(5)) == [start_read(0, 1, 2), start_read(1, 3, 4)]
    r.done(0)
    r.done(1)
    assert r.done(2) == [CLOSE, ended(24), record(FetchOutcome.WHOLE, 5, 1.0)]


def test_a_disk_that_let_us_down_is_not_waited_for_and_memory_is_read_as_ever(r: Reader) -> None:
    let_the_disk_down(r)
    r.now = 6.0
    assert r.reserve() == [OPEN]
    # Computing is said to be faster once the holder has told where it lies.
    end = r.holder(staging(0))
    assert end[:2] == [CLOSE, ended(4)]
    assert isinstance(end[2], RecordFetch)
    assert end[2].outcome is FetchOutcome.RECOMPUTE
    # What is in memory is read.
    assert r.open() == [start_read(0, 1, 2), start_read(1, 3, 4)]
    for number in range(3):
        r.done(number)
    # That says nothing good of the disk.
    assert r.reserve() == [OPEN]
    assert r.holder(staging(0))[:2] == [CLOSE, ended(4)]


def test_what_is_ready_is_read_where_the_disk_is_not_waited_for(r: Reader) -> None:
    let_the_disk_down(r)
    r.now = 6.0
    r.reserve()
    assert r.holder(staging(2, 4)) == [CLOSE, open_for(2)]
    assert r.holder(opened(2)) == [start_read(0, 1, 2)]
    r.now = 6.5
    end = r.done(0)
    assert end[:2] == [CLOSE, ended(12)]
    # It held two more, on its disk.
    assert isinstance(end[2], RecordFetch)
    assert (end[2].outcome, end[2].num_blocks) == (FetchOutcome.MEMORY_ONLY, 2)
    assert (end[2].num_held_tokens, end[2].elapsed_s) == (20, 0.5)


def test_a_disk_that_takes_too_long_leaves_what_was_ready(r: Reader) -> None:
    r.reserve()
    r.holder(staging(3))
    assert r.at(4.9) == []
    assert r.at(5.0) == [CLOSE, open_for(3)]
    # Computing what is ready takes 12 s, of which the first piece may take as long as before.
    assert r.machine.next_wakeup() == 10.0
    assert r.holder(opened(3)) == [start_read(0, 1, 2), start_read(1, 3)]
    r.done(0)
    r.now = 6.0
    end = r.done(1)
    assert end == [CLOSE, ended(16), record(FetchOutcome.MEMORY_ONLY, 3, 6.0)]


def test_a_disk_that_takes_too_long_where_nothing_is_ready(r: Reader) -> None:
    r.reserve()
    r.holder(staging(0))
    assert r.at(5.0) == [CLOSE, ended(4), record(FetchOutcome.SLOW, 0, 5.0)]
    assert r.machine.worth_asking(PEER, r.now) == PEER


def test_a_disk_that_brings_nothing_in_the_holders_time_is_slow(r: Reader) -> None:
    r.reserve()
    r.holder(staging(0, 3))
    r.now = 1.0
    end = r.holder(opened(0))
    assert end[:2] == [CLOSE, ended(4)]
    # It held what it did not bring.
    assert isinstance(end[2], RecordFetch)
    assert (end[2].outcome, end[2].num_held_tokens) == (FetchOutcome.ABSENT, 16)
    r.reserve()
    assert r.holder(staging(0))[:2] == [CLOSE, ended(4)]


def test_a_disk_that_brings_nothing_is_slow_also_where_something_was_ready(r: Reader) -> None:
    r.reserve()
    r.holder(staging(2))
    r.now = 1.0
    assert r.holder(opened(2)) == [start_read(0, 1, 2)]
    end = r.done(0)
    assert isinstance(end[2], RecordFetch)
    assert (end[2].outcome, end[2].num_held_tokens) == (FetchOutcome.MEMORY_ONLY, None)
    r.reserve()
    assert r.holder(staging(0))[:2] == [CLOSE, ended(4)]


def test_a_holder_that_says_twice_that_it_goes_to_its_disk_is_not_trusted(r: Reader) -> None:
    r.reserve()
    r.holder(staging(2))
    assert r.holder(staging(2)) == [CLOSE, ended(4), record(FetchOutcome.LOST, held=4)]
    assert r.machine.worth_asking(PEER, r.now) is None


def test_what_was_ready_and_has_gone_to_the_disk_meanwhile(r: Reader) -> None:
    let_the_disk_down(r)
    r.reserve()
    r.holder(staging(2))
    end = r.holder(staging(1, 2))
    assert end[:2] == [CLOSE, ended(4)]
    assert isinstance(end[2], RecordFetch)
    assert end[2].outcome is FetchOutcome.ABSENT


def test_a_disk_with_more_than_was_asked_for_is_not_trusted(r: Reader) -> None:
    r.reserve()
    assert r.holder(staging(1, 6)) == [CLOSE, ended(4), record(FetchOutcome.LOST, held=4)]


def test_a_lock_on_more_than_was_ready_is_not_trusted(r: Reader) -> None:
    let_the_disk_down(r)
    r.reserve()
    r.holder(staging(2))
    assert r.holder(opened(3))[:2] == [CLOSE, ended(4)]
    assert r.machine.is_quiet


def test_a_disk_after_the_lock_is_not_trusted(r: Reader) -> None:
    r.open()
    assert r.holder(staging(1)) == [STOP]
    r.done(0)
    assert r.done(1, is_ok=False)[1] == ended(12)


def test_who_always_reads_waits_for_any_disk(r: Reader) -> None:
    r = Reader(FetchMode.ALWAYS)
    r.reserve()
    assert r.holder(staging(2)) == []
    assert r.machine.next_wakeup() == 30.0
    assert r.at(30.0) == [CLOSE, open_for(2)]
    assert r.machine.next_wakeup() == 60.0


def test_abort_while_the_disk_is_waited_for(r: Reader) -> None:
    r.reserve()
    r.holder(staging(2))
    assert r(AttemptAborted(attempt_id=A)) == [
        CLOSE,
        record(FetchOutcome.CANCELLED, held=None),
        READ_ENDED,
    ]
    assert r.machine.is_quiet


# -- ends that come from elsewhere --


def test_the_core_starts_without(r: Reader) -> None:
    r.named()
    assert r.core(PrefillStarted(attempt_id=A, num_cached_tokens=0, block_ids=TARGETS)) == []
    assert r.machine.is_quiet


def test_the_core_refuses(r: Reader) -> None:
    r.named()
    assert r.core(Refused(attempt_id=A, reason=RefuseReason.NO_BLOCKS)) == []
    assert r.machine.is_quiet


def test_abort_before_the_core_has_answered(r: Reader) -> None:
    r.named()
    # A reservation may be on its way here: the core gets its ReadEnded in any case.
    assert r(AttemptAborted(attempt_id=A)) == [READ_ENDED]
    assert r.core(RESERVED) == []
    assert r.machine.is_quiet


def test_abort_while_it_opens(r: Reader) -> None:
    r.reserve()
    assert r(AttemptAborted(attempt_id=A)) == [
        CLOSE,
        record(FetchOutcome.CANCELLED),
        READ_ENDED,
    ]
    assert r.holder(opened(5)) == []
    assert r(StreamBroken(attempt_id=A)) == []
    assert r.machine.is_quiet


def test_abort_while_it_is_read(r: Reader) -> None:
    r.open()
    r.done(0)
    assert r(AttemptAborted(attempt_id=A)) == [CLOSE, record(FetchOutcome.CANCELLED, 2), STOP]
    assert r(AttemptAborted(attempt_id=A)) == []
    assert r.done(1, is_ok=False) == []
    assert not r.machine.is_quiet
    assert r.done(2) == [READ_ENDED]
    assert r.machine.is_quiet


@pytest.mark.parametrize(
    "reply",
    [Revoked(attempt_id=A), HandedBack(attempt_id=A, reason=HandBackReason.DRAINING)],
)
def test_the_core_takes_the_blocks_back(r: Reader, reply: Reply) -> None:
    r.open(num_blocks=1)
    assert r.core(reply) == [CLOSE, record(FetchOutcome.CANCELLED, held=8), STOP]
    # If it goes on, then without: it is told when no read is outstanding, once.
    assert r.core(PrefillStarted(attempt_id=A, num_cached_tokens=0, block_ids=TARGETS)) == []
    assert r.done(0) == [READ_ENDED]


def test_revoked_and_ended_cross(r: Reader) -> None:
    r.open(num_blocks=1)
    r.done(0)
    assert r.core(Revoked(attempt_id=A)) == []
    assert r(AttemptAborted(attempt_id=A)) == []


def test_a_fork_is_independent(r: Reader) -> None:
    r.open()
    fork = r.machine.fork()
    assert fork.key() == r.machine.key()
    r.done(0)
    assert fork.key() != r.machine.key()
    fork.validate()
    assert fork.num_open_reads == 2
