"""WorkerHandoffs: the machines of one worker behind one door, in the order that each event needs.

A worker's shell feeds it every event and performs the effects in order. Four machines: both roles of
handoffs, and both ends of reads of prefixes. Both roles see every router message, since a higher attempt
in one role ends a lower one in the other.

A worker has at most one role in an attempt: a router that asks for the other as well is refused. So
the core's replies are told apart by the attempt alone, and an Abort needs no role; and since only an
attempt without a source reads a prefix, its streams and reads are told apart by the attempt as well.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import replace

from moonpool.core.protocol import Abort, Decode, Prefill, Refused, RefuseReason
from moonpool.handoff.config import FetchConfig, HandoffConfig
from moonpool.handoff.decode import DecodeHandoffs
from moonpool.handoff.effects import (
    FetchEffect,
    HandoffEffect,
    RecordFetch,
    SendCommand,
    SendToRouter,
)
from moonpool.handoff.events import (
    AttemptAborted,
    CoreFrameReceived,
    HandoffEvent,
    HolderMessageReceived,
    LayersDone,
    OpenReceived,
    PeerLacked,
    PeerNamed,
    PrefixDelayed,
    PrefixLeaseClosed,
    PrefixOpenReceived,
    ReadDone,
    RouterLost,
    RouterMessageReceived,
    SourceMessageReceived,
    StreamBroken,
    StreamClosed,
)
from moonpool.handoff.fetch_holder import PrefixHolds
from moonpool.handoff.fetch_reader import FetchReads, HashChain
from moonpool.handoff.messages import DecodeRequest, PeerPrefix, PrefillRequest
from moonpool.handoff.prefill import PrefillHandoffs
from moonpool.ids import WorkerKey


class WorkerHandoffs:
    """The handoff machines of one worker.

    Args:
        key: This worker's id and incarnation.
        namespace: Fingerprint of all that changes the values of this worker's KV.
        secret_fingerprint: Of the cluster's secret.
        hash_chain: See FetchReads.
    """

    def __init__(
        self,
        *,
        key: WorkerKey,
        namespace: str,
        secret_fingerprint: str = "",
        config: HandoffConfig,
        fetch: FetchConfig | None = None,
        hash_chain: HashChain | None = None,
    ) -> None:
        fetch = fetch or FetchConfig()
        self.prefill = PrefillHandoffs(key=key, namespace=namespace, config=config)
        self.decode = DecodeHandoffs(key=key, namespace=namespace, config=config)
        self.fetches = FetchReads(
            key=key,
            namespace=namespace,
            secret_fingerprint=secret_fingerprint,
            config=config,
            fetch=fetch,
            hash_chain=hash_chain,
        )
        self.holds = PrefixHolds(
            key=key, namespace=namespace, secret_fingerprint=secret_fingerprint, config=fetch
        )

    def handle(self, event: HandoffEvent, now: float) -> list[HandoffEffect]:
        """Take one event; returns what is to be done, in order."""
        match event:
            case RouterMessageReceived(
                router=router, message=PrefillRequest() | DecodeRequest() as message
            ):
                if self._has_other_role(message):
                    reply = Refused(attempt_id=message.attempt_id, reason=RefuseReason.NEVER_FITS)
                    return [SendToRouter(router=router, message=reply)]
                return self._on_request(event, message, now)
            case RouterMessageReceived() | RouterLost():
                return self._followed(
                    [*self.prefill.handle(event, now), *self.decode.handle(event, now)], None, now
                )
            case CoreFrameReceived():
                effects = [*self.prefill.handle(event, now), *self.decode.handle(event, now)]
                return [
                    *self._followed(effects, None, now),
                    *self._reported(self.fetches.handle(event, now), now),
                    *self.holds.handle(event, now),
                ]
            case LayersDone() | OpenReceived() | StreamClosed():
                return self._followed(self.prefill.handle(event, now), None, now)
            case ReadDone(read_id=read_id) if self.fetches.is_reading(read_id.attempt_id):
                return self._reported(self.fetches.handle(event, now), now)
            case StreamBroken():
                effects = [*self.decode.handle(event, now)]
                return [*effects, *self._reported(self.fetches.handle(event, now), now)]
            case SourceMessageReceived() | ReadDone():
                return self._followed(self.decode.handle(event, now), None, now)
            case HolderMessageReceived() | PeerNamed() | AttemptAborted():
                return self._reported(self.fetches.handle(event, now), now)
            case PeerLacked():
                return [*self.prefill.handle(event, now), *self.decode.handle(event, now)]
            case PrefixOpenReceived() | PrefixDelayed() | PrefixLeaseClosed():
                return list(self.holds.handle(event, now))

    def _on_request(
        self, event: RouterMessageReceived, message: PrefillRequest | DecodeRequest, now: float
    ) -> list[HandoffEffect]:
        has_source = isinstance(message, DecodeRequest) and message.source is not None
        peer = None if has_source else self.fetches.worth_asking(message.peer, now)
        if peer != message.peer:
            event = replace(event, message=replace(message, peer=peer))
        # What ends goes before what begins: the core gets Abort before Prefill or Decode.
        if isinstance(message, PrefillRequest):
            effects = [*self.decode.handle(event, now), *self.prefill.handle(event, now)]
        else:
            effects = [*self.prefill.handle(event, now), *self.decode.handle(event, now)]
        return self._followed(effects, peer, now)

    def _followed(
        self, effects: Sequence[HandoffEffect], peer: PeerPrefix | None, now: float
    ) -> list[HandoffEffect]:
        """The effects, with what the core's attempts and their ends mean for their fetches."""
        result: list[HandoffEffect] = []
        for effect in effects:
            result.append(effect)
            match effect:
                case SendCommand(command=Prefill() | Decode() as command) if (
                    command.num_peer_tokens and peer is not None
                ):
                    named = PeerNamed(
                        attempt_id=command.attempt_id, peer=peer, request=command.request
                    )
                    result += self.fetches.handle(named, now)
                case SendCommand(command=Abort(attempt_id=attempt_id)):
                    result += self.fetches.handle(AttemptAborted(attempt_id=attempt_id), now)
                case _:
                    pass
        return result

    def _reported(self, effects: Sequence[FetchEffect], now: float) -> list[HandoffEffect]:
        """The effects of a fetch; its attempt, in either role, learns what the peer lacked."""
        result: list[HandoffEffect] = []
        for effect in effects:
            result.append(effect)
            if isinstance(effect, RecordFetch) and effect.num_held_tokens is not None:
                lacked = PeerLacked(
                    attempt_id=effect.attempt_id, num_held_tokens=effect.num_held_tokens
                )
                result += self.handle(lacked, now)
        return result

    def _has_other_role(self, message: PrefillRequest | DecodeRequest) -> bool:
        other = self.decode if isinstance(message, PrefillRequest) else self.prefill
        return other.is_live(message.attempt_id)

    def tick(self, now: float) -> list[HandoffEffect]:
        """Do what is due. Call at `next_wakeup()` or later."""
        effects = [*self.prefill.tick(now), *self.decode.tick(now)]
        # A fetch moves no engine, but it is bounded in time: who waits for its prefill can wait.
        waiting = self.prefill.keep_waiting(now) if self.fetches.num_fetches else []
        return [
            *self._followed(effects, None, now),
            *waiting,
            *self._reported(self.fetches.tick(now), now),
            *self.holds.tick(now),
        ]

    def next_wakeup(self) -> float | None:
        """When `tick` has something to do next, or None. Asked after every event."""
        machines = (self.prefill, self.decode, self.fetches, self.holds)
        times = [time for machine in machines if (time := machine.next_wakeup()) is not None]
        if self.fetches.num_fetches and (time := self.prefill.next_waiting_at) is not None:
            times.append(time)
        return min(times, default=None)

    @property
    def num_entries(self) -> int:
        """What the machines have open: attempts, fetches and prefixes that are held."""
        return (
            self.prefill.num_handoffs
            + self.decode.num_handoffs
            + self.fetches.num_fetches
            + self.holds.num_holds
        )

    @property
    def is_quiet(self) -> bool:
        """No attempt, stream or read is open here."""
        return all(
            machine.is_quiet for machine in (self.prefill, self.decode, self.fetches, self.holds)
        )

    def fork(self) -> WorkerHandoffs:
        """An independent copy, for exploration."""
        fork = copy.copy(self)
        fork.prefill = self.prefill.fork()
        fork.decode = self.decode.fork()
        fork.fetches = self.fetches.fork()
        fork.holds = self.holds.fork()
        return fork

    def key(self) -> tuple[object, ...]:
        """Equal for machines that behave alike, their timers' exact times apart."""
        return (self.prefill.key(), self.decode.key(), self.fetches.key(), self.holds.key())

    def validate(self) -> None:
        """Check every invariant; for tests and debugging."""
        self.prefill.validate()
        self.decode.validate()
        self.fetches.validate()
        self.holds.validate()
