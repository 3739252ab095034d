"""BlockPool: which block ids are free, and how many references each of the others has.

A block is in one of three states, kept as one number per block:

    free        -1   on the free list
    idle         0   nobody references it, but it is kept: somebody (the radix tree) wants its contents
    referenced  >0   held by that many holders

    free --allocate--> referenced --release (last)--> idle --free--> free
                           ^---------- acquire --------'

The pool does not know why an idle block is kept; BlockCache frees those that nobody can find.

The free list is a stack, for two reasons. The block freed last is the one whose memory is warm. And
tails are released first, so a chain that is freed and allocated again comes back with its ids in the
same ascending order, and runs of consecutive ids are what a transfer copies in one piece.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from moonpool.ids import BlockId

_FREE = -1


class BlockPool:
    """Reference counts over block ids [0, num_blocks). Every call raises before it changes anything."""

    def __init__(self, num_blocks: int) -> None:
        if num_blocks < 1:
            raise ValueError(f"num_blocks must be positive: {num_blocks}")
        self._ref_counts: list[int] = [_FREE] * num_blocks
        #: The next block to allocate is last; ids ascend at first.
        self._free: list[BlockId] = [BlockId(i) for i in reversed(range(num_blocks))]
        self._num_idle = 0

    @property
    def num_total(self) -> int:
        return len(self._ref_counts)

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_idle(self) -> int:
        return self._num_idle

    @property
    def num_referenced(self) -> int:
        return len(self._ref_counts) - len(self._free) - self._num_idle

    def ref_count(self, block_id: BlockId) -> int:
        """References to a block; 0 if it is idle or free."""
        return max(self._ref_counts[block_id], 0)

    def is_free(self, block_id: BlockId) -> bool:
        return self._ref_counts[block_id] == _FREE

    def is_idle(self, block_id: BlockId) -> bool:
        return self._ref_counts[block_id] == 0

    def is_referenced(self, block_id: BlockId) -> bool:
        return self._ref_counts[block_id] > 0

    def are_referenced(self, block_ids: Sequence[BlockId]) -> bool:
        """Whether every one of the blocks has a reference.

        Raises:
            ValueError: an id is outside the pool.
        """
        return min(self._counts_of(block_ids), default=1) > 0

    def count_idle(self, block_ids: Iterable[BlockId]) -> int:
        """How many different ones of these blocks are idle."""
        return list(map(self._ref_counts.__getitem__, set(block_ids))).count(0)

    def allocate(self, num_blocks: int) -> tuple[BlockId, ...]:
        """Take free blocks, one reference each. O(num_blocks).

        Raises:
            ValueError: fewer are free, or the number is negative.
        """
        if not 0 <= num_blocks <= len(self._free):
            raise ValueError(f"allocate {num_blocks} of {len(self._free)} free blocks")
        if num_blocks == 0:
            return ()
        block_ids = tuple(self._free[: -num_blocks - 1 : -1])
        del self._free[-num_blocks:]
        for block_id in block_ids:
            self._ref_counts[block_id] = 1
        return block_ids

    def acquire(self, block_ids: Sequence[BlockId]) -> None:
        """Add one reference to each; an id that occurs twice gets two.

        Raises:
            ValueError: an id is free or outside the pool.
        """
        self._check_ids(block_ids)
        ref_counts = self._ref_counts
        num_woken = 0
        for position, block_id in enumerate(block_ids):
            count = ref_counts[block_id]
            if count < 1:
                if count == _FREE:
                    for taken in block_ids[:position]:
                        ref_counts[taken] -= 1
                    raise ValueError(f"acquire of free block {block_id}")
                num_woken += 1
            ref_counts[block_id] = count + 1
        self._num_idle -= num_woken

    def release(self, block_ids: Sequence[BlockId]) -> list[BlockId]:
        """Drop one reference of each, the last id first; returns what became idle, in that order.

        Raises:
            ValueError: an id has no reference left to drop, or is outside the pool.
        """
        self._check_ids(block_ids)
        ref_counts = self._ref_counts
        idle: list[BlockId] = []
        for position, block_id in enumerate(reversed(block_ids)):
            count = ref_counts[block_id] - 1
            if count < 1:
                if count < 0:
                    for dropped in block_ids[len(block_ids) - position :]:
                        ref_counts[dropped] += 1
                    raise ValueError(f"release of unreferenced block {block_id}")
                idle.append(block_id)
            ref_counts[block_id] = count
        self._num_idle += len(idle)
        return idle

    def free(self, block_ids: Sequence[BlockId]) -> None:
        """Put idle blocks on the free list; the last of them is the first to be allocated.

        Raises:
            ValueError: an id is not idle, occurs twice or is outside the pool.
        """
        if any(self._counts_of(block_ids)) or len(set(block_ids)) != len(block_ids):
            raise ValueError(f"free of blocks that are not idle: {block_ids}")
        for block_id in block_ids:
            self._ref_counts[block_id] = _FREE
        self._free.extend(block_ids)
        self._num_idle -= len(block_ids)

    def _counts_of(self, block_ids: Sequence[BlockId]) -> list[int]:
        self._check_ids(block_ids)
        return list(map(self._ref_counts.__getitem__, block_ids))

    def _check_ids(self, block_ids: Sequence[BlockId]) -> None:
        if block_ids and not (min(block_ids) >= 0 and max(block_ids) < len(self._ref_counts)):
            raise ValueError(f"a block id is outside [0, {len(self._ref_counts)}): {block_ids}")

    def validate(self) -> None:
        """Raise AssertionError if the books do not add up."""
        assert all(count >= _FREE for count in self._ref_counts), min(self._ref_counts)
        free = Counter(self._free)
        marked = Counter(i for i, count in enumerate(self._ref_counts) if count == _FREE)
        assert free == marked, f"free list {free} != blocks marked free {marked}"
        num_idle = self._ref_counts.count(0)
        assert num_idle == self._num_idle, (num_idle, self._num_idle)
