"""RequestRecord: what the dispatcher knows about one request that has not ended."""

from __future__ import annotations

import enum
import math
from dataclasses import dataclass, field, replace

from moonpool.dispatch.effects import RetryReason
from moonpool.ids import AttemptId, RequestId, WorkerKey
from moonpool.inference.cached_tokens import CachedTokens
from moonpool.inference.request import InferenceRequest


class DispatchState(enum.StrEnum):
    #: Waits here for room on a worker.
    QUEUED = "queued"
    #: Sent to its workers; no token of this attempt has come.
    PLACED = "placed"
    #: Tokens of this attempt have come.
    RUNNING = "running"


@dataclass(frozen=True, slots=True, kw_only=True)
class OnWorkers:
    """Where the current attempt is, and who has ended it there."""

    decode: WorkerKey
    #: None: the decode worker prefills it itself.
    prefill: WorkerKey | None
    #: Whoever prefills was told to read from a store.
    has_store_peer: bool = False
    has_decode_ended: bool = False
    has_prefill_ended: bool = False
    #: A token of the decode worker has come: the prefill worker's part is over.
    has_decode_begun: bool = False

    @property
    def prefilling(self) -> WorkerKey:
        """Who computes what is not cached."""
        return self.prefill if self.prefill is not None else self.decode


@dataclass(slots=True, kw_only=True)
class RequestRecord:
    """Mutable; owned and written by the dispatcher alone."""

    request: InferenceRequest
    deadline_at: float
    #: From here on it ends instead of waiting for workers, unless the client has a token.
    queue_deadline_at: float = math.inf
    #: The dispatcher's heap holds `queue_deadline_at`.
    is_queue_timed: bool = False
    #: What the client has, in order; grows in place.
    emitted: list[int] = field(default_factory=list)
    state: DispatchState = DispatchState.QUEUED
    #: Of the current placement, or of the last one while it is queued; 0 before the first.
    attempt: int = 0
    placed: OnWorkers | None = None
    num_failures: int = 0
    #: Attempts that lost a worker while it worked on them.
    num_deaths: int = 0
    #: The last of these.
    dead_attempt: int = 0
    #: Workers that said that they can never hold it.
    unfit: frozenset[WorkerKey] = frozenset()
    #: Prefill workers that vanished in the middle of a handoff of this request.
    lost_sources: frozenset[WorkerKey] = frozenset()
    #: What no attempt that drew a token had to compute; None before the first one that said so.
    cached: CachedTokens | None = None
    #: Whose word that is; 0 before.
    cached_attempt: int = 0
    #: What any worker held when the current attempt was placed.
    num_held_tokens: int = 0
    #: Bound of `cached`: beyond it, an attempt that ended in silence may have computed; None: no bound.
    num_credible_tokens: int | None = None
    #: Why the last attempt ended: in words, and as one of few.
    outcome: str = ""
    retry_reason: RetryReason | None = None

    @property
    def request_id(self) -> RequestId:
        return self.request.request_id

    @property
    def attempt_id(self) -> AttemptId:
        return AttemptId(self.request.request_id, self.attempt)

    def note_cached(self, cached: CachedTokens) -> None:
        """An attempt says what it did not have to compute.

        What one attempt found and another one computed was computed, so the least of them counts.
        Requires that it is placed: whom it was told to read from is known from there.
        """
        assert self.placed is not None, self
        cached = replace(cached, is_peer_store=self.placed.has_store_peer)
        cached = cached.within(len(self.request.prompt_token_ids))
        if self.num_credible_tokens is not None:
            cached = cached.within(self.num_credible_tokens)
        if self.cached is None or cached.num_tokens < self.cached.num_tokens:
            self.cached, self.cached_attempt = cached, self.attempt

    def note_silent_end(self) -> None:
        """The current attempt, which was not refused, ends without a word of what it found cached.

        What the next one finds beyond what was held before may be this one's work.
        """
        if self.num_credible_tokens is None or self.num_held_tokens < self.num_credible_tokens:
            self.num_credible_tokens = self.num_held_tokens

    def note_death(self) -> None:
        """A worker of the current attempt died. Both of its workers on one host are one death."""
        if self.dead_attempt != self.attempt:
            self.dead_attempt = self.attempt
            self.num_deaths += 1

    def fork(self) -> RequestRecord:
        """An independent copy, for exploration."""
        return replace(self, emitted=list(self.emitted))

    def key(self) -> tuple[object, ...]:
        return (
            self.request_id,
            tuple(self.emitted),
            self.state,
            self.attempt,
            self.placed,
            self.num_failures,
            self.num_deaths,
            self.dead_attempt,
            tuple(sorted(self.unfit)),
            tuple(sorted(self.lost_sources)),
            self.cached,
            self.cached_attempt,
            self.num_held_tokens,
            self.num_credible_tokens,
        )
