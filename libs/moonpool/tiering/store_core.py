"""StoreCore: a store node's machine. Commands in, frames out; the one owner of the arena's block ids.

    handle each command -> take_frame() -> tell the replies, do the disk work, publish the events

It is to a store what core/core.py is to a worker, and speaks the same messages where it does the same: it
lends prefixes to readers and reads prefixes from workers. It computes nothing, so there are no steps.

                 puts.py  workers' chains in        gets.py  readers' locks, loads from the disk
                        \\                           /
                         catalogue.py  what lies where, what is published
                        /                           \\
      host_tier.py  the arena: found, held, evicted     disk_tier.py  the log: written, believed, asked
      shares.py     quotas and floors of tenants        write_budget.py, frequency.py, breaker.py
      pins.py

Rules
- Total: a command about what is unknown or over is ignored, since commands and frames cross.
- Every block of the arena is free, or idle and findable, or held by a put, a get, a load or a write. Only
  idle ones are evicted, from the high-water mark on and when somebody needs room.
- A block leaves the published set when it lies in neither tier, never when it only moves.
- The disk is never waited for but by gets that need it, and by them not for long. What fails there is counted
  and tried again in its time; it takes nothing from what is in the arena.
- Readers verify what they copy; whoever loads a record verifies it. Nothing here looks into a block.

Life of a block: read for a put -> found -> [written] -> evicted from HOST -> [loaded -> found -> ...]
-> reclaimed with its segment of the log.

What it deliberately does not do: it does not choose which segment the log reclaims (the oldest), only what of
it is written once more; and it moves no block between nodes (tiering/homes.py, tiering/replicas.py).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from typing import Final

from moonpool.core.protocol import (
    Abort,
    BlockLedger,
    BlocksFetched,
    ClearCache,
    Drain,
    FetchEnded,
    LockPrefix,
    ReadEnded,
    UnlockPrefix,
)
from moonpool.ids import BlockHash, BlockId
from moonpool.kv.eviction import make_eviction
from moonpool.tiering.catalogue import Catalogue
from moonpool.tiering.config import StoreConfig
from moonpool.tiering.disk_tier import DiskTier
from moonpool.tiering.frame_builder import StoreFrameBuilder
from moonpool.tiering.gets import Gets
from moonpool.tiering.host_tier import HostTier
from moonpool.tiering.pins import Pins
from moonpool.tiering.protocol import (
    BlocksLoaded,
    BlocksWritten,
    ClearDisk,
    DiskContents,
    DiskDropped,
    Pin,
    Pinned,
    Put,
    PutRefusal,
    StageBlocks,
    StoreCommand,
    StoreFrame,
    StoreStats,
    Unpin,
    WriteBlocks,
)
from moonpool.tiering.puts import Puts
from moonpool.tiering.shares import Shares

#: Blocks evicted ahead of need with one command: under a millisecond or two.
_MAX_SPARED = 512
#: Pins at a time; more are answered with 0 blocks.
_MAX_PINS = 4_096


class StoreCore:
    """One store node's blocks, puts and gets. See the file's head."""

    def __init__(self, config: StoreConfig) -> None:
        self._config: Final = config
        self._shares = Shares(config.tenants)
        self._pins = Pins(int(config.max_hard_pin_share * config.num_blocks))
        self._host = HostTier(
            num_blocks=config.num_blocks,
            eviction=make_eviction(config.eviction, config.num_blocks),
            shares=self._shares,
            pins=self._pins,
        )
        self._disk = DiskTier(config)
        self._catalogue = Catalogue(self._host, self._disk)
        self._frame = StoreFrameBuilder()
        self._gets = Gets(config, catalogue=self._catalogue, frame=self._frame)
        self._puts = Puts(
            config,
            catalogue=self._catalogue,
            shares=self._shares,
            gets=self._gets,
            frame=self._frame,
        )
        self._is_draining = False
        #: With fewer free blocks eviction starts; it ends with this many.
        self._min_free = config.num_blocks - math.ceil(config.num_blocks * config.high_water)
        self._spare = self._min_free + int(config.num_blocks * config.evict_share)

    # -- the interface --

    def handle(self, command: StoreCommand, now: float) -> None:
        """Apply one command; answers lie in the next frame. Never raises for what a command says.

        Args:
            now: Never earlier than before.
        """
        match command:
            case Put():
                self._puts.offer(command, now, is_draining=self._is_draining)
            case BlocksFetched(attempt_id=attempt_id, num_tokens=num_tokens):
                self._puts.fetched(attempt_id, num_tokens, now)
            case FetchEnded(attempt_id=attempt_id, num_tokens=num_tokens):
                self._puts.fetch_ended(attempt_id, num_tokens, now)
            case ReadEnded(attempt_id=attempt_id):
                self._puts.read_ended(attempt_id)
            case Abort(attempt_id=attempt_id):
                self._puts.abort(attempt_id)
            case LockPrefix(read_id=read_id, hashes=hashes):
                self._gets.lock(read_id, () if self._is_draining else hashes, now)
            case UnlockPrefix(read_id=read_id):
                self._gets.unlock(read_id)
            case StageBlocks(hashes=hashes):
                self._gets.stage(() if self._is_draining else hashes, now)
            case BlocksLoaded():
                self._gets.loaded(command, now)
            case BlocksWritten():
                self._on_blocks_written(command, now)
            case DiskContents(hashes=hashes, tags=tags):
                self._catalogue.disk_found(hashes, [self._shares.of_tag(tag) for tag in tags])
            case DiskDropped(hashes=hashes, is_damaged=is_damaged):
                num_dropped = self._catalogue.disk_dropped(hashes)
                # What is damaged was counted where it was read.
                self._catalogue.num_reclaimed += 0 if is_damaged else num_dropped
            case Pin():
                self._on_pin(command, now)
            case Unpin(pin_id=pin_id):
                self._host.pins_changed(self._pins.remove(pin_id))
            case ClearCache():
                self._on_clear_cache()
            case Drain(hand_back=hand_back):
                self._is_draining = True
                if hand_back:
                    self._puts.revoke_all()
        self._settle(now)

    def tick(self, now: float) -> None:
        """Do what is due. Call at `next_due()` or later; too early or too often does nothing."""
        self._puts.tick(now)
        self._gets.tick(now)
        while (pin_id := self._pins.ended(now)) is not None:
            self._host.pins_changed(self._pins.remove(pin_id))
        self._settle(now)

    def next_due(self) -> float | None:
        """When `tick` has something to do next, or None."""
        times = (
            self._puts.next_due(),
            self._gets.next_due(),
            self._pins.next_end(),
            self._disk.next_due(),
        )
        return min((time for time in times if time is not None), default=None)

    def keep_on_disk(
        self, hashes: Sequence[BlockHash], max_blocks: int, now: float
    ) -> tuple[BlockHash, ...]:
        """The log is about to reclaim a segment with these blocks: which of them to write once more.

        The best first, at most half of them and `max_blocks`; what is returned is on the write budget. All
        others are to be told as dropped.
        """
        return self._disk.keep(hashes, max_blocks, lambda h: self._pins.kind(h) is not None, now)

    def tenant_of(self, block_hash: BlockHash) -> str:
        """On whose account a block is kept; empty: on that of all tenants without a quota, or it is not here.

        A put for that tenant keeps it on the same account.
        """
        return self._shares.tenant(self._catalogue.owner(block_hash))

    def num_here(self, hashes: Sequence[BlockHash]) -> int:
        """How many leading blocks of a chain lie here, in either tier."""
        for index, block_hash in enumerate(hashes):
            if block_hash not in self._catalogue:
                return index
        return len(hashes)

    def is_on_disk(self, hashes: Sequence[BlockHash]) -> bool:
        """Whether all of these lie on disk, wherever else they lie."""
        return all(block_hash in self._catalogue.disk for block_hash in hashes)

    def take_frame(self) -> StoreFrame:
        """What has happened since the last frame."""
        return self._frame.take(self.ledger(), self._catalogue.take_events())

    def ledger(self) -> BlockLedger:
        """Where every block of the arena is, at this moment. What is pinned is cached."""
        return BlockLedger(
            num_total=self._host.num_total,
            num_free=self._host.num_free,
            num_cached=self._host.num_idle,
            num_referenced=self._host.num_referenced,
            num_reserved=self._puts.num_reading,
            num_quarantined=self._puts.num_quarantined,
            num_prefix_locks=len(self._gets),
        )

    def stats(self, now: float) -> StoreStats:
        """What is here, and what has happened since the start."""
        puts, gets, disk, catalogue = self._puts, self._gets, self._disk, self._catalogue
        return StoreStats(
            num_host_blocks=len(self._host),
            num_disk_blocks=len(disk),
            num_unwritten_blocks=disk.num_unwritten,
            num_loading_blocks=gets.num_loading,
            num_pinned_blocks=self._pins.num_blocks,
            num_gets=gets.num_gets,
            num_missed_gets=gets.num_missed,
            num_short_gets=gets.num_short,
            num_hit_host_blocks=gets.num_hit_host_blocks,
            num_hit_disk_blocks=gets.num_hit_disk_blocks,
            num_puts=puts.num_offered,
            num_put_blocks=puts.num_blocks,
            num_known_puts=puts.num_known,
            num_expired_puts=puts.num_expired,
            num_refused_puts=tuple((reason, puts.refusals[reason]) for reason in PutRefusal),
            num_evicted_blocks=catalogue.num_evicted,
            num_demoted_blocks=catalogue.num_demoted,
            num_written_blocks=disk.num_written,
            num_failed_write_blocks=disk.num_failed_writes,
            num_loaded_blocks=gets.num_loaded,
            num_failed_load_blocks=gets.num_failed_loads,
            num_bad_blocks=gets.num_bad,
            num_reclaimed_blocks=catalogue.num_reclaimed,
            num_unadmitted_blocks=disk.num_unadmitted,
            write_budget_bytes=disk.budget.left_bytes(now),
            write_budget_max_bytes=disk.budget.max_bytes,
            disk_reads=disk.reads.state(now),
            disk_writes=disk.writes.state(now),
            tenants=self._shares.uses(),
        )

    # -- commands --

    def _on_blocks_written(self, command: BlocksWritten, now: float) -> None:
        hashes = self._catalogue.disk_written(command.write_id, command.hashes, now)
        self._host.release(self._blocks_of(hashes), is_use=False)

    def _on_pin(self, command: Pin, now: float) -> None:
        if command.pin_id in self._pins:
            return
        chain = command.hashes if len(self._pins) < _MAX_PINS else ()
        chain = chain[: self.num_here(chain)]
        pinned = self._pins.add(command.pin_id, command.kind, chain, now + command.ttl_s)
        self._host.pins_changed(pinned)
        self._frame.tell(Pinned(pin_id=command.pin_id, num_blocks=len(pinned)))

    def _on_clear_cache(self) -> None:
        self._pins.clear()
        self._catalogue.clear()
        if self._config.has_disk:
            self._frame.do(ClearDisk())

    # -- after each command --

    def _settle(self, now: float) -> None:
        """Keep some blocks free, and the disk busy."""
        if self._host.num_free < self._min_free:
            self._catalogue.evict_spare(min(self._spare - self._host.num_free, _MAX_SPARED))
        while (write := self._disk.begin_write(self._host.__contains__, now)) is not None:
            block_ids = self._blocks_of(write.hashes)
            self._host.acquire(block_ids)
            blocks = tuple(zip(write.hashes, block_ids, strict=True))
            self._frame.do(
                WriteBlocks(write_id=write.write_id, blocks=blocks, parents=write.parents)
            )
        if self._config.is_checked:
            self.validate()

    def _blocks_of(self, hashes: tuple[BlockHash, ...]) -> list[BlockId]:
        """Of findable blocks."""
        block_ids = [b for h in hashes if (b := self._host.find(h)) is not None]
        assert len(block_ids) == len(hashes), "a block is not in HOST"
        return block_ids

    # -- checking --

    def validate(self) -> None:
        """Raise AssertionError if any invariant is broken. O(blocks)."""
        self._catalogue.validate()
        self._pins.validate()
        self._puts.validate()
        self._gets.validate()
        held = Counter(self._puts.held())
        held.update(self._gets.held())
        held.update(self._blocks_of(tuple(self._disk.held())))
        for index in range(self._host.num_total):
            block_id = BlockId(index)
            num_references = self._host.ref_count(block_id)
            assert num_references == held[block_id], (block_id, num_references, held[block_id])
        ledger = self.ledger()
        assert ledger.num_free + ledger.num_cached + ledger.num_referenced == ledger.num_total
