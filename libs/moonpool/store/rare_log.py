"""RareLog: a log line for what may happen with every block, at most once a minute."""

from __future__ import annotations

from typing import Any

import structlog

from moonpool.clock import Clock

_PERIOD_S = 60.0


class RareLog:
    """Warnings; each event has its own minute."""

    def __init__(self, clock: Clock, name: str) -> None:
        self._clock = clock
        self._log = structlog.get_logger(name)
        self._next_by_event: dict[str, float] = {}
        self._num_left_out: dict[str, int] = {}

    def warning(self, event: str, **fields: Any) -> None:  # Any: what structlog takes
        """Log it, with how many of its kind were left out since the last; or leave it out."""
        now = self._clock.now()
        if now < self._next_by_event.get(event, now):
            self._num_left_out[event] = self._num_left_out.get(event, 0) + 1
            return
        self._next_by_event[event] = now + _PERIOD_S
        self._log.warning(event, num_left_out=self._num_left_out.pop(event, 0), **fields)
