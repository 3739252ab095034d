"""What `moonpool cache stats` is told: the books of reuse beside what workers hold at this moment."""

from __future__ import annotations

from moonpool.dispatch.reuse_books import ReuseCounts, ReuseReport
from moonpool.ids import WorkerKey
from moonpool.kv.prefix_index import PrefixIndex
from moonpool.kv.published_set import EMPTY_HEAD
from moonpool.wire.cache_stats import CacheStats, WorkerCache
from moonpool.wire.worker import WorkerHello
from moonpool_router.dispatch_loop import DispatchLoop


def cache_stats(
    reuse: ReuseReport, index: PrefixIndex, loop: DispatchLoop, *, router_id: str, model: str
) -> CacheStats:
    """Every worker that is live, then those that are gone and have counts."""
    hellos = sorted(loop.hellos, key=lambda hello: hello.worker)
    live = {hello.worker.worker_id for hello in hellos}
    return CacheStats(
        router_id=router_id,
        model=model,
        block_size=hellos[0].namespace.block_size if hellos else 0,
        total=reuse.total,
        workers=(
            *(_live(hello, reuse, index, loop) for hello in hellos),
            *(
                WorkerCache(worker_id=worker_id, role=None, counts=counts)
                for worker_id, counts in sorted(reuse.by_worker.items())
                if worker_id not in live
            ),
        ),
        num_indexed_blocks=index.num_blocks,
        num_asked_keys=reuse.num_asked_keys,
        kept_fraction=reuse.kept_fraction,
    )


def _live(
    hello: WorkerHello, reuse: ReuseReport, index: PrefixIndex, loop: DispatchLoop
) -> WorkerCache:
    key: WorkerKey = hello.worker
    load = loop.load(key)
    head = index.head(key) if key in index.workers else EMPTY_HEAD
    return WorkerCache(
        worker_id=key.worker_id,
        role=hello.role,
        counts=reuse.by_worker.get(key.worker_id, ReuseCounts()),
        num_published_blocks=head.count,
        published_digest=head.digest,
        num_total_blocks=load.ledger.num_total if load is not None else 0,
        kv_eviction_policy=hello.kv_eviction_policy,
    )
