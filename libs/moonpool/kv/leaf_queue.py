"""LeafQueue: leaves by segment and priority, each in one place; what is out of date is skipped later."""

from __future__ import annotations

import heapq
from collections.abc import Hashable, Iterator
from typing import Generic, TypeVar

Leaf = TypeVar("Leaf", bound=Hashable)

#: Void entries that a heap may hold beyond as many as valid ones.
_MAX_VOID = 64


class LeafQueue(Generic[Leaf]):
    """A heap for each segment. Of equal priorities the one that was put first goes first."""

    def __init__(self, num_segments: int) -> None:
        #: Entries (priority, order of putting, leaf); void unless `_places` says the same.
        self._heaps: list[list[tuple[int, int, Leaf]]] = [[] for _ in range(num_segments)]
        self._num_valid = [0] * num_segments
        #: Where each leaf stands: (segment, order of putting).
        self._places: dict[Leaf, tuple[int, int]] = {}
        self._num_put = 0

    def __iter__(self) -> Iterator[Leaf]:
        return iter(self._places)

    def __contains__(self, leaf: Leaf) -> bool:
        return leaf in self._places

    def segment(self, leaf: Leaf) -> int | None:
        """Where a leaf stands; None: it is not here."""
        place = self._places.get(leaf)
        return None if place is None else place[0]

    def put(self, leaf: Leaf, segment: int, priority: int) -> None:
        """Add a leaf, or move it here from where it stood."""
        self.drop(leaf)
        self._num_put += 1
        self._places[leaf] = (segment, self._num_put)
        self._num_valid[segment] += 1
        heapq.heappush(self._heaps[segment], (priority, self._num_put, leaf))

    def drop(self, leaf: Leaf) -> None:
        """Take a leaf out, if it is here."""
        place = self._places.pop(leaf, None)
        if place is None:
            return
        segment = place[0]
        self._num_valid[segment] -= 1
        heap = self._heaps[segment]
        if len(heap) > 2 * self._num_valid[segment] + _MAX_VOID:
            heap[:] = [entry for entry in heap if self._is_valid(segment, entry)]
            heapq.heapify(heap)

    def first_priority(self, segment: int) -> int | None:
        """The smallest priority in a segment; None: nothing is there."""
        self._skip_void(segment)
        heap = self._heaps[segment]
        return heap[0][0] if heap else None

    def pop(self, segment: int) -> tuple[int, Leaf] | None:
        """Take the leaf of the smallest priority out of a segment, with that; None: nothing is there."""
        self._skip_void(segment)
        heap = self._heaps[segment]
        if not heap:
            return None
        priority, _, leaf = heapq.heappop(heap)
        del self._places[leaf]
        self._num_valid[segment] -= 1
        return priority, leaf

    def _is_valid(self, segment: int, entry: tuple[int, int, Leaf]) -> bool:
        return self._places.get(entry[2]) == (segment, entry[1])

    def _skip_void(self, segment: int) -> None:
        heap = self._heaps[segment]
        while heap and not self._is_valid(segment, heap[0]):
            heapq.heappop(heap)

    def validate(self) -> None:
        """Raise AssertionError unless every leaf has exactly one entry, in its segment."""
        for segment, heap in enumerate(self._heaps):
            valid = [entry for entry in heap if self._is_valid(segment, entry)]
            assert len(valid) == self._num_valid[segment], (segment, valid)
            here = {leaf for leaf, place in self._places.items() if place[0] == segment}
            assert {entry[2] for entry in valid} == here, segment
            assert len(heap) <= 2 * len(valid) + _MAX_VOID + 1, (len(heap), len(valid))
