"""DecodeHandoff: what the decode side knows of one live attempt."""

from __future__ import annotations

import copy
import enum
from dataclasses import dataclass

from moonpool.core.protocol import HandBackReason
from moonpool.handoff.arrival import Arrival
from moonpool.handoff.messages import Commit, RouterKey, SourceRef
from moonpool.ids import AttemptId
from moonpool.inference.output import FinishReason


class DecodeState(enum.StrEnum):
    #: The core has been asked and has not answered: nothing is held.
    ASKED = "asked"
    #: Blocks are reserved, the stream is open or reads are outstanding.
    READING = "reading"
    #: Admitted (or queued for a local prefill): the core's alone.
    RUNNING = "running"


@dataclass(slots=True, kw_only=True)
class DecodeHandoff:
    """One live attempt at one request."""

    attempt_id: AttemptId
    router: RouterKey
    source: SourceRef | None
    num_tokens: int
    end_at: float
    state: DecodeState = DecodeState.ASKED
    #: ASKED: when the core's silence is a refusal. READING, not committed: when the source is lost.
    patience_ends_at: float | None = None
    is_stream_open: bool = False
    #: READING only.
    arrival: Arrival | None = None
    #: Prefix of tokens that the core was told of.
    num_told_tokens: int = 0
    commit: Commit | None = None
    is_source_lost: bool = False
    #: Why the source failed the commit, if it did.
    failure: HandBackReason | FinishReason | None = None
    #: What the source did not have to compute; None until it said so. Of that, from a peer of its own.
    num_source_cached_tokens: int | None = None
    num_source_peer_tokens: int = 0
    #: Leading tokens that its peer, or its source's, held in the end; None: as was believed, for all that is known.
    num_peer_held_tokens: int | None = None

    def fork(self) -> DecodeHandoff:
        handoff = copy.copy(self)
        handoff.arrival = self.arrival.fork() if self.arrival is not None else None
        return handoff

    def key(self) -> tuple[object, ...]:
        return (
            self.attempt_id,
            self.router,
            self.source,
            self.state,
            self.is_stream_open,
            self.arrival.key() if self.arrival is not None else None,
            self.num_told_tokens,
            self.commit,
            self.is_source_lost,
            self.failure,
            self.num_source_cached_tokens,
            self.num_source_peer_tokens,
            self.num_peer_held_tokens,
        )
