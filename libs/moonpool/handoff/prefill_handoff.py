"""PrefillHandoff: what the prefill side knows of one attempt; and an Open that came before its Prefill."""

from __future__ import annotations

import copy
import enum
from dataclasses import dataclass

from moonpool.handoff.announcement import Announcement
from moonpool.handoff.messages import RouterKey, StreamId
from moonpool.ids import AttemptId
from moonpool.inference.output import FinishReason


class PrefillState(enum.StrEnum):
    #: Sent to the core, which has not begun.
    WAITING = "waiting"
    #: Has its blocks; chunks are computed.
    RUNNING = "running"
    #: All KV is there, the first token is drawn.
    DONE = "done"


@dataclass(slots=True, kw_only=True)
class PrefillHandoff:
    """One attempt at one request."""

    attempt_id: AttemptId
    router: RouterKey
    num_tokens: int
    #: Position of the first token: len(emitted).
    position: int
    end_at: float
    state: PrefillState = PrefillState.WAITING
    stream_id: StreamId | None = None
    #: None while it is WAITING.
    announcement: Announcement | None = None
    first_token: int | None = None
    finish_reason: FinishReason | None = None
    #: Of what was cached, how much this worker read from a peer; known when it is DONE.
    num_peer_tokens: int = 0
    #: Leading tokens that the peer held in the end; known before it is RUNNING, if ever.
    num_peer_held_tokens: int | None = None
    #: Set while it is DONE and nobody reads it.
    unclaimed_at: float | None = None
    #: When the reader is next told that it waits, if it hears nothing else.
    waiting_at: float = 0.0

    def fork(self) -> PrefillHandoff:
        handoff = copy.copy(self)
        handoff.announcement = self.announcement.fork() if self.announcement is not None else None
        return handoff

    def key(self) -> tuple[object, ...]:
        return (
            self.attempt_id,
            self.router,
            self.state,
            self.stream_id,
            self.announcement.key() if self.announcement is not None else None,
            self.first_token,
            self.finish_reason,
            self.num_peer_tokens,
            self.num_peer_held_tokens,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class ParkedOpen:
    """An Open whose Prefill has not come."""

    attempt_id: AttemptId
    stream_id: StreamId
    reset_at: float
