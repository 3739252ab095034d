"""fork(), key() and the refusals of a core that are bugs of its caller."""

from __future__ import annotations

import pytest

from moonpool.core.attempt_log import AttemptLog
from moonpool.core.protocol import Abort, Release
from moonpool.core.step import StepResult
from moonpool.ids import AttemptId, RequestId
from moonpool.sched.request import Role
from support.core_cases import decode_here, ident, make_worker, prefill, reserve
from support.requests import make_request


def test_a_fork_is_equal_and_independent() -> None:
    worker = make_worker()
    worker.step(
        prefill(make_request("held", prompt=5)),
        reserve(make_request("reserved", prompt=9)),
        decode_here(make_request("running", prompt=7, max_tokens=9)),
    )
    worker.step(decode_here(make_request("more", prompt=30, arrival=1.0)))
    fork = worker.core.fork()
    key = fork.key()
    assert key == worker.core.key()
    assert hash(key) == hash(worker.core.key())
    worker.run_until_idle(Abort(attempt_id=ident("reserved")), Release(attempt_id=ident("held")))
    assert fork.key() == key != worker.core.key()
    fork.validate()


def test_key_does_not_depend_on_which_blocks_are_held() -> None:
    request = make_request("r", prompt=6)
    direct, detour = make_worker(), make_worker()
    direct.step(reserve(request))
    # Another request has block 0 when this one takes its blocks, and is gone without a trace.
    other = make_request("x", prompt=3, max_tokens=1)
    detour.step(prefill(other), reserve(request))
    detour.run_until_idle(Abort(attempt_id=ident("x")))
    direct.step(Abort(attempt_id=ident("x")))
    assert direct.core.key() == detour.core.key()
    assert direct.frames[0].replies != detour.frames[0].replies


def test_a_result_of_another_plan_raises_and_changes_nothing() -> None:
    worker = make_worker()
    worker.core.handle(decode_here(make_request(prompt=5)), 0.0)
    plan = worker.core.schedule(0.0)
    assert plan is not None
    key = worker.core.key()
    for step, tokens in ((plan.step + 1, ((1,),)), (plan.step, ()), (plan.step, ((1,), (2,)))):
        with pytest.raises(ValueError, match="result of step"):
            worker.core.update(StepResult(step=step, tokens=tokens), 0.0)
    assert worker.core.key() == key
    worker.core.update(StepResult(step=plan.step, tokens=((1,),)), 0.0)


def test_the_memory_of_attempts_is_bounded() -> None:
    log = AttemptLog()
    first = AttemptId(RequestId("r0"), 1)
    assert log.note(Role.DECODE, first, 0.0)
    assert not log.note(Role.DECODE, first, 0.0)
    for number in range(1, 8193):
        log.note(Role.DECODE, AttemptId(RequestId(f"r{number}"), 1), 0.0)
    assert len(log.key()) == 8192
    # The oldest has been forgotten.
    assert log.note(Role.DECODE, first, 0.0)
