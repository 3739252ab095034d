"""DiskTier: what lies on disk, what is to be written there, and whether the disk is asked at all.

    candidate --admitted--> queued --budget, breaker--> being written --BlocksWritten--> on disk
        |                     |                              |
        '--seen too rarely    '--evicted meanwhile,          '--failed: counted, a candidate
                                 no budget left                 again when it is used again

A queued block is not held: writing is worth nothing that somebody waits for. A block that is being written
is, by the core. Loads are another matter (tiering/loads.py); here is only whether the disk may be read.

Rules
- Reads and writes have a breaker each: a full or read-only disk is still read.
- Nothing is written beyond the budget, admitted or not.
- How often a block must have been seen follows from what is left of the budget: a flood of blocks that
  nobody asks for again takes at most the upper half of it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from moonpool.ids import BlockHash
from moonpool.tiering.breaker import Breaker
from moonpool.tiering.config import DiskAdmission, StoreConfig
from moonpool.tiering.frequency import FrequencySketch
from moonpool.tiering.shares import Share
from moonpool.tiering.write_budget import WriteBudget

#: Different blocks of which it is remembered how often they were seen, for each block of the arena.
_NUM_REMEMBERED = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class DiskWrite:
    """Blocks to write together."""

    write_id: int
    hashes: tuple[BlockHash, ...]
    #: For each of them the hash before it in its chain; None: it is the first.
    parents: tuple[BlockHash | None, ...]


class DiskTier:
    """One store's log, as the core believes it to be."""

    def __init__(self, config: StoreConfig) -> None:
        self._config = config
        #: Whose a block on disk is, as far as it is known.
        self._owners: dict[BlockHash, Share] = {}
        #: By hash, the hash before it in its chain.
        self._queue: dict[BlockHash, BlockHash | None] = {}
        self._writes: dict[int, tuple[BlockHash, ...]] = {}
        self._being_written: set[BlockHash] = set()
        #: Writes that a clearing has overtaken: what they bring is gone.
        self._cleared_writes: set[int] = set()
        self._next_write_id = 1
        self._sketch = FrequencySketch(_NUM_REMEMBERED * config.num_blocks)
        self.budget = WriteBudget(config.write_budget_bytes_per_day, config.write_budget_left)
        self.reads = Breaker(config.disk_breaker)
        self.writes = Breaker(config.disk_breaker)
        self.num_written = 0
        self.num_failed_writes = 0
        self.num_unadmitted = 0

    # -- what lies there --

    def __len__(self) -> int:
        return len(self._owners)

    def __contains__(self, block_hash: BlockHash) -> bool:
        return block_hash in self._owners

    def owner(self, block_hash: BlockHash) -> Share:
        """Whose a block on disk is."""
        return self._owners[block_hash]

    def adopt(self, hashes: Iterable[BlockHash], share: Share) -> None:
        """These are of this share, so far as they lie here."""
        owners = self._owners
        for block_hash in hashes:
            if owners.get(block_hash, share) != share:
                owners[block_hash] = share

    def found(self, hashes: Sequence[BlockHash], shares: Sequence[Share]) -> list[BlockHash]:
        """The scan has found these, of these shares; those that were not known."""
        new: list[BlockHash] = []
        for block_hash, share in zip(hashes, shares, strict=True):
            if block_hash not in self._owners:
                self._owners[block_hash] = share
                self._queue.pop(block_hash, None)
                new.append(block_hash)
        return new

    def dropped(self, hashes: Iterable[BlockHash]) -> list[BlockHash]:
        """These lie here no more; those that did."""
        return [h for h in hashes if self._owners.pop(h, None) is not None]

    def keep(
        self,
        hashes: Sequence[BlockHash],
        max_blocks: int,
        is_pinned: Callable[[BlockHash], bool],
        now: float,
    ) -> tuple[BlockHash, ...]:
        """Of blocks whose segment is about to be reclaimed: which to write once more, the best first.

        What is pinned, and then what was asked for again, most often first; no more than half of them, since
        else the log would only turn round, and no more than `max_blocks` and the budget allow.
        """
        num_most = min(len(hashes) // 2, max_blocks)
        num_affordable = self.budget.num_affordable(self._config.block_bytes, now)
        if num_affordable is not None:
            num_most = min(num_most, num_affordable)
        counts = self._sketch.counts(hashes)
        num_needed = max(self._num_needed_sightings(now), 2)
        order = np.argsort(-counts.astype(np.int16), kind="stable").tolist()
        pinned = [hashes[i] for i in order if is_pinned(hashes[i])]
        hot = [hashes[i] for i in order if counts[i] >= num_needed and not is_pinned(hashes[i])]
        kept = (*pinned, *hot)[:num_most]
        self.budget.take(len(kept) * self._config.block_bytes, now)
        return kept

    # -- what is written --

    @property
    def num_unwritten(self) -> int:
        """Blocks that are queued or being written."""
        return len(self._queue) + len(self._being_written)

    def see(self, hashes: Sequence[BlockHash]) -> None:
        """A block comes new, or is asked for: that decides whether it is worth writing."""
        if self._config.has_disk:
            self._sketch.see(hashes)

    def consider(self, chain: Sequence[BlockHash], now: float, first: int = 0) -> None:
        """Queue those blocks of a chain, from the `first` on, that are to be written.

        Each lies in HOST or here; what is only on its way is passed over when its turn comes too soon.
        Behind a block that is not written, nothing is: a chain is read up to its hole.
        """
        if not self._config.has_disk or (first and not self._is_kept(chain[first - 1])):
            return
        owners, queue, being_written = self._owners, self._queue, self._being_written
        candidates = [
            (h, chain[position - 1] if position else None)
            for position, h in enumerate(chain[first:], first)
            if h not in owners and h not in queue and h not in being_written
        ]
        num_needed = self._num_needed_sightings(now)
        if num_needed > 1 and candidates:
            counts = self._sketch.counts([h for h, _ in candidates])
            refused = np.flatnonzero(counts < num_needed)
            if len(refused):
                self.num_unadmitted += len(candidates) - int(refused[0])
                del candidates[refused[0] :]
        # What was evicted meanwhile still stands in the queue: where a disk hangs, it would grow for ever.
        num_queueable = max(self._config.num_blocks - len(queue), 0)
        self.num_unadmitted += max(len(candidates) - num_queueable, 0)
        queue.update(candidates[:num_queueable])

    def _is_kept(self, block_hash: BlockHash) -> bool:
        """It lies here, or will."""
        return (
            block_hash in self._owners
            or block_hash in self._queue
            or block_hash in self._being_written
        )

    def begin_write(self, is_here: Callable[[BlockHash], bool], now: float) -> DiskWrite | None:
        """The next write, of blocks that are all in HOST. None: nothing to do now."""
        config = self._config
        if len(self._writes) >= config.max_writes or not self._queue:
            return None
        if not self.writes.is_allowed(now):
            return None
        num_affordable = self.budget.num_affordable(config.block_bytes, now)
        num_wanted = config.max_write_blocks
        if num_affordable is not None:
            num_wanted = min(num_wanted, num_affordable)
        if not num_wanted:
            self.num_unadmitted += len(self._queue)
            self._queue.clear()
            return None
        parents: dict[BlockHash, BlockHash | None] = {}
        while self._queue and len(parents) < num_wanted:
            block_hash = next(iter(self._queue))
            parent = self._queue.pop(block_hash)
            if is_here(block_hash):
                parents[block_hash] = parent
        if not parents:
            return None
        hashes = tuple(parents)
        write_id, self._next_write_id = self._next_write_id, self._next_write_id + 1
        self.budget.take(len(hashes) * config.block_bytes, now)
        self.writes.begin(now)
        self._writes[write_id] = hashes
        self._being_written.update(hashes)
        return DiskWrite(write_id=write_id, hashes=hashes, parents=tuple(parents.values()))

    def end_write(
        self,
        write_id: int,
        kept: Sequence[BlockHash],
        owner: Callable[[BlockHash], Share],
        now: float,
    ) -> tuple[BlockHash, ...]:
        """A write has ended and `kept` lie on disk; all its blocks. None, if there is no such write."""
        hashes = self._writes.pop(write_id, ())
        if not hashes:
            return ()
        self._being_written.difference_update(hashes)
        if write_id in self._cleared_writes:
            self._cleared_writes.remove(write_id)
            self.writes.gave_up()
            return hashes
        kept_set = set(kept)
        num_kept = 0
        for block_hash in hashes:
            if block_hash in kept_set:
                self._owners[block_hash] = owner(block_hash)
                num_kept += 1
        self.num_written += num_kept
        self.num_failed_writes += len(hashes) - num_kept
        if num_kept < len(hashes):
            self.writes.failed(now)
        else:
            self.writes.succeeded(now)
        return hashes

    def clear(self) -> None:
        """Everything is to be forgotten, also what is being written."""
        self._owners.clear()
        self._queue.clear()
        self._cleared_writes.update(self._writes)

    def _num_needed_sightings(self, now: float) -> int:
        match self._config.admission:
            case DiskAdmission.ALL:
                return 1
            case DiskAdmission.SECOND_HIT:
                return 2
            case DiskAdmission.BUDGET:
                level = self.budget.level(now)
                num_needed = 1
                while level < 0.5 and num_needed < 8:
                    level *= 2.0
                    num_needed += 1
                return num_needed

    def next_due(self) -> float | None:
        """When a queued block may be written that may not be now."""
        if not self._queue or len(self._writes) >= self._config.max_writes:
            return None
        return self.writes.next_due()

    # -- checking --

    def held(self) -> Iterable[BlockHash]:
        """Blocks that are being written, once for each."""
        for hashes in self._writes.values():
            yield from hashes

    def validate(self) -> None:
        """Raise AssertionError if the books contradict each other."""
        self.reads.validate()
        self.writes.validate()
        being_written = [h for hashes in self._writes.values() for h in hashes]
        assert len(being_written) == len(set(being_written)), "a block is in two writes"
        assert set(being_written) == self._being_written
        assert not self._being_written & self._queue.keys(), "a block is queued and written"
        assert not self._queue.keys() & self._owners.keys(), "a block on disk is queued"
        assert len(self._writes) <= self._config.max_writes
        assert self._cleared_writes <= self._writes.keys()
