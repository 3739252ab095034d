"""Core: the worker's machine. Commands in, frames and step plans out; the one owner of block ids.

    drain commands -> handle each -> plan = schedule -> send take_frame() -> run plan -> update

It lives in the engine process, is synchronous and pure (`now` is an argument), and knows both roles.
The scheduler decides who runs and on whose blocks (sched/scheduler.py); this file knows attempts: what
a command means, what is answered, when an attempt is over.

Rules
- Total: a command about an unknown or ended attempt is ignored; so is one for an attempt at or below
  the last that this worker saw of that request in that role.
- A higher attempt, or Abort, ends the lower ones. What a plan in flight writes, or a read may write,
  is given back only when the plan's result came, or ReadEnded (Arrived, FetchEnded) did.
- Whether a peer is read from, and what came of it, changes when a token comes, never which.
- A reader's lock needs no room and no turn: it is answered with what is here, with nothing when this
  worker drains.
- A refusal changes nothing but this: younger reservations may be revoked, so that the request's next
  attempt finds room.
- Nobody is told twice: whoever sent Abort, Release or a higher attempt is not answered for the lower.
- A block enters the cache when its KV is written and verified and all its tokens are final. The block
  of the last prompt token waits for the first token as well: whoever lacks that computes the block
  again, which nobody else may be using then.
- Output that is not finite takes the whole chain that it stands on out of the cache, wherever in it
  the fault lies: without that every later request with this prefix would fail. For a while nothing
  of it is read from a peer either, since a peer may not know.

Life of an attempt: see core/protocol.py for what is said, sched/request.py for the states.
"""

from __future__ import annotations

import copy
import dataclasses
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Final

from moonpool.core import replies
from moonpool.core.attempts import Attempts
from moonpool.core.config import CoreConfig
from moonpool.core.failed_chains import FailedChains
from moonpool.core.frame_builder import FrameBuilder
from moonpool.core.plan_builder import build_plan
from moonpool.core.protocol import (
    Abort,
    Accepted,
    Arrived,
    BlockLedger,
    BlocksArrived,
    BlocksFetched,
    ChunkPlanned,
    ClearCache,
    Command,
    CoreFrame,
    Decode,
    Drain,
    FetchEnded,
    HandBackReason,
    LockPrefix,
    Prefill,
    PrefixLocked,
    ReadEnded,
    Refused,
    RefuseReason,
    Release,
    Revoked,
    UnlockPrefix,
)
from moonpool.core.step import StepPlan, StepResult
from moonpool.ids import AttemptId, BlockId
from moonpool.inference.output import FinishReason, TokenRun
from moonpool.inference.request import InferenceRequest
from moonpool.kv.block_cache import BlockCache
from moonpool.kv.block_hash import NamespaceSeed
from moonpool.kv.eviction import make_eviction
from moonpool.sched.output import ScheduledRow, SchedulerOutput
from moonpool.sched.request import Order, RequestState, RequestStatus, Role
from moonpool.sched.scheduler import Scheduler

NamespaceSeedOf = Callable[[InferenceRequest], NamespaceSeed]


class Core:
    """One worker's blocks, attempts and steps.

    Args:
        config: Limits; validated in config/, asserted here.
        namespace_seed: The start of a request's hash chain (tenant, salt, adapter and the model's
            part of the namespace); pure, cheap.
    """

    def __init__(self, config: CoreConfig, namespace_seed: NamespaceSeedOf) -> None:
        self._config: Final = config
        self._namespace_seed: Final = namespace_seed
        eviction = make_eviction(config.eviction, config.num_blocks)
        self._cache = BlockCache(config.num_blocks, eviction)
        self._scheduler = Scheduler(
            cache=self._cache,
            block_size=config.block_size,
            max_num_batched_tokens=config.max_num_batched_tokens,
            max_num_seqs=config.max_num_seqs,
            headroom_tokens=config.headroom_tokens,
            local_prefill_tokens=config.local_prefill_tokens,
        )
        self._attempts = Attempts()
        self._failed_chains = FailedChains()
        self._is_draining = False
        #: Number of the last plan.
        self._step = 0
        #: The rows of the plan whose result is due; empty: none.
        self._rows_in_flight: list[ScheduledRow] = []
        #: Blocks that were read into since the last plan: an ordered set.
        self._arrived_blocks: dict[BlockId, None] = {}
        self._frame = FrameBuilder()

    # -- the step loop's interface --

    def handle(self, command: Command, now: float) -> None:
        """Apply one command; answers lie in the next frame. Never raises for what a command says."""
        match command:
            case Prefill():
                self._on_prefill(command, now)
            case Decode():
                self._on_decode(command, now)
            case BlocksArrived():
                self._on_blocks_arrived(command)
            case Arrived():
                self._on_arrived(command, now)
            case BlocksFetched():
                self._on_blocks_fetched(command)
            case FetchEnded():
                self._on_fetch_ended(command)
            case ReadEnded():
                self._scheduler.end_read(command.attempt_id)
            case Release():
                self._on_release(command)
            case Abort():
                self._on_abort(command, now)
            case LockPrefix():
                self._on_lock_prefix(command)
            case UnlockPrefix():
                self._scheduler.prefix_locks.unlock(command.read_id)
            case Drain():
                self._on_drain(command)
            case ClearCache():
                self._cache.clear()
        self._check()

    def schedule(self, now: float) -> StepPlan | None:
        """Plan the next step; None: nothing can run until another command comes.

        Requires that the result of the plan before has come (one plan in flight).
        """
        assert not self._rows_in_flight, f"the result of step {self._step} is due"
        self._attempts.forget_old(now)
        out = self._scheduler.schedule()
        self._report(out)
        plan: StepPlan | None = None
        if out.rows:
            self._step += 1
            self._frame.on_planned(self._step)
            self._rows_in_flight = out.rows
            plan = build_plan(self._step, out.rows, tuple(self._arrived_blocks))
            self._arrived_blocks.clear()
        self._check()
        return plan

    def update(self, result: StepResult, now: float) -> None:
        """Apply the result of the plan in flight.

        Raises:
            ValueError: the result is not that plan's.
        """
        rows = self._rows_in_flight
        num_sampling = sum(row.is_sampling for row in rows)
        if not rows or result.step != self._step or len(result.tokens) != num_sampling:
            raise ValueError(
                f"result of step {result.step} with {len(result.tokens)} rows;"
                f" due is step {self._step if rows else None} with {num_sampling}"
            )
        self._rows_in_flight = []
        self._scheduler.complete(rows)
        tokens = iter(result.tokens)
        for row in rows:
            drawn = next(tokens) if row.is_sampling else None
            if row.state.status is RequestStatus.RUNNING:
                self._on_row_computed(row, drawn, now)
        self._frame.on_result(result.timing, sum(row.num_scheduled_tokens for row in rows))
        self._check()

    def take_frame(self) -> CoreFrame:
        """What has happened since the last frame, and which plan runs after this one."""
        return self._frame.take(
            self.ledger(), self._scheduler.num_queued_tokens, self._cache.take_events()
        )

    @property
    def is_idle(self) -> bool:
        """Nothing waits to be computed and no result is due: only a command makes work."""
        return not (self._scheduler.has_work or self._rows_in_flight)

    def ledger(self) -> BlockLedger:
        """Where every block and every attempt is, at this moment."""
        scheduler = self._scheduler
        return BlockLedger(
            num_total=self._cache.num_total,
            num_free=self._cache.num_free,
            num_cached=self._cache.num_evictable,
            num_referenced=self._cache.num_referenced,
            num_running=scheduler.num_running_decodes,
            num_waiting=scheduler.num_waiting,
            num_reserved=scheduler.reservations.num_reserved,
            num_prefills=scheduler.num_prefills,
            num_quarantined=scheduler.reservations.num_quarantined,
            num_prefix_locks=len(scheduler.prefix_locks),
        )

    # -- commands --

    def _on_prefill(self, command: Prefill, now: float) -> None:
        if self._is_new(Role.PREFILL, command.attempt_id, now):
            reason = self._refusal(Role.PREFILL, command.request)
            if reason is None:
                reason = self._enqueue(self._make_state(command, Role.PREFILL, now))
            if reason is not None:
                self._frame.tell(Refused(attempt_id=command.attempt_id, reason=reason))

    def _on_decode(self, command: Decode, now: float) -> None:
        if self._is_new(Role.DECODE, command.attempt_id, now):
            reason = self._refusal(Role.DECODE, command.request)
            if reason is None:
                state = self._make_state(command, Role.DECODE, now, has_source=command.has_source)
                reason = self._reserve(state) if command.has_source else self._enqueue(state)
                self._on_revoked(self._scheduler.revoke_for_slot(state.order))
            if reason is not None:
                self._frame.tell(Refused(attempt_id=command.attempt_id, reason=reason))

    def _on_blocks_arrived(self, command: BlocksArrived) -> None:
        state = self._find_reserved(command.attempt_id)
        if state is not None:
            first = state.num_final_blocks
            self._scheduler.cache_final_blocks(state, min(command.num_tokens, state.num_tokens - 1))
            self._note_arrived(state.block_ids[first : state.num_final_blocks])

    def _on_arrived(self, command: Arrived, now: float) -> None:
        state = self._find_reserved(command.attempt_id)
        if state is None:
            # Revoked while it arrived: this says as well that the reads have ended.
            self._scheduler.end_read(command.attempt_id)
            return
        if command.finish_reason is FinishReason.INVALID_OUTPUT:
            self._scheduler.admit(state, 0)
            self._fail(state, now)
            return
        num_tokens = self._num_usable_tokens(state, command)
        has_token = command.first_token is not None
        is_answered = has_token and command.finish_reason is not None
        num_missing_tokens = state.num_tokens - num_tokens
        if num_missing_tokens > self._config.local_prefill_tokens and not is_answered:
            self._scheduler.end_reservation(state)
            self._hand_back(
                state,
                HandBackReason.TOO_LONG_TO_REPAIR if has_token else HandBackReason.SOURCE_LOST,
            )
            return
        end = -(-num_tokens // state.block_size)
        self._note_arrived(state.block_ids[state.num_final_blocks : end])
        self._scheduler.cache_final_blocks(state, num_tokens)
        self._scheduler.admit(state, num_tokens)
        if command.first_token is not None:
            self._append(state, (command.first_token,), command.finish_reason)

    def _on_blocks_fetched(self, command: BlocksFetched) -> None:
        state = self._find_fetching(command.attempt_id)
        if state is not None:
            self._note_fetched(state, command.num_tokens)

    def _on_fetch_ended(self, command: FetchEnded) -> None:
        state = self._find_fetching(command.attempt_id)
        if state is None:
            # Revoked while it ended: this says as well that the reads have ended.
            self._scheduler.end_read(command.attempt_id)
            return
        self._note_fetched(state, command.num_tokens)
        self._scheduler.end_fetch(state)
        self._tell_started(state)

    def _note_fetched(self, state: RequestState, num_tokens: int) -> None:
        first = state.num_final_blocks
        self._scheduler.note_fetched(state, num_tokens)
        self._note_arrived(state.block_ids[first : state.num_final_blocks])

    def _note_arrived(self, block_ids: Iterable[BlockId]) -> None:
        """The pool has new values in these blocks, which the runner did not write."""
        self._arrived_blocks.update(dict.fromkeys(block_ids))

    def _on_lock_prefix(self, command: LockPrefix) -> None:
        hashes = () if self._is_draining else command.hashes
        block_ids = self._scheduler.prefix_locks.lock(command.read_id, hashes)
        if block_ids is not None:
            self._frame.tell(PrefixLocked(read_id=command.read_id, block_ids=block_ids))

    def _on_release(self, command: Release) -> None:
        state = self._attempts.find(Role.PREFILL, command.attempt_id)
        if state is not None:
            self._end(state)

    def _on_abort(self, command: Abort, now: float) -> None:
        for role in Role:
            self._attempts.note_ended(role, command.attempt_id, now)
            self._end_at_or_below(role, command.attempt_id)

    def _on_drain(self, command: Drain) -> None:
        self._is_draining = True
        if not command.hand_back:
            return
        for state in self._attempts:
            if state.status is RequestStatus.HELD:
                continue
            is_read_into = state.status is RequestStatus.WAITING_FOR_REMOTE_KV
            self._scheduler.end(state)
            if is_read_into:
                self._frame.tell(Revoked(attempt_id=state.attempt_id))
            if state.has_source and is_read_into:
                self._attempts.remove(state)
            else:
                self._hand_back(state, HandBackReason.DRAINING)

    # -- taking an attempt --

    def _is_new(self, role: Role, attempt_id: AttemptId, now: float) -> bool:
        """Whether to look at a new attempt; it ends the lower ones of its request in its role."""
        if not self._attempts.note(role, attempt_id, now):
            return False
        self._end_at_or_below(role, attempt_id)
        return True

    def _refusal(self, role: Role, request: InferenceRequest) -> RefuseReason | None:
        """What can be said before the prompt is hashed."""
        if self._is_draining:
            return RefuseReason.DRAINING
        config = self._config
        num_tokens = request.num_tokens
        max_num_tokens = min(
            len(request.prompt_token_ids) + request.sampling.max_tokens, config.max_model_len
        )
        if not 0 < num_tokens < max_num_tokens:
            return RefuseReason.NEVER_FITS
        # The last token drawn is never computed.
        num_kv_tokens = num_tokens if role is Role.PREFILL else max_num_tokens - 1
        if num_kv_tokens > config.num_blocks * config.block_size:
            return RefuseReason.NEVER_FITS
        if role is Role.DECODE and not self._scheduler.has_slot(Order(request.age, role)):
            return RefuseReason.NO_SLOTS
        return None

    def _make_state(
        self, command: Prefill | Decode, role: Role, now: float, *, has_source: bool = False
    ) -> RequestState:
        state = RequestState.create(
            command.request,
            command.attempt,
            role=role,
            has_source=has_source,
            num_peer_tokens=command.num_peer_tokens,
            block_size=self._config.block_size,
            max_model_len=self._config.max_model_len,
            eos_token_ids=self._config.eos_token_ids,
            seed=self._namespace_seed(command.request),
        )
        if state.block_hashes and self._failed_chains.has(state.block_hashes[0], now):
            state.num_offered_tokens = 0
        return state

    def _enqueue(self, state: RequestState) -> RefuseReason | None:
        # The younger do not count: the oldest request is taken whoever waits, so that it gets on.
        num_queued_tokens = self._scheduler.num_queued_tokens_before(state.order)
        limit = self._config.max_queued_steps * self._config.max_num_batched_tokens
        # Who waits for nobody may be of any length.
        if num_queued_tokens:
            num_queued_tokens += self._scheduler.num_tokens_to_compute(state)
            if num_queued_tokens > limit:
                return RefuseReason.QUEUE_FULL
        if not self._scheduler.has_room_in_time(state):
            return RefuseReason.NO_BLOCKS
        self._scheduler.enqueue(state)
        self._attempts.add(state)
        self._frame.tell(Accepted(attempt_id=state.attempt_id))
        return None

    def _reserve(self, state: RequestState) -> RefuseReason | None:
        if not self._scheduler.reserve(state):
            # Revoked blocks come when their reads have ended, for this request's next attempt; only
            # the growth that was expected of them is forgone at once.
            self._on_revoked(self._scheduler.revoke_for(state))
            if not self._scheduler.reserve(state):
                return RefuseReason.NO_BLOCKS
        self._attempts.add(state)
        self._frame.tell(replies.reserved(state))
        return None

    def _num_usable_tokens(self, state: RequestState, command: Arrived) -> int:
        """How many tokens' KV need not be computed here."""
        num_tokens = max(command.num_tokens, state.num_final_blocks * state.block_size)
        if command.first_token is not None and num_tokens >= state.num_tokens:
            return state.num_tokens
        # No block mixes what was read with what is computed here; and without a first token the
        # last prompt token must be computed.
        num_tokens = min(num_tokens, state.num_tokens - 1)
        return num_tokens - num_tokens % state.block_size

    # -- what a step brings --

    def _report(self, out: SchedulerOutput) -> None:
        """Tell what the scheduler decided; attempts that it ended are forgotten."""
        self._on_revoked(out.revoked)
        self._frame.on_preempted(len(out.preempted))
        for state in out.handed_back:
            self._hand_back(state, HandBackReason.PREEMPTED)
        for state in out.fetching:
            self._frame.tell(replies.fetch_reserved(state))
        for state in out.started:
            self._tell_started(state)
        for row in out.rows:
            if row.state.role is Role.PREFILL:
                self._frame.tell(
                    ChunkPlanned(attempt_id=row.state.attempt_id, start=row.start, end=row.end)
                )

    def _on_row_computed(
        self, row: ScheduledRow, drawn: tuple[int, ...] | None, now: float
    ) -> None:
        """`drawn` is None for a row that draws nothing, empty if its logits were not finite."""
        state = row.state
        if drawn == ():
            self._fail(state, now)
            return
        self._scheduler.cache_final_blocks(state, row.end)
        if drawn is None:
            return
        if state.role is Role.DECODE:
            self._append(state, drawn, None)
            state.is_token_in_slot = state.slot >= 0
            return
        finish_reason = state.append_token(drawn[0])
        self._scheduler.hold(state)
        self._frame.tell(replies.prefill_done(state, drawn[0], finish_reason))

    def _append(
        self, state: RequestState, token_ids: Iterable[int], finish_reason: FinishReason | None
    ) -> None:
        """Tokens of a decode are known: report them, end it if they end the answer."""
        first_position = state.num_tokens - state.num_prompt_tokens
        taken: list[int] = []
        for token_id in token_ids:
            taken.append(token_id)
            finish_reason = state.append_token(token_id) or finish_reason
            if finish_reason is not None:
                break
        self._report_tokens(state, first_position, tuple(taken), finish_reason)

    def _fail(self, state: RequestState, now: float) -> None:
        """The logits were not finite: the request fails, nothing of its chain stays cached or is read.

        Only a row that draws is looked at. What is not finite may come from a chunk before it, from
        the prefix that it found here or at a peer, or from its source: any of them is in the cache by
        then. So the whole chain goes, from its first block on, and with it every other conversation of
        this tenant that begins with the same block: they are computed again. To spare the beginning that
        they share would have them fail in turn where that is what is damaged, or answer wrongly.
        """
        self._scheduler.forget_chain(state)
        if state.block_hashes:
            self._failed_chains.note(state.block_hashes[0], now)
            for other in self._attempts:
                if other.block_hashes[:1] == state.block_hashes[:1]:
                    other.num_offered_tokens = 0
        if state.role is Role.PREFILL:
            self._end(state)
            self._frame.tell(replies.given_back(state, FinishReason.INVALID_OUTPUT))
        else:
            first_position = state.num_tokens - state.num_prompt_tokens
            self._report_tokens(state, first_position, (), FinishReason.INVALID_OUTPUT)

    def _report_tokens(
        self,
        state: RequestState,
        first_position: int,
        token_ids: tuple[int, ...],
        finish_reason: FinishReason | None,
    ) -> None:
        run = TokenRun(
            first_position=first_position, token_ids=token_ids, finish_reason=finish_reason
        )
        self._frame.tell(replies.tokens_ready(state, run))
        state.is_cached_reported = True
        if finish_reason is not None:
            self._end(state)

    # -- attempts --

    def _tell_started(self, state: RequestState) -> None:
        """`state` runs from here: whoever reads from a prefill may read what it found."""
        if state.role is Role.PREFILL:
            self._frame.tell(replies.prefill_started(state))

    def _find_reserved(self, attempt_id: AttemptId) -> RequestState | None:
        """A live decode that reads from its source."""
        state = self._attempts.find(Role.DECODE, attempt_id)
        if state is None or state.status is not RequestStatus.WAITING_FOR_REMOTE_KV:
            return None
        return state if state.has_source else None

    def _find_fetching(self, attempt_id: AttemptId) -> RequestState | None:
        """A live attempt, in either role, that reads from a peer."""
        states = (self._attempts.find(role, attempt_id) for role in Role)
        return next((state for state in states if state is not None and state.is_fetching), None)

    def _end(self, state: RequestState) -> None:
        self._attempts.remove(state)
        self._scheduler.end(state)

    def _end_at_or_below(self, role: Role, attempt_id: AttemptId) -> None:
        state = self._attempts.find_up_to(role, attempt_id)
        if state is not None:
            self._end(state)

    def _hand_back(self, state: RequestState, reason: HandBackReason) -> None:
        """`state` has ended here without an answer: its request goes back to the router."""
        self._attempts.remove(state)
        self._frame.tell(replies.given_back(state, reason))

    def _on_revoked(self, states: Iterable[RequestState]) -> None:
        """Their blocks were taken back, and stay until ReadEnded. A fetch's attempt goes on."""
        for state in states:
            if state.has_source:
                self._attempts.remove(state)
            self._frame.tell(Revoked(attempt_id=state.attempt_id))

    # -- copying and checking --

    def fork(self) -> Core:
        """An independent copy, as it stands: for exploring what may happen."""
        other = Core(self._config, self._namespace_seed)
        other._cache = copy.deepcopy(self._cache)
        other._scheduler, copies = self._scheduler.fork(other._cache)
        other._attempts = self._attempts.fork(copies)
        other._failed_chains = self._failed_chains.fork()
        other._is_draining = self._is_draining
        other._step = self._step
        other._arrived_blocks = dict(self._arrived_blocks)
        other._rows_in_flight = [
            dataclasses.replace(row, state=copies[row.state]) for row in self._rows_in_flight
        ]
        other._frame = self._frame.fork()
        return other

    def key(self) -> tuple[object, ...]:
        """A hashable value, equal for cores that will behave alike.

        Block ids are named by who holds them first, cached blocks by hash in order of eviction; step
        numbers, times and counters are left out.
        """
        states = sorted(self._scheduler.states(), key=lambda state: (state.role, state.attempt_id))
        names: dict[BlockId, int] = {}

        def name(block_id: BlockId) -> int:
            return names.setdefault(block_id, len(names))

        return (
            tuple(state.key(tuple(map(name, state.block_ids))) for state in states),
            self._scheduler.reservations.key(name),
            self._scheduler.prefix_locks.key(name),
            tuple((value, names.get(block_id, -1)) for value, block_id in self._cache.contents()),
            self._cache.eviction_key(),
            self._attempts.key(),
            self._failed_chains.key(),
            self._is_draining,
            tuple((row.state.attempt_id, row.state.role, row.end) for row in self._rows_in_flight),
            self._frame.replies,
        )

    def validate(self) -> None:
        """Raise AssertionError if any invariant is broken. O(blocks + tokens)."""
        self._cache.validate()
        self._scheduler.validate()
        self._attempts.validate()
        states = self._scheduler.states()
        live = {state for state in states if state.status is not RequestStatus.FINISHED}
        assert live == set(self._attempts), (live, tuple(self._attempts))
        in_flight = Counter(row.state for row in self._rows_in_flight)
        assert all(state.num_in_flight == in_flight[state] for state in live), in_flight
        ledger = self.ledger()
        assert ledger.num_free + ledger.num_cached + ledger.num_referenced == ledger.num_total

    def _check(self) -> None:
        if self._config.is_checked:
            self.validate()
