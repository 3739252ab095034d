"""What changed in a worker's set of findable blocks: values, and the log that merges them.

An event is a hint: it says what could be found when it was taken; the owner locks before it answers.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

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

    def take(self) -> tuple[CacheEvent, ...]:
        """Removals first, then runs of stored blocks, parents before children; empties the log."""
        events: list[CacheEvent] = []
        if self._is_cleared:
            events.append(AllBlocksCleared())
        if self._removed:
            events.append(BlockRemoved(hashes=tuple(self._removed)))
        run: list[BlockHash] = []
        run_parent: BlockHash | None = None
        for block_hash, parent_hash in self._stored.items():
            if run and run[-1] != parent_hash:
                events.append(BlockStored(hashes=tuple(run), parent_hash=run_parent))
                run = []
            if not run:
                run_parent = parent_hash
            run.append(block_hash)
        if run:
            events.append(BlockStored(hashes=tuple(run), parent_hash=run_parent))
        self._stored.clear()
        self._removed.clear()
        self._is_cleared = False
        return tuple(events)


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


def split_cache_events(
    events: Iterable[CacheEvent], max_blocks: int
) -> Iterator[tuple[CacheEvent, ...]]:
    """The same changes in parts of at most `max_blocks` blocks each, in order; none is empty."""
    assert max_blocks > 0, max_blocks
    part: list[CacheEvent] = []
    num_blocks = 0
    for event in events:
        if isinstance(event, AllBlocksCleared):
            part.append(event)
            continue
        start = 0
        while start < len(event.hashes):
            if num_blocks == max_blocks:
                yield tuple(part)
                part, num_blocks = [], 0
            end = min(start + max_blocks - num_blocks, len(event.hashes))
            part.append(_piece(event, start, end))
            num_blocks += end - start
            start = end
    if part:
        yield tuple(part)


def _piece(event: BlockStored | BlockRemoved, start: int, end: int) -> BlockStored | BlockRemoved:
    """Blocks [start, end) of an event."""
    if end - start == len(event.hashes):
        return event
    hashes = event.hashes[start:end]
    if isinstance(event, BlockRemoved):
        return BlockRemoved(hashes=hashes)
    parent_hash = event.hashes[start - 1] if start else event.parent_hash
    return BlockStored(hashes=hashes, parent_hash=parent_hash)
