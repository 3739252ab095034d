"""Reservations: blocks that a transport may be writing into, before anyone may compute with them.

    reserved      the attempt lives and waits for its KV
    quarantined   the attempt ended (aborted, revoked, replaced); reads may be outstanding

    add -> take (the KV arrived)
        -> quarantine (revoke, abort) -> end_read

Rules
- Blocks leave only by `take` or `end_read`, never while a read may be outstanding.
- A reservation is not a promise: any of them gives way to an older request, none to a younger one.
- What comes free is counted exactly, shared blocks included: an undercount would let the oldest
  request wait for ever for blocks that only younger ones hold.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from moonpool.ids import AttemptId, BlockId
from moonpool.kv.block_cache import BlockCache
from moonpool.sched.request import Order, RequestState, RequestStatus


@dataclass(frozen=True, slots=True, kw_only=True)
class Relief:
    """How a shortage of blocks ends."""

    #: Enough blocks will come free once all reads concerned have ended.
    is_enough: bool
    #: Reservations to revoke for that, the youngest first; none if ended attempts' blocks do.
    victims: tuple[RequestState, ...]


class Reservations:
    """Reserved and quarantined attempts of one worker; the references stay those of the states."""

    def __init__(self, cache: BlockCache, headroom_tokens: int) -> None:
        self._cache = cache
        self._headroom_tokens = headroom_tokens
        self._reserved: dict[AttemptId, RequestState] = {}
        self._quarantined: dict[AttemptId, RequestState] = {}

    @property
    def num_reserved(self) -> int:
        return len(self._reserved)

    @property
    def num_quarantined(self) -> int:
        return len(self._quarantined)

    def __iter__(self) -> Iterator[RequestState]:
        """Reserved attempts, in order of reservation."""
        return iter(self._reserved.values())

    def quarantined(self) -> Iterator[RequestState]:
        return iter(self._quarantined.values())

    def add(self, state: RequestState) -> None:
        """`state` holds its blocks and waits for remote KV."""
        assert state.attempt_id not in self._reserved
        state.status = RequestStatus.WAITING_FOR_REMOTE_KV
        self._reserved[state.attempt_id] = state

    def take(self, state: RequestState) -> None:
        """The reading of a live reservation has ended; the caller goes on with it."""
        del self._reserved[state.attempt_id]

    def quarantine(self, state: RequestState) -> None:
        """The attempt ends; its blocks stay until the reads have ended."""
        del self._reserved[state.attempt_id]
        state.status = RequestStatus.QUARANTINED
        self._quarantined[state.attempt_id] = state

    def end_read(self, attempt_id: AttemptId) -> RequestState | None:
        """The reads of an ended attempt are over: the caller releases its blocks. None if unknown."""
        state = self._quarantined.pop(attempt_id, None)
        if state is not None:
            state.status = RequestStatus.FINISHED
        return state

    def relief(
        self,
        order: Order,
        num_short: int,
        *,
        keep: Iterable[BlockId] = (),
        with_headroom: bool = False,
    ) -> Relief:
        """How `num_short` more blocks can come free for a request of this order.

        Counts what ended attempts give back, then as few younger reservations as needed, youngest
        first; with `with_headroom` also the growth that is no longer expected of those. Blocks in
        `keep` are the asker's prefix and free nothing. Changes nothing. O(blocks looked at).
        """
        freed = _FreedBlocks(self._cache, keep)
        for state in self._quarantined.values():
            num_short -= freed.add(state)
        victims: list[RequestState] = []
        if num_short > 0:
            for state in sorted(self._reserved.values(), key=lambda s: s.order, reverse=True):
                if num_short <= 0 or not state.order.is_younger_than(order):
                    break
                victims.append(state)
                num_short -= freed.add(state)
                if with_headroom:
                    num_short -= state.num_growth_blocks(self._headroom_tokens)
        return Relief(is_enough=num_short <= 0, victims=tuple(victims))

    def fork(self, cache: BlockCache, copies: dict[RequestState, RequestState]) -> Reservations:
        """An independent copy over `cache`; `copies` maps each state to its copy."""
        other = Reservations(cache, self._headroom_tokens)
        other._reserved = {key: copies[state] for key, state in self._reserved.items()}
        other._quarantined = {key: copies[state] for key, state in self._quarantined.items()}
        return other

    def validate(self) -> None:
        """Raise AssertionError if an attempt stands in the wrong place."""
        for attempt_id, state in self._reserved.items():
            assert state.attempt_id == attempt_id
            assert state.status is RequestStatus.WAITING_FOR_REMOTE_KV, state
            assert state.num_missing_blocks == 0, state
        for attempt_id, state in self._quarantined.items():
            assert state.attempt_id == attempt_id
            assert state.status is RequestStatus.QUARANTINED, state


class _FreedBlocks:
    """Counts the blocks of which every reference belongs to the states added so far."""

    def __init__(self, cache: BlockCache, keep: Iterable[BlockId]) -> None:
        self._cache = cache
        self._keep = frozenset(keep)
        self._num_references: Counter[BlockId] = Counter()

    def add(self, state: RequestState) -> int:
        """How many more blocks come free if `state` too gives up its own."""
        num_freed = 0
        for block_id in state.block_ids:
            self._num_references[block_id] += 1
            if block_id not in self._keep:
                is_last = self._num_references[block_id] == self._cache.ref_count(block_id)
                num_freed += is_last
        return num_freed
