"""HandoffDriver: runs the handoff machines. Events in, effects performed in order, one timer.

Rules
  1. One event at a time: what happens while effects are performed waits for its turn.
  2. The performer never awaits; slow effects become tasks whose outcome comes back as an event.
  3. An exception of a machine or of an effect is a bug: the driver stops, and `run` raises it, which
     ends the process. It must not surface in whatever callback brought the event.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable

from moonpool.clock import Clock
from moonpool.handoff.effects import HandoffEffect
from moonpool.handoff.events import HandoffEvent
from moonpool.handoff.worker import WorkerHandoffs


class HandoffDriver:
    """Owns the machines and their timer. On one loop.

    Args:
        perform: Does what the machines want done; called on the loop, in order.
        is_checked: Validate the machines after every event.
    """

    def __init__(
        self,
        *,
        handoffs: WorkerHandoffs,
        perform: Callable[[HandoffEffect], None],
        clock: Clock,
        is_checked: bool = False,
    ) -> None:
        self._handoffs = handoffs
        self._perform = perform
        self._clock = clock
        self._is_checked = is_checked
        #: None is a tick.
        self._events: deque[HandoffEvent | None] = deque()
        self._is_handling = False
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None
        self._failure: asyncio.Future[None] = self._loop.create_future()

    async def run(self) -> None:
        """Wait for ever; raises what a machine or an effect raised."""
        try:
            await asyncio.shield(self._failure)
        finally:
            if self._timer is not None:
                self._timer.cancel()

    def handle(self, event: HandoffEvent) -> None:
        """Give an event to the machines and perform what they want. Never raises."""
        self._put(event)

    def _put(self, event: HandoffEvent | None) -> None:
        if self._failure.done():
            return
        self._events.append(event)
        if self._is_handling:
            return
        self._is_handling = True
        try:
            while self._events:
                self._handle_one(self._events.popleft())
            self._arm()
        except Exception as error:  # noqa: BLE001 - told once, by run()
            self._failure.set_exception(error)
        finally:
            self._is_handling = False

    def _handle_one(self, event: HandoffEvent | None) -> None:
        now = self._clock.now()
        handoffs = self._handoffs
        effects = handoffs.tick(now) if event is None else handoffs.handle(event, now)
        if self._is_checked:
            handoffs.validate()
        for effect in effects:
            self._perform(effect)

    def _arm(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        at = self._handoffs.next_wakeup()
        if at is not None:
            delay_s = max(0.0, at - self._clock.now())
            self._timer = self._loop.call_later(delay_s, self._put, None)
