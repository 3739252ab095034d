"""What the router's request machine wants done. A shell performs effects in the order given."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field

from moonpool.errors import MoonpoolError
from moonpool.handoff.messages import AbortRequest, DecodeRequest, PrefillRequest
from moonpool.ids import RequestId, WorkerKey
from moonpool.inference.generation import Usage
from moonpool.inference.output import FinishReason, TokenRun
from moonpool.inference.request import InferenceRequest
from moonpool.routing.disagg_decider import DisaggDecision
from moonpool.routing.selection import Selection
from moonpool.routing.selector import PlacementDecision, PrefillPlan


@dataclass(frozen=True, slots=True, kw_only=True)
class SendPrefill:
    key: WorkerKey
    message: PrefillRequest


@dataclass(frozen=True, slots=True, kw_only=True)
class SendDecode:
    key: WorkerKey
    message: DecodeRequest


@dataclass(frozen=True, slots=True, kw_only=True)
class SendAbort:
    key: WorkerKey
    message: AbortRequest


@dataclass(frozen=True, slots=True, kw_only=True)
class EmitTokens:
    """New tokens for the client: consecutive, each position exactly once.

    The run's finish reason is set only in the last EmitTokens of a request that ends well.
    """

    request_id: RequestId
    run: TokenRun


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefixLeft:
    """KV that a request leaves behind on a worker, which keeps it as long as it has room."""

    key: WorkerKey
    #: With what was emitted.
    request: InferenceRequest
    #: Leading tokens of prompt + emitted whose KV exists there.
    num_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class EndRequest:
    """The request is over; exactly one per request, and its last effect but for aborts."""

    request_id: RequestId
    #: Set if it ended well.
    finish_reason: FinishReason | None
    usage: Usage
    #: Whose cached tokens `usage` has: the attempt that found the fewest; 0: none said what it found.
    cached_attempt: int = 0
    #: Leading tokens that the peer of that attempt held in the end; None: as was believed, for all that is known.
    num_peer_held_tokens: int | None = None
    #: Placements, refused ones included.
    num_attempts: int = 0
    num_failures: int = 0
    #: The error's code if it did not; None otherwise.
    error_code: str | None = None
    #: The error itself, to raise or to map to a status.
    error: MoonpoolError | None = field(default=None, compare=False)
    #: By the last attempt of one that ended well; a worker that was lost since has none.
    left: tuple[PrefixLeft, ...] = ()


class RetryReason(enum.StrEnum):
    """What ended an attempt that was not its request's last."""

    REFUSED = "refused"
    HANDED_BACK = "handed back"
    LOST = "lost"
    DIVERGED = "diverged"


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """The record of one placement: where an attempt goes, and every term that decided it."""

    request_id: RequestId
    attempt: int
    #: It found room.
    record: PlacementDecision
    #: When, by the dispatcher's clock.
    placed_at: float
    #: Why the attempt before this one ended: in words, and as one of few; empty and None for the first.
    previous_outcome: str = ""
    previous_end: RetryReason | None = None

    @property
    def decode(self) -> Selection:
        return self.record.decode

    @property
    def prefill(self) -> Selection | None:
        """None if it is prefilled where it is decoded."""
        return self.record.prefill

    @property
    def decision(self) -> DisaggDecision:
        """Local or remote prefill."""
        assert self.record.disagg is not None, self
        return self.record.disagg

    @property
    def plan(self) -> PrefillPlan:
        """What the worker that prefills is expected to do."""
        assert self.record.plan is not None, self
        return self.record.plan


@dataclass(frozen=True, slots=True, kw_only=True)
class Placed:
    """For the log, the trace and `explain`; comes before the messages that it explains."""

    placement: Placement


DispatchEffect = SendPrefill | SendDecode | SendAbort | EmitTokens | EndRequest | Placed
