"""PrefixReads: nodes read each other's prefixes, under the holder's lock, in the time that it takes."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from functools import partial
from typing import Protocol

from moonpool.core.protocol import FetchEnded, FetchReserved, PrefixLocked
from moonpool.ids import BlockHash, WorkerKey
from moonpool_loadtest.replay.pace import BYTES_PER_TOKEN, Pace
from moonpool_loadtest.replay.trace import BLOCK_TOKENS
from moonpool_loadtest.replay.virtual_time import VirtualTime


class Node(Protocol):
    """Whoever holds blocks: a worker or a store."""

    @property
    def key(self) -> WorkerKey: ...

    def lend(self, read_id: int, reader: WorkerKey, hashes: tuple[BlockHash, ...]) -> None:
        """Lock what is here of this chain; `PrefixReads.on_locked` follows."""
        ...

    def take_back(self, read_id: int) -> None:
        """The reader is done."""
        ...

    def end_fetch(self, ended: FetchEnded) -> None:
        """What this node wanted is read."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class _Read:
    reader: Node
    holder: Node
    reserved: FetchReserved


class PrefixReads:
    """See the file's head. No read fails: what the holder has lost is short of what was wanted."""

    def __init__(self, time: VirtualTime, pace: Pace) -> None:
        self._time = time
        self._pace = pace
        self._read_ids = itertools.count(1)
        self._reads: dict[int, _Read] = {}

    def open(self, reader: Node, holder: Node, reserved: FetchReserved) -> None:
        """The reader has blocks for what it wants of the holder."""
        read_id = next(self._read_ids)
        self._reads[read_id] = _Read(reader=reader, holder=holder, reserved=reserved)
        lend = partial(holder.lend, read_id, reader.key, reserved.hashes)
        self._time.later(self._pace.message_s, lend)

    def on_locked(self, locked: PrefixLocked) -> None:
        """A holder has answered: bytes travel, then both are told."""
        read = self._reads.pop(locked.read_id)
        num_cached_tokens = read.reserved.num_cached_tokens
        num_tokens = max(len(locked.block_ids) * BLOCK_TOKENS, num_cached_tokens)

        def end() -> None:
            read.holder.take_back(locked.read_id)
            attempt_id = read.reserved.attempt_id
            read.reader.end_fetch(FetchEnded(attempt_id=attempt_id, num_tokens=num_tokens))

        num_bytes = (num_tokens - num_cached_tokens) * BYTES_PER_TOKEN
        self._time.later(self._pace.fetch.predict(num_bytes), end)
