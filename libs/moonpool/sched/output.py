"""SchedulerOutput: what one call of schedule() decided. The core turns it into a plan and replies."""

from __future__ import annotations

from dataclasses import dataclass, field

from moonpool.sched.request import RequestState


@dataclass(frozen=True, slots=True, kw_only=True)
class ScheduledRow:
    """A request computes tokens [start, end) in the coming step."""

    state: RequestState
    start: int
    end: int
    #: The row reaches the end of what is known: a token is drawn after it.
    is_sampling: bool

    @property
    def num_scheduled_tokens(self) -> int:
        return self.end - self.start


@dataclass(slots=True, kw_only=True)
class SchedulerOutput:
    """Filled by one call of schedule(), in the order in which things were decided."""

    rows: list[ScheduledRow] = field(default_factory=list)
    #: Left the queue in this step: they hold their blocks.
    started: list[RequestState] = field(default_factory=list)
    #: Hold blocks into which the service is to read a prefix from a peer.
    fetching: list[RequestState] = field(default_factory=list)
    #: Lost their blocks to an older request and wait.
    preempted: list[RequestState] = field(default_factory=list)
    #: Lost their blocks and may not compute so much here: ended.
    handed_back: list[RequestState] = field(default_factory=list)
    #: Lost the blocks that they read into to an older request. A fetch's request waits again; a
    #: decode with a source has ended.
    revoked: list[RequestState] = field(default_factory=list)
