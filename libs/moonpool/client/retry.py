"""When a call that failed is made again. Pure: time and chance are arguments."""

from __future__ import annotations

from dataclasses import dataclass

from moonpool.errors import MoonpoolError


@dataclass(frozen=True, slots=True, kw_only=True)
class RetryPolicy:
    """How patient a client is. Only errors that pass are retried, and only within the deadline."""

    #: Tries after the first; 0 turns retries off.
    max_retries: int = 2
    #: The pause doubles from the one to the other. A server that says when to come back is obeyed.
    min_pause_s: float = 0.25
    max_pause_s: float = 4.0


class CallAttempts:
    """The tries of one call.

    Args:
        deadline: On the clock of every `now`; None if the call may take for ever.
    """

    def __init__(self, policy: RetryPolicy, *, deadline: float | None) -> None:
        self._policy = policy
        self._deadline = deadline
        self._num_failures = 0

    def remaining_s(self, now: float) -> float | None:
        """What the next try may take."""
        return None if self._deadline is None else max(self._deadline - now, 0.0)

    def pause_s(self, error: MoonpoolError, *, now: float, draw: float) -> float | None:
        """How long to wait before the next try; None if there is none and the error stands.

        Args:
            draw: Uniform in [0, 1): clients that failed together do not come back together.
        """
        self._num_failures += 1
        if not error.is_retryable or self._num_failures > self._policy.max_retries:
            return None
        if error.retry_after_s is not None:
            pause_s = error.retry_after_s * (1.0 + 0.1 * draw)
        else:
            doubled = self._policy.min_pause_s * 2 ** (self._num_failures - 1)
            pause_s = min(doubled, self._policy.max_pause_s) * (0.5 + 0.5 * draw)
        if self._deadline is not None and now + pause_s >= self._deadline:
            return None
        return pause_s
