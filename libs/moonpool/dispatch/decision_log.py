"""DecisionLog: the placements of the newest requests, for `explain`."""

from __future__ import annotations

from collections import OrderedDict

from moonpool.dispatch.effects import Placement
from moonpool.ids import RequestId

#: Of one request, the newest attempts.
_MAX_ATTEMPTS = 16


class DecisionLog:
    """The request that was placed for the first time longest ago goes first.

    Args:
        max_requests: 0 keeps nothing.
    """

    def __init__(self, max_requests: int) -> None:
        self._max_requests = max_requests
        self._placements: OrderedDict[RequestId, tuple[Placement, ...]] = OrderedDict()

    def add(self, placement: Placement) -> None:
        """Keep one more decision."""
        if not self._max_requests:
            return
        kept = self._placements.get(placement.request_id, ())
        self._placements[placement.request_id] = (*kept[1 - _MAX_ATTEMPTS :], placement)
        if len(self._placements) > self._max_requests:
            self._placements.popitem(last=False)

    def get(self, request_id: RequestId) -> tuple[Placement, ...]:
        """The request's placements, the oldest first; empty if it is unknown, or no longer known."""
        return self._placements.get(request_id, ())

    def fork(self) -> DecisionLog:
        """An independent copy."""
        fork = DecisionLog(self._max_requests)
        fork._placements = self._placements.copy()
        return fork
