"""Reservations: blocks that a transport may be writing into, before anyone may compute with them.

    reserved      an attempt waits for its KV: a decode for its source's, or either role for a
                  prefix that is fetched from a peer
    quarantined   blocks whose attempt has given them up (aborted, replaced, revoked) while reads into
                  them may be outstanding

add -> take (the KV arrived)
    -> quarantine (revoke, abort) -> end_read

Rules
- Blocks leave only by `take` or `end_read`, never while a read may be outstanding.
- A reservation is not a promise: any of them gives way to an older request, none to a younger one. A
  fetch counts as old as the oldest request that waits for what it brings.
- A decode whose source's blocks are taken back ends here; a fetch is only over, and its attempt waits
  to be computed.
- What comes free is counted exactly, shared blocks included: an undercount would let the oldest
  request wait for ever for blocks that only younger ones hold.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from moonpool.ids import AttemptId, BlockId
from moonpool.kv.block_cache import BlockCache
from moonpool.sched.request import Order, RequestState, RequestStatus, Role

_NOBODY: Mapping[RequestState, Order] = MappingProxyType({})


@dataclass(frozen=True, slots=True, kw_only=True)
class Relief:
    """How a shortage of blocks ends."""

    #: Enough blocks will come free once all reads concerned have ended.
    is_enough: bool
    #: Reservations to revoke for that, the youngest first; none if quarantined blocks do.
    victims: tuple[RequestState, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Quarantined:
    """Blocks that a read of this attempt may still write into; one reference each."""

    attempt_id: AttemptId
    block_ids: tuple[BlockId, ...]


class Reservations:
    """Reserved attempts of one worker, and what is quarantined; all references are the caller's."""

    def __init__(self, cache: BlockCache, headroom_tokens: int) -> None:
        self._cache = cache
        self._headroom_tokens = headroom_tokens
        #: In order of reservation.
        self._reserved: dict[RequestState, None] = {}
        self._quarantined: list[Quarantined] = []

    @property
    def num_reserved(self) -> int:
        return len(self._reserved)

    @property
    def num_decodes(self) -> int:
        """Decodes among the reserved: those that will take a row."""
        return sum(state.role is Role.DECODE for state in self._reserved)

    @property
    def num_quarantined(self) -> int:
        return len(self._quarantined)

    def __iter__(self) -> Iterator[RequestState]:
        """Reserved attempts, in order of reservation."""
        return iter(self._reserved)

    @property
    def fetching(self) -> list[RequestState]:
        """Those that read from a peer, in order of reservation."""
        return [state for state in self._reserved if not state.has_source]

    @property
    def quarantined(self) -> tuple[Quarantined, ...]:
        return tuple(self._quarantined)

    def add(self, state: RequestState) -> None:
        """`state` holds its blocks and waits for remote KV."""
        assert state not in self._reserved
        state.status = RequestStatus.WAITING_FOR_REMOTE_KV
        self._reserved[state] = None

    def take(self, state: RequestState) -> None:
        """The reading of a live reservation has ended; the caller goes on with it."""
        del self._reserved[state]

    def quarantine(self, state: RequestState) -> None:
        """`state` gives its blocks up; they stay until the reads have ended. It is FINISHED."""
        del self._reserved[state]
        state.status = RequestStatus.FINISHED
        self._quarantined.append(
            Quarantined(attempt_id=state.attempt_id, block_ids=tuple(state.detach()))
        )

    def end_read(self, attempt_id: AttemptId) -> list[BlockId]:
        """The reads of an attempt are over: the caller releases these blocks. Empty if unknown."""
        ended = [entry for entry in self._quarantined if entry.attempt_id == attempt_id]
        if ended:
            self._quarantined = [e for e in self._quarantined if e.attempt_id != attempt_id]
        return [block_id for entry in ended for block_id in entry.block_ids]

    def relief(
        self,
        order: Order,
        num_short: int,
        *,
        keep: Iterable[BlockId] = (),
        with_headroom: bool = False,
        inherited: Mapping[RequestState, Order] = _NOBODY,
    ) -> Relief:
        """How `num_short` more blocks can come free for a request of this order.

        Counts what is quarantined, then as few younger reservations as needed, youngest first; with
        `with_headroom` also the growth that is no longer expected of those. Blocks in `keep` are the
        asker's prefix and free nothing. `inherited`: whoever counts as older than it is. Changes
        nothing. O(blocks looked at).
        """
        freed = _FreedBlocks(self._cache, keep)
        for entry in self._quarantined:
            num_short -= freed.add(entry.block_ids)
        victims: list[RequestState] = []
        if num_short > 0:
            orders = {state: inherited.get(state, state.order) for state in self._reserved}
            for state in sorted(orders, key=orders.__getitem__, reverse=True):
                if num_short <= 0 or not orders[state].is_younger_than(order):
                    break
                victims.append(state)
                num_short -= freed.add(state.block_ids)
                if with_headroom:
                    num_short -= state.num_growth_blocks(self._headroom_tokens)
        return Relief(is_enough=num_short <= 0, victims=tuple(victims))

    def key(self, name: Callable[[BlockId], int]) -> tuple[object, ...]:
        """What is quarantined, its blocks under the names that the caller gives them."""
        entries = sorted(self._quarantined, key=lambda entry: entry.attempt_id)
        return tuple((entry.attempt_id, tuple(map(name, entry.block_ids))) for entry in entries)

    def fork(self, cache: BlockCache, copies: Mapping[RequestState, RequestState]) -> Reservations:
        """An independent copy over `cache`; `copies` maps each state to its copy."""
        other = Reservations(cache, self._headroom_tokens)
        other._reserved = {copies[state]: None for state in self._reserved}
        other._quarantined = list(self._quarantined)
        return other

    def validate(self) -> None:
        """Raise AssertionError if an attempt stands in the wrong place."""
        for state in self._reserved:
            assert state.status is RequestStatus.WAITING_FOR_REMOTE_KV, state
            assert state.num_missing_blocks == 0, state
            assert not state.num_in_flight, state
            assert state.has_source or state.fetch_end, state


class _FreedBlocks:
    """Counts the blocks of which every reference belongs to the holders added so far."""

    def __init__(self, cache: BlockCache, keep: Iterable[BlockId]) -> None:
        self._cache = cache
        self._keep = frozenset(keep)
        self._num_references: Counter[BlockId] = Counter()

    def add(self, block_ids: Iterable[BlockId]) -> int:
        """How many more blocks come free if their holder too gives them up."""
        num_freed = 0
        for block_id in block_ids:
            self._num_references[block_id] += 1
            if block_id not in self._keep:
                is_last = self._num_references[block_id] == self._cache.ref_count(block_id)
                num_freed += is_last
        return num_freed
