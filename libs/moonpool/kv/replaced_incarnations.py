"""ReplacedIncarnations: which incarnation of each worker is its latest, and which ones are over for good.

An incarnation that was replaced is never accepted again, whatever is heard late. Memory is bounded: a
worker that is gone is remembered until many others have gone after it, and of one worker the last
incarnations that were replaced; what is heard of older ones is long invalid.
"""

from __future__ import annotations

from moonpool.ids import Incarnation, WorkerId, WorkerKey

#: Replaced incarnations remembered per worker.
_MAX_REPLACED = 64
#: Workers remembered that are gone.
_MAX_GONE = 4_096


class ReplacedIncarnations:
    """See the file's head."""

    def __init__(self) -> None:
        self._latest: dict[WorkerId, Incarnation] = {}
        self._replaced: dict[WorkerId, list[Incarnation]] = {}
        #: Those of `_latest` that are gone, the one that went longest ago first.
        self._gone: dict[WorkerId, None] = {}

    def take(self, worker: WorkerKey) -> WorkerKey | None:
        """This incarnation is here, the latest of its worker. Requires that it was not replaced.

        Returns:
            The one that it replaces, here or gone; None if there was none, or it was itself the latest.
        """
        assert not self.is_replaced(worker), worker
        worker_id, incarnation = worker
        latest = self._latest.get(worker_id)
        self._latest[worker_id] = incarnation
        self._gone.pop(worker_id, None)
        if latest is None or latest == incarnation:
            return None
        replaced = self._replaced.setdefault(worker_id, [])
        replaced.append(latest)
        del replaced[:-_MAX_REPLACED]
        return WorkerKey(worker_id, latest)

    def lose(self, worker: WorkerKey) -> None:
        """It is gone, and may be taken again. Ignored unless it is the latest of its worker."""
        if not self.is_latest(worker):
            return
        self._gone.pop(worker.worker_id, None)
        self._gone[worker.worker_id] = None
        if len(self._gone) > _MAX_GONE:
            longest_gone = next(iter(self._gone))
            del self._gone[longest_gone]
            del self._latest[longest_gone]
            self._replaced.pop(longest_gone, None)

    def is_latest(self, worker: WorkerKey) -> bool:
        """It was taken, and no other incarnation of its worker since."""
        return self._latest.get(worker.worker_id) == worker.incarnation

    def is_replaced(self, worker: WorkerKey) -> bool:
        """Another incarnation of its worker was taken after it."""
        return worker.incarnation in self._replaced.get(worker.worker_id, ())

    def validate(self) -> None:
        """Check every invariant; raises AssertionError."""
        assert self._replaced.keys() <= self._latest.keys()
        assert self._gone.keys() <= self._latest.keys()
        assert len(self._gone) <= _MAX_GONE
        for worker_id, replaced in self._replaced.items():
            assert len(replaced) <= _MAX_REPLACED, worker_id
            assert self._latest[worker_id] not in replaced, worker_id
