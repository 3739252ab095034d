"""KvPublisher: what this worker's cache holds, told over the bus as it changes, or whole when asked.

    core's events ----> log ----> PublishedSet ----> batches ----> bus
                     (merges)         |
                                      +----> head: in every announcement; snapshot: over gRPC

Rules
  1. Nothing waits for the broker but the net change: while it is away, and from one message to the next,
     events merge in the log, and the set stays at what was published.
  2. A batch that the bus drops is gone: whoever follows notices by the next one, or by an announcement,
     and asks for a snapshot.
  3. A large change leaves as several batches, each a change of the set with a sequence of its own: no
     message is larger than a broker takes, and between two of them others have their turn.
  4. A snapshot, and what is looked up here, is up to date whether the broker is there or not.
  5. A snapshot holds up nobody: it is made in turns with others.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Iterable

import numpy as np
import structlog

from moonpool.bus.protocol import Bus
from moonpool.bus.subjects import Subjects
from moonpool.errors import InvalidRequestError
from moonpool.failpoints import Failpoints
from moonpool.ids import WorkerKey
from moonpool.kv.block_key import KeyArray
from moonpool.kv.events import CacheEvent, CacheEventLog
from moonpool.kv.published_set import EventBatch, PublishedSet, SetHead, SetSnapshot
from moonpool.wire.kv_events import MAX_BATCH_BLOCKS, encode_kv_events
from moonpool.worker.books import WorkerBooks

log = structlog.get_logger("moonpool.worker")

#: What has changed leaves at once, but the next change not before this: every router decodes each message.
MIN_INTERVAL_S = 0.05
#: Of one batch: the set takes them up in two milliseconds. Far below what a message may have.
BATCH_BLOCKS = 4_096
#: Of a snapshot: two milliseconds.
_KEYS_PER_TURN = 32_768


class KvPublisher:
    """On one loop.

    Args:
        worker: This incarnation.
        max_batch_blocks: Most blocks that one message tells of.
        min_interval_s: Between two changes that are told.
    """

    def __init__(
        self,
        worker: WorkerKey,
        *,
        books: WorkerBooks,
        failpoints: Failpoints | None = None,
        max_batch_blocks: int = BATCH_BLOCKS,
        min_interval_s: float = MIN_INTERVAL_S,
    ) -> None:
        assert max_batch_blocks <= MAX_BATCH_BLOCKS, max_batch_blocks
        self._worker = worker
        self._books = books
        self._failpoints = failpoints or Failpoints.off()
        self._max_batch_blocks = max_batch_blocks
        self._min_interval_s = min_interval_s
        self._log = CacheEventLog()
        self._set = PublishedSet()
        #: Changes of the set that have not left; sent, or dropped, together.
        self._batches: deque[EventBatch] = deque()
        self._has_news = asyncio.Event()

    @property
    def head(self) -> SetHead:
        """Of what has been published."""
        return self._set.head

    def take(self, events: Iterable[CacheEvent]) -> None:
        """The cache has changed."""
        self._log.add(events)
        if self._log:
            self._has_news.set()

    def num_held(self, keys: KeyArray) -> int:
        """How many leading blocks of a chain the cache holds."""
        self._advance()
        return self._set.num_leading(keys)

    async def snapshot(self) -> SetSnapshot:
        """All that the cache holds at one moment, made in turns with others: it may be a million blocks."""
        while self._log:
            self._take_part()
            await asyncio.sleep(0)
        head, numbers = self.head, self._set.keys()
        keys = np.empty(len(numbers), np.uint64)
        for start in range(0, len(numbers), _KEYS_PER_TURN):
            piece = numbers[start : start + _KEYS_PER_TURN]
            keys[start : start + len(piece)] = np.fromiter(piece, np.uint64, len(piece))
            await asyncio.sleep(0)
        keys.flags.writeable = False
        return SetSnapshot(head=head, keys=keys)

    async def run(self, bus: Bus, subjects: Subjects) -> None:
        """Publish until cancelled."""
        subject = subjects.kv_events(self._worker.worker_id)
        bus.on_connection(lambda _is_connected: self._has_news.set())
        while True:
            await self._has_news.wait()
            self._has_news.clear()
            # What comes meanwhile is told next time.
            num_due = max(self._log.num_blocks, 1)
            has_told = False
            while self._batches or (num_due > 0 and self._log and bus.is_connected):
                if not self._batches:
                    num_due -= self._max_batch_blocks
                    self._take_part()
                    # The loop is everybody's, and publishing need not wait.
                    await asyncio.sleep(0)
                while self._batches:
                    await self._publish(bus, subject, self._batches.popleft())
                    has_told = True
            if has_told:
                await asyncio.sleep(self._min_interval_s)

    def _advance(self) -> None:
        """Bring the set up to the cache."""
        while self._log:
            self._take_part()

    def _take_part(self) -> None:
        """What makes a batch, from the log to the set."""
        batch = self._set.apply(self._log.take(self._max_batch_blocks))
        if batch is not None:
            self._batches.append(batch)
            self._has_news.set()

    async def _publish(self, bus: Bus, subject: str, batch: EventBatch) -> None:
        if self._failpoints.hit("kv.publish") == "drop":
            self._books.kv_events(is_sent=True)
            return
        try:
            is_sent = await bus.publish(subject, encode_kv_events(self._worker, batch))
        except InvalidRequestError as error:
            log.warning("worker.kv_events_refused", why=error.message, num_blocks=batch.num_keys)
            is_sent = False
        self._books.kv_events(is_sent=is_sent)
