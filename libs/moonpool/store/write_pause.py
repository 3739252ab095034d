"""WritePause: after a disk has refused a write, when to try the next. Pure.

The first refusal pauses writes for a second, each further one in a row for twice as long, up to a
minute; one that succeeds ends that, and until one does the disk counts as broken. Reads are not concerned.
"""

from __future__ import annotations

from moonpool.store.base import LogHealth

_FIRST_PAUSE_S = 1.0
_LONGEST_PAUSE_S = 60.0


class WritePause:
    """One log's."""

    def __init__(self) -> None:
        self._problem = ""
        self._ends_at = 0.0
        self._pause_s = _FIRST_PAUSE_S

    def health(self, now: float) -> LogHealth:
        """Not writable during a pause; when that is over, the next write is the probe."""
        left_s = max(0.0, self._ends_at - now) if self._problem else 0.0
        return LogHealth(is_writable=left_s == 0.0, problem=self._problem, retry_after_s=left_s)

    def fail(self, now: float, problem: str) -> None:
        """A write was refused."""
        self._problem = problem
        self._ends_at = now + self._pause_s
        self._pause_s = min(2 * self._pause_s, _LONGEST_PAUSE_S)

    def succeed(self, now: float) -> None:
        """A write was taken. Changes nothing in a pause, which began while that write ran."""
        if now >= self._ends_at:
            self._problem = ""
            self._pause_s = _FIRST_PAUSE_S
