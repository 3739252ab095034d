"""PublishedSet: the blocks that a worker has announced, and the batches that tell of changes.

It lives beside the core, in the process that talks to routers. The core's events go in; numbered batches
for the bus come out, and on demand the whole set as a snapshot.

Rules
- The set starts empty at sequence 0 in each incarnation; each batch counts one on. So (incarnation,
  sequence) names one content, and two sides compare count and digest only at equal sequence.
- A batch is a net change: cleared first, then removed, then stored. No key is in it twice.
- A key is in the set or not: storing it again, or removing what is not there, changes nothing.
- Parents come before children, in batches and in snapshots.
- Batches may get lost on their way: whoever follows (kv/prefix_index.py) asks for a snapshot then.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from moonpool.kv.block_key import CHAIN_START, KeyArray, block_key, block_keys, keys_digest
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
    #: uint64[num_stored], parents before children; a run of a chain lies together.
    stored_keys: KeyArray
    #: uint64[num_stored]: the key before each in its chain, or CHAIN_START. For followers that keep
    #: a tree; a key alone names its whole prefix.
    stored_parents: KeyArray

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
            and np.array_equal(self.stored_parents, other.stored_parents)
        )

    __hash__ = None  # type: ignore[assignment]  # arrays have none


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SetSnapshot:
    """A whole set at one sequence."""

    head: SetHead
    #: uint64[head.count], parents before children.
    keys: KeyArray
    #: uint64[head.count]: as in EventBatch.
    parents: KeyArray

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, SetSnapshot):
            return NotImplemented
        return (
            self.head == other.head
            and np.array_equal(self.keys, other.keys)
            and np.array_equal(self.parents, other.parents)
        )

    __hash__ = None  # type: ignore[assignment]  # arrays have none


class PublishedSet:
    """See the file's head. About 150 bytes a block."""

    def __init__(self) -> None:
        #: Key -> parent key, parents before children.
        self._parents: dict[int, int] = {}
        self._head = EMPTY_HEAD

    @property
    def head(self) -> SetHead:
        """What the batches so far add up to; goes with every heartbeat."""
        return self._head

    def apply(self, events: Iterable[CacheEvent]) -> EventBatch | None:
        """Take over what the core's cache reports; the batch to publish, or None if nothing changed."""
        change = _Change(self._parents)
        for event in events:
            match event:
                case BlockStored(hashes=hashes, parent_hash=parent_hash):
                    parent = CHAIN_START if parent_hash is None else block_key(parent_hash)
                    change.store(block_keys(hashes).tolist(), parent)
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
            sequence=self._head.sequence + 1, count=len(self._parents), digest=digest % _WRAP
        )
        return EventBatch(
            head=self._head,
            is_cleared=change.is_cleared,
            removed_keys=removed,
            stored_keys=stored,
            stored_parents=_array(change.stored.values()),
        )

    def num_leading(self, keys: KeyArray) -> int:
        """How many leading blocks of a chain are in the set."""
        for index, key in enumerate(keys.tolist()):
            if key not in self._parents:
                return index
        return len(keys)

    def snapshot(self) -> SetSnapshot:
        """The whole set at `head`. O(blocks)."""
        return SetSnapshot(
            head=self._head, keys=_array(self._parents), parents=_array(self._parents.values())
        )

    def validate(self) -> None:
        """Check head and order against the set; raises AssertionError. O(blocks)."""
        assert self._head.count == len(self._parents), self._head
        assert self._head.digest == keys_digest(_array(self._parents)), self._head
        assert CHAIN_START not in self._parents
        seen = {CHAIN_START}
        for key, parent in self._parents.items():
            assert parent in seen, f"key {key:#x} comes before its parent {parent:#x}"
            seen.add(key)


class _Change:
    """The net effect of some events on `parents`, which it changes as they come."""

    def __init__(self, parents: dict[int, int]) -> None:
        self._parents = parents
        self._num_before = len(parents)
        #: Key -> parent key.
        self.stored: dict[int, int] = {}
        self.removed: dict[int, None] = {}
        self.is_cleared = False

    @property
    def is_empty(self) -> bool:
        return not (self.stored or self.removed or self.is_cleared)

    def store(self, keys: Iterable[int], parent: int) -> None:
        for key in keys:
            if key not in self._parents:
                self._parents[key] = parent
                if key in self.removed:
                    del self.removed[key]
                else:
                    self.stored[key] = parent
            parent = key

    def remove(self, keys: Iterable[int]) -> None:
        for key in keys:
            if self._parents.pop(key, None) is None:
                continue
            if key in self.stored:
                del self.stored[key]
            else:
                self.removed[key] = None

    def clear(self) -> None:
        self._parents.clear()
        self.stored.clear()
        self.removed.clear()
        self.is_cleared = self._num_before > 0


def _array(keys: Iterable[int]) -> KeyArray:
    array = np.fromiter(keys, np.uint64)
    array.flags.writeable = False
    return array
