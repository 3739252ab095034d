"""IndexFollower: keeps a prefix index true to what its workers publish. A machine without IO.

What it is: joins and losses of workers, their batches and heads go in; snapshots to be asked for come
out, when they are due. What the workers hold stands in the index (kv/prefix_index.py), which says whether
it knows enough; this machine says when to ask, and whom.

Rules
- A worker that has joined is asked at once: it may hold something already.
- A worker of which a change is missing is asked after `patience_s`: what it says in two places (its
  events, its announcements) may overtake each other. One whose count or digest is another is asked at
  once.
- One question at a time per worker; one that failed, or did not help, is repeated after a pause that
  doubles.
- While the bus is away nothing is heard of changes: each worker is asked every `poll_s`.
- A worker that is lost holds nothing, from then on; what is still heard of it is ignored.

Life of a worker

    joined -> ASKED -> FOLLOWED -> (behind) -> ASKED     patience ends
                                -> (wrong)  -> ASKED     at once
              ASKED -> WAITING  -> ASKED                 no answer, or not enough; a pause
    any -> (forgotten)                                   lost
"""

from __future__ import annotations

import enum
from collections.abc import Iterator
from dataclasses import dataclass

from moonpool.ids import WorkerKey
from moonpool.kv.block_key import KeyArray
from moonpool.kv.prefix_index import PrefixIndex
from moonpool.kv.published_set import EventBatch, SetHead, SetSnapshot
from moonpool.routing.worker_view import WorkerInfo

#: Far beyond any longest pause.
_MAX_DOUBLINGS = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class IndexFollowerConfig:
    #: How long a change that was heard of may be missing.
    patience_s: float = 0.25
    #: First pause after a question that did not help; doubles up to `max_retry_s`.
    min_retry_s: float = 0.1
    max_retry_s: float = 5.0
    #: While the bus is away.
    poll_s: float = 10.0

    def __post_init__(self) -> None:
        assert 0 < self.min_retry_s <= self.max_retry_s, self
        assert self.patience_s >= 0, self
        assert self.poll_s > 0, self


class AskReason(enum.StrEnum):
    """Why a worker is asked for a snapshot."""

    JOINED = "joined"
    #: A change was missing.
    GAP = "gap"
    #: Count or digest were another at the same sequence.
    MISMATCH = "mismatch"
    BUS_AWAY = "bus_away"


@dataclass(frozen=True, slots=True, kw_only=True)
class AskSnapshot:
    """Ask this worker for its published set; `loading` or on_not_answered must follow."""

    key: WorkerKey
    address: str
    reason: AskReason
    #: Earlier questions for the same reason were in vain.
    is_repeated: bool


@dataclass(slots=True)
class _Followed:
    address: str
    #: The next question is due then; None while one is under way, or nothing is known against us.
    due_at: float | None
    reason: AskReason = AskReason.JOINED
    is_asked: bool = False
    asked_at: float = 0.0
    #: Questions in vain, one after the other.
    num_failures: int = 0
    #: No snapshot has come yet.
    is_new: bool = True


class IndexFollower:
    """See the file's head. Owns `index`: nobody else changes it."""

    def __init__(self, index: PrefixIndex, config: IndexFollowerConfig | None = None) -> None:
        self._index = index
        self._config = config or IndexFollowerConfig()
        self._workers: dict[WorkerKey, _Followed] = {}
        self._is_bus_there = False

    @property
    def index(self) -> PrefixIndex:
        """To be read."""
        return self._index

    # -- what happens --

    def on_joined(self, info: WorkerInfo, now: float) -> None:
        """A worker lives at this address."""
        if info.key not in self._workers:
            self._index.join(info.key)
            self._workers[info.key] = _Followed(address=info.address, due_at=now)

    def on_lost(self, key: WorkerKey) -> None:
        if self._workers.pop(key, None) is not None:
            self._index.lose(key)

    def on_bus_changed(self, is_there: bool) -> None:
        """The bus has come or gone."""
        self._is_bus_there = is_there

    def on_batch(self, key: WorkerKey, batch: EventBatch, now: float) -> None:
        """A change of a worker's set."""
        followed = self._workers.get(key)
        if followed is not None:
            self._index.apply(key, batch)
            self._look(key, followed, now)

    def on_head(self, key: WorkerKey, head: SetHead, now: float) -> None:
        """A worker has announced what its set is."""
        followed = self._workers.get(key)
        if followed is not None:
            self._index.note_head(key, head)
            self._look(key, followed, now)

    def on_left(self, key: WorkerKey, keys: KeyArray) -> None:
        """A request has ended that left this chain of blocks behind."""
        self._index.expect(key, keys)

    def loading(self, key: WorkerKey, snapshot: SetSnapshot, now: float) -> Iterator[None]:
        """The answer to AskSnapshot, loaded in pieces; go through all of them.

        Between two of them anything may happen. Requires a snapshot that is consistent; another is no answer.
        """
        followed = self._workers.get(key)
        if followed is None:
            return
        before = self._index.head(key)
        yield from self._index.loading(key, snapshot)
        if self._workers.get(key) is not followed:
            return
        followed.is_asked = False
        followed.is_new = False
        needs_more = self._index.needs_snapshot(key)
        if needs_more and self._index.head(key) == before:
            self._retry(followed, now)
            return
        # If it has been overtaken on its way, what is missing may still come.
        followed.num_failures = 0
        self._look(key, followed, now)

    def on_not_answered(self, key: WorkerKey, now: float) -> None:
        """AskSnapshot brought nothing, or what contradicts itself."""
        followed = self._workers.get(key)
        if followed is not None:
            followed.is_asked = False
            self._retry(followed, now)

    # -- what is due --

    def tick(self, now: float) -> list[AskSnapshot]:
        """Whom to ask now. Call at `next_due()` or later; too early or too often does nothing."""
        effects: list[AskSnapshot] = []
        for key, followed in self._workers.items():
            due_at = self._due_at(followed)
            if due_at is None or due_at > now:
                continue
            if followed.due_at is None or followed.due_at > now:
                followed.reason = AskReason.BUS_AWAY
            followed.due_at = None
            followed.is_asked = True
            followed.asked_at = now
            effects.append(
                AskSnapshot(
                    key=key,
                    address=followed.address,
                    reason=followed.reason,
                    is_repeated=followed.num_failures > 0,
                )
            )
        return effects

    def next_due(self) -> float | None:
        """When `tick` has something to do next, or None."""
        times = (self._due_at(followed) for followed in self._workers.values())
        return min((time for time in times if time is not None), default=None)

    def validate(self) -> None:
        """Check every invariant; raises AssertionError."""
        self._index.validate()
        assert set(self._workers) == set(self._index.workers)
        for key, followed in self._workers.items():
            assert not (followed.is_asked and followed.due_at is not None), (key, followed)
            is_in_doubt = followed.is_new or self._index.needs_snapshot(key)
            assert not is_in_doubt or followed.is_asked or followed.due_at is not None, key

    # -- parts --

    def _due_at(self, followed: _Followed) -> float | None:
        if followed.is_asked:
            return None
        times = [followed.due_at] if followed.due_at is not None else []
        if not self._is_bus_there:
            times.append(followed.asked_at + self._config.poll_s)
        return min(times, default=None)

    def _look(self, key: WorkerKey, followed: _Followed, now: float) -> None:
        """Something was heard of this worker: is there anything to ask?"""
        if followed.is_asked or followed.is_new:
            return
        if not self._index.needs_snapshot(key):
            followed.due_at = None
            followed.num_failures = 0
        elif followed.num_failures:
            # The next question is due after its pause.
            return
        elif self._index.is_wrong(key):
            followed.reason = AskReason.MISMATCH
            followed.due_at = now
        elif followed.due_at is None:
            followed.reason = AskReason.GAP
            followed.due_at = now + self._config.patience_s

    def _retry(self, followed: _Followed, now: float) -> None:
        config = self._config
        num_doublings = min(followed.num_failures, _MAX_DOUBLINGS)
        pause_s = min(config.min_retry_s * 2.0**num_doublings, config.max_retry_s)
        followed.num_failures += 1
        followed.due_at = now + pause_s
