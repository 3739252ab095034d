"""Pins: which blocks somebody wants kept in HOST, for a time.

A pin names blocks, by hash. It holds no reference: a block that is gone for another reason (the operator
clears the store) is no longer pinned by being named, and one that comes again is.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from moonpool.ids import BlockHash
from moonpool.tiering.protocol import PinKind

#: Ends of pins that are gone are forgotten when there are more, and more than there are pins.
_MAX_STALE_ENDS = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class _Pin:
    kind: PinKind
    hashes: tuple[BlockHash, ...]
    end_at: float


class Pins:
    """Pins by the service's number for them.

    Args:
        max_hard_blocks: At most so many different blocks are pinned hard.
    """

    def __init__(self, max_hard_blocks: int) -> None:
        self._max_hard_blocks = max_hard_blocks
        self._pins: dict[int, _Pin] = {}
        #: How many pins of this kind name a block.
        self._counts: dict[PinKind, Counter[BlockHash]] = {kind: Counter() for kind in PinKind}
        #: (end_at, pin id) of all pins, and of some that are gone.
        self._ends: list[tuple[float, int]] = []

    def __len__(self) -> int:
        """Pins there are."""
        return len(self._pins)

    def __contains__(self, pin_id: int) -> bool:
        return pin_id in self._pins

    @property
    def num_blocks(self) -> int:
        """Different blocks that are pinned."""
        return len(self._counts[PinKind.SOFT].keys() | self._counts[PinKind.HARD].keys())

    def kind(self, block_hash: BlockHash) -> PinKind | None:
        """How a block is pinned: the harder kind, if both."""
        for kind in (PinKind.HARD, PinKind.SOFT):
            if block_hash in self._counts[kind]:
                return kind
        return None

    def add(
        self, pin_id: int, kind: PinKind, hashes: Sequence[BlockHash], end_at: float
    ) -> tuple[BlockHash, ...]:
        """Pin as many leading blocks as may be; returns these."""
        assert pin_id not in self._pins, pin_id
        counts = self._counts[kind]
        num_left = self._max_hard_blocks - len(counts) if kind is PinKind.HARD else len(hashes)
        pinned: list[BlockHash] = []
        for block_hash in hashes:
            is_new = block_hash not in counts
            if is_new and num_left <= 0:
                break
            num_left -= is_new
            pinned.append(block_hash)
            counts[block_hash] += 1
        if pinned:
            self._pins[pin_id] = _Pin(kind=kind, hashes=tuple(pinned), end_at=end_at)
            heapq.heappush(self._ends, (end_at, pin_id))
        return tuple(pinned)

    def remove(self, pin_id: int) -> tuple[BlockHash, ...]:
        """End a pin; returns the blocks that it named. Nothing happens if there is no such pin."""
        pin = self._pins.pop(pin_id, None)
        if pin is None:
            return ()
        if len(self._ends) > 2 * len(self._pins) + _MAX_STALE_ENDS:
            self._ends = [end for end in self._ends if end[1] in self._pins]
            heapq.heapify(self._ends)
        counts = self._counts[pin.kind]
        for block_hash in pin.hashes:
            counts[block_hash] -= 1
            if not counts[block_hash]:
                del counts[block_hash]
        return pin.hashes

    def clear(self) -> None:
        """End all pins."""
        self._pins.clear()
        self._ends.clear()
        for counts in self._counts.values():
            counts.clear()

    def ended(self, now: float) -> int | None:
        """A pin whose time is over, for the caller to remove; None: there is none."""
        end_at = self.next_end()
        return None if end_at is None or end_at > now else self._ends[0][1]

    def next_end(self) -> float | None:
        """When the next pin ends."""
        while self._ends and self._ends[0][1] not in self._pins:
            heapq.heappop(self._ends)
        return self._ends[0][0] if self._ends else None

    def validate(self) -> None:
        """Raise AssertionError if the counts are wrong."""
        for kind, counts in self._counts.items():
            named = Counter(
                h for pin in self._pins.values() if pin.kind is kind for h in pin.hashes
            )
            assert named == counts, (kind, named, counts)
        assert len(self._counts[PinKind.HARD]) <= self._max_hard_blocks
        assert set(self._pins) <= {pin_id for _, pin_id in self._ends}
        assert len(self._ends) <= 2 * len(self._pins) + _MAX_STALE_ENDS
