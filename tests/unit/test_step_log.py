"""The steps that a worker remembers, from its core's frames."""

from __future__ import annotations

from moonpool.core.protocol import BlockLedger, CoreFrame
from moonpool.wire.engine_messages import TimedFrame
from moonpool.wire.steps import StepRecord, steps_from_pb, steps_to_pb
from moonpool.worker.step_log import StepLog

LEDGER = BlockLedger(num_total=1, num_free=1, num_cached=0, num_referenced=0)


def frame(step: int, *, at: int, computed: int = 0, num_tokens: int = 0) -> TimedFrame:
    """Plans `step`; tells that the one before had `num_tokens` and ended at `computed`."""
    return TimedFrame(
        frame=CoreFrame(
            step=step,
            replies=(),
            ledger=LEDGER,
            forward_s=0.5 if computed else 0.0,
            num_step_tokens=num_tokens,
        ),
        planned_unix_ns=at,
        computed_unix_ns=computed,
    )


def record(step: int, *, planned: int, computed: int, num_tokens: int) -> StepRecord:
    return StepRecord(
        step=step,
        planned_unix_ns=planned,
        computed_unix_ns=computed,
        num_tokens=num_tokens,
        forward_s=0.5,
        logits_s=0.0,
        sample_s=0.0,
    )


def test_a_step_is_told_by_the_frame_before_it_and_the_one_after() -> None:
    log = StepLog()
    log.frame_received(frame(0, at=1))
    log.frame_received(frame(1, at=10))
    log.frame_received(frame(2, at=21, computed=20, num_tokens=8))
    log.frame_received(frame(0, at=31, computed=30, num_tokens=7))
    log.frame_received(frame(3, at=40))
    steps = log.after(0, max_steps=10)
    assert steps == (
        record(1, planned=10, computed=20, num_tokens=8),
        record(2, planned=21, computed=30, num_tokens=7),
    )
    assert log.after(1, max_steps=10) == steps[1:]
    assert log.after(0, max_steps=1) == steps[:1]
    assert steps_from_pb(steps_to_pb(steps)) == steps


def test_a_step_whose_frame_was_merged_away_is_left_out() -> None:
    log = StepLog()
    log.frame_received(frame(1, at=10))
    log.frame_received(frame(3, at=31, computed=30, num_tokens=2))
    log.frame_received(frame(4, at=41, computed=40, num_tokens=3))
    assert [step.step for step in log.after(0, max_steps=10)] == [3]


def test_the_oldest_goes_first() -> None:
    log = StepLog(max_steps=2)
    for step in range(1, 5):
        log.frame_received(frame(step, at=10 * step, computed=10 * step - 1))
    assert [step.step for step in log.after(0, max_steps=10)] == [2, 3]


def test_what_a_step_takes_beside_the_model_is_told_of_steps_that_follow_another() -> None:
    log = StepLog()
    second = 10**9
    told = [
        log.frame_received(one)
        for one in (
            frame(1, at=1 * second),
            frame(2, at=2 * second, computed=2 * second),  # the first: from where is not known
            frame(3, at=3 * second, computed=3 * second),  # 1 s, of which the model took 0.5
            frame(0, at=4 * second, computed=4 * second),
            frame(4, at=9 * second),  # the engine was idle
            frame(5, at=10 * second, computed=10 * second),
            frame(7, at=12 * second, computed=12 * second),  # one was merged away
        )
    ]
    assert told == [None, None, 0.5, 0.5, None, None, None]
