"""The prefill side of a handoff: events in, the whole list of effects out."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest

from moonpool.core.protocol import (
    Abort,
    ChunkPlanned,
    HandBackReason,
    HandedBack,
    Prefill,
    PrefillDone,
    PrefillFailed,
    PrefillStarted,
    Refused,
    RefuseReason,
    Release,
    Reply,
    TokensReady,
)
from moonpool.handoff.config import HandoffConfig
from moonpool.handoff.effects import EndStream, SendCommand, SendOnStream, SendToRouter
from moonpool.handoff.events import (
    CoreFrameReceived,
    LayersDone,
    OpenReceived,
    PrefillEvent,
    RouterLost,
    RouterMessageReceived,
    StreamClosed,
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
    StreamId,
    Waiting,
)
from moonpool.handoff.prefill import PrefillHandoffs
from moonpool.ids import AttemptId, BlockId, Incarnation, RequestId, WorkerId, WorkerKey
from moonpool.inference.output import FinishReason, TokenRun
from support.requests import make_request

P = WorkerKey(WorkerId("p"), Incarnation("1"))
D = WorkerKey(WorkerId("d"), Incarnation("1"))
R = RouterKey("r")
S = StreamId(7)
#: 10 tokens in blocks of 4: two full ones and one half; 4 layers in groups of 2.
REQUEST = make_request("a", prompt=10, max_tokens=5)
BLOCKS = (BlockId(20), BlockId(21), BlockId(22))


def attempt(number: int = 1) -> AttemptId:
    return AttemptId(RequestId("a"), number)


class Prefiller:
    """The machine, checked after every event."""

    def __init__(self) -> None:
        self.machine = PrefillHandoffs(
            key=P,
            namespace="n",
            config=HandoffConfig(num_layers=4, block_size=4, layers_per_group=2),
        )
        self.now = 0.0

    def __call__(self, event: PrefillEvent) -> list[object]:
        effects = self.machine.handle(event, self.now)
        self.machine.validate()
        return list(effects)

    def at(self, now: float) -> list[object]:
        self.now = now
        effects = self.machine.tick(now)
        self.machine.validate()
        return list(effects)

    def prefill(self, number: int = 1) -> list[object]:
        message = PrefillRequest(request=REQUEST, attempt=number, deadline_s=60.0)
        return self(RouterMessageReceived(router=R, message=message))

    def abort(self, number: int = 1) -> list[object]:
        return self(
            RouterMessageReceived(router=R, message=AbortRequest(attempt_id=attempt(number)))
        )

    def core(self, *replies: Reply, step: int = 1) -> list[object]:
        return self(CoreFrameReceived(step=step, replies=replies))

    def open(self, number: int = 1, stream_id: StreamId = S) -> list[object]:
        return self(OpenReceived(stream_id=stream_id, open=make_open(number)))


def make_open(number: int = 1) -> Open:
    return Open(attempt_id=attempt(number), reader=D, source=P, namespace="n")


def started(num_cached_tokens: int = 0) -> PrefillStarted:
    return PrefillStarted(
        attempt_id=attempt(), num_cached_tokens=num_cached_tokens, block_ids=BLOCKS
    )


def planned(start: int, end: int) -> ChunkPlanned:
    return ChunkPlanned(attempt_id=attempt(), start=start, end=end)


def done(finish_reason: FinishReason | None = None) -> PrefillDone:
    return PrefillDone(
        attempt_id=attempt(), num_cached_tokens=4, first_token=99, finish_reason=finish_reason
    )


def sent(message: object, stream_id: StreamId = S) -> SendOnStream:
    return SendOnStream(stream_id=stream_id, message=message)  # type: ignore[arg-type]


def reset(reason: ResetReason, number: int = 1, stream_id: StreamId = S) -> list[object]:
    message = Reset(attempt_id=attempt(number), reason=reason)
    return [sent(message, stream_id), EndStream(stream_id=stream_id)]


def ready(start: int, end: int, first: int, last: int, blocks: tuple[BlockId, ...]) -> SendOnStream:
    return sent(
        LayersReady(
            attempt_id=attempt(),
            start=start,
            end=end,
            first_layer=first,
            end_layer=last,
            block_ids=blocks,
        )
    )


COMMIT = sent(
    Commit(
        attempt_id=attempt(), first_token=99, position=0, finish_reason=None, num_cached_tokens=4
    )
)
FIRST_TOKEN = SendToRouter(
    router=R,
    message=TokensReady(
        attempt_id=attempt(),
        run=TokenRun(first_position=0, token_ids=(99,)),
        num_cached_tokens=4,
    ),
)
ABORT = SendCommand(command=Abort(attempt_id=attempt()))
RELEASE = SendCommand(command=Release(attempt_id=attempt()))


@pytest.fixture
def p() -> Iterator[Prefiller]:
    prefiller = Prefiller()
    yield prefiller
    prefiller.machine.validate()


def test_layers_are_announced_in_groups_while_the_next_ones_compute(p: Prefiller) -> None:
    assert p.prefill() == [SendCommand(command=Prefill(request=REQUEST, attempt=1))]
    assert p.open() == []
    assert p.core(started(4), planned(4, 8), step=5) == [
        sent(Opened(attempt_id=attempt(), num_cached_tokens=4, block_ids=BLOCKS[:1]))
    ]
    assert p(LayersDone(step=5, num_layers=1)) == []
    assert p(LayersDone(step=5, num_layers=3)) == [ready(4, 8, 0, 2, BLOCKS[1:2])]
    # The next step's first word tells that all layers of the one before are done.
    assert p.core(planned(8, 10), step=6) == []
    assert p(LayersDone(step=6, num_layers=2)) == [
        ready(4, 8, 2, 4, BLOCKS[1:2]),
        ready(8, 10, 0, 2, BLOCKS[2:]),
    ]
    assert p.core(done()) == [FIRST_TOKEN, ready(8, 10, 2, 4, BLOCKS[2:]), COMMIT]
    assert p(StreamClosed(stream_id=S)) == [RELEASE]
    assert p.machine.is_quiet


def test_the_page_may_run_ahead_of_the_frame(p: Prefiller) -> None:
    p.prefill()
    p.open()
    assert p(LayersDone(step=5, num_layers=4)) == []
    assert p.core(started(4), planned(4, 8), step=5)[1:] == [ready(4, 8, 0, 4, BLOCKS[1:2])]


def test_a_late_reader_gets_all_that_is_ready_in_one_message(p: Prefiller) -> None:
    p.prefill()
    p.core(started(4), planned(4, 8), step=5)
    p.core(planned(8, 10), step=6)
    assert p.core(done()) == [FIRST_TOKEN]
    assert p.open() == [
        sent(Opened(attempt_id=attempt(), num_cached_tokens=4, block_ids=BLOCKS[:1])),
        ready(4, 10, 0, 4, BLOCKS[1:]),
        COMMIT,
    ]


def test_an_open_before_its_prefill_is_parked(p: Prefiller) -> None:
    assert p.open() == []
    assert p.machine.next_wakeup() == 2.0
    p.prefill()
    assert p.core(started())[0] == sent(
        Opened(attempt_id=attempt(), num_cached_tokens=0, block_ids=())
    )


def test_a_parked_open_is_reset_after_two_seconds(p: Prefiller) -> None:
    p.open()
    assert p.at(1.9) == []
    assert p.at(2.0) == reset(ResetReason.NO_PREFILL)
    assert p.machine.is_quiet
    # The Prefill may still come: then nobody reads it, unless a reader opens once more.
    assert p.prefill() == [SendCommand(command=Prefill(request=REQUEST, attempt=1))]


def test_an_abort_before_the_open_is_remembered(p: Prefiller) -> None:
    assert p.abort() == []
    assert p.open() == reset(ResetReason.ABORTED)
    assert p.prefill() == []
    assert p.at(2.0) == []
    assert p.open() == []


def test_an_abort_ends_computing_and_reader(p: Prefiller) -> None:
    p.prefill()
    p.open()
    p.core(started())
    assert p.abort() == [ABORT, *reset(ResetReason.ABORTED)]
    assert p.abort() == []
    assert p.core(done()) == []
    assert p.machine.is_quiet


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"source": WorkerKey(WorkerId("p"), Incarnation("0"))}, ResetReason.WRONG_INCARNATION),
        ({"namespace": "other"}, ResetReason.WRONG_NAMESPACE),
    ],
)
def test_a_reader_that_means_another_worker_is_reset(
    p: Prefiller, change: dict[str, object], reason: ResetReason
) -> None:
    p.prefill()
    event = OpenReceived(stream_id=S, open=replace(make_open(), **change))  # type: ignore[arg-type]
    assert p(event) == reset(reason)
    assert p.open() == []


def test_a_second_reader_is_reset(p: Prefiller) -> None:
    p.prefill()
    p.open()
    other = StreamId(8)
    assert p.open(stream_id=other) == reset(ResetReason.ALREADY_OPEN, stream_id=other)
    assert p.machine.num_streams == 1


def test_a_higher_attempt_drops_the_lower_in_either_role(p: Prefiller) -> None:
    p.prefill()
    p.open()
    assert p.prefill(2) == [
        ABORT,
        *reset(ResetReason.SUPERSEDED),
        SendCommand(command=Prefill(request=REQUEST, attempt=2)),
    ]
    assert p.prefill(1) == []
    decode = DecodeRequest(request=REQUEST, attempt=3, source=None, deadline_s=60.0)
    assert p(RouterMessageReceived(router=R, message=decode)) == [
        SendCommand(command=Abort(attempt_id=attempt(2)))
    ]


def test_a_refusal_goes_to_router_and_reader(p: Prefiller) -> None:
    p.prefill()
    p.open()
    refused = Refused(attempt_id=attempt(), reason=RefuseReason.QUEUE_FULL)
    assert p.core(refused) == [
        SendToRouter(router=R, message=refused),
        *reset(ResetReason.REFUSED),
    ]
    assert p.open() == reset(ResetReason.REFUSED)


def test_a_failed_prefill_is_the_readers_to_report(p: Prefiller) -> None:
    p.prefill()
    p.open()
    failed = PrefillFailed(attempt_id=attempt(), reason=HandBackReason.REVOKED)
    assert p.core(failed) == [
        sent(CommitFailed(attempt_id=attempt(), reason=HandBackReason.REVOKED)),
        EndStream(stream_id=S),
    ]


def test_a_failed_prefill_without_reader_is_told_to_the_router(p: Prefiller) -> None:
    p.prefill()
    failed = PrefillFailed(attempt_id=attempt(), reason=HandBackReason.REVOKED)
    back = HandedBack(attempt_id=attempt(), reason=HandBackReason.REVOKED)
    assert p.core(failed) == [SendToRouter(router=R, message=back)]
    assert p.open() == reset(ResetReason.REFUSED)


def test_output_that_is_not_finite_ends_the_request(p: Prefiller) -> None:
    p.prefill()
    run = TokenRun(first_position=0, token_ids=(), finish_reason=FinishReason.INVALID_OUTPUT)
    failed = PrefillFailed(attempt_id=attempt(), reason=FinishReason.INVALID_OUTPUT)
    assert p.core(failed) == [
        SendToRouter(router=R, message=TokensReady(attempt_id=attempt(), run=run))
    ]


def test_a_finished_prefill_waits_ten_seconds_for_its_reader(p: Prefiller) -> None:
    p.prefill()
    p.core(started(), planned(0, 10))
    p.core(done())
    assert p.machine.next_wakeup() == 10.0
    assert p.at(10.0) == [RELEASE]
    assert p.open() == reset(ResetReason.EXPIRED)


def test_a_reader_that_goes_early_ends_the_computing(p: Prefiller) -> None:
    p.prefill()
    p.open()
    p.core(started())
    assert p(StreamClosed(stream_id=S)) == [ABORT]
    assert p.machine.is_quiet


def test_what_a_lost_router_began_dies_with_it(p: Prefiller) -> None:
    p.prefill()
    p.open()
    assert p(RouterLost(router=RouterKey("other"))) == []
    assert p(RouterLost(router=R)) == [ABORT, *reset(ResetReason.ABORTED)]


def test_a_worker_ends_an_attempt_five_seconds_after_its_deadline(p: Prefiller) -> None:
    p.prefill()
    p.core(started())
    assert p.at(64.9) == []
    assert p.at(65.0) == [ABORT]


def test_a_queued_reader_is_told_that_the_engine_steps(p: Prefiller) -> None:
    p.prefill()
    p.open()
    p.now = 0.9
    assert p.core(step=2) == []
    p.now = 1.0
    assert p.core(step=0) == []
    assert p.core(step=3) == [sent(Waiting(attempt_id=attempt()))]
    assert p.core(step=4) == []


def test_a_reader_is_kept_patient_through_a_long_step(p: Prefiller) -> None:
    """A step of others may take longer than a reader's patience; its layers tell that it moves."""
    p.prefill()
    p.open()
    p.core(step=2)
    p.now = 0.9
    assert p(LayersDone(step=2, num_layers=1)) == []
    p.now = 1.5
    waiting = [sent(Waiting(attempt_id=attempt()))]
    assert p(LayersDone(step=2, num_layers=2)) == waiting
    assert p(LayersDone(step=2, num_layers=2)) == []
    p.now = 2.5
    assert p(LayersDone(step=2, num_layers=3)) == waiting


def test_a_fork_lives_on_its_own(p: Prefiller) -> None:
    p.prefill()
    p.open()
    p.core(started(), planned(0, 10), step=5)
    fork = p.machine.fork()
    assert fork.key() == p.machine.key()
    fork.handle(LayersDone(step=5, num_layers=4), 0.0)
    assert fork.key() != p.machine.key()
    assert p(LayersDone(step=5, num_layers=4)) == [ready(0, 10, 0, 4, BLOCKS)]
