"""Dispatcher: the router's request machine. It owns every request from arrival to its last token.

Events in (dispatch/events.py), effects out (dispatch/effects.py); `now` is an argument; no IO. What it
knows of workers stands in dispatch/fleet.py, who waits for them in dispatch/waiting_room.py.

Rules
- Every placement is a new attempt; what comes from another attempt, or from a worker that the attempt
  is not placed on, is ignored. So a late word of a dead attempt is harmless.
- One token per position: the decode worker's stream is complete by itself, the prefill worker's early
  token only shortens TTFT. If the decode worker went on from another token than the client has (a
  repair that drew anew, in low precision), the attempt is replaced: the client's tokens hold.
- A replay is the same request with `emitted` filled in, never a longer prompt.
- A failure (a decode worker lost, a source that failed the handoff) is counted, three end the request.
  A refusal, a revocation, a preemption, a drain are not failures: they take a new attempt number and
  leave the request in the queue, in order of arrival, until there is room or its deadline passes.
- The decode worker decides about a lost prefill worker: it may have all it needs, or repair the rest.
  A request does not go back to a source that it lost; without another the decode worker prefills it.
- A request that waits here past its queue deadline, also after workers refused it, fails unless the client
  has a token: what has begun is worth waiting for, up to the request's own deadline.
- A request that was in flight on two workers that died is taken for the cause and fails.
- When an attempt or a request ends, it is aborted on every worker that did not end it itself.
- A request ends exactly once: finish, error, cancel or deadline, whichever comes first.

Life of a request

    state    event                                       effects and next state
    -        RequestArrived                                                               -> QUEUED
    QUEUED   a decode worker (and, if the disagg         Placed, SendPrefill, SendDecode  -> PLACED
             decider says so, a prefill worker) has room
    PLACED   first tokens                                EmitTokens                       -> RUNNING
    PLACED.. Refused, HandedBack, decode worker lost     SendAbort to the others          -> QUEUED
    RUNNING  TokensReady                                 EmitTokens                       -> RUNNING
    any      finish reason, cancel, stop string,         EndRequest, SendAbort            -> ended
             deadline, third failure, second death

What it deliberately does not do: it does not detokenize, does not know prefixes and does not choose
workers (dispatch/placer.py), does not decide who is alive (dispatch/membership.py), does not admit.
"""

from __future__ import annotations

import heapq
from dataclasses import replace

from moonpool.core.protocol import (
    HandBackReason,
    HandedBack,
    Refused,
    RefuseReason,
    TokensReady,
)
from moonpool.dispatch.config import DispatchConfig
from moonpool.dispatch.effects import (
    DispatchEffect,
    EmitTokens,
    EndRequest,
    Placement,
    PrefixLeft,
    RetryReason,
    SendAbort,
)
from moonpool.dispatch.events import (
    DispatchEvent,
    DrainRequested,
    LoadReported,
    RequestArrived,
    RequestCancelled,
    RequestStopped,
    WorkerJoined,
    WorkerLost,
    WorkerMessageReceived,
)
from moonpool.dispatch.fleet import Fleet, RoomNews
from moonpool.dispatch.placer import MatchPrefix, nothing_cached
from moonpool.dispatch.request_record import DispatchState, RequestRecord
from moonpool.dispatch.waiting_room import NeverFits, WaitingRoom
from moonpool.errors import (
    CancelledByClientError,
    DeadlineExceededError,
    InternalError,
    InvalidRequestError,
    MoonpoolError,
    OverloadedError,
    QueueDeadlineError,
    TenantLimitError,
    UnavailableError,
    WorkerLostError,
)
from moonpool.handoff.messages import AbortRequest
from moonpool.ids import RequestId, WorkerKey
from moonpool.inference.cached_tokens import CachedTokens
from moonpool.inference.generation import Usage
from moonpool.inference.output import FinishReason, TokenRun

#: When a client that nobody had room for may come again.
_RETRY_AFTER_S = 2.0


class Dispatcher:
    """See the file's head.

    Args:
        match: What the prefix index believes; asked once per look at a request.
    """

    def __init__(self, config: DispatchConfig, *, match: MatchPrefix = nothing_cached) -> None:
        self._config = config
        self._match = match
        self._requests: dict[RequestId, RequestRecord] = {}
        #: Heap of deadlines, requests' own and those of their waits; entries of ended requests are
        #: skipped, and swept when they are many.
        self._deadlines: list[tuple[float, RequestId]] = []
        self._fleet = Fleet(config)
        #: The QUEUED ones.
        self._waiting = WaitingRoom(config, self._fleet, match)
        self._is_draining = False
        self._effects: list[DispatchEffect] = []

    # -- the interface --

    def handle(self, event: DispatchEvent, now: float) -> list[DispatchEffect]:
        """Take one event; returns what is to be done, in order."""
        match event:
            case WorkerMessageReceived(key=key, message=message):
                self._on_worker_message(key, message, now)
            case LoadReported(key=key, load=load):
                news = self._fleet.report(key, load)
                if news is RoomNews.WORKERS:
                    self._waiting.look_again()
                elif news is not RoomNews.NONE:
                    self._waiting.note_room()
            case RequestArrived():
                self._on_request_arrived(event, now)
            case RequestCancelled(request_id=request_id):
                self._on_cancelled(request_id)
            case RequestStopped():
                self._on_stopped(event)
            case WorkerJoined(info=info):
                self._fleet.join(info)
                self._waiting.look_again()
            case WorkerLost(key=key):
                self._on_worker_lost(key, now)
            case DrainRequested():
                self._is_draining = True
        return self._finish_turn(now)

    def tick(self, now: float) -> list[DispatchEffect]:
        """Do what is due. Call at `next_wakeup(now)` or later; too early or too often does nothing."""
        while self._deadlines and self._deadlines[0][0] <= now:
            _, request_id = heapq.heappop(self._deadlines)
            request = self._requests.get(request_id)
            if request is not None:
                self._on_deadline(request, now)
        return self._finish_turn(now)

    def next_wakeup(self, now: float) -> float | None:
        """When `tick` has something to do next, or None."""
        self._sweep_deadlines()
        times = [self._deadlines[0][0]] if self._deadlines else []
        time = self._waiting.next_wakeup(now)
        times += [time] if time is not None else []
        return min(times, default=None)

    @property
    def num_queued(self) -> int:
        """Requests that wait here for room."""
        return len(self._waiting)

    @property
    def num_requests(self) -> int:
        """Requests that have not ended, queued ones included."""
        return len(self._requests)

    def decisions(self, request_id: RequestId) -> tuple[Placement, ...]:
        """Why one of the newest requests went where; empty if it is not known, or no longer."""
        return self._waiting.decisions(request_id)

    def fork(self) -> Dispatcher:
        """An independent copy, for exploration."""
        fork = Dispatcher(self._config, match=self._match)
        fork._requests = {key: request.fork() for key, request in self._requests.items()}
        fork._deadlines = list(self._deadlines)
        fork._fleet = self._fleet.fork()
        fork._waiting = self._waiting.fork(fork._requests, fork._fleet)
        fork._is_draining = self._is_draining
        return fork

    def key(self) -> tuple[object, ...]:
        """Equal for machines that behave alike, exact times apart."""
        return (
            tuple(sorted(request.key() for request in self._requests.values())),
            self._fleet.key(),
            self._waiting.key(),
            self._is_draining,
        )

    def validate(self) -> None:
        """Check every invariant; for tests and debugging."""
        assert not self._effects
        self._waiting.validate(
            {
                request_id: request
                for request_id, request in self._requests.items()
                if request.state is DispatchState.QUEUED
            }
        )
        decoding: dict[WorkerKey, set[RequestId]] = {}
        prefilling: dict[WorkerKey, set[RequestId]] = {}
        deadlines = set(self._deadlines)
        for request_id, request in self._requests.items():
            assert request.request_id == request_id, request
            assert (request.deadline_at, request_id) in deadlines, request
            if request.is_queue_timed:
                assert (request.queue_deadline_at, request_id) in deadlines, request
            else:
                assert request.emitted or request.state is not DispatchState.QUEUED, request
            assert (request.placed is None) == (request.state is DispatchState.QUEUED), request
            assert len(request.emitted) < request.request.sampling.max_tokens, request
            assert request.num_failures < self._config.max_failures, request
            assert request.num_deaths < self._config.max_deaths, request
            assert request.attempt <= self._config.max_attempts, request
            placed = request.placed
            if placed is None:
                continue
            assert not placed.has_decode_ended, request
            assert placed.decode in self._fleet, request
            assert placed.decode != placed.prefill, request
            decoding.setdefault(placed.decode, set()).add(request_id)
            if request.state is DispatchState.RUNNING or placed.has_prefill_ended:
                continue
            prefilling.setdefault(placed.prefilling, set()).add(request_id)
        self._fleet.validate(decoding, prefilling)

    # -- clients --

    def _on_request_arrived(self, event: RequestArrived, now: float) -> None:
        request = RequestRecord(
            request=event.request,
            deadline_at=now + event.deadline_s,
            queue_deadline_at=now + event.queue_timeout_s,
        )
        assert request.request_id not in self._requests, request
        assert not event.request.emitted_token_ids, request
        assert event.request.num_remaining_tokens > 0, request
        if self._is_draining:
            self._append_end(
                request, None, UnavailableError("the router is draining", code="draining")
            )
            return
        if event.deadline_s <= 0:
            self._append_end(
                request, None, QueueDeadlineError("the deadline passed before it came")
            )
            return
        max_own = self._config.max_queued_per_tenant
        if max_own is not None and self._waiting.num_of(event.request.tenant) >= max_own:
            words = "As many of your requests wait for a worker as may."
            error = TenantLimitError(words, retry_after_s=_RETRY_AFTER_S)
            self._append_end(request, None, error)
            return
        if len(self._waiting) >= self._config.max_queued_requests:
            self._append_end(request, None, OverloadedError("too many requests wait for a worker"))
            return
        self._requests[request.request_id] = request
        heapq.heappush(self._deadlines, (request.deadline_at, request.request_id))
        self._enqueue(request)

    def _on_cancelled(self, request_id: RequestId) -> None:
        request = self._requests.get(request_id)
        if request is not None:
            self._fail(request, CancelledByClientError("the client went away"))

    def _on_stopped(self, event: RequestStopped) -> None:
        request = self._requests.get(event.request_id)
        if request is not None:
            assert event.num_output_tokens <= len(request.emitted), (event, request)
            del request.emitted[event.num_output_tokens :]
            self._end(request, FinishReason.STOP, None)

    def _on_deadline(self, request: RequestRecord, now: float) -> None:
        """One of its two deadlines has passed."""
        is_waiting = request.state is DispatchState.QUEUED and not request.emitted
        if request.deadline_at <= now and is_waiting:
            self._fail(request, QueueDeadlineError("the deadline passed while it was queued"))
        elif request.deadline_at <= now:
            self._fail(request, DeadlineExceededError("the deadline passed while it ran"))
        elif is_waiting:
            self._fail(
                request,
                QueueDeadlineError(
                    "No worker had room for the request in time.", retry_after_s=_RETRY_AFTER_S
                ),
            )
        else:
            request.is_queue_timed = False

    # -- workers --

    def _on_worker_message(
        self, key: WorkerKey, message: TokensReady | Refused | HandedBack, now: float
    ) -> None:
        request = self._requests.get(message.attempt_id.request_id)
        if request is None or request.placed is None or request.attempt_id != message.attempt_id:
            return
        if key not in (request.placed.decode, request.placed.prefill):
            return
        match message:
            case TokensReady():
                self._on_tokens(request, key, message, now)
            case Refused(reason=reason):
                self._on_refused(request, key, reason, now)
            case HandedBack(reason=reason):
                self._on_handed_back(request, key, reason, now)

    def _on_tokens(
        self, request: RequestRecord, key: WorkerKey, reply: TokensReady, now: float
    ) -> None:
        placed = request.placed
        assert placed is not None
        run = reply.run
        num_emitted = len(request.emitted)
        if key == placed.prefill:
            if run.first_position != num_emitted:
                return
        else:
            num_known = num_emitted - run.first_position
            known = tuple(request.emitted[run.first_position :])
            if num_known < 0 or run.token_ids[:num_known] != known[: len(run.token_ids)]:
                self._on_diverged(request, run, now)
                return
            if run.finish_reason is not None and run.end_position < num_emitted:
                self._on_diverged(request, run, now)
                return
        if reply.cached is not None:
            request.note_cached(reply.cached)
        self._begin_running(request)
        if key == placed.decode and not placed.has_decode_begun:
            request.placed = replace(placed, has_decode_begun=True)
        if run.finish_reason is not None and key == placed.decode:
            assert request.placed is not None
            request.placed = replace(request.placed, has_decode_ended=True)
        self._take_tokens(request, run.token_ids[num_emitted - run.first_position :], run)

    def _take_tokens(
        self, request: RequestRecord, token_ids: tuple[int, ...], run: TokenRun
    ) -> None:
        """Tokens at new positions, and the finish reason of the run that they came in."""
        first_position = len(request.emitted)
        finish_reason = run.finish_reason
        num_left = request.request.sampling.max_tokens - first_position
        token_ids = token_ids[:num_left]
        if len(token_ids) == num_left and finish_reason is None:
            finish_reason = FinishReason.LENGTH
        request.emitted += token_ids
        is_invalid = finish_reason is FinishReason.INVALID_OUTPUT
        if token_ids or (finish_reason is not None and not is_invalid):
            self._effects.append(
                EmitTokens(
                    request_id=request.request_id,
                    run=TokenRun(
                        first_position=first_position,
                        token_ids=token_ids,
                        choice=run.choice,
                        finish_reason=None if is_invalid else finish_reason,
                    ),
                )
            )
        if is_invalid:
            self._fail(
                request,
                InternalError("the model's output is not finite", code="model_output_invalid"),
            )
        elif finish_reason is not None:
            self._end(request, finish_reason, None)

    def _on_diverged(self, request: RequestRecord, run: TokenRun, now: float) -> None:
        """The decode worker contradicts, or leaves out, what the client has."""
        assert request.placed is not None
        self._fleet.inhibit(request.placed.decode, now)
        outcome = f"diverged at position {run.first_position}"
        self._fail_attempt(request, RetryReason.DIVERGED, outcome)

    def _on_refused(
        self, request: RequestRecord, key: WorkerKey, reason: RefuseReason, now: float
    ) -> None:
        if reason is RefuseReason.NEVER_FITS:
            request.unfit |= {key}
        else:
            self._fleet.refused(key, reason, now)
        self._note_ended(request, key)
        assert request.placed is not None
        # The prefill worker refuses before it computes, but not before the decode worker refuses.
        may_have_computed = request.placed.prefill not in (None, key)
        self._leave(
            request,
            RetryReason.REFUSED,
            f"{key.worker_id} refused: {reason}",
            may_have_computed=may_have_computed,
        )

    def _on_handed_back(
        self, request: RequestRecord, key: WorkerKey, reason: HandBackReason, now: float
    ) -> None:
        placed = request.placed
        assert placed is not None
        self._note_ended(request, key)
        outcome = f"{key.worker_id} handed back: {reason}"
        match reason:
            case HandBackReason.REVOKED | HandBackReason.PREEMPTED:
                self._fleet.refused(key, RefuseReason.NO_BLOCKS, now)
            case HandBackReason.DRAINING:
                self._fleet.refused(key, RefuseReason.DRAINING, now)
            case HandBackReason.SOURCE_REFUSED:
                if placed.prefill is not None:
                    self._fleet.refused(placed.prefill, RefuseReason.QUEUE_FULL, now)
            case HandBackReason.SOURCE_LOST | HandBackReason.TOO_LONG_TO_REPAIR:
                if placed.prefill is not None:
                    self._fleet.inhibit(placed.prefill, now)
                    if reason is HandBackReason.SOURCE_LOST:
                        request.lost_sources |= {placed.prefill}
                self._fail_attempt(request, RetryReason.HANDED_BACK, outcome)
                return
        may_have_computed = reason is not HandBackReason.SOURCE_REFUSED
        self._leave(request, RetryReason.HANDED_BACK, outcome, may_have_computed=may_have_computed)

    def _on_worker_lost(self, key: WorkerKey, now: float) -> None:
        self._fleet.lose(key)
        self._waiting.look_again()
        for request in list(self._requests.values()):
            placed = request.placed
            if placed is None or key not in (placed.decode, placed.prefill):
                continue
            self._note_ended(request, key)
            if key == placed.prefill and placed.has_decode_begun:
                continue
            request.note_death()
            if request.num_deaths >= self._config.max_deaths:
                error = InternalError(
                    f"workers died in {request.num_deaths} attempts at this request",
                    code="poison_request",
                )
                self._fail(request, error)
            elif key == placed.decode:
                self._fail_attempt(request, RetryReason.LOST, f"{key.worker_id} lost")

    # -- states --

    def _enqueue(self, request: RequestRecord) -> None:
        self._waiting.add(request)
        if not request.emitted and not request.is_queue_timed:
            request.is_queue_timed = True
            heapq.heappush(self._deadlines, (request.queue_deadline_at, request.request_id))

    def _begin_running(self, request: RequestRecord) -> None:
        if request.state is DispatchState.PLACED:
            assert request.placed is not None
            request.state = DispatchState.RUNNING
            self._fleet.end_prefill(request.placed.prefilling, request.request_id)

    def _note_ended(self, request: RequestRecord, key: WorkerKey) -> None:
        """This worker ended the attempt itself: it needs no abort."""
        placed = request.placed
        assert placed is not None
        if key == placed.decode:
            request.placed = replace(placed, has_decode_ended=True)
        else:
            request.placed = replace(placed, has_prefill_ended=True)

    def _fail_attempt(self, request: RequestRecord, reason: RetryReason, outcome: str) -> None:
        request.num_failures += 1
        if request.num_failures >= self._config.max_failures:
            self._fail(
                request,
                WorkerLostError(f"{request.num_failures} attempts failed, the last: {outcome}"),
            )
        else:
            self._leave(request, reason, outcome)

    def _leave(
        self,
        request: RequestRecord,
        reason: RetryReason,
        outcome: str,
        *,
        may_have_computed: bool = True,
    ) -> None:
        """The attempt is over, the request is not."""
        if may_have_computed and request.state is DispatchState.PLACED:
            request.note_silent_end()
        self._abort(request)
        request.outcome, request.retry_reason = outcome, reason
        if request.attempt >= self._config.max_attempts:
            self._fail(
                request,
                OverloadedError(f"{request.attempt} placements failed, the last: {outcome}"),
            )
        else:
            self._enqueue(request)

    def _abort(self, request: RequestRecord) -> None:
        """Tell every worker that did not end the attempt itself, and take it off their books."""
        placed, request.placed = request.placed, None
        if placed is None:
            return
        message = AbortRequest(attempt_id=request.attempt_id)
        self._fleet.end_decode(placed.decode, request.request_id)
        self._fleet.end_prefill(placed.prefilling, request.request_id)
        if placed.prefill is not None and not placed.has_prefill_ended:
            self._effects.append(SendAbort(key=placed.prefill, message=message))
        if not placed.has_decode_ended:
            self._effects.append(SendAbort(key=placed.decode, message=message))

    def _fail(self, request: RequestRecord, error: MoonpoolError) -> None:
        self._end(request, None, error)

    def _end(
        self,
        request: RequestRecord,
        finish_reason: FinishReason | None,
        error: MoonpoolError | None,
    ) -> None:
        del self._requests[request.request_id]
        if request.state is DispatchState.QUEUED:
            self._waiting.remove(request)
        self._append_end(request, finish_reason, error)
        self._abort(request)
        self._waiting.note_room()

    def _append_end(
        self,
        request: RequestRecord,
        finish_reason: FinishReason | None,
        error: MoonpoolError | None,
    ) -> None:
        cached = request.cached or CachedTokens(num_tokens=0)
        usage = Usage(
            num_prompt_tokens=len(request.request.prompt_token_ids),
            num_completion_tokens=len(request.emitted),
            num_cached_tokens=cached.num_tokens,
            num_peer_tokens=0 if cached.is_peer_store else cached.num_peer_tokens,
            num_store_tokens=cached.num_peer_tokens if cached.is_peer_store else 0,
        )
        self._effects.append(
            EndRequest(
                request_id=request.request_id,
                finish_reason=finish_reason,
                usage=usage,
                cached_attempt=request.cached_attempt,
                num_peer_held_tokens=cached.num_peer_held_tokens,
                num_attempts=request.attempt,
                num_failures=request.num_failures,
                error_code=error.code if error is not None else None,
                error=error,
                left=self._left(request) if finish_reason is not None else (),
            )
        )

    def _left(self, request: RequestRecord) -> tuple[PrefixLeft, ...]:
        """What the workers keep of a request that has just ended well."""
        placed = request.placed
        if placed is None:
            return ()
        value = replace(request.request, emitted_token_ids=tuple(request.emitted))
        left = []
        if placed.has_decode_begun:
            # The last token was drawn and not computed.
            left.append((placed.decode, value.num_tokens - 1))
        if placed.prefill is not None:
            left.append((placed.prefill, len(value.prompt_token_ids)))
        return tuple(
            PrefixLeft(key=key, request=value, num_tokens=num_tokens)
            for key, num_tokens in left
            if key in self._fleet
        )

    # -- plumbing --

    def _finish_turn(self, now: float) -> list[DispatchEffect]:
        self._waiting.expire(now)
        while (found := self._waiting.place_next(now)) is not None:
            if isinstance(found, NeverFits):
                error = InvalidRequestError(
                    f"{found.num_tokens} tokens do not fit on any worker",
                    code="prompt_too_large_for_deployment",
                )
                self._fail(found.request, error)
            else:
                self._effects += found
        effects, self._effects = self._effects, []
        return effects

    def _sweep_deadlines(self) -> None:
        heap = self._deadlines
        while heap and heap[0][1] not in self._requests:
            heapq.heappop(heap)
        if len(heap) > 4 * len(self._requests) + 64:
            self._deadlines = [entry for entry in heap if entry[1] in self._requests]
            heapq.heapify(self._deadlines)
