"""StoreRecord, RingView: what store nodes tell each other of themselves, as values.

Where a chain lies follows from hashing (tiering/homes.py). A record says what hashing cannot tell: that
a node is there and since when, which chains it holds that others are to hold as well, and how fast it
is read. A node writes its own record and no other; all of them together are the view.

A copy is asked for by the node that has it and taken by the one that is named: takers read, as for a
put, since only a node itself writes its memory. When a taker has it, the router hears of it as of any
block that it published.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Iterable
from dataclasses import dataclass, replace

from moonpool.ids import BlockHash, WorkerId, WorkerKey

_HASH_BYTES = 32
#: Of one record: what is asked for beyond waits until these copies are taken.
MAX_COPIES = 64
MAX_COPY_BLOCKS = 4_096
MAX_READS = 256
MAX_TAKEN = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreMember:
    """One life of one store node."""

    key: WorkerKey
    #: gRPC address (host:port) that peers connect to.
    address: str
    #: Wall clock at the start of this life; hosts' clocks may differ by a second or so.
    since_unix_s: float
    #: When this store came to the ring, if that was in an earlier life that this one has replaced.
    joined_unix_s: float | None = None
    #: It takes nothing new, and others take over what it holds.
    is_draining: bool = False

    def __post_init__(self) -> None:
        if not math.isfinite(self.since_unix_s):
            raise ValueError(f"since_unix_s = {self.since_unix_s}")
        if self.joined_unix_s is not None and not math.isfinite(self.joined_unix_s):
            raise ValueError(f"joined_unix_s = {self.joined_unix_s}")

    @property
    def in_ring_since_unix_s(self) -> float:
        """When this store came to the ring, in this life or an earlier one."""
        return self.since_unix_s if self.joined_unix_s is None else self.joined_unix_s

    def age_s(self, now_unix_s: float) -> float:
        """Seconds since it came to the ring; never negative."""
        return max(now_unix_s - self.in_ring_since_unix_s, 0.0)


class CopyKind(enum.StrEnum):
    """Why a chain is to lie somewhere else too."""

    #: It is read faster than one node should serve.
    REPLICA = "replica"
    #: Its home is another node by now: the ring has changed, or this node leaves it.
    MOVE = "move"


@dataclass(frozen=True, slots=True, kw_only=True)
class ChainCopy:
    """A chain that the record's node holds and that others are to take from it."""

    kind: CopyKind
    #: On whose account it is kept; empty: on the one that all those share who have none of their own.
    tenant: str
    #: The chain from its start; at least one block.
    hashes: tuple[BlockHash, ...]
    takers: tuple[WorkerId, ...]

    def __post_init__(self) -> None:
        if not self.hashes or any(len(block_hash) != _HASH_BYTES for block_hash in self.hashes):
            raise ValueError(f"a copy of {len(self.hashes)} blocks, or a hash of another length")


@dataclass(frozen=True, slots=True, kw_only=True)
class ChainReads:
    """How fast one node's copy of a chain is read."""

    #: Of the block that decides the chain's home.
    home_hash: BlockHash
    bytes_per_s: float

    def __post_init__(self) -> None:
        if len(self.home_hash) != _HASH_BYTES or not 0.0 <= self.bytes_per_s < math.inf:
            raise ValueError(f"{len(self.home_hash)} bytes of hash, {self.bytes_per_s} bytes/s")


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreRecord:
    """All that one node says of itself, whole each time."""

    member: StoreMember
    copies: tuple[ChainCopy, ...] = ()
    reads: tuple[ChainReads, ...] = ()
    #: Of the chains that nodes that leave ask this one to take, those that lie here, by their last blocks.
    taken: tuple[BlockHash, ...] = ()
    #: And those that it has tried to take, in vain: no more of them comes.
    declined: tuple[BlockHash, ...] = ()

    def __post_init__(self) -> None:
        num_blocks = sum(len(copy.hashes) for copy in self.copies)
        if (
            len(self.copies) > MAX_COPIES
            or num_blocks > MAX_COPY_BLOCKS
            or len(self.reads) > MAX_READS
            or max(len(self.taken), len(self.declined)) > MAX_TAKEN
        ):
            raise ValueError(
                f"{len(self.copies)} copies of {num_blocks} blocks, {len(self.reads)} reads, "
                f"{len(self.taken)} taken, {len(self.declined)} declined"
            )
        if any(len(block_hash) != _HASH_BYTES for block_hash in self.taken + self.declined):
            raise ValueError("taken or declined: a hash of another length")


@dataclass(frozen=True, slots=True, kw_only=True)
class RingView:
    """The records of all nodes that were there when it was read; one of each store, in order of id."""

    records: tuple[StoreRecord, ...] = ()

    @classmethod
    def of(cls, records: Iterable[StoreRecord]) -> RingView:
        """Of two lives of one store the one that began later counts.

        It is as old in the ring as the other one, as workers see it too (tiering/live_stores.py): its home
        keys are the same. If the other one was leaving, this one has come anew.
        """
        latest: dict[WorkerId, StoreRecord] = {}
        for record in sorted(records, key=lambda record: _life(record.member)):
            store_id = record.member.key.worker_id
            before = latest.get(store_id)
            latest[store_id] = record if before is None else _replacing(before.member, record)
        return cls(records=tuple(latest[store_id] for store_id in sorted(latest)))

    @property
    def members(self) -> tuple[StoreMember, ...]:
        """In order of store id."""
        return tuple(record.member for record in self.records)

    def copies_for(self, store_id: WorkerId) -> tuple[tuple[StoreMember, ChainCopy], ...]:
        """What this store is asked to take, each with the node that it is read from."""
        return tuple(
            (record.member, copy)
            for record in self.records
            for copy in record.copies
            if store_id in copy.takers and record.member.key.worker_id != store_id
        )

    def reads_elsewhere(self, store_id: WorkerId) -> dict[BlockHash, float]:
        """Bytes per second by home hash, summed over all nodes but this one."""
        bytes_per_s: dict[BlockHash, float] = {}
        for record in self.records:
            if record.member.key.worker_id != store_id:
                for reads in record.reads:
                    before = bytes_per_s.get(reads.home_hash, 0.0)
                    bytes_per_s[reads.home_hash] = before + reads.bytes_per_s
        return bytes_per_s


def _replacing(earlier: StoreMember, record: StoreRecord) -> StoreRecord:
    """The record of a life that follows on an earlier one."""
    since_unix_s = earlier.in_ring_since_unix_s
    if earlier.is_draining or since_unix_s >= record.member.in_ring_since_unix_s:
        return record
    return replace(record, member=replace(record.member, joined_unix_s=since_unix_s))


def _life(member: StoreMember) -> tuple[float, str]:
    return (member.since_unix_s, member.key.incarnation)
