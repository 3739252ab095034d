"""Slots: where the runner keeps each request's last drawn token, so that a plan need not carry it.

Having no slot costs nothing but carrying one token: a slot is taken from whoever is not in the step.
"""

from __future__ import annotations

from collections.abc import Iterable

from moonpool.sched.request import RequestState


class Slots:
    """Slots [0, num_slots) and who has them."""

    def __init__(self, num_slots: int) -> None:
        self._owners: list[RequestState | None] = [None] * num_slots

    def assign(self, planned: Iterable[RequestState]) -> None:
        """Give each request of a step a slot; at most as many as there are slots."""
        planned = tuple(planned)
        needy = [state for state in planned if state.slot < 0]
        if not needy:
            return
        spare = [slot for slot, owner in enumerate(self._owners) if owner not in planned]
        # Free ones first.
        spare.sort(key=lambda slot: self._owners[slot] is not None)
        for state, slot in zip(needy, spare, strict=False):
            owner = self._owners[slot]
            if owner is not None:
                self.drop(owner)
            self._owners[slot] = state
            state.slot = slot

    def drop(self, state: RequestState) -> None:
        """`state` loses its slot, if it has one, and what the runner keeps there."""
        if state.slot >= 0:
            self._owners[state.slot] = None
            state.slot = -1
            state.is_token_in_slot = False

    def fork(self, copies: dict[RequestState, RequestState]) -> Slots:
        """An independent copy; `copies` maps each state to its copy."""
        other = Slots(len(self._owners))
        other._owners = [None if owner is None else copies[owner] for owner in self._owners]
        return other

    def validate(self, running: Iterable[RequestState]) -> None:
        """Raise AssertionError unless exactly those of `running` that say so have their slots."""
        having = {state.slot: state for state in running if state.slot >= 0}
        assert having == {
            slot: owner for slot, owner in enumerate(self._owners) if owner is not None
        }, self._owners
