"""Both roles of one worker: which machine hears of what, and that an attempt has one role here."""

from __future__ import annotations

import pytest

from moonpool.core.protocol import Abort, Accepted, Decode, Prefill, Refused, RefuseReason
from moonpool.handoff.config import HandoffConfig
from moonpool.handoff.effects import SendCommand, SendToRouter
from moonpool.handoff.events import CoreFrameReceived, RouterMessageReceived
from moonpool.handoff.messages import DecodeRequest, PrefillRequest, RouterKey
from moonpool.handoff.worker import WorkerHandoffs
from moonpool.ids import AttemptId, Incarnation, WorkerId, WorkerKey
from support.requests import make_request

R = RouterKey("r")
REQUEST = make_request("a", prompt=10, max_tokens=5)


def make_handoffs() -> WorkerHandoffs:
    return WorkerHandoffs(
        key=WorkerKey(WorkerId("w"), Incarnation("1")),
        namespace="n",
        config=HandoffConfig(num_layers=2, block_size=4),
    )


def asked(role: str, number: int) -> RouterMessageReceived:
    message = (
        PrefillRequest(request=REQUEST, attempt=number, deadline_s=60.0)
        if role == "prefill"
        else DecodeRequest(request=REQUEST, attempt=number, source=None, deadline_s=60.0)
    )
    return RouterMessageReceived(router=R, message=message)


def command(role: str, number: int) -> SendCommand:
    if role == "prefill":
        return SendCommand(command=Prefill(request=REQUEST, attempt=number))
    return SendCommand(command=Decode(request=REQUEST, attempt=number, has_source=False))


@pytest.mark.parametrize(("first", "second"), [("prefill", "decode"), ("decode", "prefill")])
def test_a_second_role_in_one_attempt_is_refused(first: str, second: str) -> None:
    handoffs = make_handoffs()
    attempt_id = AttemptId(REQUEST.request_id, 1)
    assert handoffs.handle(asked(first, 1), 0.0) == [command(first, 1)]
    refused = Refused(attempt_id=attempt_id, reason=RefuseReason.NEVER_FITS)
    assert handoffs.handle(asked(second, 1), 0.0) == [SendToRouter(router=R, message=refused)]
    frame = CoreFrameReceived(step=0, replies=(Accepted(attempt_id=attempt_id),))
    assert handoffs.handle(frame, 0.0) == []
    handoffs.validate()


@pytest.mark.parametrize(("first", "second"), [("prefill", "decode"), ("decode", "prefill")])
def test_a_higher_attempt_in_the_other_role_ends_the_lower_first(first: str, second: str) -> None:
    handoffs = make_handoffs()
    handoffs.handle(asked(first, 1), 0.0)
    abort = SendCommand(command=Abort(attempt_id=AttemptId(REQUEST.request_id, 1)))
    assert handoffs.handle(asked(second, 2), 0.0) == [abort, command(second, 2)]
    handoffs.validate()
