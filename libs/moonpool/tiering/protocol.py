"""What a store's service process and its StoreCore say to each other. Values only.

A store node is a worker that computes nothing: where it does what a worker does (lend a prefix, read one from
a peer) the messages are those of core/protocol.py, so the machines that drive a worker's core drive this
one too. Here are the others.

Commands are answered in the next frame. Life of a put:

    Put -> PutAnswered(refusal)                             nothing is reserved
        or PutAnswered(0)                                   all of it lies here, or is on its way
        or PutAnswered(n), FetchReserved                    n blocks are to be read from the offering worker
               BlocksFetched* -> FetchEnded                 what is verified is in the store and published
               or Revoked (by the core: it took too long)  -> ReadEnded
               or Abort (by the service)                    -> ReadEnded

Life of a get:

    LockPrefix -> PrefixLocked                              at once if all of it lies in HOST
        or PrefixLoading, LoadBlocks* -> BlocksLoaded*      part of it is staged from DISK first
               -> PrefixLocked
    StageBlocks -> LoadBlocks* -> BlocksLoaded*             ahead of a get; not answered
    UnlockPrefix at any time, also before PrefixLocked, which is then not told

Life of what is on disk:

    DiskContents*                                           after the scan at the start
    WriteBlocks -> BlocksWritten                            exactly one for each, however it went
    LoadBlocks -> BlocksLoaded                              exactly one for each, however it went
    DiskDropped                                             a segment was reclaimed, or a record was bad
    DropBlocks, ClearDisk                                   not answered

From LoadBlocks or WriteBlocks to its answer the arena's blocks belong to the disk: they are written or
read, and nobody else changes them.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

from moonpool.core.protocol import (
    Abort,
    BlockLedger,
    BlocksFetched,
    ClearCache,
    Drain,
    FetchEnded,
    FetchReserved,
    LockPrefix,
    PrefixLocked,
    ReadEnded,
    Revoked,
    UnlockPrefix,
)
from moonpool.ids import AttemptId, BlockHash, BlockId
from moonpool.kv.events import CacheEvent
from moonpool.tiering.breaker import BreakerState

#: In FetchReserved.block_ids: a block before `num_cached_tokens` that lies on disk only. Never read into.
NOT_IN_ARENA = BlockId(-1)


class PutRefusal(enum.StrEnum):
    """Why a store takes nothing of a put. The worker may offer the chain again later."""

    DRAINING = "draining"
    #: As many puts are read as may be, in all or for this tenant.
    TOO_MANY_PUTS = "too_many_puts"
    #: Nothing may be evicted for it: all is leased, pinned, or others' floor.
    NO_ROOM = "no_room"
    #: The tenant may hold no more.
    OVER_QUOTA = "over_quota"


class PinKind(enum.StrEnum):
    """How firmly a block is kept in HOST."""

    #: Evicted only when nothing else is left.
    SOFT = "soft"
    #: Not evicted.
    HARD = "hard"


# -- commands: service -> core --


@dataclass(frozen=True, slots=True, kw_only=True)
class Put:
    """A worker offers a chain: reserve blocks for what of it is neither here nor on its way.

    Taken is one run: from the first block that is wanted up to the next one that is not, or as much of
    that as there is room for. An offer of a live attempt is ignored.
    """

    #: Minted by the service for this offer; never used twice.
    attempt_id: AttemptId
    tenant: str
    #: The chain from its start.
    hashes: tuple[BlockHash, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class StageBlocks:
    """A reader will want this chain soon: read what of it lies on disk only."""

    #: The chain from its start.
    hashes: tuple[BlockHash, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Pin:
    """Keep the leading run of a chain that lies here in HOST for `ttl_s`, or until Unpin."""

    #: Chosen by the service; never used twice.
    pin_id: int
    kind: PinKind
    #: The chain from its start.
    hashes: tuple[BlockHash, ...]
    ttl_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Unpin:
    """May come twice, or for a pin that has expired."""

    pin_id: int


@dataclass(frozen=True, slots=True, kw_only=True)
class BlocksLoaded:
    """A LoadBlocks has ended: its first `num_blocks` blocks lie in the arena, verified, leaves included."""

    load_id: int
    num_blocks: int
    #: Records that are not there, or do not hold what they should: forgotten, and dropped from the disk.
    #: All others of the load that did not come were not read, and are still believed to be there.
    bad_hashes: tuple[BlockHash, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class BlocksWritten:
    """A WriteBlocks has ended: these of its blocks lie on disk, findable after a restart."""

    write_id: int
    hashes: tuple[BlockHash, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class DiskContents:
    """A part of what the scan at the start found, and is there yet; none comes after a ClearCache."""

    hashes: tuple[BlockHash, ...]
    #: Whose each of them is, as it was written: the `tenant_tag` of what StoreCore.tenant_of said then.
    tags: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class DiskDropped:
    """These do not lie on disk any more."""

    hashes: tuple[BlockHash, ...]
    #: They did not read as they were written; else their segment was reclaimed.
    is_damaged: bool = False


StoreCommand = (
    Put
    | BlocksFetched
    | FetchEnded
    | ReadEnded
    | Abort
    | LockPrefix
    | UnlockPrefix
    | StageBlocks
    | Pin
    | Unpin
    | BlocksLoaded
    | BlocksWritten
    | DiskContents
    | DiskDropped
    | ClearCache
    | Drain
)

# -- the frame: core -> service --


@dataclass(frozen=True, slots=True, kw_only=True)
class PutAnswered:
    """What becomes of a put. With wanted blocks, its FetchReserved is in the same frame, after this."""

    attempt_id: AttemptId
    num_wanted_blocks: int
    refusal: PutRefusal | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Pinned:
    """How many leading blocks of the chain are pinned; 0: none lies here, or too much is pinned."""

    pin_id: int
    num_blocks: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefixLoading:
    """A LockPrefix waits for the disk: its PrefixLocked comes when that has brought what it can in time."""

    read_id: int
    #: Leading blocks of the chain that lie in HOST now, and how many there will be if all comes.
    num_ready_blocks: int
    num_blocks: int


StoreReply = PutAnswered | FetchReserved | Revoked | PrefixLoading | PrefixLocked | Pinned


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadBlocks:
    """Read records into the arena's blocks, in this order: somebody waits for the first ones most."""

    load_id: int
    #: (hash, the block to read into); none is empty, no hash and no block is in two loads at a time.
    blocks: tuple[tuple[BlockHash, BlockId], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class WriteBlocks:
    """Append these blocks of the arena to the log, parents before children. Nobody waits for it."""

    write_id: int
    blocks: tuple[tuple[BlockHash, BlockId], ...]
    #: For each of them the hash before it in its chain; None: it is the first.
    parents: tuple[BlockHash | None, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class DropBlocks:
    """Forget these records, for good: after a restart they are not found either.

    A later WriteBlocks of the same hash is not to be overtaken by it.
    """

    hashes: tuple[BlockHash, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ClearDisk:
    """Forget every record for good, also those of writes that have not been answered.

    A later WriteBlocks is not to be overtaken by it.
    """


DiskWork = LoadBlocks | WriteBlocks | DropBlocks | ClearDisk


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreFrame:
    """What has happened since the last frame. Do the disk work after telling the replies."""

    replies: tuple[StoreReply, ...]
    disk_work: tuple[DiskWork, ...]
    #: Of the arena. `num_reserved` counts puts that are read, `num_prefix_locks` gets, those that wait for
    #: the disk included; what is loaded or written is referenced.
    ledger: BlockLedger
    #: What lies in neither tier any more, or in one of them now: the net change.
    cache_events: tuple[CacheEvent, ...] = ()


# -- for whoever looks --


@dataclass(frozen=True, slots=True, kw_only=True)
class TenantUse:
    """One tenant's part of the arena; the tenants without a quota of their own are one, named ''."""

    tenant: str
    num_blocks: int
    floor_blocks: int
    #: None: no limit.
    max_blocks: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreStats:
    """Counts since the start, and what is there now. Blocks everywhere; the service knows their size."""

    num_host_blocks: int = 0
    num_disk_blocks: int = 0
    #: Blocks that wait to be written or are being written.
    num_unwritten_blocks: int = 0
    num_loading_blocks: int = 0
    num_pinned_blocks: int = 0

    num_gets: int = 0
    #: Gets that found nothing; that were told less than lies here, because the disk was late, failed, is
    #: not asked at the moment, or there was no room to stage.
    num_missed_gets: int = 0
    num_short_gets: int = 0
    #: What gets were lent, by where it lay when they asked.
    num_hit_host_blocks: int = 0
    num_hit_disk_blocks: int = 0

    num_puts: int = 0
    num_put_blocks: int = 0
    #: Puts that brought nothing new: all was here or on its way.
    num_known_puts: int = 0
    num_expired_puts: int = 0
    #: Every reason once.
    num_refused_puts: tuple[tuple[PutRefusal, int], ...] = ()

    #: Blocks that left HOST for want of room; of those, how many lie on disk.
    num_evicted_blocks: int = 0
    num_demoted_blocks: int = 0

    num_written_blocks: int = 0
    num_failed_write_blocks: int = 0
    num_loaded_blocks: int = 0
    num_failed_load_blocks: int = 0
    num_bad_blocks: int = 0
    #: Blocks dropped from disk by the log: its segments went round.
    num_reclaimed_blocks: int = 0
    #: Times that a block was not written: seen too rarely for what is left of the budget.
    num_unadmitted_blocks: int = 0

    #: What may be written now and at most at a time; None: no budget.
    write_budget_bytes: int | None = None
    write_budget_max_bytes: int | None = None
    disk_reads: BreakerState = BreakerState.CLOSED
    disk_writes: BreakerState = BreakerState.CLOSED
    tenants: tuple[TenantUse, ...] = ()
