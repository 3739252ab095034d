"""WriteBudget: how much may be written to a disk, so that it lasts: bytes a day, in any 24 hours.

A bucket that holds a twelfth of the day's bytes and fills at the rate of the rest:

    burst + rate * 24 h = budget          whatever the pattern, no 24 hours see more

It is full at the start, unless it is known what was left of it before.
"""

from __future__ import annotations

from dataclasses import dataclass

_DAY_S = 86_400.0
_BURSTS_PER_DAY = 12


@dataclass(frozen=True, slots=True, kw_only=True)
class BudgetLeft:
    """What an earlier life of a store left of its budget."""

    num_bytes: int
    #: So long ago; since then nothing was written.
    age_s: float


class WriteBudget:
    """See the file's head.

    Args:
        bytes_per_day: None: no limit.
        left: None: nobody knows.
    """

    def __init__(self, bytes_per_day: int | None, left: BudgetLeft | None = None) -> None:
        self._is_limited = bytes_per_day is not None
        num_bytes = float(bytes_per_day or 0)
        self._burst_bytes = num_bytes / _BURSTS_PER_DAY
        self._bytes_per_s = (num_bytes - self._burst_bytes) / _DAY_S
        self._left_bytes = self._burst_bytes
        if left is not None:
            filled_bytes = left.num_bytes + left.age_s * self._bytes_per_s
            self._left_bytes = min(filled_bytes, self._burst_bytes)
        #: When `_left_bytes` was right; None: before the first look.
        self._counted_at: float | None = None

    @property
    def max_bytes(self) -> int | None:
        """The most that can be written at a time; None: no limit."""
        return int(self._burst_bytes) if self._is_limited else None

    def left_bytes(self, now: float) -> int | None:
        """What can be written now; None: no limit."""
        return int(self._refilled(now)) if self._is_limited else None

    def level(self, now: float) -> float:
        """The part of the bucket that is left, in [0, 1]; 1 if there is no limit."""
        if not self._is_limited:
            return 1.0
        return self._refilled(now) / self._burst_bytes if self._burst_bytes else 0.0

    def num_affordable(self, unit_bytes: int, now: float) -> int | None:
        """How many units can be written now; None: any number."""
        return int(self._refilled(now) // unit_bytes) if self._is_limited else None

    def take(self, num_bytes: int, now: float) -> None:
        """So much is written; it was affordable."""
        if self._is_limited:
            left_bytes = self._refilled(now) - num_bytes
            assert left_bytes >= 0, (num_bytes, left_bytes)
            self._left_bytes, self._counted_at = left_bytes, now

    def _refilled(self, now: float) -> float:
        if self._counted_at is None:
            return self._left_bytes
        elapsed_s = max(now - self._counted_at, 0.0)
        return min(self._left_bytes + elapsed_s * self._bytes_per_s, self._burst_bytes)
