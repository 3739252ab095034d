"""WorkerHandoffs: both roles of one worker behind one door, in the order that each event needs.

A worker's shell feeds it every event and performs the effects in order. Both machines see every
router message, since a higher attempt in one role ends a lower one in the other.

A worker has at most one role in an attempt: a router that asks for the other as well is refused. So
the core's replies are told apart by the attempt alone, and an Abort needs no role.
"""

from __future__ import annotations

from moonpool.core.protocol import Refused, RefuseReason
from moonpool.handoff.config import HandoffConfig
from moonpool.handoff.decode import DecodeHandoffs
from moonpool.handoff.effects import HandoffEffect, SendToRouter
from moonpool.handoff.events import (
    CoreFrameReceived,
    HandoffEvent,
    LayersDone,
    OpenReceived,
    ReadDone,
    RouterLost,
    RouterMessageReceived,
    SourceMessageReceived,
    StreamBroken,
    StreamClosed,
)
from moonpool.handoff.messages import DecodeRequest, PrefillRequest
from moonpool.handoff.prefill import PrefillHandoffs
from moonpool.ids import WorkerKey


class WorkerHandoffs:
    """The handoff machines of one worker."""

    def __init__(self, *, key: WorkerKey, namespace: str, config: HandoffConfig) -> None:
        self.prefill = PrefillHandoffs(key=key, namespace=namespace, config=config)
        self.decode = DecodeHandoffs(key=key, namespace=namespace, config=config)

    def handle(self, event: HandoffEvent, now: float) -> list[HandoffEffect]:
        """Take one event; returns what is to be done, in order."""
        match event:
            case RouterMessageReceived(
                router=router, message=PrefillRequest() | DecodeRequest() as message
            ) if self._has_other_role(message):
                reply = Refused(attempt_id=message.attempt_id, reason=RefuseReason.NEVER_FITS)
                return [SendToRouter(router=router, message=reply)]
            case RouterMessageReceived(message=PrefillRequest()):
                # What ends goes before what begins: the core gets Abort before Prefill.
                return [*self.decode.handle(event, now), *self.prefill.handle(event, now)]
            case RouterMessageReceived() | RouterLost() | CoreFrameReceived():
                return [*self.prefill.handle(event, now), *self.decode.handle(event, now)]
            case LayersDone() | OpenReceived() | StreamClosed():
                return list(self.prefill.handle(event, now))
            case SourceMessageReceived() | StreamBroken() | ReadDone():
                return list(self.decode.handle(event, now))

    def _has_other_role(self, message: PrefillRequest | DecodeRequest) -> bool:
        other = self.decode if isinstance(message, PrefillRequest) else self.prefill
        return other.is_live(message.attempt_id)

    def tick(self, now: float) -> list[HandoffEffect]:
        """Do what is due. Call at `next_wakeup()` or later."""
        return [*self.prefill.tick(now), *self.decode.tick(now)]

    def next_wakeup(self) -> float | None:
        """When `tick` has something to do next, or None."""
        times = (self.prefill.next_wakeup(), self.decode.next_wakeup())
        return min((time for time in times if time is not None), default=None)

    @property
    def is_quiet(self) -> bool:
        """No attempt, stream or read is open here."""
        return self.prefill.is_quiet and self.decode.is_quiet

    def fork(self) -> WorkerHandoffs:
        """An independent copy, for exploration."""
        fork = object.__new__(WorkerHandoffs)
        fork.prefill = self.prefill.fork()
        fork.decode = self.decode.fork()
        return fork

    def key(self) -> tuple[object, ...]:
        """Equal for machines that behave alike, their timers' exact times apart."""
        return (self.prefill.key(), self.decode.key())

    def validate(self) -> None:
        """Check every invariant; for tests and debugging."""
        self.prefill.validate()
        self.decode.validate()
