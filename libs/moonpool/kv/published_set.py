"""PublishedSet: the blocks that a worker has announced, and the batches that tell of changes.

It lives beside the core, in the process that talks to routers. The core's events go in; numbered batches
for the bus come out, and on demand the whole set as a snapshot.

Rules
- The set starts empty at sequence 0 in each incarnation; each batch counts one on. So (incarnation,
  sequence) names one content, and two sides compare count and digest only at equal sequence.
- A batch is a net change: cleared first, then removed, then stored. No key is in it twice.
- A key is in the set or not: storing it again, or removing what is not there, changes nothing.
- A key alone names its whole prefix, so nobody is told which block lies behind which.
- Batches may get lost on their way: whoever follows (kv/prefix_index.py) asks for a snapshot then.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from moonpool.kv.block_key import KeyArray, are_distinct, block_keys, keys_digest
from moonpool.kv.events import AllBlocksCleared, BlockRemoved, BlockStored, CacheEvent

_WRAP = 2**64


@dataclass(frozen=True, slots=True, kw_only=True)
class SetHead:
    """What a set was after its batch number `sequence`."""

    sequence: int
    #: Blocks in the set.
    count: int
    #: `keys_digest` of the set.
    digest: int


EMPTY_HEAD = SetHead(sequence=0, count=0, digest=0)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class EventBatch:
    """One change of a set, from `head.sequence - 1` to `head`: cleared, then removed, then stored."""

    head: SetHead
    #: Nothing that was in the set before is in it any more; `removed_keys` is empty then.
    is_cleared: bool
    #: uint64[num_removed].
    removed_keys: KeyArray
    #: uint64[num_stored].
    stored_keys: KeyArray

    @property
    def num_keys(self) -> int:
        """How many keys the batch names: what it takes to hold or to send it."""
        return len(self.removed_keys) + len(self.stored_keys)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, EventBatch):
            return NotImplemented
        return (
            self.head == other.head
            and self.is_cleared == other.is_cleared
            and np.array_equal(self.removed_keys, other.removed_keys)
            and np.array_equal(self.stored_keys, other.stored_keys)
        )

    __hash__ = None  # type: ignore[assignment]  # arrays have none


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SetSnapshot:
    """A whole set at one sequence."""

    head: SetHead
    #: uint64[head.count].
    keys: KeyArray

    def is_consistent(self) -> bool:
        """Whether the keys are those that the head tells of, each once. O(n log n), without the interpreter lock."""
        keys = self.keys
        return (
            self.head.count == len(keys)
            and self.head.digest == keys_digest(keys)
            and bool(np.all(keys))
            and are_distinct(keys)
        )

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, SetSnapshot):
            return NotImplemented
        return self.head == other.head and np.array_equal(self.keys, other.keys)

    __hash__ = None  # type: ignore[assignment]  # arrays have none


class PublishedSet:
    """See the file's head. About 100 bytes a block."""

    def __init__(self) -> None:
        #: In the order of storing, so that equal histories give equal batches and snapshots.
        self._keys: dict[int, None] = {}
        self._head = EMPTY_HEAD

    @property
    def head(self) -> SetHead:
        """What the batches so far add up to; goes with every heartbeat."""
        return self._head

    def apply(self, events: Iterable[CacheEvent]) -> EventBatch | None:
        """Take over what the core's cache reports; the batch to publish, or None if nothing changed."""
        change = _Change(self._keys)
        for event in events:
            match event:
                case BlockStored(hashes=hashes):
                    change.store(block_keys(hashes).tolist())
                case BlockRemoved(hashes=hashes):
                    change.remove(block_keys(hashes).tolist())
                case AllBlocksCleared():
                    change.clear()
        if change.is_empty:
            return None
        removed, stored = _array(change.removed), _array(change.stored)
        digest = 0 if change.is_cleared else self._head.digest
        digest += keys_digest(stored) - keys_digest(removed)
        self._head = SetHead(
            sequence=self._head.sequence + 1, count=len(self._keys), digest=digest % _WRAP
        )
        return EventBatch(
            head=self._head,
            is_cleared=change.is_cleared,
            removed_keys=removed,
            stored_keys=stored,
        )

    def num_leading(self, keys: KeyArray) -> int:
        """How many leading blocks of a chain are in the set."""
        for index, key in enumerate(keys.tolist()):
            if key not in self._keys:
                return index
        return len(keys)

    def keys(self) -> list[int]:
        """The whole set at `head`, several times as fast as `snapshot`. O(blocks)."""
        return list(self._keys)

    def snapshot(self) -> SetSnapshot:
        """The whole set at `head`. O(blocks)."""
        return SetSnapshot(head=self._head, keys=_array(self._keys))

    def validate(self) -> None:
        """Check the head against the set; raises AssertionError. O(blocks)."""
        assert self._head.count == len(self._keys), self._head
        assert self._head.digest == keys_digest(_array(self._keys)), self._head
        assert 0 not in self._keys


class _Change:
    """The net effect of some events on `keys`, which it changes as they come."""

    def __init__(self, keys: dict[int, None]) -> None:
        self._keys = keys
        self._num_before = len(keys)
        self.stored: dict[int, None] = {}
        self.removed: dict[int, None] = {}
        self.is_cleared = False

    @property
    def is_empty(self) -> bool:
        return not (self.stored or self.removed or self.is_cleared)

    def store(self, keys: Iterable[int]) -> None:
        for key in keys:
            if key not in self._keys:
                self._keys[key] = None
                if key in self.removed:
                    del self.removed[key]
                else:
                    self.stored[key] = None

    def remove(self, keys: Iterable[int]) -> None:
        for key in keys:
            if key not in self._keys:
                continue
            del self._keys[key]
            if key in self.stored:
                del self.stored[key]
            else:
                self.removed[key] = None

    def clear(self) -> None:
        self._keys.clear()
        self.stored.clear()
        self.removed.clear()
        self.is_cleared = self._num_before > 0


def _array(keys: Iterable[int]) -> KeyArray:
    array = np.fromiter(keys, np.uint64)
    array.flags.writeable = False
    return array
