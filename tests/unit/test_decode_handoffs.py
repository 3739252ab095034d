"""The decode side of a handoff: events in, the whole list of effects out."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest

from moonpool.core.protocol import (
    Abort,
    Accepted,
    Arrived,
    BlocksArrived,
    Decode,
    HandBackReason,
    HandedBack,
    ReadEnded,
    Refused,
    RefuseReason,
    Reply,
    Reserved,
    Revoked,
    TokensReady,
)
from moonpool.handoff.config import HandoffConfig
from moonpool.handoff.decode import DecodeHandoffs
from moonpool.handoff.effects import CloseStream, OpenStream, SendCommand, SendToRouter, StartRead
from moonpool.handoff.events import (
    CoreFrameReceived,
    DecodeEvent,
    ReadDone,
    ReadId,
    RouterLost,
    RouterMessageReceived,
    SourceMessageReceived,
    StreamBroken,
)
from moonpool.handoff.messages import (
    AbortRequest,
    Commit,
    CommitFailed,
    DecodeRequest,
    LayersReady,
    Open,
    Opened,
    PrefillRequest,
    Reset,
    ResetReason,
    RouterKey,
    SourceMessage,
    SourceRef,
    Waiting,
)
from moonpool.ids import AttemptId, BlockId, Incarnation, RequestId, WorkerId, WorkerKey
from moonpool.inference.output import FinishReason, TokenRun
from support.requests import make_request

P = WorkerKey(WorkerId("p"), Incarnation("1"))
D = WorkerKey(WorkerId("d"), Incarnation("1"))
R = RouterKey("r")
SOURCE = SourceRef(key=P, address="p:1")
#: 10 tokens in blocks of 4: two full ones and one half; 2 layers.
REQUEST = make_request("a", prompt=10, max_tokens=5)
TARGETS = (BlockId(0), BlockId(1), BlockId(2))


def attempt(number: int = 1) -> AttemptId:
    return AttemptId(RequestId("a"), number)


def read(number: int, attempt_number: int = 1) -> ReadId:
    return ReadId(attempt(attempt_number), number)


class Decoder:
    """The machine, checked after every event."""

    def __init__(self) -> None:
        self.machine = DecodeHandoffs(
            key=D, namespace="n", config=HandoffConfig(num_layers=2, block_size=4)
        )
        self.now = 0.0

    def __call__(self, event: DecodeEvent) -> list[object]:
        effects = self.machine.handle(event, self.now)
        self.machine.validate()
        return list(effects)

    def at(self, now: float) -> list[object]:
        self.now = now
        effects = self.machine.tick(now)
        self.machine.validate()
        return list(effects)

    def decode(self, number: int = 1, source: SourceRef | None = SOURCE) -> list[object]:
        message = DecodeRequest(request=REQUEST, attempt=number, source=source, deadline_s=60.0)
        return self(RouterMessageReceived(router=R, message=message))

    def abort(self) -> list[object]:
        return self(RouterMessageReceived(router=R, message=AbortRequest(attempt_id=attempt())))

    def core(self, *replies: Reply) -> list[object]:
        return self(CoreFrameReceived(step=1, replies=replies))

    def reserve(self, num_cached_tokens: int = 0) -> list[object]:
        self.decode()
        return self.core(
            Reserved(attempt_id=attempt(), num_cached_tokens=num_cached_tokens, block_ids=TARGETS)
        )

    def source(self, message: SourceMessage) -> list[object]:
        return self(SourceMessageReceived(message=message))

    def layers(self, start: int, end: int, first: int, last: int) -> list[object]:
        blocks = range(start // 4, -(-end // 4))
        return self.source(
            LayersReady(
                attempt_id=attempt(),
                start=start,
                end=end,
                first_layer=first,
                end_layer=last,
                block_ids=tuple(BlockId(20 + block) for block in blocks),
                digests=b"".join(bytes([block, first]) for block in blocks),
            )
        )

    def done(self, number: int, *bad: int, is_ok: bool = True) -> list[object]:
        return self(ReadDone(read_id=read(number), is_ok=is_ok, bad_indices=bad))


def command(command: object) -> SendCommand:
    return SendCommand(command=command)  # type: ignore[arg-type]


def to_router(message: object) -> SendToRouter:
    return SendToRouter(router=R, message=message)  # type: ignore[arg-type]


def start_read(number: int, blocks: range, first: int, last: int) -> StartRead:
    return StartRead(
        read_id=read(number),
        source=SOURCE,
        source_block_ids=tuple(BlockId(20 + block) for block in blocks),
        target_block_ids=tuple(TARGETS[block] for block in blocks),
        first_layer=first,
        end_layer=last,
        digests=tuple(bytes([block, first]) for block in blocks),
    )


def arrived(
    num_tokens: int, first_token: int | None = 99, finish_reason: FinishReason | None = None
) -> SendCommand:
    return command(
        Arrived(
            attempt_id=attempt(),
            num_tokens=num_tokens,
            first_token=first_token,
            finish_reason=finish_reason,
        )
    )


def commit(finish_reason: FinishReason | None = None) -> Commit:
    return Commit(
        attempt_id=attempt(),
        first_token=99,
        position=0,
        finish_reason=finish_reason,
        num_cached_tokens=4,
    )


OPEN = OpenStream(
    attempt_id=attempt(),
    source=SOURCE,
    open=Open(attempt_id=attempt(), reader=D, source=P, namespace="n"),
)
CLOSE = CloseStream(attempt_id=attempt())
ABORT = command(Abort(attempt_id=attempt()))
READ_ENDED = command(ReadEnded(attempt_id=attempt()))


def blocks_arrived(num_tokens: int) -> SendCommand:
    return command(BlocksArrived(attempt_id=attempt(), num_tokens=num_tokens))


def handed_back(reason: HandBackReason) -> HandedBack:
    return HandedBack(attempt_id=attempt(), reason=reason)


def tokens(
    position: int = 0,
    num_cached_tokens: int | None = None,
    finish_reason: FinishReason | None = None,
    num_peer_tokens: int = 0,
) -> TokensReady:
    return TokensReady(
        attempt_id=attempt(),
        run=TokenRun(first_position=position, token_ids=(99,), finish_reason=finish_reason),
        num_cached_tokens=num_cached_tokens,
        num_peer_tokens=num_peer_tokens,
    )


@pytest.fixture
def d() -> Iterator[Decoder]:
    decoder = Decoder()
    yield decoder
    decoder.machine.validate()


def test_the_life_of_a_handoff(d: Decoder) -> None:
    assert d.decode() == [command(Decode(request=REQUEST, attempt=1, has_source=True))]
    reserved = Reserved(attempt_id=attempt(), num_cached_tokens=4, block_ids=TARGETS)
    assert d.core(reserved) == [OPEN]
    opened = Opened(
        attempt_id=attempt(), num_cached_tokens=4, block_ids=(BlockId(20),), digests=b"xx"
    )
    assert d.source(opened) == []  # held here already
    assert d.layers(4, 8, 0, 1) == [start_read(0, range(1, 2), 0, 1)]
    assert d.layers(4, 8, 1, 2) == [start_read(1, range(1, 2), 1, 2)]
    assert d.done(1) == []
    assert d.done(0) == [blocks_arrived(8)]
    assert d.layers(8, 10, 0, 2) == [start_read(2, range(2, 3), 0, 2)]
    assert d.source(commit()) == []
    assert d.done(2) == [CLOSE, arrived(10)]
    # 10 of prompt + emitted were not computed here, but the source computed 6 of them.
    assert d.core(tokens(num_cached_tokens=10)) == [to_router(tokens(num_cached_tokens=4))]
    last = tokens(1, finish_reason=FinishReason.LENGTH)
    assert d.core(last) == [to_router(last)]
    assert d.machine.is_quiet


@pytest.mark.parametrize(
    ("num_computed_from", "num_cached", "num_peer"), [(10, 8, 4), (6, 6, 2), (3, 3, 0)]
)
def test_what_the_source_read_from_a_peer_is_told(
    d: Decoder, num_computed_from: int, num_cached: int, num_peer: int
) -> None:
    d.reserve()
    d.layers(0, 10, 0, 2)
    d.done(0)
    d.source(replace(commit(), num_cached_tokens=8, num_peer_tokens=4))
    # The source had 4 tokens, read 4 more, and computed 2.
    reply = tokens(num_cached_tokens=num_computed_from)
    told = tokens(num_cached_tokens=num_cached, num_peer_tokens=num_peer)
    assert d.core(reply) == [to_router(told)]


def test_a_source_that_dies_early_has_said_what_it_read_from_a_peer(d: Decoder) -> None:
    d.reserve()
    blocks = (BlockId(20), BlockId(21))
    d.source(
        Opened(
            attempt_id=attempt(),
            num_cached_tokens=8,
            block_ids=blocks,
            num_peer_tokens=4,
            num_peer_held_tokens=8,
            digests=b"xxxx",
        )
    )
    d.done(0)
    assert d(StreamBroken(attempt_id=attempt()))[-1:] == [arrived(8, None)]
    told = replace(tokens(num_cached_tokens=8, num_peer_tokens=4), num_peer_held_tokens=8)
    assert d.core(tokens(num_cached_tokens=8)) == [to_router(told)]


def test_what_has_no_room_is_refused_without_asking_the_core(d: Decoder) -> None:
    message = DecodeRequest(request=REQUEST, attempt=2, source=SOURCE, deadline_s=60.0)
    hopeless = RouterMessageReceived(router=R, message=message, has_room=False)
    refused = Refused(attempt_id=attempt(2), reason=RefuseReason.NO_BLOCKS)
    # It is a new attempt all the same: the lower one ends.
    d.reserve()
    assert d(hopeless) == [ABORT, CLOSE, READ_ENDED, to_router(refused)]
    assert d(hopeless) == []
    assert d.decode(1) == []
    assert d.machine.is_quiet
    assert len(d.decode(3)) == 1


def test_it_waits_for_the_commit_even_if_it_lacks_nothing_else(d: Decoder) -> None:
    d.reserve(8)
    d.layers(8, 10, 0, 2)
    assert d.done(0) == [blocks_arrived(10)]
    assert d.source(commit()) == [CLOSE, arrived(10)]


def test_a_finish_in_the_commit_is_passed_on(d: Decoder) -> None:
    d.reserve()
    d.layers(0, 10, 0, 2)
    d.done(0)
    assert d.source(commit(FinishReason.STOP))[1] == command(
        Arrived(
            attempt_id=attempt(),
            num_tokens=10,
            first_token=99,
            finish_reason=FinishReason.STOP,
        )
    )


def test_a_bad_leaf_makes_all_from_its_block_on_missing(d: Decoder) -> None:
    d.reserve()
    d.layers(0, 8, 0, 1)
    d.layers(0, 8, 1, 2)
    assert d.done(0, 1) == []
    assert d.done(1) == [blocks_arrived(4)]
    assert d.layers(8, 10, 0, 2) == []  # it is recomputed anyway
    assert d.source(commit()) == [CLOSE, arrived(4)]


def test_a_read_that_fails_proves_nothing(d: Decoder) -> None:
    d.reserve()
    d.layers(0, 10, 0, 2)
    assert d.source(commit()) == []
    assert d.done(0, is_ok=False) == [CLOSE, arrived(0)]


def test_an_announcement_that_comes_twice_is_read_once(d: Decoder) -> None:
    d.reserve()
    assert len(d.layers(0, 8, 0, 1)) == 1
    assert d.layers(0, 8, 0, 1) == []


@pytest.mark.parametrize("state", ["asked", "reading"])
def test_a_refusal_and_a_revocation_go_to_the_router(d: Decoder, state: str) -> None:
    if state == "asked":
        d.decode()
        refused = Refused(attempt_id=attempt(), reason=RefuseReason.NO_BLOCKS)
        assert d.core(refused) == [to_router(refused)]
    else:
        d.reserve()
        back = to_router(handed_back(HandBackReason.REVOKED))
        assert d.core(Revoked(attempt_id=attempt())) == [back, CLOSE, READ_ENDED]
    assert d.machine.is_quiet


def test_blocks_stay_until_the_last_read_has_ended(d: Decoder) -> None:
    d.reserve()
    d.layers(0, 8, 0, 1)
    d.layers(0, 8, 1, 2)
    assert d.abort() == [ABORT, CLOSE]
    assert d.core(Revoked(attempt_id=attempt())) == []
    assert d.done(1) == []
    assert d.machine.num_open_reads == 1
    assert d.done(0, is_ok=False) == [READ_ENDED]
    assert d.machine.is_quiet


def test_a_new_attempt_may_run_while_the_old_reads_end(d: Decoder) -> None:
    d.reserve()
    d.layers(0, 8, 0, 2)
    assert d.decode(2) == [
        ABORT,
        CLOSE,
        command(Decode(request=REQUEST, attempt=2, has_source=True)),
    ]
    assert d.decode(1) == []
    assert d.done(0) == [READ_ENDED]
    assert d.machine.num_handoffs == 1


def test_a_revocation_that_crosses_arrived_is_answered(d: Decoder) -> None:
    d.reserve(8)
    d.layers(8, 10, 0, 2)
    d.source(commit())
    d.done(0)
    back = to_router(handed_back(HandBackReason.REVOKED))
    assert d.core(Revoked(attempt_id=attempt())) == [back, READ_ENDED]


def test_an_abort_of_a_running_attempt_says_that_no_read_is_left(d: Decoder) -> None:
    d.reserve(8)
    d.source(commit())
    assert d.abort() == [ABORT, READ_ENDED]
    assert d.abort() == []


@pytest.mark.parametrize("how", ["broken", "reset", "failed", "silent", "nonsense"])
def test_a_lost_source_leaves_the_verified_prefix(d: Decoder, how: str) -> None:
    d.reserve()
    d.layers(0, 4, 0, 2)
    d.layers(4, 8, 0, 1)
    d.done(0)
    lost = {
        "broken": lambda: d(StreamBroken(attempt_id=attempt())),
        "reset": lambda: d.source(Reset(attempt_id=attempt(), reason=ResetReason.NO_PREFILL)),
        "failed": lambda: d.source(
            CommitFailed(attempt_id=attempt(), reason=HandBackReason.PREEMPTED)
        ),
        "silent": lambda: d.at(5.0),
        "nonsense": lambda: d.layers(8, 30, 0, 2),
    }
    assert lost[how]() == ([] if how == "broken" else [CLOSE])
    assert d.done(1) == [arrived(4, None)]
    back = handed_back(HandBackReason.SOURCE_LOST)
    is_no_fault = how == "failed"
    told = handed_back(HandBackReason.SOURCE_REFUSED) if is_no_fault else back
    assert d.core(back) == [to_router(told)]


def test_a_source_that_dies_after_the_commit_is_not_lost(d: Decoder) -> None:
    d.reserve()
    d.layers(0, 10, 0, 2)
    d.source(commit())
    assert d(StreamBroken(attempt_id=attempt())) == []
    assert d.done(0) == [arrived(10)]


def test_what_the_router_knows_already_is_handed_back_at_once(d: Decoder) -> None:
    d.reserve()
    reset = Reset(attempt_id=attempt(), reason=ResetReason.REFUSED)
    back = to_router(handed_back(HandBackReason.SOURCE_REFUSED))
    assert d.source(reset) == [back, ABORT, CLOSE, READ_ENDED]


def test_a_source_that_is_not_finite_is_not_repaired(d: Decoder) -> None:
    d.reserve()
    d.layers(0, 8, 0, 2)
    d.done(0)
    invalid = CommitFailed(attempt_id=attempt(), reason=FinishReason.INVALID_OUTPUT)
    assert d.source(invalid) == [CLOSE, arrived(8, None, FinishReason.INVALID_OUTPUT)]


def test_a_waiting_source_is_waited_for(d: Decoder) -> None:
    d.reserve()
    d.now = 4.0
    assert d.source(Waiting(attempt_id=attempt())) == []
    assert d.at(8.9) == []
    assert d.at(9.0) == [CLOSE, arrived(0, None)]


def test_a_decode_that_the_core_does_not_answer_is_refused(d: Decoder) -> None:
    d.decode()
    busy = Refused(attempt_id=attempt(), reason=RefuseReason.BUSY)
    assert d.at(2.0) == [to_router(busy), ABORT, READ_ENDED]
    reserved = Reserved(attempt_id=attempt(), num_cached_tokens=0, block_ids=TARGETS)
    assert d.core(reserved) == []


def test_a_decode_without_a_source_is_the_cores(d: Decoder) -> None:
    assert d.decode(source=None) == [command(Decode(request=REQUEST, attempt=1, has_source=False))]
    assert d.core(Accepted(attempt_id=attempt())) == []
    assert d.at(30.0) == []
    assert d.core(tokens(num_cached_tokens=8)) == [to_router(tokens(num_cached_tokens=8))]
    assert d.abort() == [ABORT]


def test_a_higher_prefill_attempt_drops_a_lower_decode(d: Decoder) -> None:
    d.reserve()
    prefill = PrefillRequest(request=REQUEST, attempt=2, deadline_s=60.0)
    assert d(RouterMessageReceived(router=R, message=prefill)) == [ABORT, CLOSE, READ_ENDED]


def test_an_abort_before_the_decode_is_remembered(d: Decoder) -> None:
    assert d.abort() == []
    assert d.decode() == []
    assert d.at(2.0) == []
    assert len(d.decode()) == 1


def test_router_and_deadline_end_an_attempt_silently(d: Decoder) -> None:
    d.reserve()
    assert d(RouterLost(router=R)) == [ABORT, CLOSE, READ_ENDED]
    d.decode(2)
    d.core(Reserved(attempt_id=attempt(2), num_cached_tokens=0, block_ids=TARGETS))
    d.source(Waiting(attempt_id=attempt(2)))
    assert [type(effect) for effect in d.at(65.0)] == [SendCommand, CloseStream, SendCommand]
    assert d.machine.is_quiet


def test_a_fork_lives_on_its_own(d: Decoder) -> None:
    d.reserve()
    d.layers(0, 8, 0, 2)
    fork = d.machine.fork()
    assert fork.key() == d.machine.key()
    fork.handle(ReadDone(read_id=read(0)), 0.0)
    assert fork.key() != d.machine.key()
    assert d.done(0) == [blocks_arrived(8)]
