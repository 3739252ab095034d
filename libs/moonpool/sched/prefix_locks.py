"""PrefixLocks: cached prefixes that somebody elsewhere reads, and that must stay until it is done.

A lock is a reference on each block of the longest cached prefix of a chain, and on nothing else: it
waits for nothing, needs no room, and ends with its reader's stream.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from moonpool.ids import BlockHash, BlockId
from moonpool.kv.block_cache import BlockCache


class PrefixLocks:
    """Locks by the service's number for them; all references are this object's."""

    def __init__(self, cache: BlockCache) -> None:
        self._cache = cache
        self._block_ids: dict[int, tuple[BlockId, ...]] = {}

    def __len__(self) -> int:
        """Locks that are held, empty ones included."""
        return len(self._block_ids)

    def lock(self, read_id: int, hashes: Sequence[BlockHash]) -> tuple[BlockId, ...] | None:
        """Hold the longest cached prefix of the chain; its blocks. None: there is such a lock."""
        if read_id in self._block_ids:
            return None
        block_ids = self._cache.match_prefix(hashes).block_ids
        self._cache.lend(block_ids)
        self._block_ids[read_id] = block_ids
        return block_ids

    def unlock(self, read_id: int) -> None:
        """The reader is done. Nothing happens if there is no such lock."""
        self._cache.take_back(self._block_ids.pop(read_id, ()))

    def block_ids(self) -> Iterator[BlockId]:
        """Every block, once for each reference, in order of locking."""
        for block_ids in self._block_ids.values():
            yield from block_ids

    def key(self, name: Callable[[BlockId], int]) -> tuple[object, ...]:
        """What is held, its blocks under the names that the caller gives them."""
        locks = sorted(self._block_ids.items())
        return tuple((read_id, tuple(map(name, block_ids))) for read_id, block_ids in locks)

    def fork(self, cache: BlockCache) -> PrefixLocks:
        """An independent copy over `cache`, a copy of this one's."""
        other = PrefixLocks(cache)
        other._block_ids = dict(self._block_ids)
        return other
