"""Breaker: whether to try something that may be broken. For a store's disk, and for stores.

    state      event                                               next
    CLOSED     a failure, the last of `num_failures` in a row
               of which the first is at most `within_s` ago        OPEN
    OPEN       `open_s` have passed                                HALF_OPEN
    HALF_OPEN  begin: the one try that is allowed
               it succeeds                                         CLOSED
               it fails                                            OPEN, twice as long (at most `max_open_s`)

Rules
- Whoever tries says so (`begin`), and says once how it went: `succeeded`, `failed`, or `gave_up` if the try
  tells nothing.
- While OPEN, what earlier tries report changes nothing. In HALF_OPEN any of them counts: it is as good a
  witness as the probe.
- Failures expire: whatever has failed is tried again.
"""

from __future__ import annotations

import enum
from collections import deque
from dataclasses import dataclass


class BreakerState(enum.StrEnum):
    """Whether it is tried: as ever, not at all, or once to see."""

    CLOSED = "closed"
    OPEN = "open"
    HALF_OPEN = "half_open"


@dataclass(frozen=True, slots=True, kw_only=True)
class BreakerConfig:
    """When a breaker opens, and for how long."""

    num_failures: int = 3
    within_s: float = 1.0
    open_s: float = 2.0
    max_open_s: float = 30.0


class Breaker:
    """See the file's head. Times are those of any one clock that does not go back."""

    def __init__(self, config: BreakerConfig | None = None) -> None:
        self._config = config or BreakerConfig()
        #: When the last failures in a row came.
        self._failed_at: deque[float] = deque(maxlen=self._config.num_failures)
        #: When it may be tried again; None: CLOSED.
        self._open_until: float | None = None
        self._open_s = self._config.open_s
        self._is_probing = False

    def state(self, now: float) -> BreakerState:
        if self._open_until is None:
            return BreakerState.CLOSED
        return BreakerState.OPEN if now < self._open_until else BreakerState.HALF_OPEN

    def is_allowed(self, now: float) -> bool:
        """Whether to try: always while CLOSED, one at a time in HALF_OPEN."""
        match self.state(now):
            case BreakerState.CLOSED:
                return True
            case BreakerState.HALF_OPEN:
                return not self._is_probing
            case _:
                return False

    def begin(self, now: float) -> None:
        """A try begins; it is allowed."""
        assert self.is_allowed(now), self.state(now)
        self._is_probing = self._open_until is not None

    def succeeded(self, now: float) -> None:
        """A try has come to its end."""
        if self.state(now) is BreakerState.OPEN:
            return
        self._failed_at.clear()
        self._open_until, self._is_probing = None, False
        self._open_s = self._config.open_s

    def failed(self, now: float) -> None:
        """A try has failed, or takes longer than it may."""
        match self.state(now):
            case BreakerState.CLOSED:
                self._failed_at.append(now)
                is_full = len(self._failed_at) == self._config.num_failures
                if is_full and now - self._failed_at[0] <= self._config.within_s:
                    self._open(now)
            case BreakerState.HALF_OPEN:
                self._open_s = min(2.0 * self._open_s, self._config.max_open_s)
                self._open(now)
            case _:
                pass

    def gave_up(self) -> None:
        """A try has ended for a reason of ours: it tells nothing."""
        self._is_probing = False

    def next_due(self) -> float | None:
        """When it may be tried again; None: it may, or a try is under way."""
        return None if self._is_probing else self._open_until

    def _open(self, now: float) -> None:
        self._failed_at.clear()
        self._open_until, self._is_probing = now + self._open_s, False

    def validate(self) -> None:
        """Raise AssertionError if an invariant is broken."""
        assert self._open_until is not None or not self._is_probing, "a probe of what is closed"
        assert self._open_until is None or not self._failed_at, "failures are counted while open"
        assert self._config.open_s <= self._open_s <= self._config.max_open_s, self._open_s
