"""StoreNode: a store's core under virtual time, without bytes. Puts are read as gets are; HOST only."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass

from moonpool.core.protocol import (
    FetchEnded,
    FetchReserved,
    LockPrefix,
    PrefixLocked,
    Revoked,
    UnlockPrefix,
)
from moonpool.ids import AttemptId, BlockHash, RequestId, WorkerKey
from moonpool.kv.published_set import EventBatch, PublishedSet
from moonpool.tiering.offloader import BeginPut
from moonpool.tiering.protocol import Put, PutAnswered, StoreCommand
from moonpool.tiering.store_core import StoreCore
from moonpool_loadtest.replay.pace import Tally
from moonpool_loadtest.replay.prefix_reads import Node, PrefixReads
from moonpool_loadtest.replay.trace import BLOCK_TOKENS
from moonpool_loadtest.replay.virtual_time import Alarm, VirtualTime


@dataclass(slots=True, kw_only=True)
class _Put:
    source: Node
    on_answered: Callable[[PutAnswered], None]
    #: What the core had of it before.
    num_cached_tokens: int = 0


class StoreNode:
    """One store's core and its published set.

    Args:
        on_batch: What the router hears of its blocks.
    """

    def __init__(
        self,
        key: WorkerKey,
        core: StoreCore,
        *,
        time: VirtualTime,
        reads: PrefixReads,
        tally: Tally,
        on_batch: Callable[[WorkerKey, EventBatch], None],
    ) -> None:
        self._key = key
        self.core = core
        self._time = time
        self._reads = reads
        self._tally = tally
        self._on_batch = on_batch
        self._published = PublishedSet()
        self._puts: dict[AttemptId, _Put] = {}
        self._put_numbers = itertools.count(1)
        self._alarm = Alarm(time, self._tick)

    @property
    def key(self) -> WorkerKey:
        return self._key

    def put(
        self, command: BeginPut, source: Node, on_answered: Callable[[PutAnswered], None]
    ) -> None:
        """A worker offers a chain, and is told once what will become of it."""
        attempt_id = AttemptId(RequestId(f"put-{next(self._put_numbers)}"), 1)
        self._tally.num_puts += 1
        self._puts[attempt_id] = _Put(source=source, on_answered=on_answered)
        self._tell(Put(attempt_id=attempt_id, tenant=command.tenant, hashes=command.hashes))

    def lend(self, read_id: int, reader: WorkerKey, hashes: tuple[BlockHash, ...]) -> None:
        self._tell(LockPrefix(read_id=read_id, hashes=hashes))

    def take_back(self, read_id: int) -> None:
        self._tell(UnlockPrefix(read_id=read_id))

    def end_fetch(self, ended: FetchEnded) -> None:
        """What a put brings is read."""
        put = self._puts.pop(ended.attempt_id)
        num_tokens = ended.num_tokens - put.num_cached_tokens
        self._tally.num_put_blocks += num_tokens // BLOCK_TOKENS
        self._tell(ended)

    # -- parts --

    def _tell(self, command: StoreCommand) -> None:
        self.core.handle(command, self._time.now)
        self._take_frame()

    def _tick(self) -> None:
        self.core.tick(self._time.now)
        self._take_frame()

    def _take_frame(self) -> None:
        frame = self.core.take_frame()
        assert not frame.disk_work, "there is no disk"
        batch = self._published.apply(frame.cache_events)
        if batch is not None:
            self._on_batch(self._key, batch)
        for reply in frame.replies:
            match reply:
                case PutAnswered():
                    self._on_put_answered(reply)
                case FetchReserved(attempt_id=attempt_id, num_cached_tokens=num_cached_tokens):
                    put = self._puts[attempt_id]
                    put.num_cached_tokens = num_cached_tokens
                    self._reads.open(self, put.source, reply)
                case PrefixLocked():
                    self._reads.on_locked(reply)
                case Revoked(attempt_id=attempt_id):
                    raise AssertionError(f"{attempt_id}: no read takes so long here")
                case _:
                    pass
        self._alarm.set(self.core.next_due())

    def _on_put_answered(self, answered: PutAnswered) -> None:
        put = self._puts[answered.attempt_id]
        self._tally.num_refused_puts += answered.refusal is not None
        put.on_answered(answered)
        if not answered.num_wanted_blocks:
            del self._puts[answered.attempt_id]
