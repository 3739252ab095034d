"""Scheduler: who takes part in a step, with how many tokens, and on whose blocks.

One scheduler for prefill, decode and both at once. A step holds decodes (one token each) and chunks
of prefills under one token budget; a prefill that reaches its end draws its token in that step.

Rules
- The oldest goes first (`request.age`), and always advances: blocks go from younger reservations,
  then from younger running decodes, to older growth; from younger reservations to older prefills and
  reservations; never the other way. So do places in the batch, to older decodes.
- Nobody waits while holding blocks, and whoever runs holds blocks for all that is known of it. Only
  reads that are under way are waited for with blocks in hand: one's own (a reservation, a fetch), and,
  to grow, those of ended attempts. They end by themselves.
- A block that one request is about to make is waited for, not made twice: see sched/single_flight.py.
  Who waits so lets younger ones go ahead, on blocks that it was not promised.
- A fetch begins when it is its request's turn to take blocks; it needs no row and no tokens of the
  budget, so it does not wait for them.
- Acceptance is honest: need + what older queued requests were promised + the growth expected of what
  runs must be available.
- A chunk ends on a block edge, except at the end of what is known.
- Decodes go before prefills, but for one row and one block of tokens that the oldest request gets
  when it is a prefill; at least one decode takes part all the same.

schedule():
    1. running requests grow, oldest first; who finds no block revokes, preempts, waits or gives way
    2. fetches begin, oldest first, as blocks allow
    3. decodes take their rows, oldest first
    4. prefills take chunks of what is left, oldest first, starting queued ones as blocks allow
    5. rows get slots; a slot is only where the runner keeps a last token, so it may be taken from a
       request that is not in the step

Counts advance here, when planned. Nothing ends here, except by hand-back. When schedule() finds no
row, none can run until a command comes: it need not be called again before.
"""

from __future__ import annotations

import enum
from bisect import insort
from collections import Counter
from collections.abc import Iterable, Iterator
from operator import itemgetter

from moonpool.ids import AttemptId
from moonpool.kv.block_cache import BlockCache
from moonpool.sched.outlook import Outlook, Prefix
from moonpool.sched.output import ScheduledRow, SchedulerOutput
from moonpool.sched.prefix_locks import PrefixLocks
from moonpool.sched.request import Order, RequestState, RequestStatus, Role
from moonpool.sched.reservations import Reservations
from moonpool.sched.slots import Slots
from moonpool.sched.wait_queue import WaitQueue


class _Turn(enum.Enum):
    """What came of a queued request's turn."""

    STARTED = enum.auto()
    FETCHES = enum.auto()
    #: Another request is about to make the block that it lacks.
    FOLLOWS = enum.auto()
    NO_BLOCKS = enum.auto()
    HANDED_BACK = enum.auto()


class Scheduler:
    """The attempts of one worker by what they wait for, and the batch of each step.

    Args:
        cache: The worker's blocks; this scheduler takes and drops all references of its requests.
        block_size: Tokens of a block.
        max_num_batched_tokens: Budget of a step; at least a block.
        max_num_seqs: Most rows of a step, and the number of the runner's slots.
        headroom_tokens: Expected growth of a running request that a new one must leave free.
        local_prefill_tokens: Most that a request with a source may compute here.
    """

    def __init__(
        self,
        *,
        cache: BlockCache,
        block_size: int,
        max_num_batched_tokens: int,
        max_num_seqs: int,
        headroom_tokens: int,
        local_prefill_tokens: int,
    ) -> None:
        # With less, a chunk could not reach the next block edge.
        assert max_num_batched_tokens >= block_size, (max_num_batched_tokens, block_size)
        assert max_num_seqs >= 1, max_num_seqs
        self._cache = cache
        self._block_size = block_size
        self._max_num_batched_tokens = max_num_batched_tokens
        self._max_num_seqs = max_num_seqs
        self._headroom_tokens = headroom_tokens
        self._local_prefill_tokens = local_prefill_tokens
        self.reservations = Reservations(cache, headroom_tokens)
        self.prefix_locks = PrefixLocks(cache)
        self._waiting = WaitQueue()
        #: Oldest first. RUNNING.
        self._running: list[RequestState] = []
        #: HELD, in order of their last step.
        self._held: list[RequestState] = []
        #: FINISHED while a plan that writes their blocks was under way.
        self._ending: list[RequestState] = []
        self._slots = Slots(max_num_seqs)
        self._outlook = self._look()

    def _look(self) -> Outlook:
        return Outlook(
            cache=self._cache,
            waiting=self._waiting,
            running=self._running,
            reservations=self.reservations,
            headroom_tokens=self._headroom_tokens,
        )

    # -- what there is --

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def num_running_decodes(self) -> int:
        return sum(state.role is Role.DECODE for state in self._running)

    @property
    def num_prefills(self) -> int:
        """Prefills that hold blocks: running, or held for their reader."""
        return len(self._running) - self.num_running_decodes + len(self._held)

    @property
    def num_decodes(self) -> int:
        """Decode attempts in any state that will, or may, take a row."""
        return self.num_running_decodes + self._waiting.num_decodes + self.reservations.num_decodes

    @property
    def num_queued_tokens(self) -> int:
        """Uncached tokens that wait to be computed, running prefills' rest included.

        What a peer or another request here is to bring is left out.
        """
        return (
            self._waiting.num_queued_tokens
            + sum(state.num_queued_tokens for state in self.reservations.fetching)
            + sum(state.num_uncomputed_tokens for state in self._running if state.is_prefilling)
        )

    def num_queued_tokens_before(self, order: Order) -> int:
        """Those of `num_queued_tokens` that are not behind a request of this order: its wait."""
        prefilling = [state for state in self._running if state.is_prefilling]
        return (
            self._waiting.num_queued_tokens_before(order)
            + sum(s.num_queued_tokens for s in self.reservations.fetching if s.order < order)
            + sum(s.num_uncomputed_tokens for s in prefilling if s.order < order)
        )

    @property
    def has_work(self) -> bool:
        return bool(self._waiting or self._running)

    # -- taking requests --

    def num_tokens_to_compute(self, state: RequestState) -> int:
        """What `state` would have to compute: not found here, nor about to come in another way."""
        return self._outlook.num_tokens_to_compute(state)

    def has_room_in_time(self, state: RequestState) -> bool:
        """Whether `state` may be queued: room is there, or comes when reads of younger ones end."""
        return self._outlook.has_room_in_time(state)

    def enqueue(self, state: RequestState) -> None:
        """Queue a new or a preempted request. It holds no block; its need is promised."""
        self._outlook.note(state, self._outlook.match(state))
        self._waiting.add(state)

    def reserve(self, state: RequestState) -> bool:
        """Lock the own prefix and allocate the rest, at once or not at all."""
        prefix = self._outlook.match(state)
        if self._outlook.num_short(state, prefix) > 0:
            return False
        self._take_blocks(state, prefix)
        self.reservations.add(state)
        return True

    def revoke_for(self, state: RequestState) -> tuple[RequestState, ...]:
        """Take back the younger reservations that keep `state` out, if that makes room for it."""
        prefix = self._outlook.match(state)
        relief = self._outlook.relief(state, self._outlook.num_short(state, prefix), prefix)
        if not relief.is_enough:
            return ()
        self._revoke(relief.victims)
        return relief.victims

    def has_slot(self, order: Order) -> bool:
        """Whether a new decode finds a place in the batch, be it a younger reservation's."""
        return self.num_decodes < self._max_num_seqs or any(
            other.has_source and other.order.is_younger_than(order) for other in self.reservations
        )

    def revoke_for_slot(self, order: Order) -> tuple[RequestState, ...]:
        """After a decode was taken: take back the youngest reservation if there is one too many."""
        if self.num_decodes <= self._max_num_seqs:
            return ()
        # A fetch that is taken back keeps its place: it is queued.
        victim = max((other for other in self.reservations if other.has_source), key=_order)
        assert victim.order.is_younger_than(order), (victim.order, order)
        self._revoke((victim,))
        return (victim,)

    def admit(self, state: RequestState, num_computed_tokens: int) -> None:
        """A reservation's KV is there up to `num_computed_tokens`: it runs from here."""
        self.reservations.take(state)
        state.num_computed_tokens = num_computed_tokens
        state.num_cached_tokens = min(num_computed_tokens, state.request.num_tokens)
        self._run(state)

    def note_fetched(self, state: RequestState, num_tokens: int) -> None:
        """KV of [0, num_tokens) of a fetch lies verified: full blocks may be found."""
        num_tokens = min(num_tokens, state.fetch_end)
        state.num_fetched_tokens = max(state.num_fetched_tokens, num_tokens)
        self.cache_final_blocks(state, state.num_fetched_tokens)

    def end_fetch(self, state: RequestState) -> None:
        """No read of a fetch is outstanding: it runs, and computes what has not come."""
        self.reservations.take(state)
        # No block mixes what was read with what is computed here.
        state.num_computed_tokens = state.num_final_blocks * self._block_size
        state.num_cached_tokens = state.num_computed_tokens
        self._run(state)

    # -- one step --

    def schedule(self) -> SchedulerOutput:
        """Plan a step. No plan may be under way: blocks are taken from whoever must give way."""
        out = SchedulerOutput()
        stalled = self._grow_running(out)
        self._begin_fetches(out)
        self._plan_decodes(stalled, out)
        self._plan_prefills(stalled, out)
        self._slots.assign(row.state for row in out.rows)
        return out

    def complete(self, rows: list[ScheduledRow]) -> None:
        """The plan of these rows has run: nobody writes their blocks any more."""
        for row in rows:
            row.state.num_in_flight -= 1
        ended = [state for state in self._ending if not state.num_in_flight]
        self._ending = [state for state in self._ending if state.num_in_flight]
        for state in ended:
            self._release(state)

    def cache_final_blocks(self, state: RequestState, num_final_tokens: int) -> None:
        """Make the full blocks of [0, num_final_tokens) findable; KV and tokens are final."""
        num_blocks = num_final_tokens // self._block_size
        if num_blocks > state.num_final_blocks:
            state.hash_up_to(num_blocks)
            self._cache.insert(state.block_hashes[:num_blocks], state.block_ids[:num_blocks])
            state.num_final_blocks = num_blocks

    def forget_chain(self, state: RequestState) -> None:
        """Nobody finds any more what `state` stands on, its prefix included."""
        if state.block_hashes:
            self._cache.forget_chain(state.block_hashes[0])

    def hold(self, state: RequestState) -> None:
        """A prefill drew its token: it leaves the batch and keeps its blocks for its reader."""
        self._running.remove(state)
        self._slots.drop(state)
        state.status = RequestStatus.HELD
        self._held.append(state)

    # -- ending --

    def end(self, state: RequestState) -> None:
        """The attempt is over, in whatever state; blocks that are read into are quarantined."""
        match state.status:
            case RequestStatus.WAITING | RequestStatus.PREEMPTED:
                self._waiting.remove(state)
            case RequestStatus.WAITING_FOR_REMOTE_KV:
                self.reservations.quarantine(state)
                return
            case RequestStatus.RUNNING:
                self._running.remove(state)
            case RequestStatus.HELD:
                self._held.remove(state)
            case RequestStatus.FINISHED:
                raise AssertionError(f"{state.attempt_id} has ended before")
        state.status = RequestStatus.FINISHED
        self._slots.drop(state)
        if state.num_in_flight:
            self._ending.append(state)
        else:
            self._release(state)

    def end_reservation(self, state: RequestState) -> None:
        """A reservation ends and no read is outstanding: its blocks are given back."""
        self.reservations.take(state)
        state.status = RequestStatus.FINISHED
        self._release(state)

    def end_read(self, attempt_id: AttemptId) -> None:
        """The reads of an attempt that gave up its blocks are over. Ignored if there are none."""
        self._cache.release(self.reservations.end_read(attempt_id))

    # -- blocks --

    def _take_blocks(self, state: RequestState, prefix: Prefix) -> None:
        self._cache.acquire(prefix)
        state.attach(prefix)
        state.attach(self._cache.allocate(state.num_missing_blocks))
        state.num_final_blocks = len(prefix)
        state.num_computed_tokens = len(prefix) * self._block_size

    def _release(self, state: RequestState) -> None:
        self._cache.release(state.detach())

    # -- growing --

    def _grow_running(self, out: SchedulerOutput) -> list[RequestState]:
        """Give running requests a block where one is due; returns those that wait for reads to end."""
        stalled: list[RequestState] = []
        num_claimed = 0
        for state in tuple(self._running):
            if state.status is not RequestStatus.RUNNING or state.num_missing_blocks <= 0:
                continue
            if self._has_room_to_grow(state, num_claimed, out):
                state.attach(self._cache.allocate(state.num_missing_blocks))
            elif state.status is RequestStatus.RUNNING:
                stalled.append(state)
                num_claimed += state.num_missing_blocks
        for state in tuple(stalled):
            # A younger one may have given way meanwhile.
            if state.num_missing_blocks <= self._cache.num_available:
                state.attach(self._cache.allocate(state.num_missing_blocks))
                stalled.remove(state)
        return stalled

    def _has_room_to_grow(
        self, state: RequestState, num_claimed: int, out: SchedulerOutput
    ) -> bool:
        """Make room. False: `state` waits for reads to end, or, being the youngest, gave way itself."""
        while True:
            num_short = state.num_missing_blocks + num_claimed - self._cache.num_available
            if num_short <= 0:
                return True
            relief = self._outlook.growth_relief(state, num_short)
            if relief.is_enough:
                self._revoke_in_step(relief.victims, out)
                return False
            victim = next(s for s in reversed(self._running) if s.role is Role.DECODE)
            self._preempt(victim, out)
            if victim is state:
                return False

    def _revoke(self, victims: Iterable[RequestState]) -> None:
        """Take blocks back that are read into; a fetch's request waits, to be computed."""
        for victim in victims:
            self.reservations.quarantine(victim)
            if not victim.has_source:
                victim.status = RequestStatus.WAITING
                self.enqueue(victim)

    def _revoke_in_step(self, victims: Iterable[RequestState], out: SchedulerOutput) -> None:
        """As `_revoke`; of a fetch that this step began nobody knows yet, so it never was."""
        told = [victim for victim in victims if victim not in out.fetching]
        for victim in victims:
            if victim in out.fetching:
                out.fetching.remove(victim)
                self.reservations.take(victim)
                victim.undo_fetch()
                self._release(victim)
                victim.status = RequestStatus.WAITING
                self.enqueue(victim)
        self._revoke(told)
        out.revoked += told

    def _preempt(self, state: RequestState, out: SchedulerOutput) -> None:
        """Take all blocks back; full ones stay cached, so that coming back is cheap."""
        assert not state.num_in_flight, state.attempt_id
        self._running.remove(state)
        self._slots.drop(state)
        self._release(state)
        state.status = RequestStatus.PREEMPTED
        out.preempted.append(state)
        if self._may_compute(state, self.num_tokens_to_compute(state)):
            self.enqueue(state)
        else:
            state.status = RequestStatus.FINISHED
            out.handed_back.append(state)

    def _may_compute(self, state: RequestState, num_uncached_tokens: int) -> bool:
        return not state.has_source or num_uncached_tokens <= self._local_prefill_tokens

    # -- planning --

    def _plan_decodes(self, stalled: list[RequestState], out: SchedulerOutput) -> None:
        decodes = [s for s in self._running if s.is_decoding and s not in stalled]
        num_rows = min(self._max_num_seqs, self._max_num_batched_tokens)
        is_crowded = (
            len(decodes) >= self._max_num_seqs
            or len(decodes) + self._block_size > self._max_num_batched_tokens
        )
        if is_crowded and self._is_prefill_before(decodes[-1], stalled, out):
            num_rows = min(self._max_num_seqs - 1, self._max_num_batched_tokens - self._block_size)
            # Whoever holds blocks and decodes must get on as well.
            num_rows = max(num_rows, 1)
        for state in decodes[:num_rows]:
            self._plan(state, 1, out)

    def _is_prefill_before(
        self, decode: RequestState, stalled: list[RequestState], out: SchedulerOutput
    ) -> bool:
        """Whether a prefill older than `decode` can take part in this step; a queued one is started."""
        for order, state in self._prefills(stalled):
            if not order < decode.order:
                return False
            if state.status is RequestStatus.RUNNING:
                return True
            match self._start(state, out):
                case _Turn.STARTED:
                    return True
                case _Turn.NO_BLOCKS:
                    return False
        return False

    def _plan_prefills(self, stalled: list[RequestState], out: SchedulerOutput) -> None:
        if not self._waiting and len(out.rows) == len(self._running):
            return  # each of them decodes
        num_rows_left = self._max_num_seqs - len(out.rows)
        num_tokens_left = self._max_num_batched_tokens - len(out.rows)
        is_blocked = False
        for _, state in self._prefills(stalled):
            if not num_rows_left or not num_tokens_left:
                break
            if state.status is not RequestStatus.RUNNING:
                # A queued request never takes blocks before an older one that lacks them.
                turn = _Turn.NO_BLOCKS if is_blocked else self._start(state, out)
                is_blocked = turn is _Turn.NO_BLOCKS
                if turn is not _Turn.STARTED:
                    continue
            num_scheduled_tokens = self._chunk(state, num_tokens_left)
            if not num_scheduled_tokens:
                break
            self._plan(state, num_scheduled_tokens, out)
            num_rows_left -= 1
            num_tokens_left -= num_scheduled_tokens

    def _prefills(self, stalled: list[RequestState]) -> list[tuple[Order, RequestState]]:
        """Running and queued requests with more than a decode step to compute, oldest first."""
        inherited = self._outlook.inherited()
        running = [s for s in self._running if s.is_prefilling and s not in stalled]
        pairs = [(inherited.get(state, state.order), state) for state in running]
        pairs += [(state.order, state) for state in self._waiting]
        return sorted(pairs, key=itemgetter(0))

    def _begin_fetches(self, out: SchedulerOutput) -> None:
        for state in tuple(self._waiting):
            if state.num_offered_tokens:
                prefix = self._outlook.match(state)
                is_due = self._has_to_fetch(state, prefix) and self._outlook.is_first(state, prefix)
                if is_due and self._start(state, out) is _Turn.NO_BLOCKS:
                    return

    def _start(self, state: RequestState, out: SchedulerOutput) -> _Turn:
        """Take a queued request's blocks if they are there: it runs, or fetches first."""
        prefix = self._outlook.match(state)
        if self._outlook.leader(state, prefix) is not None:
            return _Turn.FOLLOWS
        if not self._may_compute(state, state.num_tokens - len(prefix) * self._block_size):
            self._waiting.remove(state)
            state.status = RequestStatus.FINISHED
            out.handed_back.append(state)
            return _Turn.HANDED_BACK
        num_short = self._outlook.num_short(state, prefix)
        if num_short > 0:
            relief = self._outlook.relief(state, num_short, prefix)
            if relief.is_enough:
                self._revoke_in_step(relief.victims, out)
            # Their blocks come when their reads have ended, but their growth is forgone at once.
            if self._outlook.num_short(state, prefix) > 0:
                self._outlook.note(state, prefix)
                return _Turn.NO_BLOCKS
        self._waiting.remove(state)
        self._take_blocks(state, prefix)
        state.note_cached(state.num_computed_tokens)
        if self._has_to_fetch(state, prefix):
            self._begin_fetch(state)
            out.fetching.append(state)
            return _Turn.FETCHES
        out.started.append(state)
        self._run(state)
        return _Turn.STARTED

    def _has_to_fetch(self, state: RequestState, prefix: Prefix) -> bool:
        return state.num_offered_tokens > len(prefix) * self._block_size

    def _begin_fetch(self, state: RequestState) -> None:
        state.begin_fetch()
        state.num_queued_tokens = state.num_tokens - state.fetch_end
        self.reservations.add(state)

    def _run(self, state: RequestState) -> None:
        state.status = RequestStatus.RUNNING
        state.num_offered_tokens = 0
        insort(self._running, state, key=_order)

    def _chunk(self, state: RequestState, num_tokens_left: int) -> int:
        """How many tokens to compute: to the end of what is known, or to a block edge; perhaps 0."""
        end = min(state.num_tokens, state.num_computed_tokens + num_tokens_left)
        if end < state.num_tokens:
            end -= end % self._block_size
        return max(0, end - state.num_computed_tokens)

    def _plan(self, state: RequestState, num_scheduled_tokens: int, out: SchedulerOutput) -> None:
        start = state.num_computed_tokens
        end = start + num_scheduled_tokens
        state.num_computed_tokens = end
        state.num_in_flight += 1
        out.rows.append(
            ScheduledRow(state=state, start=start, end=end, is_sampling=end == state.num_tokens)
        )

    # -- copying and checking --

    def states(self) -> Iterator[RequestState]:
        """Every attempt that has not ended, or whose blocks are still written by a plan."""
        yield from self._waiting
        yield from self._running
        yield from self._held
        yield from self._ending
        yield from self.reservations

    def fork(self, cache: BlockCache) -> tuple[Scheduler, dict[RequestState, RequestState]]:
        """An independent copy over `cache`, and the copy of each state."""
        copies = {state: state.fork() for state in self.states()}
        other = Scheduler(
            cache=cache,
            block_size=self._block_size,
            max_num_batched_tokens=self._max_num_batched_tokens,
            max_num_seqs=self._max_num_seqs,
            headroom_tokens=self._headroom_tokens,
            local_prefill_tokens=self._local_prefill_tokens,
        )
        other.reservations = self.reservations.fork(cache, copies)
        other.prefix_locks = self.prefix_locks.fork(cache)
        other._waiting = self._waiting.fork(copies)
        other._running = [copies[state] for state in self._running]
        other._held = [copies[state] for state in self._held]
        other._ending = [copies[state] for state in self._ending]
        other._slots = self._slots.fork(copies)
        other._outlook = other._look()
        return other, copies

    def validate(self) -> None:
        """Raise AssertionError if lists, slots, or the blocks held contradict each other or the cache."""
        self.reservations.validate()
        self._waiting.validate()
        for states, status in (
            (self._running, RequestStatus.RUNNING),
            (self._held, RequestStatus.HELD),
            (self._ending, RequestStatus.FINISHED),
        ):
            assert all(state.status is status for state in states), states
        assert self._running == sorted(self._running, key=_order)
        self._slots.validate(self._running)
        num_references = Counter(self.prefix_locks.block_ids())
        for entry in self.reservations.quarantined:
            num_references.update(entry.block_ids)
        for state in self.states():
            assert state.slot < 0 or state in self._running, state
            state.validate()
            num_references.update(state.block_ids)
            for block_id in state.block_ids[state.num_final_blocks :]:
                assert self._cache.ref_count(block_id) == 1, (state.attempt_id, block_id)
                assert not self._cache.is_cached(block_id), (state.attempt_id, block_id)
        for block_id, count in num_references.items():
            assert self._cache.ref_count(block_id) == count, (block_id, count)
        assert self._cache.num_referenced == len(num_references)


def _order(state: RequestState) -> Order:
    return state.order
