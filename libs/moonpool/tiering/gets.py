"""Gets: chains that readers have locked in a store, staged from the disk where they must be.

    state     event                                   effects and next state
    -         LockPrefix, all in HOST (or nothing)    PrefixLocked                        -> LOCKED
    -         LockPrefix, part of it on disk only     PrefixLoading, LoadBlocks*          -> WAITING
    WAITING   BlocksLoaded, more is due                                                   -> WAITING
    WAITING   BlocksLoaded, nothing more is due       PrefixLocked                        -> LOCKED
    WAITING   BlocksLoaded, not all of it             the run ends before the first that
                                                      did not come; as above
    WAITING   time is up                              PrefixLocked, up to the first that
                                                      has not come                        -> LOCKED
    any       UnlockPrefix                            its blocks are released             -> ended

A load is a thing of its own: it holds its blocks itself, several gets may wait for it, and when nobody does
any more it ends all the same, and what it brings stays in HOST.

Rules
- What is told is the leading run of the chain that lies in the arena, is held, and has been verified.
- Who has to wait for the disk is told so at once: a reader that would rather compute can go.
- A get holds every block of its run from the start, so nothing of it is evicted while the rest is loaded.
- The disk is read as far as there is room in the arena and in its queue, and not at all while its breaker
  is open: then the run ends where HOST does, and nobody joins those that wait for it.
- What is loaded for nobody yet has half of the disk's queue, waits for whoever does have a reader, and fills a
  part of the arena at most: so it neither delays a get nor pushes out what it loaded itself.
- The disk is slow if it brings nothing within a get's patience. If it brings something, it is only busy.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from moonpool.core.protocol import PrefixLocked
from moonpool.ids import BlockHash, BlockId
from moonpool.tiering.breaker import BreakerState
from moonpool.tiering.catalogue import Catalogue
from moonpool.tiering.config import StoreConfig
from moonpool.tiering.frame_builder import StoreFrameBuilder
from moonpool.tiering.loads import Loads
from moonpool.tiering.protocol import (
    NOT_IN_ARENA,
    BlocksLoaded,
    DropBlocks,
    LoadBlocks,
    PrefixLoading,
)

#: No reader's id: they begin with 1.
_NOBODY = 0


@dataclass(slots=True, kw_only=True)
class _Get:
    """One reader's lock."""

    read_id: int
    #: The run that it holds, one reference each.
    block_ids: list[BlockId]
    #: Positions in the run that lay on disk only when it came, ascending.
    staged: list[int]
    #: Loads that it waits for, with the first position in the run that each brings.
    pending: dict[int, int]
    begun_at: float
    #: Less than lies here will be told.
    is_short: bool
    is_told: bool = False


class Gets:
    """All gets and loads of one store."""

    def __init__(
        self, config: StoreConfig, *, catalogue: Catalogue, frame: StoreFrameBuilder
    ) -> None:
        self._config = config
        self._catalogue = catalogue
        self._frame = frame
        self._gets: dict[int, _Get] = {}
        #: Those that wait, in order of beginning.
        self._waiting: dict[int, _Get] = {}
        self._loads = Loads()
        #: Loaded for nobody yet, and not asked for since.
        self._ahead: dict[BlockHash, None] = {}
        #: When the disk last brought something in time.
        self._came_at = float("-inf")
        self.num_gets = 0
        self.num_missed = 0
        self.num_short = 0
        self.num_hit_host_blocks = 0
        self.num_hit_disk_blocks = 0
        self.num_loaded = 0
        self.num_failed_loads = 0
        self.num_bad = 0

    def __len__(self) -> int:
        """Locks that are held or waited for, empty ones included."""
        return len(self._gets)

    @property
    def num_loading(self) -> int:
        """Blocks that are read from the disk."""
        return self._loads.num_blocks

    def is_loading(self, block_hash: BlockHash) -> bool:
        return block_hash in self._loads

    # -- readers --

    def lock(self, read_id: int, hashes: Sequence[BlockHash], now: float) -> None:
        """A reader wants the leading run of a chain."""
        if read_id in self._gets:
            return
        self.num_gets += 1
        get = self._plan(read_id, hashes, now)
        self._gets[read_id] = get
        num_blocks = len(get.block_ids)
        self._catalogue.disk.see(hashes[:num_blocks])
        self._catalogue.disk.consider(hashes[:num_blocks], now)
        if get.pending:
            self._waiting[read_id] = get
            self._frame.tell(
                PrefixLoading(
                    read_id=read_id,
                    num_ready_blocks=min(get.pending.values()),
                    num_blocks=len(get.block_ids),
                )
            )
        else:
            self._tell(get)

    def stage(self, hashes: Sequence[BlockHash], now: float) -> None:
        """A reader will want the leading run of a chain: load what of it lies on disk only, for nobody yet."""
        if self._waiting:
            return
        get = self._plan(_NOBODY, hashes, now, is_ahead=True)
        self._gets[_NOBODY] = get
        for position in get.staged:
            self._ahead[hashes[position]] = None
        self.unlock(_NOBODY)

    def unlock(self, read_id: int) -> None:
        """A reader is gone. Nothing happens if there is no such lock."""
        get = self._gets.pop(read_id, None)
        if get is not None:
            self._stop_waiting(get)
            self._catalogue.host.release(get.block_ids, is_use=get.is_told)

    def tick(self, now: float) -> None:
        """Tell those who have waited long enough what has come."""
        reads = self._catalogue.disk.reads
        while self._waiting:
            get = next(iter(self._waiting.values()))
            if get.begun_at + self._config.load_patience_s > now:
                return
            if self._came_at < get.begun_at:
                reads.failed(now)
            self._cut(get, min(get.pending.values()))
            self._tell(get)

    def next_due(self) -> float | None:
        """When the next one has waited long enough."""
        get = next(iter(self._waiting.values()), None)
        return None if get is None else get.begun_at + self._config.load_patience_s

    # -- the disk --

    def loaded(self, event: BlocksLoaded, now: float) -> None:
        """A load has ended."""
        load = self._loads.end(event.load_id)
        if load is None:
            return
        num_come = min(max(event.num_blocks, 0), len(load.block_ids))
        self._catalogue.insert(load.chain, load.positions[:num_come], load.block_ids[:num_come])
        missing = load.hashes[num_come:]
        bad = tuple(block_hash for block_hash in event.bad_hashes if block_hash in missing)
        self.num_loaded += num_come
        self.num_bad += len(bad)
        if bad:
            self._catalogue.disk_dropped(bad)
            self._frame.do(DropBlocks(hashes=bad))
        has_failed = bool(missing) and missing[0] not in bad
        self._judge(load.begun_at, num_failed=len(missing) if has_failed else 0, now=now)
        for read_id in load.waiting:
            get = self._gets[read_id]
            del get.pending[load.load_id]
            if missing:
                self._cut_before(get, load.block_ids[num_come])
            if not get.pending:
                self._tell(get)
        self._catalogue.host.release(load.block_ids)

    def _judge(self, begun_at: float, *, num_failed: int, now: float) -> None:
        reads = self._catalogue.disk.reads
        self.num_failed_loads += num_failed
        if num_failed:
            reads.failed(now)
        elif now - begun_at < self._config.load_patience_s:
            self._came_at = now
            reads.succeeded(now)
        else:
            reads.gave_up()

    # -- how --

    def _plan(
        self, read_id: int, hashes: Sequence[BlockHash], now: float, *, is_ahead: bool = False
    ) -> _Get:
        """Hold the run, and begin the loads that it needs."""
        catalogue, loads = self._catalogue, self._loads
        find, disk = catalogue.host.find, catalogue.disk
        block_ids: list[BlockId] = []
        pending: dict[int, int] = {}
        staged: list[int] = []
        lacking: list[int] = []
        is_disk_well = disk.reads.state(now) is BreakerState.CLOSED
        is_short = False
        for position, block_hash in enumerate(hashes):
            block_id = find(block_hash)
            if block_id is None:
                loading = loads.find(block_hash)
                if loading is not None:
                    if not is_disk_well:
                        is_short = True
                        break
                    load, block_id = loading
                    pending.setdefault(load.load_id, position)
                    staged.append(position)
                elif block_hash in disk:
                    block_id = NOT_IN_ARENA
                    lacking.append(position)
                    staged.append(position)
                else:
                    break
            block_ids.append(block_id)
        here = [block_id for block_id in block_ids if block_id != NOT_IN_ARENA]
        # Whoever finds what was loaded ahead is who it was loaded for: that is one use.
        ahead = set(here) if is_ahead else self._take_ahead(hashes, block_ids)
        catalogue.host.acquire([one for one in here if one not in ahead], is_found=True)
        catalogue.host.acquire([one for one in here if one in ahead])
        num_stageable = self._num_stageable(hashes, lacking, now)
        if is_ahead:
            num_stageable = min(num_stageable, self._num_stageable_ahead())
        get = _Get(
            read_id=read_id,
            block_ids=block_ids,
            staged=staged,
            pending=pending,
            begun_at=now,
            is_short=is_short or num_stageable < len(lacking),
        )
        if num_stageable < len(lacking):
            end = lacking[num_stageable]
            catalogue.host.release(
                [block_id for block_id in block_ids[end:] if block_id != NOT_IN_ARENA], is_use=False
            )
            self._shorten(get, end)
        for load_id in get.pending:
            loads.get(load_id).waiting[read_id] = None
        self._stage(get, hashes, lacking[:num_stageable], now)
        return get

    def _num_stageable(
        self, hashes: Sequence[BlockHash], lacking: Sequence[int], now: float
    ) -> int:
        """How many of the lacking blocks may be loaded now."""
        disk = self._catalogue.disk
        if not lacking or not disk.reads.is_allowed(now):
            return 0
        num_blocks = min(
            len(lacking),
            self._config.max_loading_blocks - self._loads.num_blocks,
            self._catalogue.host.num_available(disk.owner(hashes[lacking[0]])),
        )
        if disk.reads.state(now) is BreakerState.HALF_OPEN:
            num_blocks = min(num_blocks, self._config.max_load_blocks)
        return max(num_blocks, 0)

    def _take_ahead(
        self, hashes: Sequence[BlockHash], block_ids: Sequence[BlockId]
    ) -> set[BlockId]:
        """Which blocks of a run that is asked for now were loaded ahead; from here on they are like others."""
        if not self._ahead:
            return set()
        run = zip(hashes, block_ids, strict=False)
        ahead = {one: block_id for one, block_id in run if one in self._ahead}
        for block_hash in ahead:
            del self._ahead[block_hash]
        return set(ahead.values())

    def _num_stageable_ahead(self) -> int:
        """How many blocks may be loaded for nobody yet."""
        most = int(self._config.num_blocks * self._config.ahead_share)
        if len(self._ahead) >= most:
            find = self._catalogue.host.find
            for block_hash in list(self._ahead):
                if find(block_hash) is None and block_hash not in self._loads:
                    del self._ahead[block_hash]
        num_queued = self._config.max_loading_blocks // 2 - self._loads.num_blocks
        return max(min(most - len(self._ahead), num_queued), 0)

    def _stage(
        self, get: _Get, hashes: Sequence[BlockHash], positions: Sequence[int], now: float
    ) -> None:
        """Load the blocks at these positions of the chain."""
        if not positions:
            return
        catalogue = self._catalogue
        owner = catalogue.disk.owner(hashes[positions[0]])
        block_ids = catalogue.allocate(len(positions), owner)
        catalogue.host.acquire(block_ids)
        for position, block_id in zip(positions, block_ids, strict=True):
            get.block_ids[position] = block_id
        for start in range(0, len(positions), self._config.max_load_blocks):
            piece = slice(start, start + self._config.max_load_blocks)
            load = self._loads.begin(hashes, positions[piece], block_ids[piece], now)
            load.waiting[get.read_id] = None
            get.pending[load.load_id] = positions[start]
            catalogue.disk.reads.begin(now)
            self._frame.do(LoadBlocks(load_id=load.load_id, blocks=load.blocks()))

    def _cut_before(self, get: _Get, block_id: BlockId) -> None:
        """A block did not come: the run ends before it."""
        if block_id in get.block_ids:
            self._cut(get, get.block_ids.index(block_id))

    def _cut(self, get: _Get, end: int) -> None:
        """Hold only the first `end` blocks of the run."""
        self._catalogue.host.release(get.block_ids[end:], is_use=False)
        get.is_short = True
        for load_id in self._shorten(get, end):
            del self._loads.get(load_id).waiting[get.read_id]

    def _shorten(self, get: _Get, end: int) -> list[int]:
        """Forget what is behind `end`; loads that it waits for no more."""
        del get.block_ids[end:]
        del get.staged[bisect.bisect_left(get.staged, end) :]
        dropped = [load_id for load_id, first in get.pending.items() if first >= end]
        for load_id in dropped:
            del get.pending[load_id]
        return dropped

    def _stop_waiting(self, get: _Get) -> None:
        self._waiting.pop(get.read_id, None)
        for load_id in get.pending:
            del self._loads.get(load_id).waiting[get.read_id]
        get.pending.clear()

    def _tell(self, get: _Get) -> None:
        self._waiting.pop(get.read_id, None)
        get.is_told = True
        self.num_missed += not get.block_ids
        self.num_short += get.is_short
        self.num_hit_disk_blocks += len(get.staged)
        self.num_hit_host_blocks += len(get.block_ids) - len(get.staged)
        self._frame.tell(PrefixLocked(read_id=get.read_id, block_ids=tuple(get.block_ids)))

    # -- checking --

    def held(self) -> Iterator[BlockId]:
        """Every block that a get or a load holds, once for each reference."""
        for get in self._gets.values():
            yield from get.block_ids
        yield from self._loads.held()

    def validate(self) -> None:
        """Raise AssertionError if the books contradict each other."""
        self._loads.validate()
        assert all(not get.is_told for get in self._waiting.values())
        for get in self._gets.values():
            assert NOT_IN_ARENA not in get.block_ids, get
            assert (get.read_id in self._waiting) == bool(get.pending), get
            assert get.is_told != bool(get.pending), get
            assert all(position < len(get.block_ids) for position in get.staged), get
            for load_id, first in get.pending.items():
                load = self._loads.get(load_id)
                assert get.read_id in load.waiting, get
                assert get.block_ids[first] in load.block_ids, get
        for load in self._loads:
            for read_id in load.waiting:
                assert load.load_id in self._gets[read_id].pending, load
