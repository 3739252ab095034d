"""What changed in a worker's set of findable blocks: values, and the log that merges them.

An event is a hint: it says what could be found when it was taken; the owner locks before it answers.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import islice

from moonpool.ids import BlockHash


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockStored:
    """A run of blocks can be found: each the child of the one before it."""

    hashes: tuple[BlockHash, ...]
    #: The hash before `hashes[0]` in its chain; None at the chain's start.
    parent_hash: BlockHash | None


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockRemoved:
    """These blocks cannot be found any more."""

    hashes: tuple[BlockHash, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class AllBlocksCleared:
    """No block that was announced before can be found."""


CacheEvent = BlockStored | BlockRemoved | AllBlocksCleared


class CacheEventLog:
    """The net change since the last `take`, never a queue.

    What was stored and removed again between two takes was never there, and the other way round, so
    the log holds at most one entry per block of the pool and one per block announced before, however
    rarely it is taken.
    """

    def __init__(self) -> None:
        #: Hash -> parent hash, parents before children.
        self._stored: dict[BlockHash, BlockHash | None] = {}
        self._removed: dict[BlockHash, None] = {}
        self._is_cleared = False

    def __bool__(self) -> bool:
        """Whether there is anything to take."""
        return bool(self._stored or self._removed or self._is_cleared)

    def add(self, events: Iterable[CacheEvent]) -> None:
        """Take up what another log gave."""
        for event in events:
            match event:
                case BlockStored(hashes=hashes, parent_hash=parent_hash):
                    self.on_stored(hashes, parent_hash)
                case BlockRemoved(hashes=hashes):
                    self.on_removed(hashes)
                case AllBlocksCleared():
                    self.on_cleared()

    def on_stored(self, hashes: Sequence[BlockHash], parent_hash: BlockHash | None) -> None:
        """`hashes` can be found from now on, as the continuation of `parent_hash`."""
        for block_hash in hashes:
            if block_hash in self._removed:
                del self._removed[block_hash]
            else:
                self._stored[block_hash] = parent_hash
            parent_hash = block_hash

    def on_removed(self, hashes: Iterable[BlockHash]) -> None:
        """`hashes` cannot be found from now on."""
        for block_hash in hashes:
            if block_hash in self._stored:
                del self._stored[block_hash]
            else:
                self._removed[block_hash] = None

    def on_cleared(self) -> None:
        """Nothing can be found from now on: whatever was pending is moot."""
        self._stored.clear()
        self._removed.clear()
        self._is_cleared = True

    @property
    def num_blocks(self) -> int:
        """Blocks that there is something to tell of."""
        return len(self._stored) + len(self._removed)

    def take(self, max_blocks: int | None = None) -> tuple[CacheEvent, ...]:
        """Removals first, then runs of stored blocks, parents before children.

        Args:
            max_blocks: What is beyond that many blocks stays in the log, and goes on merging; None: all is taken.
        """
        removed, stored = list(islice(self._removed, max_blocks)), self._stored
        if max_blocks is not None and self.num_blocks > max_blocks:
            stored = dict(islice(stored.items(), max_blocks - len(removed)))
        events: list[CacheEvent] = []
        if self._is_cleared:
            events.append(AllBlocksCleared())
        if removed:
            events.append(BlockRemoved(hashes=tuple(removed)))
        run: list[BlockHash] = []
        run_parent: BlockHash | None = None
        for block_hash, parent_hash in stored.items():
            if run and run[-1] != parent_hash:
                events.append(BlockStored(hashes=tuple(run), parent_hash=run_parent))
                run = []
            if not run:
                run_parent = parent_hash
            run.append(block_hash)
        if run:
            events.append(BlockStored(hashes=tuple(run), parent_hash=run_parent))
        self._forget(removed, stored)
        return tuple(events)

    def _forget(self, removed: list[BlockHash], stored: dict[BlockHash, BlockHash | None]) -> None:
        self._is_cleared = False
        if len(removed) + len(stored) == self.num_blocks:
            self._stored.clear()
            self._removed.clear()
            return
        for block_hash in removed:
            del self._removed[block_hash]
        for block_hash in stored:
            del self._stored[block_hash]


def merge_cache_events(
    older: tuple[CacheEvent, ...], newer: tuple[CacheEvent, ...]
) -> tuple[CacheEvent, ...]:
    """The net change of both, as one log that is taken once would tell it."""
    if not (older and newer):
        return older or newer
    log = CacheEventLog()
    log.add(older)
    log.add(newer)
    return log.take()
