"""AttemptLog: the highest attempt that was seen of each request in each role, for a while.

Commands may come late, twice, or after their Abort. An attempt that was seen is never taken again.
"""

from __future__ import annotations

from moonpool.ids import AttemptId, RequestId
from moonpool.sched.request import Role

#: Longer than an Open may be parked on a prefill worker (2 s) and than silence ends a stream (5 s).
_REMEMBERED_S = 10.0
_MAX_ENTRIES = 8192


class AttemptLog:
    """Bounded memory: entries go after ten seconds, the oldest earlier when there are too many."""

    def __init__(self) -> None:
        #: (attempt, when it was noted), in order of noting.
        self._entries: dict[tuple[Role, RequestId], tuple[int, float]] = {}

    def note(self, role: Role, attempt_id: AttemptId, now: float) -> bool:
        """Remember an attempt for ten seconds from `now`. False if it or a higher one was seen."""
        key = (role, attempt_id.request_id)
        seen_attempt, _ = self._entries.get(key, (0, now))
        if seen_attempt > attempt_id.attempt:
            return False
        self._entries.pop(key, None)
        self._entries[key] = (attempt_id.attempt, now)
        if len(self._entries) > _MAX_ENTRIES:
            del self._entries[next(iter(self._entries))]
        return seen_attempt < attempt_id.attempt

    def forget_old(self, now: float) -> None:
        """Drop what was noted more than ten seconds ago."""
        while self._entries:
            key, (_, noted_at) = next(iter(self._entries.items()))
            if now - noted_at <= _REMEMBERED_S:
                break
            del self._entries[key]

    def key(self) -> tuple[tuple[str, str, int], ...]:
        """What is remembered, without the times."""
        return tuple(
            sorted((role, rid, attempt) for (role, rid), (attempt, _) in self._entries.items())
        )

    def fork(self) -> AttemptLog:
        """An independent copy."""
        other = AttemptLog()
        other._entries = dict(self._entries)
        return other
