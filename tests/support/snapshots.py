"""Snapshots of what workers hold, taken up whole: between the pieces of a load nothing happens."""

from __future__ import annotations

from moonpool.dispatch.index_follower import IndexFollower
from moonpool.ids import WorkerKey
from moonpool.kv.prefix_index import PrefixIndex
from moonpool.kv.published_set import SetSnapshot


def load_snapshot(index: PrefixIndex, worker: WorkerKey, snapshot: SetSnapshot) -> bool:
    """Load it, unless it contradicts itself. Returns whether the index needs another one of this worker."""
    if snapshot.is_consistent():
        for _ in index.loading(worker, snapshot):
            pass
    return index.needs_snapshot(worker)


def answer(follower: IndexFollower, worker: WorkerKey, snapshot: SetSnapshot, now: float) -> None:
    """The worker's answer to AskSnapshot has come."""
    assert snapshot.is_consistent(), snapshot.head
    for _ in follower.loading(worker, snapshot, now):
        pass
