"""PrefillHandoffs: the prefill worker's side of all handoffs, in the service process.

It stands between three parties that do not wait for each other: the router (which asks for a
prefill and may abort it), the core (which computes it, chunk by chunk) and the reader (a decode
worker that opened a handoff stream). Events in, effects out; `now` is an argument; no IO.

Rules
- One prefill per request: a higher attempt drops the lower, whichever role the news comes in.
- The stream is the lease: while it is open the core keeps the blocks; when it ends the prefill is
  released if it was finished, aborted if it was not.
- Orders do not matter: an Open that comes before its Prefill is parked (2 s), an abort or any other
  end is remembered as long, so that a late Open or Prefill is not taken for new.
- Layers are announced in groups, in order, each layer of each block exactly once. What became ready
  while nobody listened is announced in one message.
- The router is told what the reader cannot tell it: a refusal, a prefill that failed before anyone
  read it, the first token (which only shortens TTFT). Whatever ends a handoff that has a reader is
  the reader's to report, so that one side decides about repair or another attempt.

Life of one attempt

    state        event                                effects and next state
    -            Prefill                              core Prefill                        -> WAITING
    WAITING      core Refused                         router Refused, reader Reset        -> ended
    WAITING      core PrefillStarted                  Opened                              -> RUNNING
    RUNNING      core ChunkPlanned, LayersDone        LayersReady*                        -> RUNNING
    RUNNING      core PrefillDone                     router token, LayersReady*, Commit  -> DONE
    WAITING..    core PrefillFailed                   CommitFailed, or router HandedBack  -> ended
    WAITING..    reader's stream ends                 core Abort                          -> ended
    DONE         reader's stream ends, or unclaimed   core Release                        -> ended
    any          Abort, higher attempt, RouterLost,   core Abort, Reset                   -> ended
                 deadline + 5 s

What it deliberately does not do: it never looks at digests (the shell attaches them when it sends),
never waits for a reader to take what was announced, and knows nothing of what the reader holds.
"""

from __future__ import annotations

from collections.abc import Iterator

from moonpool.core.protocol import (
    Abort,
    ChunkPlanned,
    HandBackReason,
    HandedBack,
    Prefill,
    PrefillDone,
    PrefillFailed,
    PrefillStarted,
    PrefixLocked,
    Refused,
    Release,
    Reply,
    TokensReady,
)
from moonpool.handoff.announcement import Announcement, Page
from moonpool.handoff.config import HandoffConfig
from moonpool.handoff.effects import (
    EndStream,
    PrefillEffect,
    SendCommand,
    SendOnStream,
    SendToRouter,
)
from moonpool.handoff.ended import EndedAttempts
from moonpool.handoff.events import (
    CoreFrameReceived,
    LayersDone,
    OpenReceived,
    PeerLacked,
    PrefillEvent,
    RouterLost,
    RouterMessageReceived,
    StreamClosed,
)
from moonpool.handoff.messages import (
    AbortRequest,
    Commit,
    CommitFailed,
    DecodeRequest,
    PrefillRequest,
    Reset,
    ResetReason,
    RouterKey,
    SourceMessage,
    StreamId,
    Waiting,
)
from moonpool.handoff.prefill_handoff import ParkedOpen, PrefillHandoff, PrefillState
from moonpool.ids import AttemptId, RequestId, WorkerKey
from moonpool.inference.output import FinishReason, TokenRun


class PrefillHandoffs:
    """All handoffs that this worker is the source of.

    Args:
        key: This worker's id and incarnation; an Open for another is reset.
        namespace: Fingerprint of all that changes the values of this worker's KV.
    """

    def __init__(self, *, key: WorkerKey, namespace: str, config: HandoffConfig) -> None:
        self._key = key
        self._namespace = namespace
        self._config = config
        self._handoffs: dict[RequestId, PrefillHandoff] = {}
        self._parked: dict[RequestId, ParkedOpen] = {}
        #: Open streams, parked ones included, to the request that they belong to.
        self._request_by_stream: dict[StreamId, RequestId] = {}
        self._ended = EndedAttempts(config.remember_s)
        self._page = Page()
        self._effects: list[PrefillEffect] = []

    # -- the interface --

    def handle(self, event: PrefillEvent, now: float) -> list[PrefillEffect]:
        """Take one event; returns what is to be done, in order."""
        match event:
            case RouterMessageReceived(router=router, message=PrefillRequest() as message):
                self._on_prefill(router, message, now)
            case RouterMessageReceived(message=DecodeRequest(attempt_id=attempt_id)):
                self._drop_lower(attempt_id, now)
            case RouterMessageReceived(message=AbortRequest() as message):
                self._on_abort(message, now)
            case CoreFrameReceived(step=step, replies=replies):
                self._on_core_frame(step, replies, now)
            case LayersDone(step=step, num_layers=num_layers):
                self._on_layers_done(step, num_layers, now)
            case OpenReceived():
                self._on_open(event, now)
            case StreamClosed(stream_id=stream_id):
                self._on_stream_closed(stream_id, now)
            case PeerLacked():
                self._on_peer_lacked(event)
            case RouterLost(router=router):
                self._on_router_lost(router, now)
        return self._take_effects()

    def tick(self, now: float) -> list[PrefillEffect]:
        """Do what is due. Call at `next_wakeup()` or later; too early or too often does nothing."""
        for parked in [parked for parked in self._parked.values() if parked.reset_at <= now]:
            self._unpark(parked, ResetReason.NO_PREFILL)
        for handoff in list(self._handoffs.values()):
            if handoff.end_at <= now:
                self._drop(handoff, ResetReason.ABORTED, now)
            elif handoff.unclaimed_at is not None and handoff.unclaimed_at <= now:
                self._command(Release(attempt_id=handoff.attempt_id))
                self._forget(handoff, ResetReason.EXPIRED, now)
        self._ended.forget(now)
        return self._take_effects()

    def next_wakeup(self) -> float | None:
        """When `tick` has something to do next, or None."""
        if not (self._parked or self._handoffs):
            return self._ended.next_wakeup()
        return min(self._wakeups(), default=None)

    def keep_waiting(self, now: float) -> list[PrefillEffect]:
        """A prefix is being read from a peer: readers that wait for its prefill are kept patient."""
        self._tell_waiting(now)
        return self._take_effects()

    @property
    def next_waiting_at(self) -> float | None:
        """When `keep_waiting` has something to say, if no news comes; None: nobody waits."""
        return min((handoff.waiting_at for handoff in self._waiting()), default=None)

    def is_live(self, attempt_id: AttemptId) -> bool:
        """This very attempt has begun here and has not ended."""
        handoff = self._handoffs.get(attempt_id.request_id)
        return handoff is not None and handoff.attempt_id == attempt_id

    @property
    def num_handoffs(self) -> int:
        """Attempts that the core knows of."""
        return len(self._handoffs)

    @property
    def num_streams(self) -> int:
        """Open handoff streams, parked ones included."""
        return len(self._request_by_stream)

    @property
    def is_quiet(self) -> bool:
        """No attempt and no stream is open here."""
        return not (self._handoffs or self._parked or self._request_by_stream)

    def fork(self) -> PrefillHandoffs:
        """An independent copy, for exploration."""
        fork = PrefillHandoffs(key=self._key, namespace=self._namespace, config=self._config)
        fork._handoffs = {key: handoff.fork() for key, handoff in self._handoffs.items()}
        fork._parked = dict(self._parked)
        fork._request_by_stream = dict(self._request_by_stream)
        fork._ended = self._ended.fork()
        fork._page = self._page
        return fork

    def key(self) -> tuple[object, ...]:
        """Equal for machines that behave alike, their timers' exact times apart."""
        return (
            tuple(sorted((h.attempt_id, h.key()) for h in self._handoffs.values())),
            tuple(sorted((p.attempt_id, p.stream_id) for p in self._parked.values())),
            self._ended.key(),
            self._page,
        )

    def validate(self) -> None:
        """Check every invariant; for tests and debugging."""
        assert not self._effects
        self._ended.validate()
        streams: dict[StreamId, RequestId] = {}
        for request_id, parked in self._parked.items():
            assert parked.attempt_id.request_id == request_id, parked
            streams[parked.stream_id] = request_id
            handoff = self._handoffs.get(request_id)
            assert handoff is None or handoff.attempt_id < parked.attempt_id, (handoff, parked)
            assert self._ended.reason(parked.attempt_id) is None, parked
        for request_id, handoff in self._handoffs.items():
            self._validate_handoff(request_id, handoff)
            if handoff.stream_id is not None:
                assert handoff.stream_id not in streams, handoff
                streams[handoff.stream_id] = request_id
        assert streams == self._request_by_stream, (streams, self._request_by_stream)

    def _validate_handoff(self, request_id: RequestId, handoff: PrefillHandoff) -> None:
        assert handoff.attempt_id.request_id == request_id, handoff
        assert self._ended.reason(handoff.attempt_id) is None, handoff
        is_done = handoff.state is PrefillState.DONE
        assert (handoff.first_token is not None) == is_done, handoff
        assert (handoff.unclaimed_at is not None) == (is_done and handoff.stream_id is None), (
            handoff
        )
        assert (handoff.announcement is None) == (handoff.state is PrefillState.WAITING), handoff
        if handoff.announcement is not None:
            handoff.announcement.validate(self._config)
            has_reader = handoff.stream_id is not None
            assert handoff.announcement.is_opened == has_reader, handoff
            assert not (is_done and has_reader) or handoff.announcement.is_all_told, handoff

    # -- the router --

    def _on_prefill(self, router: RouterKey, message: PrefillRequest, now: float) -> None:
        attempt_id = message.attempt_id
        if self._ended.reason(attempt_id) is not None:
            return
        known = self._handoffs.get(attempt_id.request_id)
        if known is not None and known.attempt_id >= attempt_id:
            return
        self._drop_lower(attempt_id, now)
        handoff = PrefillHandoff(
            attempt_id=attempt_id,
            router=router,
            num_tokens=message.request.num_tokens,
            position=len(message.request.emitted_token_ids),
            end_at=now + message.deadline_s + self._config.deadline_grace_s,
        )
        self._handoffs[attempt_id.request_id] = handoff
        self._command(
            Prefill(
                request=message.request,
                attempt=message.attempt,
                num_peer_tokens=message.peer.num_tokens if message.peer is not None else 0,
            )
        )
        parked = self._parked.get(attempt_id.request_id)
        if parked is not None and parked.attempt_id == attempt_id:
            del self._parked[attempt_id.request_id]
            self._attach(handoff, parked.stream_id, now)

    def _on_abort(self, message: AbortRequest, now: float) -> None:
        if message.choice not in (None, 0):
            return
        request_id = message.attempt_id.request_id
        self._ended.add(message.attempt_id, ResetReason.ABORTED, now)
        handoff = self._handoffs.get(request_id)
        if handoff is not None and handoff.attempt_id <= message.attempt_id:
            self._drop(handoff, ResetReason.ABORTED, now)
        parked = self._parked.get(request_id)
        if parked is not None and parked.attempt_id <= message.attempt_id:
            self._unpark(parked, ResetReason.ABORTED)

    def _on_router_lost(self, router: RouterKey, now: float) -> None:
        for handoff in [h for h in self._handoffs.values() if h.router == router]:
            self._drop(handoff, ResetReason.ABORTED, now)

    def _drop_lower(self, attempt_id: AttemptId, now: float) -> None:
        """A worker that sees a higher attempt drops the lower."""
        handoff = self._handoffs.get(attempt_id.request_id)
        if handoff is not None and handoff.attempt_id < attempt_id:
            self._drop(handoff, ResetReason.SUPERSEDED, now)
        parked = self._parked.get(attempt_id.request_id)
        if parked is not None and parked.attempt_id < attempt_id:
            self._unpark(parked, ResetReason.SUPERSEDED)

    # -- the core --

    def _on_core_frame(self, step: int, replies: tuple[Reply, ...], now: float) -> None:
        for reply in replies:
            if isinstance(reply, PrefixLocked):
                continue
            handoff = self._handoffs.get(reply.attempt_id.request_id)
            if handoff is None or handoff.attempt_id != reply.attempt_id:
                continue
            match reply:
                case Refused():
                    self._to_router(handoff, reply)
                    self._reset(handoff, ResetReason.REFUSED)
                    self._forget(handoff, ResetReason.REFUSED, now)
                case PrefillStarted():
                    self._on_prefill_started(handoff, reply, now)
                case ChunkPlanned(start=start, end=end):
                    assert handoff.announcement is not None, handoff
                    handoff.announcement.plan(start=start, end=end, step=step)
                    self._announce(handoff, now)
                case PrefillDone():
                    self._on_prefill_done(handoff, reply, now)
                case PrefillFailed(reason=reason):
                    self._on_prefill_failed(handoff, reason, now)
                case _:
                    pass
        if step:
            self._tell_waiting(now)

    def _on_prefill_started(
        self, handoff: PrefillHandoff, reply: PrefillStarted, now: float
    ) -> None:
        assert handoff.state is PrefillState.WAITING, handoff
        assert len(reply.block_ids) == self._config.num_blocks_for(handoff.num_tokens), reply
        handoff.state = PrefillState.RUNNING
        handoff.announcement = Announcement(
            attempt_id=handoff.attempt_id,
            block_ids=reply.block_ids,
            num_cached_tokens=reply.num_cached_tokens,
            num_peer_tokens=reply.num_peer_tokens,
            num_peer_held_tokens=handoff.num_peer_held_tokens,
        )
        self._announce(handoff, now)

    def _on_peer_lacked(self, event: PeerLacked) -> None:
        handoff = self._handoffs.get(event.attempt_id.request_id)
        if handoff is not None and handoff.attempt_id == event.attempt_id:
            handoff.num_peer_held_tokens = event.num_held_tokens

    def _on_prefill_done(self, handoff: PrefillHandoff, reply: PrefillDone, now: float) -> None:
        assert handoff.state is PrefillState.RUNNING, handoff
        handoff.state = PrefillState.DONE
        handoff.first_token = reply.first_token
        handoff.finish_reason = reply.finish_reason
        handoff.num_peer_tokens = reply.num_peer_tokens
        run = TokenRun(
            first_position=handoff.position,
            token_ids=(reply.first_token,),
            finish_reason=reply.finish_reason,
        )
        self._to_router(
            handoff,
            TokensReady(
                attempt_id=handoff.attempt_id,
                run=run,
                num_cached_tokens=reply.num_cached_tokens,
                num_peer_tokens=reply.num_peer_tokens,
                num_peer_held_tokens=handoff.num_peer_held_tokens,
            ),
        )
        if handoff.stream_id is None:
            handoff.unclaimed_at = now + self._config.unclaimed_s
        else:
            self._announce(handoff, now)
            self._commit(handoff)

    def _on_prefill_failed(
        self, handoff: PrefillHandoff, reason: HandBackReason | FinishReason, now: float
    ) -> None:
        attempt_id = handoff.attempt_id
        if isinstance(reason, FinishReason):
            run = TokenRun(first_position=handoff.position, token_ids=(), finish_reason=reason)
            self._to_router(handoff, TokensReady(attempt_id=attempt_id, run=run))
        elif handoff.stream_id is None:
            self._to_router(handoff, HandedBack(attempt_id=attempt_id, reason=reason))
        if handoff.stream_id is not None:
            self._send(handoff, CommitFailed(attempt_id=attempt_id, reason=reason))
            self._end_stream(handoff.stream_id)
            handoff.stream_id = None
        self._forget(handoff, ResetReason.REFUSED, now)

    def _on_layers_done(self, step: int, num_layers: int, now: float) -> None:
        page = Page(step, num_layers)
        if page <= self._page:
            return
        self._page = page
        for handoff in self._handoffs.values():
            self._announce(handoff, now)
        self._tell_waiting(now)

    # -- the reader --

    def _on_open(self, event: OpenReceived, now: float) -> None:
        attempt_id = event.open.attempt_id
        reason = self._refuse_open(event)
        if reason is not None:
            self._effects.append(
                SendOnStream(
                    stream_id=event.stream_id, message=Reset(attempt_id=attempt_id, reason=reason)
                )
            )
            self._effects.append(EndStream(stream_id=event.stream_id))
            return
        handoff = self._handoffs.get(attempt_id.request_id)
        if handoff is not None and handoff.attempt_id == attempt_id:
            self._attach(handoff, event.stream_id, now)
            return
        parked = self._parked.get(attempt_id.request_id)
        if parked is not None:
            self._unpark(parked, ResetReason.SUPERSEDED)
        self._parked[attempt_id.request_id] = ParkedOpen(
            attempt_id=attempt_id,
            stream_id=event.stream_id,
            reset_at=now + self._config.park_s,
        )
        self._request_by_stream[event.stream_id] = attempt_id.request_id

    def _refuse_open(self, event: OpenReceived) -> ResetReason | None:
        assert event.stream_id not in self._request_by_stream, event
        attempt_id = event.open.attempt_id
        if event.open.source != self._key:
            return ResetReason.WRONG_INCARNATION
        if event.open.namespace != self._namespace:
            return ResetReason.WRONG_NAMESPACE
        reason = self._ended.reason(attempt_id)
        if reason is not None:
            return reason
        handoff = self._handoffs.get(attempt_id.request_id)
        if handoff is not None and handoff.attempt_id > attempt_id:
            return ResetReason.SUPERSEDED
        if (
            handoff is not None
            and handoff.attempt_id == attempt_id
            and handoff.stream_id is not None
        ):
            return ResetReason.ALREADY_OPEN
        parked = self._parked.get(attempt_id.request_id)
        if parked is not None and parked.attempt_id == attempt_id:
            return ResetReason.ALREADY_OPEN
        if parked is not None and parked.attempt_id > attempt_id:
            return ResetReason.SUPERSEDED
        return None

    def _on_stream_closed(self, stream_id: StreamId, now: float) -> None:
        request_id = self._request_by_stream.pop(stream_id, None)
        if request_id is None:
            return
        parked = self._parked.get(request_id)
        if parked is not None and parked.stream_id == stream_id:
            del self._parked[request_id]
            return
        handoff = self._handoffs[request_id]
        handoff.stream_id = None
        if handoff.state is PrefillState.DONE:
            self._command(Release(attempt_id=handoff.attempt_id))
        else:
            self._command(Abort(attempt_id=handoff.attempt_id))
        self._forget(handoff, ResetReason.EXPIRED, now)

    def _attach(self, handoff: PrefillHandoff, stream_id: StreamId, now: float) -> None:
        handoff.stream_id = stream_id
        handoff.unclaimed_at = None
        handoff.waiting_at = now + self._config.waiting_s
        self._request_by_stream[stream_id] = handoff.attempt_id.request_id
        self._announce(handoff, now)
        if handoff.state is PrefillState.DONE:
            self._commit(handoff)

    # -- what the reader hears --

    def _announce(self, handoff: PrefillHandoff, now: float) -> None:
        """Tell the reader, if there is one, all that it can read and was not told."""
        if handoff.stream_id is None or handoff.announcement is None:
            return
        is_done = handoff.state is PrefillState.DONE
        for message in handoff.announcement.take(self._page, is_done=is_done, config=self._config):
            handoff.waiting_at = now + self._config.waiting_s
            self._send(handoff, message)

    def _commit(self, handoff: PrefillHandoff) -> None:
        assert handoff.first_token is not None, handoff
        assert handoff.announcement is not None, handoff
        self._send(
            handoff,
            Commit(
                attempt_id=handoff.attempt_id,
                first_token=handoff.first_token,
                position=handoff.position,
                finish_reason=handoff.finish_reason,
                num_cached_tokens=handoff.announcement.num_cached_tokens,
                num_peer_tokens=handoff.num_peer_tokens,
            ),
        )

    def _tell_waiting(self, now: float) -> None:
        """The engine moves, in steps and layers, but not for these readers: keep them patient."""
        for handoff in self._waiting():
            if handoff.waiting_at <= now:
                handoff.waiting_at = now + self._config.waiting_s
                self._send(handoff, Waiting(attempt_id=handoff.attempt_id))

    def _waiting(self) -> Iterator[PrefillHandoff]:
        """Handoffs whose readers wait for more."""
        for handoff in self._handoffs.values():
            if handoff.stream_id is not None and handoff.state is not PrefillState.DONE:
                yield handoff

    # -- ends --

    def _drop(self, handoff: PrefillHandoff, reason: ResetReason, now: float) -> None:
        """End an attempt that the core still works on or holds blocks for."""
        self._command(Abort(attempt_id=handoff.attempt_id))
        self._reset(handoff, reason)
        self._forget(handoff, reason, now)

    def _forget(self, handoff: PrefillHandoff, reason: ResetReason, now: float) -> None:
        assert handoff.stream_id is None, handoff
        del self._handoffs[handoff.attempt_id.request_id]
        self._ended.add(handoff.attempt_id, reason, now)

    def _reset(self, handoff: PrefillHandoff, reason: ResetReason) -> None:
        if handoff.stream_id is None:
            return
        self._send(handoff, Reset(attempt_id=handoff.attempt_id, reason=reason))
        self._end_stream(handoff.stream_id)
        handoff.stream_id = None

    def _unpark(self, parked: ParkedOpen, reason: ResetReason) -> None:
        del self._parked[parked.attempt_id.request_id]
        message = Reset(attempt_id=parked.attempt_id, reason=reason)
        self._effects.append(SendOnStream(stream_id=parked.stream_id, message=message))
        self._end_stream(parked.stream_id)

    def _end_stream(self, stream_id: StreamId) -> None:
        del self._request_by_stream[stream_id]
        self._effects.append(EndStream(stream_id=stream_id))

    # -- plumbing --

    def _wakeups(self) -> Iterator[float]:
        for parked in self._parked.values():
            yield parked.reset_at
        for handoff in self._handoffs.values():
            yield handoff.end_at
            if handoff.unclaimed_at is not None:
                yield handoff.unclaimed_at
        forget_at = self._ended.next_wakeup()
        if forget_at is not None:
            yield forget_at

    def _command(self, command: Prefill | Abort | Release) -> None:
        self._effects.append(SendCommand(command=command))

    def _to_router(
        self, handoff: PrefillHandoff, message: TokensReady | Refused | HandedBack
    ) -> None:
        self._effects.append(SendToRouter(router=handoff.router, message=message))

    def _send(self, handoff: PrefillHandoff, message: SourceMessage) -> None:
        assert handoff.stream_id is not None, handoff
        self._effects.append(SendOnStream(stream_id=handoff.stream_id, message=message))

    def _take_effects(self) -> list[PrefillEffect]:
        effects, self._effects = self._effects, []
        return effects
