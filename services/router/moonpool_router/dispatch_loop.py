"""DispatchLoop: feeds the router's two machines and performs what they want. Its only owner.

    doors ---- RequestArrived, RequestCancelled ---->+------------+ SendPrefill, SendDecode, SendAbort
    links ---- hellos, frames, cuts --> Membership ->| Dispatcher |-----------------> links
    bus ------ announcements ---------> Membership   +------------+ EmitTokens, EndRequest --> answers

Rules
  1. Everything happens on one event loop, synchronously and in order: an event that an effect causes is
     handled after the effects of the event before it. Timers are the machines' own `next_due`.
  2. An exception of a machine or of an effect is a bug: nothing more is handled, and `run` raises it,
     which ends the process. It must not surface in whatever callback or client's coroutine brought the
     event.
  3. A message that does not fit its fields is one request's misfortune: that worker has refused it.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

import structlog

from moonpool.clock import Clock
from moonpool.core.protocol import Refused, RefuseReason
from moonpool.dispatch.dispatcher import Dispatcher
from moonpool.dispatch.effects import (
    DispatchEffect,
    EmitTokens,
    EndRequest,
    Placed,
    Placement,
    SendAbort,
    SendDecode,
    SendPrefill,
)
from moonpool.dispatch.events import (
    DispatchEvent,
    DrainRequested,
    LoadReported,
    RequestArrived,
    RequestStopped,
    WorkerJoined,
    WorkerLost,
    WorkerMessageReceived,
)
from moonpool.dispatch.membership import (
    Announcement,
    CloseLink,
    IgnoreAddress,
    Member,
    Membership,
    MembershipEffect,
    OpenLink,
)
from moonpool.errors import MoonpoolError
from moonpool.failpoints import Failpoints
from moonpool.handoff.messages import RouterMessage
from moonpool.ids import RequestId, WorkerKey
from moonpool.inference.request import InferenceRequest
from moonpool.kv.block_hash import ModelNamespace
from moonpool.routing.worker_view import WorkerInfo
from moonpool.telemetry import names
from moonpool.telemetry.spans import TraceRing
from moonpool.wire.session import WorkerFrame
from moonpool.wire.spans import Span
from moonpool.wire.worker import LoadReport, WorkerHello
from moonpool_router.answer import Answer, PrefillTimes
from moonpool_router.compatibility import Compatibility
from moonpool_router.placement_facts import placement_facts

#: After the last decode-capable worker is gone, new requests wait this long for another before they
#: are refused at once: a worker that crashed is back by then.
NO_WORKER_GRACE_S = 30.0

log = structlog.get_logger("moonpool.router")


class Links(Protocol):
    """The streams to workers, by address. All calls return at once."""

    def open(self, address: str) -> None: ...

    def close(self, address: str) -> None: ...

    def send(self, address: str, message: RouterMessage) -> None:
        """Dropped if the stream has been cut: its end is on its way.

        Raises:
            ValueError: A value does not fit its field; nothing was sent.
        """
        ...


class FleetWatcher(Protocol):
    """Who follows the workers, for their prefixes. All calls return at once."""

    def on_worker_joined(self, info: WorkerInfo, namespace: ModelNamespace) -> None: ...

    def on_worker_lost(self, key: WorkerKey) -> None: ...

    def on_placed(self, placement: Placement, request: InferenceRequest) -> None: ...

    def on_request_ended(self, end: EndRequest) -> None: ...


class DispatchLoop:
    """See the file's head.

    Args:
        on_change: Called when a worker has come or gone; must return at once.
    """

    def __init__(
        self,
        dispatcher: Dispatcher,
        membership: Membership,
        *,
        links: Links,
        watcher: FleetWatcher,
        compatibility: Compatibility,
        traces: TraceRing,
        clock: Clock,
        failpoints: Failpoints,
        on_change: Callable[[], None] = lambda: None,
    ) -> None:
        self._dispatcher = dispatcher
        self._membership = membership
        self._links = links
        self._watcher = watcher
        self._compatibility = compatibility
        self._traces = traces
        self._clock = clock
        self._failpoints = failpoints
        self._on_change = on_change
        self._answers: dict[RequestId, Answer] = {}
        #: By the span id of the request's root: the parent of its workers' spans.
        self._answers_by_span: dict[str, Answer] = {}
        self._loads: dict[WorkerKey, LoadReport] = {}
        #: Of joined workers.
        self._hellos: dict[WorkerKey, WorkerHello] = {}
        self._address_by_key: dict[WorkerKey, str] = {}
        #: None is a tick.
        self._events: deque[DispatchEvent | None] = deque()
        self._is_handling = False
        #: The bug that ends this loop; see rule 2.
        self._failure: Exception | None = None
        self._wakeup = asyncio.Event()
        self._was_ready = False
        #: The last moment at which a decode worker was there; None: never.
        self._last_ready_at: float | None = None

    # -- for doors --

    def begin(self, answer: Answer, arrived: RequestArrived) -> None:
        """Take a request; its answer is fed until `forget`."""
        assert answer.request_id == arrived.request.request_id
        self._answers[answer.request_id] = answer
        self._answers_by_span[answer.trace.root.context.span_id] = answer
        self.handle(arrived)

    def forget(self, request_id: RequestId) -> None:
        """Nobody reads this answer any more. Idempotent."""
        answer = self._answers.pop(request_id, None)
        if answer is not None:
            del self._answers_by_span[answer.trace.root.context.span_id]

    def fail_all(self, error: MoonpoolError) -> None:
        """End every answer that has not ended (the router goes down)."""
        for answer in tuple(self._answers.values()):
            answer.fail(error)

    def why_not_ready(self) -> str:
        """Empty if requests can be taken; else who is missing, for a client and for status."""
        if self._has_decode_worker():
            return ""
        now = self._clock.now()
        if self._last_ready_at is not None and now < self._last_ready_at + NO_WORKER_GRACE_S:
            return ""
        return self.missing()

    def missing(self) -> str:
        """What keeps requests from being served this moment; empty if nothing does."""
        if self._has_decode_worker():
            return ""
        if any(info.role.computes for info in self._membership.live):
            return "Prefill workers have joined, but no worker that can decode."
        if self._membership.live:
            return "Stores have joined, but no worker yet."
        return "No worker has joined yet."

    # -- events --

    def handle(self, event: DispatchEvent) -> None:
        """Handle an event and all that it causes. Never raises."""
        self._put(event)
        self._wakeup.set()

    def drain(self) -> None:
        """Give nothing that is new to a worker from here on."""
        self.handle(DrainRequested())

    def start(self) -> None:
        with self._bugs_kept():
            self._change(self._membership.start(self._clock.now()))

    def on_announced(self, announcement: Announcement) -> None:
        with self._bugs_kept():
            self._change(self._membership.on_announced(announcement, self._clock.now()))

    def on_bus_changed(self, is_connected: bool) -> None:
        with self._bugs_kept():
            self._change(self._membership.on_bus_changed(is_connected, self._clock.now()))

    def on_hello(self, address: str, hello: WorkerHello) -> None:
        """Who lives at `address` has said who it is."""
        info = WorkerInfo(
            key=hello.worker,
            role=hello.role,
            address=address,
            block_size=hello.namespace.block_size,
            bytes_per_token=sum(region.layout.block_bytes for region in hello.regions)
            // hello.namespace.block_size,
            num_layers=max((region.layout.num_layers for region in hello.regions), default=1),
        )
        incompatibility = self._compatibility.incompatibility(hello)
        with self._bugs_kept():
            now = self._clock.now()
            effects = self._membership.on_hello(address, info, incompatibility, now)
            self._change(effects, hello=hello)

    def on_refused(self, address: str, reason: str) -> None:
        with self._bugs_kept():
            self._change(self._membership.on_refused(address, reason, self._clock.now()))

    def on_closed(self, address: str, reason: str) -> None:
        with self._bugs_kept():
            self._change(self._membership.on_closed(address, reason, self._clock.now()))

    def on_frame(self, address: str, key: WorkerKey, frame: WorkerFrame) -> None:
        """One frame of one worker: its spans, its messages, then its load."""
        self._membership.on_frame(address, self._clock.now())
        if self._address_by_key.get(key) != address:
            return
        last = self._loads.get(key)
        self._loads[key] = frame.load
        if frame.load.is_draining != (last is not None and last.is_draining):
            self._note_readiness()
            self._on_change()
        for span in frame.spans:
            self._on_span(span)
        for report in frame.reports:
            self.handle(WorkerMessageReceived(key=key, message=report.message))
        self.handle(LoadReported(key=key, load=frame.load.worker_load))

    async def run(self) -> None:
        """The timers of both machines. For ever; raises what a machine or an effect raised."""
        while True:
            self._wakeup.clear()
            now = self._clock.now()
            with self._bugs_kept():
                self._change(self._membership.tick(now))
            self._put(None)
            if self._failure is not None:
                raise self._failure
            due = [self._membership.next_due(), self._dispatcher.next_wakeup(now)]
            wait_s = min(
                (max(moment - now, 0.0) for moment in due if moment is not None), default=None
            )
            try:
                async with asyncio.timeout(wait_s):
                    await self._wakeup.wait()
            except TimeoutError:
                continue

    # -- for status --

    @property
    def num_queued(self) -> int:
        return self._dispatcher.num_queued

    @property
    def num_running(self) -> int:
        return self._dispatcher.num_requests - self._dispatcher.num_queued

    @property
    def max_model_len(self) -> int | None:
        """The longest prompt + answer that a joined decode worker takes; None without one."""
        return max(
            (hello.max_model_len for hello in self._hellos.values() if hello.role.can_decode),
            default=None,
        )

    def members(self) -> tuple[Member, ...]:
        return self._membership.members()

    def placements(self, request_id: RequestId) -> tuple[Placement, ...]:
        """Why one of the newest requests went where; empty if it is not known, or no longer."""
        return self._dispatcher.decisions(request_id)

    @property
    def hellos(self) -> tuple[WorkerHello, ...]:
        """What the joined workers said of themselves, in order of joining."""
        return tuple(self._hellos.values())

    def load(self, key: WorkerKey) -> LoadReport | None:
        """As of the worker's last frame."""
        return self._loads.get(key)

    # -- parts --

    def _on_span(self, span: Span) -> None:
        """A span that a worker has closed."""
        self._traces.add(span)
        answer = self._answers_by_span.get(span.parent_span_id)
        if answer is not None and span.name == names.SPAN_PREFILL:
            answer.on_prefilled(
                PrefillTimes(
                    started_unix_s=span.start_unix_ns / 1e9, ended_unix_s=span.end_unix_ns / 1e9
                )
            )

    @contextlib.contextmanager
    def _bugs_kept(self) -> Iterator[None]:
        """See rule 2."""
        try:
            yield
        except Exception as error:  # noqa: BLE001 - told once, by run()
            self._failure = self._failure or error
            self._wakeup.set()

    def _put(self, event: DispatchEvent | None) -> None:
        if self._failure is not None:
            return
        self._events.append(event)
        if self._is_handling:
            return
        self._is_handling = True
        try:
            with self._bugs_kept():
                while self._events and self._failure is None:
                    self._perform(self._effects_of(self._events.popleft()))
        finally:
            self._is_handling = False

    def _effects_of(self, event: DispatchEvent | None) -> Sequence[DispatchEffect]:
        now = self._clock.now()
        return self._dispatcher.tick(now) if event is None else self._dispatcher.handle(event, now)

    def _change(
        self, effects: Sequence[MembershipEffect], *, hello: WorkerHello | None = None
    ) -> None:
        """Args: hello: Of the worker that joins, if one does."""
        if self._failure is not None:
            return
        for effect in effects:
            match effect:
                case OpenLink(address=address):
                    self._links.open(address)
                case CloseLink(address=address, reason=reason):
                    log.warning("worker.link_closed", address=address, reason=reason)
                    self._links.close(address)
                case IgnoreAddress(address=address, num_unjoined=num_unjoined):
                    log.warning("worker.address_ignored", at=address, num_unjoined=num_unjoined)
                case WorkerJoined(info=info):
                    log.info("worker.joined", worker=str(info.key), role=info.role, at=info.address)
                    self._address_by_key[info.key] = info.address
                    if hello is not None:
                        assert hello.worker == info.key, (hello, info)
                        self._hellos[info.key] = hello
                    namespace = self._hellos[info.key].namespace
                    self._compatibility.adopt(namespace)
                    self._watcher.on_worker_joined(info, namespace)
                    self.handle(effect)
                case WorkerLost(key=key):
                    log.warning("worker.lost", worker=str(key))
                    del self._address_by_key[key]
                    del self._hellos[key]
                    self._loads.pop(key, None)
                    if not self._address_by_key:
                        self._compatibility.release()
                    self._watcher.on_worker_lost(key)
                    self.handle(effect)
        if effects:
            self._wakeup.set()
            self._note_readiness()
            self._on_change()

    def _note_readiness(self) -> None:
        """Whenever a worker has come, gone, or begun to drain."""
        is_ready = self._has_decode_worker()
        if is_ready or self._was_ready:
            self._last_ready_at = self._clock.now()
        self._was_ready = is_ready

    def _perform(self, effects: Sequence[DispatchEffect]) -> None:
        for effect in effects:
            match effect:
                case SendPrefill() | SendDecode() | SendAbort():
                    self._send(effect)
                case EmitTokens(request_id=request_id, run=run):
                    self._failpoints.hit("router.after_token", run.end_position - 1)
                    answer = self._answers.get(request_id)
                    if answer is not None and answer.on_tokens(run, self._clock.unix()):
                        self._events.append(
                            RequestStopped(
                                request_id=request_id, num_output_tokens=answer.num_tokens
                            )
                        )
                case EndRequest(request_id=request_id):
                    self._log_end(effect)
                    self._watcher.on_request_ended(effect)
                    answer = self._answers.get(request_id)
                    if answer is not None:
                        answer.on_end(effect)
                case Placed(placement=placement):
                    self._failpoints.hit("router.before_dispatch")
                    self._log_placement(placement)
                    answer = self._answers.get(placement.request_id)
                    if answer is not None:
                        answer.on_placed(placement, self._clock.unix())
                        self._watcher.on_placed(placement, answer.request)

    def _send(self, effect: SendPrefill | SendDecode | SendAbort) -> None:
        address = self._address_by_key.get(effect.key)
        if address is None:
            return
        try:
            self._links.send(address, effect.message)
        except ValueError as error:
            attempt_id = effect.message.attempt_id
            log.error(
                "request.not_sendable",
                request_id=attempt_id.request_id,
                worker=str(effect.key),
                why=str(error),
            )
            refused = Refused(attempt_id=attempt_id, reason=RefuseReason.NEVER_FITS)
            self._events.append(WorkerMessageReceived(key=effect.key, message=refused))

    def _has_decode_worker(self) -> bool:
        return any(
            info.role.can_decode
            and not ((load := self._loads.get(info.key)) is not None and load.is_draining)
            for info in self._membership.live
        )

    def _log_placement(self, placement: Placement) -> None:
        log.info("request.placed", request_id=placement.request_id, **placement_facts(placement))

    def _log_end(self, end: EndRequest) -> None:
        log.info(
            "request.ended",
            request_id=end.request_id,
            finish_reason=end.finish_reason,
            error=end.error_code,
            num_prompt_tokens=end.usage.num_prompt_tokens,
            num_output_tokens=end.usage.num_completion_tokens,
            num_cached_tokens=end.usage.num_cached_tokens,
            num_peer_tokens=end.usage.num_peer_tokens,
            num_store_tokens=end.usage.num_store_tokens,
            num_attempts=end.num_attempts,
            num_failures=end.num_failures,
        )
