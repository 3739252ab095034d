"""A StoreCore to talk to: chains by letters, frames with defaults, puts and gets from start to end."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from moonpool.core.protocol import (
    BlockLedger,
    FetchEnded,
    FetchReserved,
    LockPrefix,
    PrefixLocked,
    UnlockPrefix,
)
from moonpool.ids import AttemptId, BlockHash, BlockId, RequestId
from moonpool.kv.events import BlockRemoved, BlockStored, CacheEvent
from moonpool.kv.eviction import EvictionName
from moonpool.tiering.config import StoreConfig
from moonpool.tiering.protocol import (
    BlocksLoaded,
    BlocksWritten,
    DiskContents,
    DiskWork,
    LoadBlocks,
    Put,
    PutAnswered,
    StoreCommand,
    StoreFrame,
    StoreReply,
    WriteBlocks,
)
from moonpool.tiering.shares import tenant_tag
from moonpool.tiering.store_core import StoreCore
from support.kv import make_chain

BLOCK_SIZE = 16
BLOCK_BYTES = 1_000


def make_config(num_blocks: int = 8, **changes: Any) -> StoreConfig:
    """Small, exact (LRU, nothing evicted ahead of need) and checked. Any: StoreConfig's fields."""
    fields: dict[str, Any] = {
        "num_blocks": num_blocks,
        "block_size": BLOCK_SIZE,
        "block_bytes": BLOCK_BYTES,
        "eviction": EvictionName.LRU,
        "high_water": 1.0,
        "evict_share": 0.0,
        "is_checked": True,
    }
    return StoreConfig(**{**fields, **changes})


def chain(tokens: str) -> tuple[BlockHash, ...]:
    """The hashes of a chain, one block a letter."""
    return tuple(make_chain(tokens))


def attempt(number: int) -> AttemptId:
    return AttemptId(RequestId(f"put-{number}"), 1)


def ids(*numbers: int) -> tuple[BlockId, ...]:
    return tuple(BlockId(number) for number in numbers)


def stored(tokens: str, first: int = 0) -> BlockStored:
    """Blocks of a chain from the `first` on can be found."""
    hashes = chain(tokens)
    return BlockStored(hashes=hashes[first:], parent_hash=hashes[first - 1] if first else None)


def removed(tokens: str, first: int) -> BlockRemoved:
    """The blocks from the `first` on of a chain cannot be found, the last was removed first."""
    return BlockRemoved(hashes=chain(tokens)[: first - 1 if first else None : -1])


def make_ledger(
    *,
    total: int = 8,
    cached: int = 0,
    referenced: int = 0,
    reserved: int = 0,
    quarantined: int = 0,
    locks: int = 0,
) -> BlockLedger:
    return BlockLedger(
        num_total=total,
        num_free=total - cached - referenced,
        num_cached=cached,
        num_referenced=referenced,
        num_reserved=reserved,
        num_quarantined=quarantined,
        num_prefix_locks=locks,
    )


def make_frame(
    *replies: StoreReply,
    work: tuple[DiskWork, ...] = (),
    events: tuple[CacheEvent, ...] = (),
    **ledger: int,
) -> StoreFrame:
    """A whole frame; `ledger` as in make_ledger."""
    return StoreFrame(
        replies=replies, disk_work=work, ledger=make_ledger(**ledger), cache_events=events
    )


def reserved(number: int, tokens: str, first: int, block_ids: tuple[BlockId, ...]) -> FetchReserved:
    """Read the blocks from the `first` on of a chain."""
    return FetchReserved(
        attempt_id=attempt(number),
        num_cached_tokens=first * BLOCK_SIZE,
        num_tokens=len(tokens) * BLOCK_SIZE,
        block_ids=block_ids,
        hashes=chain(tokens),
    )


def found(hashes: Sequence[BlockHash], tenant: str = "") -> DiskContents:
    """The scan has found these, which were written for that tenant."""
    return DiskContents(hashes=tuple(hashes), tags=(tenant_tag(tenant),) * len(hashes))


class Store:
    """A core, its clock, and the numbers of what was begun. Ends each command with a frame."""

    def __init__(self, num_blocks: int = 8, **changes: Any) -> None:
        self.core = StoreCore(make_config(num_blocks, **changes))
        self.now = 0.0
        self._num_begun = 0

    def say(self, *commands: StoreCommand) -> StoreFrame:
        """The frame after these commands."""
        for command in commands:
            self.core.handle(command, self.now)
        return self.core.take_frame()

    def wait(self, seconds: float) -> StoreFrame:
        """The frame after some time."""
        self.now += seconds
        self.core.tick(self.now)
        return self.core.take_frame()

    def put(self, tokens: str, tenant: str = "default") -> StoreFrame:
        """Offer a chain and read all that is wanted of it; the last frame."""
        attempt_id = self._new_attempt()
        frame = self.say(Put(attempt_id=attempt_id, tenant=tenant, hashes=chain(tokens)))
        answer = frame.replies[0]
        assert isinstance(answer, PutAnswered), answer
        if not answer.num_wanted_blocks:
            return frame
        wanted = frame.replies[1]
        assert isinstance(wanted, FetchReserved), wanted
        return self.say(FetchEnded(attempt_id=attempt_id, num_tokens=wanted.num_tokens))

    def put_to_disk(self, tokens: str) -> None:
        """Put a chain and write it, whole."""
        frame = self.put(tokens)
        while writes := [work for work in frame.disk_work if isinstance(work, WriteBlocks)]:
            frame = self.say(*map(written, writes))

    def offer(self, tokens: str, number: int, tenant: str = "default") -> StoreFrame:
        """Only offer a chain, under this number."""
        return self.say(Put(attempt_id=attempt(number), tenant=tenant, hashes=chain(tokens)))

    def lock(self, tokens: str, read_id: int) -> StoreFrame:
        return self.say(LockPrefix(read_id=read_id, hashes=chain(tokens)))

    def unlock(self, read_id: int) -> StoreFrame:
        return self.say(UnlockPrefix(read_id=read_id))

    def get(self, tokens: str) -> int:
        """Read a chain, staging it, and let go; how many blocks were lent."""
        self._num_begun += 1
        read_id = 1_000_000 + self._num_begun
        frame = self.lock(tokens, read_id)
        while loads := [work for work in frame.disk_work if isinstance(work, LoadBlocks)]:
            frame = self.say(*map(loaded, loads))
        (reply,) = frame.replies
        assert isinstance(reply, PrefixLocked), reply
        self.unlock(read_id)
        return len(reply.block_ids)

    def drop_from_host(self) -> None:
        """Push all that is idle out of the arena, by a chain that nobody asks for."""
        num_blocks = self.core.ledger().num_total - self.core.ledger().num_referenced
        self._num_begun += 1
        attempt_id = self._new_attempt()
        hashes = tuple(make_chain(range(1_000_000, 1_000_000 + num_blocks)))
        self.say(Put(attempt_id=attempt_id, tenant="default", hashes=hashes))
        self.say(FetchEnded(attempt_id=attempt_id, num_tokens=0))

    def _new_attempt(self) -> AttemptId:
        self._num_begun += 1
        return attempt(1_000_000 + self._num_begun)


def written(work: DiskWork) -> BlocksWritten:
    """All of it lies on disk."""
    assert isinstance(work, WriteBlocks), work
    return BlocksWritten(write_id=work.write_id, hashes=tuple(h for h, _ in work.blocks))


def loaded(work: DiskWork, num_blocks: int | None = None) -> BlocksLoaded:
    """All of it was read, or so many leading blocks."""
    assert isinstance(work, LoadBlocks), work
    return BlocksLoaded(
        load_id=work.load_id, num_blocks=len(work.blocks) if num_blocks is None else num_blocks
    )
