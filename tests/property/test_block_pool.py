"""BlockPool against a dict of reference counts and a list of free blocks."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from moonpool.ids import BlockId
from moonpool.kv.block_pool import BlockPool

NUM_BLOCKS = 6
some_ids = st.lists(st.integers(-1, NUM_BLOCKS).map(BlockId), max_size=5)


class BlockPoolMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(NUM_BLOCKS)
        #: Of blocks that are not free.
        self.counts: dict[BlockId, int] = {}
        self.free = [BlockId(i) for i in reversed(range(NUM_BLOCKS))]

    @rule(num_blocks=st.integers(-1, NUM_BLOCKS + 1))
    def allocate(self, num_blocks: int) -> None:
        if not 0 <= num_blocks <= len(self.free):
            with pytest.raises(ValueError, match="allocate"):
                self.pool.allocate(num_blocks)
            return
        expected = tuple(self.free.pop() for _ in range(num_blocks))
        assert self.pool.allocate(num_blocks) == expected
        self.counts.update(dict.fromkeys(expected, 1))

    @rule(block_ids=some_ids)
    def acquire(self, block_ids: list[BlockId]) -> None:
        if not set(block_ids) <= set(self.counts):
            with pytest.raises(ValueError, match=r"free|outside"):
                self.pool.acquire(block_ids)
            return
        self.pool.acquire(block_ids)
        for block_id in block_ids:
            self.counts[block_id] += 1

    @rule(block_ids=some_ids)
    def release(self, block_ids: list[BlockId]) -> None:
        if any(self.counts.get(block_id, 0) < block_ids.count(block_id) for block_id in block_ids):
            with pytest.raises(ValueError, match=r"unreferenced|outside"):
                self.pool.release(block_ids)
            return
        idle = []
        for block_id in reversed(block_ids):
            self.counts[block_id] -= 1
            if not self.counts[block_id]:
                idle.append(block_id)
        assert self.pool.release(block_ids) == idle

    @rule(block_ids=some_ids)
    def free_blocks(self, block_ids: list[BlockId]) -> None:
        idle = {block_id for block_id, count in self.counts.items() if not count}
        if not set(block_ids) <= idle or len(set(block_ids)) < len(block_ids):
            with pytest.raises(ValueError, match=r"not idle|outside"):
                self.pool.free(block_ids)
            return
        self.pool.free(block_ids)
        self.free += block_ids
        for block_id in block_ids:
            del self.counts[block_id]

    @invariant()
    def agrees_with_the_model(self) -> None:
        self.pool.validate()
        idle = [block_id for block_id, count in self.counts.items() if not count]
        assert self.pool.num_free == len(self.free)
        assert self.pool.num_idle == len(idle)
        assert self.pool.num_referenced == len(self.counts) - len(idle)
        assert self.pool.count_idle([*self.counts, *self.counts]) == len(idle)
        for index in range(NUM_BLOCKS):
            block_id = BlockId(index)
            assert self.pool.ref_count(block_id) == self.counts.get(block_id, 0)
            assert self.pool.is_free(block_id) == (block_id not in self.counts)


TestBlockPool = BlockPoolMachine.TestCase
TestBlockPool.settings = settings(max_examples=60, stateful_step_count=30)
