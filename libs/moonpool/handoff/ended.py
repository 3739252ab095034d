"""EndedAttempts: a short memory of attempts that ended here, so that what comes late is not new."""

from __future__ import annotations

from dataclasses import dataclass

from moonpool.handoff.messages import ResetReason
from moonpool.ids import AttemptId, RequestId


@dataclass(frozen=True, slots=True, kw_only=True)
class _Ended:
    attempt: int
    reason: ResetReason
    forget_at: float


class EndedAttempts:
    """Per request the highest attempt that ended, and why, for `remember_s`.

    An ended attempt covers all lower ones. Entries lie in the order in which they are forgotten.
    """

    def __init__(self, remember_s: float) -> None:
        self._remember_s = remember_s
        self._by_request: dict[RequestId, _Ended] = {}

    def __len__(self) -> int:
        return len(self._by_request)

    def add(self, attempt_id: AttemptId, reason: ResetReason, now: float) -> None:
        """Remember that this attempt and all lower ones have ended; a repetition is remembered anew."""
        request_id, attempt = attempt_id
        known = self._by_request.get(request_id)
        if known is not None and known.attempt > attempt:
            return
        if known is not None and known.attempt == attempt:
            reason = known.reason
        self._by_request.pop(request_id, None)
        forget_at = now + self._remember_s
        if self._by_request:
            forget_at = max(forget_at, next(reversed(self._by_request.values())).forget_at)
        self._by_request[request_id] = _Ended(attempt=attempt, reason=reason, forget_at=forget_at)

    def reason(self, attempt_id: AttemptId) -> ResetReason | None:
        """Why this attempt is over; None if nothing is known against it."""
        known = self._by_request.get(attempt_id.request_id)
        if known is None or known.attempt < attempt_id.attempt:
            return None
        if known.attempt > attempt_id.attempt:
            return ResetReason.SUPERSEDED
        return known.reason

    def forget(self, now: float) -> None:
        """Drop what is older than `remember_s`."""
        while (due := self.next_wakeup()) is not None and due <= now:
            del self._by_request[next(iter(self._by_request))]

    def next_wakeup(self) -> float | None:
        """When the oldest entry is forgotten."""
        for ended in self._by_request.values():
            return ended.forget_at
        return None

    def fork(self) -> EndedAttempts:
        copy = EndedAttempts(self._remember_s)
        copy._by_request = dict(self._by_request)
        return copy

    def key(self) -> tuple[object, ...]:
        return tuple(
            sorted(
                (request_id, ended.attempt, ended.reason)
                for request_id, ended in self._by_request.items()
            )
        )

    def validate(self) -> None:
        times = [ended.forget_at for ended in self._by_request.values()]
        assert times == sorted(times), times
