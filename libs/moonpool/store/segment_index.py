"""SegmentIndex: which block lies where, and which segment goes when room is needed. Pure.

Every slot of a segment that was ever given out is in one of two states: live (the index finds its
block) or dead (dropped, moved, damaged, or its write failed). Dead slots are never used again: their
room comes back with the segment.

The victim is a segment of which at least half is dead, the deadest first; if there is none, the oldest.
So the log is first in, first out, and what deserves a second life is written again (KeepHot).
"""

from __future__ import annotations

from collections.abc import Container, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from moonpool.ids import BlockHash


class Place(NamedTuple):
    """Where a record lies. Places ascend in the order of writing."""

    segment: int
    slot: int
    #: BlockRecord.tag and BlockRecord.link.
    tag: int = 0
    link: int = 0


@dataclass(slots=True, kw_only=True)
class Segment:
    """What the slots of one file hold."""

    number: int
    #: By slot: the block that is live there, or None. As long as slots were given out.
    hashes: list[BlockHash | None] = field(default_factory=list)
    num_live: int = 0

    @property
    def num_slots(self) -> int:
        return len(self.hashes)

    def live_hashes(self) -> list[BlockHash]:
        """In order of writing."""
        return [block_hash for block_hash in self.hashes if block_hash is not None]


def adjacent_runs(places: Sequence[Place], max_length: int) -> list[list[int]]:
    """Positions in `places`, each once, by runs of neighbouring slots in ascending order."""
    runs: list[list[int]] = []
    last: Place | None = None
    for position in sorted(range(len(places)), key=places.__getitem__):
        place = places[position]
        is_next = (
            last is not None
            and place.segment == last.segment
            and place.slot - last.slot in (0, 1)
            and len(runs[-1]) < max_length
        )
        if is_next:
            runs[-1].append(position)
        else:
            runs.append([position])
        last = place
    return runs


class SegmentIndex:
    """All segments of a log. Arguments that make no sense raise KeyError or IndexError."""

    def __init__(self) -> None:
        #: In order of number, which is their age.
        self._segments: dict[int, Segment] = {}
        self._place_by_hash: dict[BlockHash, Place] = {}
        self._num_slots = 0

    def __len__(self) -> int:
        """Number of blocks that can be found."""
        return len(self._place_by_hash)

    @property
    def num_segments(self) -> int:
        return len(self._segments)

    @property
    def num_slots(self) -> int:
        """Given out in all segments, live or dead."""
        return self._num_slots

    def place(self, block_hash: BlockHash) -> Place | None:
        return self._place_by_hash.get(block_hash)

    def segment(self, number: int) -> Segment | None:
        return self._segments.get(number)

    def segments(self) -> tuple[Segment, ...]:
        return tuple(self._segments.values())

    def add_segment(self, number: int, num_slots: int = 0) -> Segment:
        """A new segment, younger than all others, of which `num_slots` are given out and dead."""
        assert not self._segments or number > next(reversed(self._segments)), number
        segment = Segment(number=number, hashes=[None] * num_slots)
        self._segments[number] = segment
        self._num_slots += num_slots
        return segment

    def give_out(self, number: int, num_slots: int) -> int:
        """Take the segment's next slots, dead until `put`; the first of them."""
        segment = self._segments[number]
        first = segment.num_slots
        segment.hashes.extend([None] * num_slots)
        self._num_slots += num_slots
        return first

    def give_back(self, number: int, num_slots: int) -> None:
        """The segment's last slots, all dead, were never reached by a write."""
        segment = self._segments[number]
        first = segment.num_slots - num_slots
        assert first >= 0, (number, num_slots)
        assert not any(segment.hashes[first:]), (number, num_slots)
        del segment.hashes[first:]
        self._num_slots -= num_slots

    def put(self, block_hash: BlockHash, place: Place) -> None:
        """The block is live at `place`, and nowhere else any more."""
        segment = self._segments[place.segment]
        assert segment.hashes[place.slot] is None, place
        self.remove(block_hash)
        segment.hashes[place.slot] = block_hash
        segment.num_live += 1
        self._place_by_hash[block_hash] = place

    def remove(self, block_hash: BlockHash) -> Place | None:
        """Where the block was, or None."""
        place = self._place_by_hash.pop(block_hash, None)
        if place is not None:
            segment = self._segments[place.segment]
            segment.hashes[place.slot] = None
            segment.num_live -= 1
        return place

    def remove_all(self) -> int:
        """No block is live any more; how many were."""
        num_blocks = len(self._place_by_hash)
        self._place_by_hash.clear()
        for segment in self._segments.values():
            segment.hashes = [None] * segment.num_slots
            segment.num_live = 0
        return num_blocks

    def remove_segment(self, number: int) -> list[BlockHash]:
        """The blocks that are gone with it, in order of writing."""
        segment = self._segments.pop(number)
        self._num_slots -= segment.num_slots
        gone = segment.live_hashes()
        for block_hash in gone:
            del self._place_by_hash[block_hash]
        return gone

    def victim(self, *, keep: Container[int | None]) -> Segment | None:
        """Whose room to take next, not that of segments in `keep`; None if there is no other."""
        candidates = [segment for segment in self._segments.values() if segment.number not in keep]
        if not candidates:
            return None
        dead = [segment for segment in candidates if 2 * segment.num_live <= segment.num_slots]
        if dead:
            return min(dead, key=lambda segment: segment.num_live / max(1, segment.num_slots))
        return candidates[0]

    def contents(self, max_blocks: int) -> Iterator[list[tuple[BlockHash, Place]]]:
        """All blocks in order of writing, in parts of at most `max_blocks`; no part is empty.

        The index may change from one part to the next: what comes or moves then comes in a later part.
        """
        number = -1
        while (segment := self._after(number)) is not None:
            number, start = segment.number, 0
            while start < segment.num_slots and number in self._segments:
                hashes = segment.hashes[start : start + max_blocks]
                start += max_blocks
                found = [(h, self._place_by_hash[h]) for h in hashes if h is not None]
                if found:
                    yield found

    def _after(self, number: int) -> Segment | None:
        """The oldest segment that is younger than `number`."""
        return next((self._segments[other] for other in self._segments if other > number), None)

    def validate(self) -> None:
        """Raise AssertionError if an invariant is broken."""
        numbers = list(self._segments)
        assert numbers == sorted(numbers), numbers
        places: dict[BlockHash, tuple[int, int]] = {}
        for number, segment in self._segments.items():
            assert segment.number == number, (segment.number, number)
            assert segment.num_live == len(segment.live_hashes()), number
            for slot, block_hash in enumerate(segment.hashes):
                if block_hash is not None:
                    assert block_hash not in places, block_hash.hex()
                    places[block_hash] = (number, slot)
        assert places == {key: place[:2] for key, place in self._place_by_hash.items()}
        assert self._num_slots == sum(segment.num_slots for segment in self._segments.values())
