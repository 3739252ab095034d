"""LiveStores: the store nodes that a worker may offer blocks to, by their announcements. Without IO.

Rules
- A store lives while it announces itself. When the bus is away nobody is heard, and nobody is lost: a put
  to a store that has gone fails, and its breaker opens (tiering/offloader.py).
- One incarnation of a store at a time, the one that was announced last; what is still heard of one that
  was replaced is dropped.
- A store that says that it leaves is offered nothing more.
- Weights grow from the moment at which a store was first heard (tiering/homes.py). One that comes back as
  another incarnation goes on where it was: its home keys are the same.
"""

from __future__ import annotations

from dataclasses import dataclass

from moonpool.ids import Incarnation, WorkerId, WorkerKey
from moonpool.tiering.homes import ramp_weight

#: Stores that are remembered, live or not; a cluster has far fewer.
_MAX_STORES = 1_024


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreAnnounced:
    """A store said over the bus that it lives, or that it leaves."""

    key: WorkerKey
    address: str
    #: Counts within an incarnation.
    sequence: int
    valid_for_s: float
    is_leaving: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreNode:
    """A store that may be offered blocks."""

    key: WorkerKey
    address: str


@dataclass(slots=True, kw_only=True)
class _Store:
    announced: StoreAnnounced
    heard_at: float
    joined_at: float
    replaced: Incarnation | None = None

    @property
    def node(self) -> StoreNode:
        return StoreNode(key=self.announced.key, address=self.announced.address)


class LiveStores:
    """See the file's head.

    Args:
        ramp_s: Until a store that has joined has its whole share of the keys.
    """

    def __init__(self, *, ramp_s: float) -> None:
        self._ramp_s = ramp_s
        self._stores: dict[WorkerId, _Store] = {}
        self._is_bus_there = False

    def on_announced(self, announced: StoreAnnounced, now: float) -> bool:
        """A store was heard; whether `nodes` has changed."""
        store_id, key = announced.key.worker_id, announced.key
        store = self._stores.get(store_id)
        if store is None:
            if announced.is_leaving or len(self._stores) >= _MAX_STORES:
                return False
            self._stores[store_id] = _Store(announced=announced, heard_at=now, joined_at=now)
            return True
        last = store.announced
        if key.incarnation == store.replaced:
            return False
        if key == last.key and announced.sequence <= last.sequence:
            return False
        before = store.node
        if key != last.key:
            store.replaced = last.key.incarnation
        store.announced, store.heard_at = announced, now
        if announced.is_leaving:
            del self._stores[store_id]
            return True
        return store.node != before

    def on_bus_changed(self, is_there: bool, now: float) -> None:
        """The bus came or went. When it comes back, everyone has a full time to announce itself."""
        if is_there and not self._is_bus_there:
            for store in self._stores.values():
                store.heard_at = now
        self._is_bus_there = is_there

    def expire(self, now: float) -> bool:
        """Forget those that have been silent for too long; whether there were any."""
        if not self._is_bus_there:
            return False
        silent = [
            store_id
            for store_id, store in self._stores.items()
            if now >= store.heard_at + store.announced.valid_for_s
        ]
        for store_id in silent:
            del self._stores[store_id]
        return bool(silent)

    def next_due(self) -> float | None:
        """When `expire` may have something to do; None: not before another event."""
        if not self._is_bus_there:
            return None
        return min(
            (store.heard_at + store.announced.valid_for_s for store in self._stores.values()),
            default=None,
        )

    @property
    def nodes(self) -> dict[WorkerId, StoreNode]:
        """Those that live, by id."""
        return {store_id: store.node for store_id, store in self._stores.items()}

    def weights(self, now: float) -> dict[WorkerId, float]:
        """The weight of each; see tiering/homes.py."""
        return {
            store_id: ramp_weight(now - store.joined_at, self._ramp_s)
            for store_id, store in self._stores.items()
        }

    def validate(self) -> None:
        """Check every invariant; raises AssertionError."""
        assert len(self._stores) <= _MAX_STORES
        for store_id, store in self._stores.items():
            assert store.announced.key.worker_id == store_id, store
            assert store.announced.key.incarnation != store.replaced, store
            assert not store.announced.is_leaving, store
