"""What a router has counted of the reuse of KV <-> protobuf: what `moonpool cache stats` shows."""

from __future__ import annotations

from dataclasses import dataclass, fields

from moonpool.api.v1 import admin_pb2 as pb
from moonpool.dispatch.reuse_books import ReuseCounts
from moonpool.routing.worker_view import WorkerRole
from moonpool.wire.fields import between, invalid, name, text
from moonpool.wire.worker import role_from_pb, role_to_pb

_MAX_COUNT = 2**63 - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerCache:
    """One worker: what it found of the prompts that it prefilled, and what it holds."""

    worker_id: str
    #: None unless it is live.
    role: WorkerRole | None
    counts: ReuseCounts
    #: Blocks that the router believes it holds, and the digest of their set (kv/published_set.py); 0 unless it
    #: is live.
    num_published_blocks: int = 0
    published_digest: int = 0
    #: Of its pool.
    num_total_blocks: int = 0
    #: Which cached block goes first when the pool is full.
    kv_eviction_policy: str = ""

    @property
    def is_live(self) -> bool:
        return self.role is not None


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheStats:
    """Since the router started."""

    router_id: str
    model: str
    #: 0 before a worker has joined.
    block_size: int
    total: ReuseCounts
    #: Those that are live, and those that were.
    workers: tuple[WorkerCache, ...]
    #: Distinct blocks that any worker is believed to hold.
    num_indexed_blocks: int
    #: Block keys that are remembered for the ceiling, and their share of all that were seen.
    num_asked_keys: int
    kept_fraction: float


def cache_stats_to_pb(stats: CacheStats) -> pb.CacheStatsReply:
    return pb.CacheStatsReply(
        router_id=stats.router_id,
        model=stats.model,
        block_size=stats.block_size,
        total=_counts_to_pb(stats.total),
        workers=[
            pb.WorkerCache(
                worker_id=worker.worker_id,
                is_live=worker.is_live,
                role=role_to_pb(worker.role) if worker.role is not None else None,
                counts=_counts_to_pb(worker.counts),
                num_published_blocks=worker.num_published_blocks,
                published_digest=worker.published_digest,
                num_total_blocks=worker.num_total_blocks,
                kv_eviction_policy=worker.kv_eviction_policy,
            )
            for worker in stats.workers
        ],
        num_indexed_blocks=stats.num_indexed_blocks,
        num_asked_keys=stats.num_asked_keys,
        kept_fraction=stats.kept_fraction,
    )


def cache_stats_from_pb(message: pb.CacheStatsReply) -> CacheStats:
    """Raises InvalidMessageError."""
    if not 0.0 < message.kept_fraction <= 1.0:
        raise invalid("kept_fraction", f"is {message.kept_fraction}; allowed is above 0 to 1")
    return CacheStats(
        router_id=text(message.router_id, "router_id"),
        model=text(message.model, "model"),
        block_size=message.block_size,
        total=_counts_from_pb(message.total, "total"),
        workers=tuple(
            _worker_from_pb(worker, f"workers[{index}]")
            for index, worker in enumerate(message.workers)
        ),
        num_indexed_blocks=_count(message.num_indexed_blocks, "num_indexed_blocks"),
        num_asked_keys=_count(message.num_asked_keys, "num_asked_keys"),
        kept_fraction=message.kept_fraction,
    )


def _worker_from_pb(message: pb.WorkerCache, path: str) -> WorkerCache:
    return WorkerCache(
        worker_id=name(message.worker_id, f"{path}.worker_id"),
        role=role_from_pb(message.role, f"{path}.role") if message.is_live else None,
        counts=_counts_from_pb(message.counts, f"{path}.counts"),
        num_published_blocks=_count(message.num_published_blocks, f"{path}.num_published_blocks"),
        published_digest=message.published_digest,
        num_total_blocks=_count(message.num_total_blocks, f"{path}.num_total_blocks"),
        kv_eviction_policy=text(message.kv_eviction_policy, f"{path}.kv_eviction_policy"),
    )


def _counts_to_pb(counts: ReuseCounts) -> pb.ReuseCounts:
    """The fields have the same names."""
    return pb.ReuseCounts(**{field.name: getattr(counts, field.name) for field in fields(counts)})


def _counts_from_pb(message: pb.ReuseCounts, path: str) -> ReuseCounts:
    return ReuseCounts(
        **{
            field.name: _count(getattr(message, field.name), f"{path}.{field.name}")
            for field in fields(ReuseCounts)
        }
    )


def _count(value: int, path: str) -> int:
    return between(value, path, low=0, high=_MAX_COUNT)
