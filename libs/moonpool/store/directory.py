"""Directory: where the store nodes of a cluster find each other's records.

Rules
- A node writes its own record only, whole, again and again; a record ends with its life time after it
  was last written. So a directory that forgets everything knows it again one beat later: nothing
  is kept here alone.
- No call lasts longer than CALL_TIMEOUT_S, and none raises for a directory that is away: it says False
  or None, and whoever asked goes on with what it knew. Losing it loses hits, never a request.
- It is not on the way of any token: hints for readers come from the router's index.

What it deliberately does not know: where a chain lies (hashing does), and whether it still does (its
owner does).
"""

from __future__ import annotations

from types import TracebackType
from typing import Protocol, Self

from moonpool.clock import Clock
from moonpool.ids import WorkerKey
from moonpool.tiering.store_record import RingView, StoreRecord

#: Of every call, however the directory is.
CALL_TIMEOUT_S = 0.02
#: A node that was not heard of for so long is gone.
LIFE_TIME_S = 5.0


class Directory(Protocol):
    """Entered as an async context; see the file's head."""

    @property
    def num_failed_calls(self) -> int:
        """Calls that were not answered, or not in time."""
        ...

    @property
    def num_bad_records(self) -> int:
        """Records that could not be read: another version's, or not of a store node."""
        ...

    async def publish(self, record: StoreRecord) -> bool:
        """Write this node's record in place of its last one. False: nobody heard it."""
        ...

    async def withdraw(self, key: WorkerKey) -> bool:
        """This life of a node ends. Idempotent; its record would end by itself."""
        ...

    async def read(self) -> RingView | None:
        """The records of all nodes that live; None: no answer."""
        ...

    async def __aenter__(self) -> Self: ...

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None: ...


class EmbeddedDirectory:
    """The directory of nodes that live in one process, mostly of one node. Implements Directory."""

    def __init__(self, clock: Clock, *, life_time_s: float = LIFE_TIME_S) -> None:
        self._clock = clock
        self._life_time_s = life_time_s
        #: By life of a node: when the record ends, and the record.
        self._records: dict[WorkerKey, tuple[float, StoreRecord]] = {}

    @property
    def num_failed_calls(self) -> int:
        return 0

    @property
    def num_bad_records(self) -> int:
        return 0

    async def publish(self, record: StoreRecord) -> bool:
        self._records[record.member.key] = (self._clock.now() + self._life_time_s, record)
        return True

    async def withdraw(self, key: WorkerKey) -> bool:
        self._records.pop(key, None)
        return True

    async def read(self) -> RingView | None:
        now = self._clock.now()
        self._records = {
            key: (ends_at, record)
            for key, (ends_at, record) in self._records.items()
            if ends_at > now
        }
        return RingView.of(record for _, record in self._records.values())

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._records.clear()
