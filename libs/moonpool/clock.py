"""Time for shells. The domain never reads a clock: it is given `now`."""

from __future__ import annotations

import time
from typing import Protocol


class Clock(Protocol):
    """A monotonic clock and the wall clock, so that a test can drive both."""

    def now(self) -> float:
        """Monotonic seconds; only differences mean anything."""
        ...

    def unix(self) -> float:
        """Wall-clock seconds since 1970; for ages compared between hosts and for display only."""
        ...


class SystemClock:
    """The machine's clocks."""

    def now(self) -> float:
        return time.monotonic()

    def unix(self) -> float:
        return time.time()


class ManualClock:
    """A clock that a test moves by hand."""

    def __init__(self, now: float = 1_000.0, unix: float = 1_700_000_000.0) -> None:
        self._now = now
        self._unix = unix

    def now(self) -> float:
        return self._now

    def unix(self) -> float:
        return self._unix

    def advance(self, seconds: float) -> None:
        assert seconds >= 0, seconds
        self._now += seconds
        self._unix += seconds
