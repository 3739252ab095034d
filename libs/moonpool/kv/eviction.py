"""Which cached block goes first when the pool is full.

The tree asks only about blocks that may go (unlocked leaves); a policy orders them. A policy object
belongs to one cache.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from moonpool.ids import BlockId


class EvictionPolicy(Protocol):
    """Orders evictable blocks. Deterministic: the same calls give the same order."""

    def on_used(self, block_ids: Sequence[BlockId], tick: int) -> None:
        """The last reference to these cached blocks was released at `tick` (a counter, not a clock)."""
        ...

    def on_removed(self, block_ids: Sequence[BlockId]) -> None:
        """These blocks left the cache; their ids will come again with other contents."""
        ...

    def priority(self, block_id: BlockId) -> int:
        """The smallest goes first. `on_used` may raise a block's priority, nothing may lower it."""
        ...


class LruEviction:
    """Least recently used first; a block is used until its last reference is released."""

    def __init__(self) -> None:
        self._last_used: dict[BlockId, int] = {}

    def on_used(self, block_ids: Sequence[BlockId], tick: int) -> None:
        self._last_used.update(dict.fromkeys(block_ids, tick))

    def on_removed(self, block_ids: Sequence[BlockId]) -> None:
        for block_id in block_ids:
            self._last_used.pop(block_id, None)

    def priority(self, block_id: BlockId) -> int:
        return self._last_used[block_id]
