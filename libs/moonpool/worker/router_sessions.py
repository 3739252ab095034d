"""RouterSessions: the worker's end of the routers' streams. What a router made here dies with its stream.

Life of a session
  1. The router's hello fits (worker/compatibility.py); the stream gets a RouterKey of its own.
  2. Its messages go to the handoff machines, in order. Silence of SILENCE_S ends the session.
  3. A frame leaves when the machines have reported something (once per engine step, since the
     reports of a step are made in one turn of the loop), when the load has changed, or after
     HEARTBEAT_S.
  4. However it ends, RouterLost, once: as soon as the router is silent, ends its stream or sends what cannot
     be read, even if it takes no frames any more and so keeps the stream open.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from dataclasses import dataclass, replace

import structlog

from moonpool.clock import Clock
from moonpool.handoff.events import HandoffEvent, RouterLost, RouterMessageReceived
from moonpool.handoff.messages import RouterKey, RouterMessage, WorkerMessage
from moonpool.routing.worker_view import WorkerFits
from moonpool.wire.session import WorkerReport
from moonpool.wire.spans import Span
from moonpool.worker.load import Load
from moonpool.worker.outbox import OutboxContent, RouterOutbox

log = structlog.get_logger("moonpool.worker")

#: A frame leaves at least this often: both ends notice silence.
HEARTBEAT_S = 1.0
#: A router says something each second.
SILENCE_S = 5.0
#: A frame with nothing but news of the load comes at most this often.
_LOAD_INTERVAL_S = 0.02


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionFrame:
    """One frame to one router."""

    content: OutboxContent
    load: Load


class _Session:
    def __init__(self) -> None:
        self.outbox = RouterOutbox()
        self.wakeup = asyncio.Event()
        self.sent_load: Load | None = None
        self.told_fits: WorkerFits | None = None
        #: Nothing is read, told or kept for the router any more.
        self.is_over = False
        #: What the router sent that it must not, if that ended the session.
        self.failure: Exception | None = None


class RouterSessions:
    """All sessions. On one loop.

    Args:
        load: The worker's load as of its last frame.
        handle: Takes the routers' messages and RouterLost.
        silence_s: A router that says nothing for so long is gone.
    """

    def __init__(
        self,
        *,
        load: Callable[[], Load],
        handle: Callable[[HandoffEvent], None],
        clock: Clock,
        silence_s: float = SILENCE_S,
    ) -> None:
        self._load = load
        self._handle = handle
        self._clock = clock
        self._silence_s = silence_s
        self._sessions: dict[RouterKey, _Session] = {}
        self._numbers = itertools.count(1)

    def __len__(self) -> int:
        return len(self._sessions)

    @property
    def is_all_told(self) -> bool:
        """No report waits to leave."""
        return not any(session.outbox for session in self._sessions.values())

    def report(
        self,
        router: RouterKey,
        message: WorkerMessage,
        *,
        is_prefill_side: bool,
        spans: tuple[Span, ...] = (),
    ) -> None:
        """Tell a router; dropped if its stream is gone."""
        session = self._sessions.get(router)
        if session is not None:
            session.outbox.add(message, is_prefill_side=is_prefill_side, spans=spans)
            session.wakeup.set()

    def load_changed(self) -> None:
        """The load differs from before: routers that were told another one are told soon."""
        if not self._sessions:
            return
        load = self._load()
        for session in self._sessions.values():
            if session.sent_load is not None and load.differs_from(session.sent_load):
                session.wakeup.set()

    async def serve(
        self,
        router_id: str,
        messages: AsyncIterator[RouterMessage | WorkerReport | None],
        tasks: asyncio.TaskGroup,
    ) -> AsyncGenerator[SessionFrame, None]:
        """Run one session: yield its frames until the router's stream ends.

        Args:
            messages: After the hello; None for a ping, a report for a request that is answered at once.
                May raise for what cannot be decoded.
            tasks: Holds the task that reads.
        """
        key = RouterKey(f"{router_id}/{next(self._numbers)}")
        session = self._sessions[key] = _Session()
        reader = tasks.create_task(self._read(key, session, messages))
        sent_at = float("-inf")
        try:
            while not session.is_over:
                yield self._frame(session)
                sent_at = self._clock.now()
                await self._wait(session, sent_at)
            if session.failure is not None:
                raise session.failure
        finally:
            reader.cancel()
            self._end(key, session)

    def _frame(self, session: _Session) -> SessionFrame:
        session.wakeup.clear()
        load = self._load()
        if load.fits is session.told_fits:
            load = replace(load, fits=None)
        else:
            session.told_fits = load.fits
        session.sent_load = load
        return SessionFrame(content=session.outbox.take(), load=load)

    async def _wait(self, session: _Session, sent_at: float) -> None:
        """Until there is something to say, or the next heartbeat is due."""
        while not session.is_over and not session.outbox:
            age_s = self._clock.now() - sent_at
            is_load_due = session.wakeup.is_set()
            if age_s >= (_LOAD_INTERVAL_S if is_load_due else HEARTBEAT_S):
                return
            session.wakeup.clear()
            wait_s = (_LOAD_INTERVAL_S if is_load_due else HEARTBEAT_S) - age_s
            try:
                async with asyncio.timeout(wait_s):
                    await session.wakeup.wait()
            except TimeoutError:
                return

    async def _read(
        self,
        key: RouterKey,
        session: _Session,
        messages: AsyncIterator[RouterMessage | WorkerReport | None],
    ) -> None:
        iterator = aiter(messages)
        try:
            while True:
                try:
                    async with asyncio.timeout(self._silence_s):
                        message = await anext(iterator)
                except StopAsyncIteration:
                    return
                except TimeoutError:
                    log.warning("worker.router_silent", router=key, silence_s=self._silence_s)
                    return
                except Exception as error:  # noqa: BLE001 - raised again where the stream can be told
                    session.failure = error
                    return
                if isinstance(message, WorkerReport):
                    self.report(key, message.message, is_prefill_side=message.is_prefill_side)
                elif message is not None:
                    self._handle(RouterMessageReceived(router=key, message=message))
        finally:
            self._end(key, session)

    def _end(self, key: RouterKey, session: _Session) -> None:
        """What the router made here ends. May be called twice."""
        if not session.is_over:
            session.is_over = True
            session.wakeup.set()
            del self._sessions[key]
            self._handle(RouterLost(router=key))
