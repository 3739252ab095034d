"""WaitQueue: requests that hold no block, oldest first, and what is kept free for them."""

from __future__ import annotations

from bisect import insort
from collections.abc import Iterator, Mapping

from moonpool.sched.request import Order, RequestState, RequestStatus, Role


class WaitQueue:
    """New, preempted and following requests. What each is promised stands in its state."""

    def __init__(self) -> None:
        self._states: list[RequestState] = []

    def __len__(self) -> int:
        return len(self._states)

    def __iter__(self) -> Iterator[RequestState]:
        """Oldest first."""
        return iter(self._states)

    @property
    def num_decodes(self) -> int:
        return sum(state.role is Role.DECODE for state in self._states)

    @property
    def num_queued_tokens(self) -> int:
        """Tokens that will have to be computed."""
        return sum(state.num_queued_tokens for state in self._states)

    def num_queued_tokens_before(self, order: Order) -> int:
        """Those of requests older than `order`."""
        return sum(state.num_queued_tokens for state in self._states if state.order < order)

    def num_promised_blocks(self, order: Order) -> int:
        """Blocks that those older than `order` will take."""
        return sum(state.num_promised_blocks for state in self._states if state.order < order)

    def add(self, state: RequestState) -> None:
        assert not state.block_ids, state.attempt_id
        insort(self._states, state, key=_order)

    def remove(self, state: RequestState) -> None:
        self._states.remove(state)

    def fork(self, copies: Mapping[RequestState, RequestState]) -> WaitQueue:
        """An independent copy; `copies` maps each state to its copy."""
        other = WaitQueue()
        other._states = [copies[state] for state in self._states]
        return other

    def validate(self) -> None:
        """Raise AssertionError if somebody waits who should not, or in the wrong place."""
        for state in self._states:
            assert state.status in (RequestStatus.WAITING, RequestStatus.PREEMPTED), state
            assert not state.block_ids, state
        assert self._states == sorted(self._states, key=_order)


def _order(state: RequestState) -> Order:
    return state.order
