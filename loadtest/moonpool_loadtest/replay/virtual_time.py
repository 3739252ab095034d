"""VirtualTime: what happens when, without waiting for it."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable

#: Later than anything that is done.
NEVER_S = 1e9


class VirtualTime:
    """Acts run in order of their time, those of one time in the order in which they were planned."""

    def __init__(self) -> None:
        self.now = 0.0
        self._acts: list[tuple[float, int, Callable[[], None]]] = []
        self._order = itertools.count()

    def at(self, time_s: float, act: Callable[[], None]) -> None:
        """Do this then, or at once if that is past; never, from NEVER_S on."""
        if time_s < NEVER_S:
            heapq.heappush(self._acts, (max(time_s, self.now), next(self._order), act))

    def later(self, delay_s: float, act: Callable[[], None]) -> None:
        self.at(self.now + delay_s, act)

    def run(self) -> None:
        """Until nothing is planned any more."""
        while self._acts:
            self.now, _, act = heapq.heappop(self._acts)
            act()


class Alarm:
    """The next time at which something wants to be woken; an earlier one counts, a later one waits."""

    def __init__(self, time: VirtualTime, on_ring: Callable[[], None]) -> None:
        self._time = time
        self._on_ring = on_ring
        self._rings_at = NEVER_S

    def set(self, time_s: float | None) -> None:
        """Ring then, unless it rings before. None: there is nothing to be woken for."""
        if time_s is not None and time_s < self._rings_at:
            self._rings_at = max(time_s, self._time.now)
            rings_at = self._rings_at
            self._time.at(rings_at, lambda: self._ring(rings_at))

    def _ring(self, rings_at: float) -> None:
        if rings_at == self._rings_at:
            self._rings_at = NEVER_S
            self._on_ring()
