"""Attempts: who is alive on this worker, and which attempts it has seen."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from moonpool.core.attempt_log import AttemptLog
from moonpool.ids import AttemptId, RequestId
from moonpool.sched.request import RequestState, Role


class Attempts:
    """Attempts that have not ended, at most one per role and request."""

    def __init__(self) -> None:
        self._states: dict[tuple[Role, RequestId], RequestState] = {}
        self._seen = AttemptLog()

    def __iter__(self) -> Iterator[RequestState]:
        """In order of registration; of a copy, so that they may end meanwhile."""
        return iter(tuple(self._states.values()))

    def add(self, state: RequestState) -> None:
        self._states[state.role, state.attempt_id.request_id] = state

    def remove(self, state: RequestState) -> None:
        del self._states[state.role, state.attempt_id.request_id]

    def find(self, role: Role, attempt_id: AttemptId) -> RequestState | None:
        state = self._states.get((role, attempt_id.request_id))
        return state if state is not None and state.attempt_id == attempt_id else None

    def find_up_to(self, role: Role, attempt_id: AttemptId) -> RequestState | None:
        """The request's attempt in this role, if it is this one or a lower."""
        state = self._states.get((role, attempt_id.request_id))
        return (
            state if state is not None and state.attempt_id.attempt <= attempt_id.attempt else None
        )

    def note(self, role: Role, attempt_id: AttemptId, now: float) -> bool:
        """Remember an attempt. False if this worker has, or has seen, it or a higher one."""
        live = self._states.get((role, attempt_id.request_id))
        if live is not None and live.attempt_id.attempt >= attempt_id.attempt:
            return False
        return self._seen.note(role, attempt_id, now)

    def note_ended(self, role: Role, attempt_id: AttemptId, now: float) -> None:
        """Remember an attempt that is to be taken no more."""
        self._seen.note(role, attempt_id, now)

    def forget_old(self, now: float) -> None:
        """Forget what was seen long ago."""
        self._seen.forget_old(now)

    def key(self) -> object:
        """What is remembered of attempts seen, without the times."""
        return self._seen.key()

    def fork(self, copies: Mapping[RequestState, RequestState]) -> Attempts:
        """An independent copy; `copies` maps each state to its copy."""
        other = Attempts()
        other._states = {key: copies[state] for key, state in self._states.items()}
        other._seen = self._seen.fork()
        return other

    def validate(self) -> None:
        """Raise AssertionError if an attempt stands under another's name."""
        for (role, request_id), state in self._states.items():
            assert (state.role, state.attempt_id.request_id) == (role, request_id), state
