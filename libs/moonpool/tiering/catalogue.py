"""Catalogue: what lies in a store, in HOST, on DISK or in both, and what is published of it.

    published = findable in HOST, or on DISK

Every change of either tier goes through here, so that a block is announced when it comes into the first of
them and withdrawn when it leaves the last. A chain may have a hole (its middle was reclaimed with a segment
of the log): what lies behind it stays published, is lent to nobody, and is of use again when the chain has
been put again.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from moonpool.ids import BlockHash, BlockId
from moonpool.kv.events import CacheEvent, CacheEventLog
from moonpool.tiering.disk_tier import DiskTier
from moonpool.tiering.host_tier import HostTier
from moonpool.tiering.shares import COMMON, Share


class Catalogue:
    """Both tiers of one store.

    Args:
        host: Allocated from, inserted into and evicted from only here; held and released by anybody.
        disk: Its contents change only here.
    """

    def __init__(self, host: HostTier, disk: DiskTier) -> None:
        self.host = host
        self.disk = disk
        self._events = CacheEventLog()
        self.num_evicted = 0
        self.num_demoted = 0
        self.num_reclaimed = 0

    def __contains__(self, block_hash: BlockHash) -> bool:
        return block_hash in self.host or block_hash in self.disk

    def owner(self, block_hash: BlockHash) -> Share:
        """Whose a block is, in whichever tier it lies; COMMON if it lies in none."""
        if block_hash in self.host:
            return self.host.owner(block_hash)
        return self.disk.owner(block_hash) if block_hash in self.disk else COMMON

    # -- HOST --

    def allocate(self, num_blocks: int, share: Share) -> tuple[BlockId, ...]:
        """Take blocks for a share, one reference each; at most what HOST has available for it."""
        allocation = self.host.allocate(num_blocks, share)
        self._on_evicted(allocation.evicted)
        return allocation.block_ids

    def insert(
        self, chain: Sequence[BlockHash], positions: Sequence[int], block_ids: Sequence[BlockId]
    ) -> None:
        """These blocks hold what stands at these ascending positions of the chain: make them findable."""
        hashes = [chain[position] for position in positions]
        inserted = [positions[i] for i in self.host.insert(hashes, block_ids, positions)]
        fresh = [position for position in inserted if chain[position] not in self.disk]
        start = 0
        for end in range(1, len(fresh) + 1):
            if end == len(fresh) or fresh[end] != fresh[end - 1] + 1:
                first, last = fresh[start], fresh[end - 1]
                parent_hash = chain[first - 1] if first else None
                self._events.on_stored(chain[first : last + 1], parent_hash)
                start = end

    def evict_spare(self, num_blocks: int) -> None:
        """Evict up to so many blocks from HOST that are above everybody's floor."""
        self._on_evicted(self.host.evict_spare(num_blocks))

    def adopt(
        self, hashes: Sequence[BlockHash], block_ids: Sequence[BlockId], share: Share
    ) -> None:
        """A tenant with a quota knows these hashes, so they are its own, and so are these blocks of them."""
        if share != COMMON:
            self.host.adopt(block_ids, share)
            self.disk.adopt(hashes, share)

    # -- DISK --

    def disk_found(self, hashes: Sequence[BlockHash], shares: Sequence[Share]) -> None:
        """The scan at the start has found these. In which chains they stand is not known."""
        new = self.disk.found(hashes, shares)
        self._events.on_stored([h for h in new if h not in self.host], None)

    def disk_dropped(self, hashes: Iterable[BlockHash]) -> int:
        """These lie on disk no more; how many did."""
        dropped = self.disk.dropped(hashes)
        self._events.on_removed(h for h in dropped if h not in self.host)
        return len(dropped)

    def disk_written(
        self, write_id: int, kept: Sequence[BlockHash], now: float
    ) -> tuple[BlockHash, ...]:
        """A write has ended; all its blocks, which are in HOST. None, if there was no such write."""
        return self.disk.end_write(write_id, kept, self.host.owner, now)

    # -- both --

    def clear(self) -> None:
        """Forget all that lies on disk, and what of HOST nobody references."""
        self.disk.clear()
        self.host.clear()
        # What stays is told again: it is little beside what may lie on disk.
        self._events.on_cleared()
        self._events.on_stored(self.host.hashes(), None)

    def take_events(self) -> tuple[CacheEvent, ...]:
        """What is published, or no longer is, since the last call: the net change."""
        return self._events.take()

    def _on_evicted(self, hashes: Sequence[BlockHash]) -> None:
        lost = [block_hash for block_hash in hashes if block_hash not in self.disk]
        self.num_evicted += len(hashes)
        self.num_demoted += len(hashes) - len(lost)
        self._events.on_removed(lost)

    def validate(self) -> None:
        """Raise AssertionError if a tier contradicts itself."""
        self.host.validate()
        self.disk.validate()
        for block_hash in self.disk.held():
            assert block_hash in self.host, f"{block_hash.hex()} is written and not in HOST"
