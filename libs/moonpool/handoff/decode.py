"""DecodeHandoffs: the decode worker's side of all handoffs, in the service process.

It stands between the router (which asks for a decode and may abort it), the core (which reserves
blocks, admits and decodes), the source (a prefill worker, over one stream per attempt) and the
transport (which reads and verifies). Events in, effects out; `now` is an argument; no IO.

Rules
- One live attempt per request: a higher attempt drops the lower, whichever role the news comes in.
- Reserve, then open: a refusal costs no stream, and nobody waits while holding blocks. A Decode that
  the core does not answer in 2 s (a long step) holds nothing and is refused.
- Only what is verified counts, and only as a prefix: a bad or missing leaf makes everything from its
  block on missing. `BlocksArrived` tells the core each longer prefix, so that it can be reused.
- Exactly one `Arrived` per reservation, when the source has committed (or is lost) and no read is
  outstanding; or exactly one `ReadEnded` after its end, when none is. Until then its blocks are not
  freed: the transport may still write them.
- The stream stays open until the last read has ended, since it is the lease on the source's blocks.
- A lost source is not an error: the core repairs a short rest itself and hands a long one back. But
  one whose output is not finite ends the request: nothing that was read of it may be used.

Life of one attempt

    state      event                                  effects and next state
    -          Decode                                 core Decode                        -> ASKED
    -          Decode for which there is no room      router Refused                     -> ended
    ASKED      core Refused, or no answer in 2 s      router Refused                     -> ended
    ASKED      core Accepted (no source; a peer's prefix is fetch_reader.py's)            -> RUNNING
    ASKED      core Reserved (source)                 OpenStream                         -> READING
    READING    Opened, LayersReady                    StartRead of what is lacking       -> READING
    READING    ReadDone                               core BlocksArrived                 -> READING
    READING    Commit, or source lost, and no read    CloseStream, core Arrived          -> RUNNING
    READING    source says that the router knows      router HandedBack, core Abort      -> ended
    RUNNING    core TokensReady                       router TokensReady                 -> RUNNING
    RUNNING    ... with a finish reason, HandedBack   the same to the router             -> ended
    READING..  core Revoked                           router HandedBack                  -> ended
    any        Abort, higher attempt, RouterLost,     core Abort                         -> ended
               deadline + 5 s
    ended      the last outstanding read has ended    core ReadEnded                     -> forgotten

The source is lost when its stream breaks, it resets or fails the commit, says nothing for 5 s, or
says what cannot be meant for this request.

What it deliberately does not do: it never retries a read, never mixes sources within one attempt,
and never looks into a digest.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from moonpool.core.protocol import (
    Abort,
    Accepted,
    Arrived,
    BlocksArrived,
    Command,
    Decode,
    HandBackReason,
    HandedBack,
    PrefixLocked,
    ReadEnded,
    Refused,
    RefuseReason,
    Reply,
    Reserved,
    Revoked,
    TokensReady,
)
from moonpool.handoff.arrival import Arrival
from moonpool.handoff.config import HandoffConfig
from moonpool.handoff.decode_handoff import DecodeHandoff, DecodeState
from moonpool.handoff.effects import (
    CloseStream,
    DecodeEffect,
    OpenStream,
    SendCommand,
    SendToRouter,
    StartRead,
)
from moonpool.handoff.ended import EndedAttempts
from moonpool.handoff.events import (
    CoreFrameReceived,
    DecodeEvent,
    PeerLacked,
    ReadDone,
    ReadId,
    RouterLost,
    RouterMessageReceived,
    SourceMessageReceived,
    StreamBroken,
)
from moonpool.handoff.messages import (
    AbortRequest,
    Commit,
    CommitFailed,
    DecodeRequest,
    LayersReady,
    Open,
    Opened,
    PrefillRequest,
    Reset,
    ResetReason,
    SourceMessage,
    WorkerMessage,
)
from moonpool.ids import AttemptId, RequestId, WorkerKey
from moonpool.inference.cached_tokens import CachedTokens
from moonpool.inference.output import FinishReason

#: Resets after which the router has been or will be told by the source: not worth a repair.
_ROUTER_KNOWS = frozenset({ResetReason.REFUSED, ResetReason.ABORTED, ResetReason.SUPERSEDED})
#: Commit failures that are nobody's fault: a hand-back after one of them costs no failure.
_NO_FAULT = frozenset({HandBackReason.REVOKED, HandBackReason.PREEMPTED, HandBackReason.DRAINING})


class DecodeHandoffs:
    """All attempts that this worker decodes.

    Args:
        key: This worker's id and incarnation: the reader of its handoff streams.
        namespace: Fingerprint of all that changes the values of this worker's KV.
    """

    def __init__(self, *, key: WorkerKey, namespace: str, config: HandoffConfig) -> None:
        self._key = key
        self._namespace = namespace
        self._config = config
        self._handoffs: dict[RequestId, DecodeHandoff] = {}
        #: Ended attempts whose reads have not: the core is owed a ReadEnded.
        self._ending: dict[AttemptId, Arrival] = {}
        self._ended = EndedAttempts(config.remember_s)
        self._effects: list[DecodeEffect] = []

    # -- the interface --

    def handle(self, event: DecodeEvent, now: float) -> list[DecodeEffect]:
        """Take one event; returns what is to be done, in order."""
        match event:
            case RouterMessageReceived(message=DecodeRequest()):
                self._on_decode(event, now)
            case RouterMessageReceived(message=PrefillRequest(attempt_id=attempt_id)):
                self._drop_lower(attempt_id, now)
            case RouterMessageReceived(message=AbortRequest() as message):
                self._on_abort(message, now)
            case CoreFrameReceived(replies=replies):
                for reply in replies:
                    if not isinstance(reply, PrefixLocked):
                        self._on_reply(reply, now)
            case SourceMessageReceived(message=message):
                self._on_source_message(message, now)
            case StreamBroken(attempt_id=attempt_id):
                self._on_stream_broken(attempt_id)
            case PeerLacked():
                self._on_peer_lacked(event)
            case ReadDone():
                self._on_read_done(event)
            case RouterLost(router=router):
                for handoff in [h for h in self._handoffs.values() if h.router == router]:
                    self._drop(handoff, now)
        return self._take_effects()

    def tick(self, now: float) -> list[DecodeEffect]:
        """Do what is due. Call at `next_wakeup()` or later; too early or too often does nothing."""
        for handoff in list(self._handoffs.values()):
            if handoff.end_at <= now:
                self._drop(handoff, now)
            elif handoff.patience_ends_at is None or handoff.patience_ends_at > now:
                continue
            elif handoff.state is DecodeState.ASKED:
                reply = Refused(attempt_id=handoff.attempt_id, reason=RefuseReason.BUSY)
                self._to_router(handoff, reply)
                self._drop(handoff, now)
            else:
                self._lose_source(handoff)
        self._ended.forget(now)
        return self._take_effects()

    def next_wakeup(self) -> float | None:
        """When `tick` has something to do next, or None."""
        if not self._handoffs:
            return self._ended.next_wakeup()
        return min(self._wakeups(), default=None)

    def is_live(self, attempt_id: AttemptId) -> bool:
        """This very attempt has begun here and has not ended."""
        handoff = self._handoffs.get(attempt_id.request_id)
        return handoff is not None and handoff.attempt_id == attempt_id

    @property
    def num_handoffs(self) -> int:
        """Live attempts."""
        return len(self._handoffs)

    @property
    def num_open_reads(self) -> int:
        """Reads that the transport has not ended, those of ended attempts included."""
        live = (h.arrival.num_open_reads for h in self._handoffs.values() if h.arrival is not None)
        return sum(live) + sum(arrival.num_open_reads for arrival in self._ending.values())

    @property
    def is_quiet(self) -> bool:
        """No attempt, stream or read is open here."""
        return not (self._handoffs or self._ending)

    def fork(self) -> DecodeHandoffs:
        """An independent copy, for exploration."""
        fork = DecodeHandoffs(key=self._key, namespace=self._namespace, config=self._config)
        fork._handoffs = {key: handoff.fork() for key, handoff in self._handoffs.items()}
        fork._ending = {key: arrival.fork() for key, arrival in self._ending.items()}
        fork._ended = self._ended.fork()
        return fork

    def key(self) -> tuple[object, ...]:
        """Equal for machines that behave alike, their timers' exact times apart."""
        return (
            tuple(sorted((h.attempt_id, h.key()) for h in self._handoffs.values())),
            tuple(sorted((attempt_id, a.key()) for attempt_id, a in self._ending.items())),
            self._ended.key(),
        )

    def validate(self) -> None:
        """Check every invariant; for tests and debugging."""
        assert not self._effects
        self._ended.validate()
        for request_id, handoff in self._handoffs.items():
            assert handoff.attempt_id.request_id == request_id, handoff
            assert self._ended.reason(handoff.attempt_id) is None, handoff
            assert handoff.attempt_id not in self._ending, handoff
            is_reading = handoff.state is DecodeState.READING
            assert (handoff.arrival is not None) == is_reading, handoff
            assert is_reading or not handoff.is_stream_open, handoff
            assert handoff.source is not None or not is_reading, handoff
            is_waiting_for_source = (
                is_reading and handoff.commit is None and not handoff.is_source_lost
            )
            assert (handoff.patience_ends_at is not None) == (
                handoff.state is DecodeState.ASKED or is_waiting_for_source
            ), handoff
            if handoff.arrival is not None:
                handoff.arrival.validate()
                assert is_waiting_for_source or handoff.arrival.num_open_reads, handoff
                assert not is_waiting_for_source or handoff.is_stream_open, handoff
        for attempt_id, arrival in self._ending.items():
            arrival.validate()
            assert arrival.num_open_reads, attempt_id

    # -- the router --

    def _on_decode(self, event: RouterMessageReceived, now: float) -> None:
        message = event.message
        assert isinstance(message, DecodeRequest)
        attempt_id = message.attempt_id
        if self._ended.reason(attempt_id) is not None:
            return
        known = self._handoffs.get(attempt_id.request_id)
        if known is not None and known.attempt_id >= attempt_id:
            return
        self._drop_lower(attempt_id, now)
        if not event.has_room:
            reply = Refused(attempt_id=attempt_id, reason=RefuseReason.NO_BLOCKS)
            self._effects.append(SendToRouter(router=event.router, message=reply))
            self._ended.add(attempt_id, ResetReason.ABORTED, now)
            return
        handoff = DecodeHandoff(
            attempt_id=attempt_id,
            router=event.router,
            source=message.source,
            num_tokens=message.request.num_tokens,
            end_at=now + message.deadline_s + self._config.deadline_grace_s,
            patience_ends_at=now + self._config.core_answer_s,
        )
        self._handoffs[attempt_id.request_id] = handoff
        self._command(
            Decode(
                request=message.request,
                attempt=message.attempt,
                has_source=message.source is not None,
                num_peer_tokens=message.peer.num_tokens if message.peer is not None else 0,
            )
        )

    def _on_abort(self, message: AbortRequest, now: float) -> None:
        if message.choice not in (None, 0):
            return
        self._ended.add(message.attempt_id, ResetReason.ABORTED, now)
        handoff = self._handoffs.get(message.attempt_id.request_id)
        if handoff is not None and handoff.attempt_id <= message.attempt_id:
            self._drop(handoff, now)

    def _drop_lower(self, attempt_id: AttemptId, now: float) -> None:
        """A worker that sees a higher attempt drops the lower."""
        handoff = self._handoffs.get(attempt_id.request_id)
        if handoff is not None and handoff.attempt_id < attempt_id:
            self._drop(handoff, now)

    # -- the core --

    def _on_reply(self, reply: Reply, now: float) -> None:
        assert not isinstance(reply, PrefixLocked)
        handoff = self._handoffs.get(reply.attempt_id.request_id)
        if handoff is None or handoff.attempt_id != reply.attempt_id:
            return
        match reply:
            case Accepted():
                assert handoff.state is DecodeState.ASKED, handoff
                assert handoff.source is None, handoff
                handoff.state = DecodeState.RUNNING
                handoff.patience_ends_at = None
            case Refused():
                assert handoff.state is DecodeState.ASKED, handoff
                self._to_router(handoff, reply)
                self._forget(handoff, now)
            case Reserved():
                self._on_reserved(handoff, reply, now)
            case Revoked() if handoff.source is not None:
                back = HandedBack(attempt_id=reply.attempt_id, reason=HandBackReason.REVOKED)
                self._to_router(handoff, back)
                self._end_reading(handoff)
                self._forget(handoff, now)
            case HandedBack():
                self._on_handed_back(handoff, reply, now)
            case TokensReady():
                self._on_tokens(handoff, reply, now)
            case _:
                pass

    def _on_reserved(self, handoff: DecodeHandoff, reply: Reserved, now: float) -> None:
        assert handoff.state is DecodeState.ASKED, handoff
        assert handoff.source is not None, handoff
        handoff.state = DecodeState.READING
        handoff.patience_ends_at = now + self._config.progress_s
        handoff.num_told_tokens = reply.num_cached_tokens
        handoff.arrival = Arrival(
            num_tokens=handoff.num_tokens,
            num_held_tokens=reply.num_cached_tokens,
            target_block_ids=reply.block_ids,
            block_size=self._config.block_size,
            num_layers=self._config.num_layers,
        )
        handoff.is_stream_open = True
        self._effects.append(
            OpenStream(
                attempt_id=handoff.attempt_id,
                source=handoff.source,
                open=Open(
                    attempt_id=handoff.attempt_id,
                    reader=self._key,
                    source=handoff.source.key,
                    namespace=self._namespace,
                ),
            )
        )

    def _on_handed_back(self, handoff: DecodeHandoff, reply: HandedBack, now: float) -> None:
        if handoff.failure in _NO_FAULT and reply.reason in (
            HandBackReason.SOURCE_LOST,
            HandBackReason.TOO_LONG_TO_REPAIR,
        ):
            reply = replace(reply, reason=HandBackReason.SOURCE_REFUSED)
        self._to_router(handoff, reply)
        self._forget(handoff, now)

    def _on_tokens(self, handoff: DecodeHandoff, reply: TokensReady, now: float) -> None:
        assert handoff.state is DecodeState.RUNNING, handoff
        if reply.num_cached_tokens is not None:
            reply = replace(reply, num_peer_held_tokens=handoff.num_peer_held_tokens)
        if reply.num_cached_tokens is not None and handoff.num_source_cached_tokens is not None:
            # Read KV was not computed here, but the source may have computed it for this request.
            cached = CachedTokens(
                num_tokens=handoff.num_source_cached_tokens,
                num_peer_tokens=handoff.num_source_peer_tokens,
            ).within(reply.num_cached_tokens)
            reply = replace(
                reply,
                num_cached_tokens=cached.num_tokens,
                num_peer_tokens=cached.num_peer_tokens,
            )
        self._to_router(handoff, reply)
        if reply.run.finish_reason is not None:
            self._forget(handoff, now)

    def _on_peer_lacked(self, event: PeerLacked) -> None:
        handoff = self._handoffs.get(event.attempt_id.request_id)
        if handoff is not None and handoff.attempt_id == event.attempt_id:
            handoff.num_peer_held_tokens = event.num_held_tokens

    # -- the source --

    def _on_source_message(self, message: SourceMessage, now: float) -> None:
        handoff = self._reading(message.attempt_id)
        if handoff is None or handoff.commit is not None or handoff.is_source_lost:
            return
        handoff.patience_ends_at = now + self._config.progress_s
        match message:
            case Opened():
                handoff.num_source_cached_tokens = message.num_cached_tokens
                handoff.num_source_peer_tokens = message.num_peer_tokens
                handoff.num_peer_held_tokens = message.num_peer_held_tokens
                self._announced(handoff, message)
            case LayersReady():
                self._announced(handoff, message)
            case Commit():
                handoff.commit = message
                handoff.patience_ends_at = None
                handoff.num_source_cached_tokens = message.num_cached_tokens
                handoff.num_source_peer_tokens = message.num_peer_tokens
                self._admit_if_arrived(handoff)
            case CommitFailed(reason=reason):
                handoff.failure = reason
                self._lose_source(handoff)
            case Reset(reason=reason) if reason in _ROUTER_KNOWS:
                self._to_router(
                    handoff,
                    HandedBack(attempt_id=handoff.attempt_id, reason=HandBackReason.SOURCE_REFUSED),
                )
                self._drop(handoff, now)
            case Reset():
                self._lose_source(handoff)
            case _:
                pass

    def _announced(self, handoff: DecodeHandoff, message: Opened | LayersReady) -> None:
        assert handoff.arrival is not None, handoff
        assert handoff.source is not None, handoff
        if isinstance(message, Opened):
            start, first_layer, end_layer = 0, 0, self._config.num_layers
        else:
            start, first_layer, end_layer = message.start, message.first_layer, message.end_layer
        try:
            wanted = handoff.arrival.announce(
                start=start,
                block_ids=message.block_ids,
                first_layer=first_layer,
                end_layer=end_layer,
                digests=message.digests,
            )
        except ValueError:
            self._lose_source(handoff)
            return
        if wanted is not None:
            self._effects.append(
                StartRead(
                    read_id=ReadId(handoff.attempt_id, wanted.number),
                    source=handoff.source,
                    source_block_ids=wanted.source_block_ids,
                    target_block_ids=wanted.target_block_ids,
                    first_layer=wanted.first_layer,
                    end_layer=wanted.end_layer,
                    digests=wanted.digests,
                )
            )

    def _on_stream_broken(self, attempt_id: AttemptId) -> None:
        handoff = self._reading(attempt_id)
        if handoff is None or not handoff.is_stream_open:
            return
        handoff.is_stream_open = False
        if handoff.commit is None:
            self._lose_source(handoff)

    def _lose_source(self, handoff: DecodeHandoff) -> None:
        """No more will come: go on with what is verified, once the outstanding reads have ended."""
        handoff.is_source_lost = True
        handoff.patience_ends_at = None
        self._close_stream(handoff)
        self._admit_if_arrived(handoff)

    # -- the transport --

    def _on_read_done(self, event: ReadDone) -> None:
        attempt_id, number = event.read_id
        ending = self._ending.get(attempt_id)
        if ending is not None:
            ending.end_read(number, is_ok=event.is_ok, bad_indices=event.bad_indices)
            if ending.num_open_reads == 0:
                del self._ending[attempt_id]
                self._command(ReadEnded(attempt_id=attempt_id))
            return
        handoff = self._reading(attempt_id)
        assert handoff is not None, event
        assert handoff.arrival is not None, handoff
        handoff.arrival.end_read(number, is_ok=event.is_ok, bad_indices=event.bad_indices)
        if self._admit_if_arrived(handoff):
            return
        num_tokens = handoff.arrival.num_verified_tokens
        if num_tokens > handoff.num_told_tokens:
            handoff.num_told_tokens = num_tokens
            self._command(BlocksArrived(attempt_id=attempt_id, num_tokens=num_tokens))

    def _admit_if_arrived(self, handoff: DecodeHandoff) -> bool:
        """Arrived, once the source has said its last word and no read is outstanding."""
        assert handoff.arrival is not None, handoff
        if handoff.arrival.num_open_reads or not (handoff.commit or handoff.is_source_lost):
            return False
        self._close_stream(handoff)
        commit = handoff.commit
        finish_reason = commit.finish_reason if commit is not None else None
        if handoff.failure is FinishReason.INVALID_OUTPUT:
            finish_reason = handoff.failure
        self._command(
            Arrived(
                attempt_id=handoff.attempt_id,
                num_tokens=handoff.arrival.num_verified_tokens,
                first_token=commit.first_token if commit is not None else None,
                finish_reason=finish_reason,
            )
        )
        handoff.arrival = None
        handoff.state = DecodeState.RUNNING
        return True

    # -- ends --

    def _drop(self, handoff: DecodeHandoff, now: float) -> None:
        """End an attempt that the core still knows of."""
        self._command(Abort(attempt_id=handoff.attempt_id))
        self._end_reading(handoff)
        self._forget(handoff, now)

    def _end_reading(self, handoff: DecodeHandoff) -> None:
        """Owe the core a ReadEnded: at once if no read is outstanding, else after the last one.

        A RUNNING attempt gets one too: the core may have revoked it before it saw Arrived.
        """
        if handoff.source is None:
            return
        self._close_stream(handoff)
        arrival, handoff.arrival = handoff.arrival, None
        if arrival is not None and arrival.num_open_reads:
            self._ending[handoff.attempt_id] = arrival
        else:
            self._command(ReadEnded(attempt_id=handoff.attempt_id))

    def _forget(self, handoff: DecodeHandoff, now: float) -> None:
        del self._handoffs[handoff.attempt_id.request_id]
        self._ended.add(handoff.attempt_id, ResetReason.ABORTED, now)

    # -- plumbing --

    def _reading(self, attempt_id: AttemptId) -> DecodeHandoff | None:
        handoff = self._handoffs.get(attempt_id.request_id)
        if (
            handoff is None
            or handoff.attempt_id != attempt_id
            or handoff.state is not DecodeState.READING
        ):
            return None
        return handoff

    def _close_stream(self, handoff: DecodeHandoff) -> None:
        if handoff.is_stream_open:
            handoff.is_stream_open = False
            self._effects.append(CloseStream(attempt_id=handoff.attempt_id))

    def _wakeups(self) -> Iterator[float]:
        for handoff in self._handoffs.values():
            yield handoff.end_at
            if handoff.patience_ends_at is not None:
                yield handoff.patience_ends_at
        forget_at = self._ended.next_wakeup()
        if forget_at is not None:
            yield forget_at

    def _command(self, command: Command) -> None:
        self._effects.append(SendCommand(command=command))

    def _to_router(self, handoff: DecodeHandoff, message: WorkerMessage) -> None:
        self._effects.append(SendToRouter(router=handoff.router, message=message))

    def _take_effects(self) -> list[DecodeEffect]:
        effects, self._effects = self._effects, []
        return effects
