"""Outlook: what a request finds when it looks at what there is and at what others hold.

Reads the scheduler's lists, decides nothing. Three questions: how many blocks are lacking before a
request may take its own, and how that ends; what will have come without being computed here; who
waits for whom.
"""

from __future__ import annotations

from collections.abc import Sequence

from moonpool.ids import BlockId
from moonpool.kv.block_cache import BlockCache
from moonpool.sched.request import Order, RequestState
from moonpool.sched.reservations import Relief, Reservations
from moonpool.sched.single_flight import find_leader, inherit_orders, num_common_blocks
from moonpool.sched.wait_queue import WaitQueue

Prefix = tuple[BlockId, ...]


class Outlook:
    """A view of one scheduler's queue, batch and reservations; they stay the scheduler's.

    Args:
        headroom_tokens: Expected growth of a running request that a new one must leave free.
    """

    def __init__(
        self,
        *,
        cache: BlockCache,
        waiting: WaitQueue,
        running: Sequence[RequestState],
        reservations: Reservations,
        headroom_tokens: int,
    ) -> None:
        self._cache = cache
        self._waiting = waiting
        self._running = running
        self._reservations = reservations
        self._headroom_tokens = headroom_tokens

    def match(self, state: RequestState) -> Prefix:
        """Blocks of the longest prefix that is here. Holds no reference."""
        return self._cache.match_prefix(state.prefix_hashes).block_ids

    # -- room --

    def num_short(self, state: RequestState, prefix: Prefix) -> int:
        """Blocks that are lacking before `state` may take its own; 0 or less: it may."""
        num_idle = sum(self._cache.ref_count(block_id) == 0 for block_id in prefix)
        return (
            state.num_needed_blocks
            - len(prefix)
            + self._waiting.num_promised_blocks(state.order)
            + self._expected_growth()
            - (self._cache.num_available - num_idle)
        )

    def relief(self, state: RequestState, num_short: int, prefix: Prefix) -> Relief:
        """How blocks for a request that has none come free."""
        return self._reservations.relief(
            state.order, num_short, keep=prefix, with_headroom=True, inherited=self.inherited()
        )

    def growth_relief(self, state: RequestState, num_short: int) -> Relief:
        """How blocks for the next tokens of a running request come free."""
        return self._reservations.relief(state.order, num_short, inherited=self.inherited())

    def has_room_in_time(self, state: RequestState) -> bool:
        """Whether room for `state` is there, or comes when reads of younger ones end."""
        prefix = self.match(state)
        num_short = self.num_short(state, prefix) - self._num_led_blocks(state, prefix)
        return num_short <= 0 or self.relief(state, num_short, prefix).is_enough

    def _expected_growth(self) -> int:
        return sum(
            state.num_growth_blocks(self._headroom_tokens)
            for states in (self._running, self._reservations)
            for state in states
        )

    # -- what will have come --

    def num_tokens_to_compute(self, state: RequestState) -> int:
        """What is neither here, nor about to come from a peer or from another request here."""
        prefix = self.match(state)
        return self._num_tokens_left(state, len(prefix) + self._num_led_blocks(state, prefix))

    def note(self, state: RequestState, prefix: Prefix) -> None:
        """Write what `state` will have to compute, and the blocks it will take, into it."""
        num_led = self._num_led_blocks(state, prefix)
        # What is cached but unreferenced may be gone by then.
        num_shared = sum(self._cache.ref_count(block_id) > 0 for block_id in prefix) + num_led
        state.num_queued_tokens = self._num_tokens_left(state, len(prefix) + num_led)
        state.num_promised_blocks = state.num_needed_blocks - num_shared

    def _num_tokens_left(self, state: RequestState, num_ready_blocks: int) -> int:
        return state.num_tokens - max(num_ready_blocks * state.block_size, state.num_offered_tokens)

    def _num_led_blocks(self, state: RequestState, prefix: Prefix) -> int:
        """How many blocks after its prefix another request is about to make, now or in its turn."""
        before = (other for other in self._waiting if other.order < state.order)
        leader = find_leader(state, len(prefix), (*self._producers(), *before))
        return 0 if leader is None else num_common_blocks(state, leader) - len(prefix)

    # -- who waits for whom --

    def leader(self, state: RequestState, prefix: Prefix) -> RequestState | None:
        """Who is about to make the first block that a queued request lacks."""
        return find_leader(state, len(prefix), self._producers())

    def is_first(self, state: RequestState, prefix: Prefix) -> bool:
        """Whether nobody who waits longer lacks the same block."""
        before = (other for other in self._waiting if other.order < state.order)
        return find_leader(state, len(prefix), before) is None

    def inherited(self) -> dict[RequestState, Order]:
        """Who leads an older request, and the order that it has from it."""
        producers = self._producers()
        beginnings = {producer.block_hashes[0] for producer in producers}
        pairs: list[tuple[RequestState, RequestState]] = []
        for state in self._waiting:
            if state.block_hashes and state.block_hashes[0] in beginnings:
                leader = find_leader(state, len(self.match(state)), producers)
                if leader is not None:
                    pairs.append((state, leader))
        return inherit_orders(pairs)

    def _producers(self) -> list[RequestState]:
        """Who is about to make full blocks of what it knows."""
        return [
            state
            for states in (self._running, self._reservations.fetching)
            for state in states
            if state.num_final_blocks < len(state.block_hashes)
        ]
