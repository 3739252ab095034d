"""A cluster without a model: the product's dispatcher, index and cores under a virtual clock.

    trace -> Dispatcher -> (delay) -> Core of each worker -> frames -> (delay) -> Dispatcher, PrefixIndex

Real here: placement, queues, refusals, the prefix index fed by each worker's published set, scheduling,
chunks, caches and their eviction, prefix locks, fetch reservations. Modelled: how long a step takes and
how long bytes travel (Pace), both known to the router as if they had been measured. Every worker prefills
what it decodes; a prefix that another one holds is read from it if the router names a peer.

What it deliberately leaves out: the workers' own choice to load or recompute (a named peer is read
from), handoffs, failures.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial

from moonpool import native
from moonpool.core.config import CoreConfig
from moonpool.core.core import Core
from moonpool.core.protocol import (
    Abort,
    Command,
    CoreFrame,
    Decode,
    FetchEnded,
    FetchReserved,
    HandedBack,
    LockPrefix,
    PrefixLocked,
    ReadEnded,
    Refused,
    Revoked,
    TokensReady,
    UnlockPrefix,
)
from moonpool.core.step import StepPlan, StepResult
from moonpool.dispatch.config import DispatchConfig
from moonpool.dispatch.dispatcher import Dispatcher
from moonpool.dispatch.effects import DispatchEffect, EndRequest, SendAbort, SendDecode
from moonpool.dispatch.events import (
    DispatchEvent,
    LoadReported,
    RequestArrived,
    WorkerJoined,
    WorkerMessageReceived,
)
from moonpool.handoff.messages import DecodeRequest, PeerPrefix
from moonpool.ids import AttemptId, Incarnation, RequestId, WorkerId, WorkerKey
from moonpool.inference.request import InferenceRequest
from moonpool.inference.sampling import SamplingParams
from moonpool.kv.block_hash import ModelNamespace
from moonpool.kv.namespace_seeds import NamespaceSeeds
from moonpool.kv.prefix_index import PrefixIndex
from moonpool.kv.published_set import EventBatch, PublishedSet
from moonpool.latency.costs import DecodeCost, PrefillCost, TransferCost
from moonpool.routing.config import RoutingConfig
from moonpool.routing.prefix_matcher import PrefixMatcher
from moonpool.routing.worker_view import WorkerFits, WorkerInfo, WorkerLoad, WorkerRole
from moonpool_loadtest.replay.trace import BLOCK_TOKENS, SCALE, TraceRequest

_NAMESPACE = ModelNamespace(
    model_fingerprint="trace", compute_dtype="none", kv_dtype="none", block_size=BLOCK_TOKENS
)
_SECRET = b"replay"
#: Tokens behind the last block of a prompt: the last token is always computed, so that all blocks can hit.
_SPARE_TOKENS = 1
#: Llama-3-70B in bfloat16: 80 layers, 8 KV heads of 128.
_BYTES_PER_TOKEN = 327_680 * SCALE
_NEVER_S = 1e9


@dataclass(frozen=True, slots=True, kw_only=True)
class Pace:
    """How long things take, in seconds, for tokens of the unscaled trace."""

    #: A step without tokens.
    step_s: float = 0.02
    #: Prefill, tokens per second.
    prefill_rate: float = 16_000.0
    #: One way, router to worker or back.
    message_s: float = 0.001
    #: Reads of a peer's blocks: 100 Gbit/s.
    fetch: TransferCost = field(
        default_factory=lambda: TransferCost(latency_s=0.005, bytes_per_s=12.5e9)
    )

    def step(self, num_tokens: int) -> float:
        return self.step_s + num_tokens * SCALE / self.prefill_rate

    def fits(self, config: CoreConfig, peers: Sequence[WorkerKey]) -> WorkerFits:
        """The same as a worker would have learnt it."""
        return WorkerFits(
            prefill=PrefillCost(
                base_s=self.step_s,
                per_token_s=SCALE / self.prefill_rate,
                per_work_s=0.0,
                max_step_tokens=config.max_num_batched_tokens,
            ),
            decode=DecodeCost(
                base_s=self.step_s, per_context_token_s=0.0, per_request_s=SCALE / self.prefill_rate
            ),
            transfers=tuple((peer, self.fetch) for peer in peers),
        )


@dataclass(slots=True, kw_only=True)
class Tally:
    """What became of the prompts' blocks."""

    num_requests: int = 0
    num_failed: int = 0
    num_blocks: int = 0
    #: Blocks that the worker's own pool had, and those that it read from a peer.
    num_device_hits: int = 0
    num_peer_hits: int = 0
    ttft_s: list[float] = field(default_factory=list)

    @property
    def hit_ratio(self) -> float:
        return (self.num_device_hits + self.num_peer_hits) / max(self.num_blocks, 1)


class _Worker:
    """One core, its published set, and when it is busy."""

    def __init__(self, key: WorkerKey, core: Core) -> None:
        self.key = key
        self.core = core
        self.published = PublishedSet()
        self.commands: list[Command] = []
        self.plan: StepPlan | None = None
        #: Peers named for attempts that have not asked for a fetch.
        self.peers: dict[AttemptId, PeerPrefix] = {}


class ReplayCluster:
    """See the file's head.

    Args:
        routing: The policy to try, and whether peers are named.
    """

    def __init__(
        self, *, num_workers: int, core: CoreConfig, routing: RoutingConfig, pace: Pace
    ) -> None:
        self._core_config = core
        self._pace = pace
        self._index = PrefixIndex(native.kernels().key_table())
        self._matcher = PrefixMatcher(self._index, _SECRET)
        self._matcher.adopt(_NAMESPACE)
        self._dispatcher = Dispatcher(
            DispatchConfig(routing=routing, max_queued_requests=1_000_000, max_attempts=1_000_000),
            match=self._matcher,
        )
        self._arrived_s: dict[RequestId, float] = {}
        #: (time, order, what happens then).
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._order = itertools.count()
        self._now = 0.0
        self._wake_at = _NEVER_S
        self._read_ids = itertools.count(1)
        #: Reads of prefixes by number: the reader, the holder, and what is wanted.
        self._fetches: dict[int, tuple[_Worker, _Worker, FetchReserved]] = {}
        self.tally = Tally()
        seeds = NamespaceSeeds(_NAMESPACE, _SECRET)
        keys = [
            WorkerKey(WorkerId(f"worker-{number}"), Incarnation(f"{number:016x}"))
            for number in range(num_workers)
        ]
        self._workers = {key: _Worker(key, Core(core, seeds)) for key in keys}
        for key in keys:
            self._index.join(key)
            info = WorkerInfo(
                key=key,
                role=WorkerRole.DECODE,
                address=key.worker_id,
                block_size=BLOCK_TOKENS,
                bytes_per_token=_BYTES_PER_TOKEN,
                num_layers=80,
            )
            self._dispatch(WorkerJoined(info=info))
            load = WorkerLoad(
                num_total_blocks=core.num_blocks,
                num_available_blocks=core.num_blocks,
                num_free_blocks=core.num_blocks,
                fits=pace.fits(core, [peer for peer in keys if peer != key]),
            )
            self._dispatch(LoadReported(key=key, load=load))

    def run(self, requests: Sequence[TraceRequest], *, on_progress: Callable[[int], None]) -> Tally:
        """Replay all of them; returns what became of them."""
        for number, request in enumerate(requests):
            self._at(request.arrived_s, partial(self._arrive, number, request, on_progress))
        while self._events:
            self._now, _, act = heapq.heappop(self._events)
            act()
        return self.tally

    # -- requests --

    def _arrive(
        self, number: int, traced: TraceRequest, on_progress: Callable[[int], None]
    ) -> None:
        prompt = [block_id for block_id in traced.block_ids for _ in range(BLOCK_TOKENS)]
        request = InferenceRequest(
            request_id=RequestId(f"r{number:06}"),
            model="trace",
            prompt_token_ids=(*prompt, *[0] * _SPARE_TOKENS),
            sampling=SamplingParams(max_tokens=traced.num_output_tokens, seed=0),
            arrival_unix_s=self._now,
        )
        self._arrived_s[request.request_id] = self._now
        self.tally.num_requests += 1
        self.tally.num_blocks += traced.num_blocks
        on_progress(number + 1)
        self._dispatch(RequestArrived(request=request, deadline_s=_NEVER_S))

    def _dispatch(self, event: DispatchEvent) -> None:
        self._perform(self._dispatcher.handle(event, self._now))
        self._plan_wakeup()

    def _plan_wakeup(self) -> None:
        wake_at = self._dispatcher.next_wakeup(self._now)
        if wake_at is not None and (wake_at < self._wake_at or self._wake_at <= self._now):
            self._wake_at = wake_at
            if wake_at < _NEVER_S:
                self._at(max(wake_at, self._now), self._wake)

    def _wake(self) -> None:
        self._wake_at = _NEVER_S
        self._perform(self._dispatcher.tick(self._now))
        self._plan_wakeup()

    def _perform(self, effects: Iterable[DispatchEffect]) -> None:
        for effect in effects:
            match effect:
                case SendDecode(key=key, message=message):
                    worker = self._workers[key]
                    self._later(self._pace.message_s, partial(self._decode, worker, message))
                case SendAbort(key=key, message=abort):
                    command = Abort(attempt_id=abort.attempt_id)
                    worker = self._workers[key]
                    self._later(self._pace.message_s, partial(self._tell, worker, command))
                case EndRequest(request_id=request_id, error=error):
                    self.tally.num_failed += error is not None
                    self._matcher.forget(request_id)
                case _:
                    pass

    # -- workers --

    def _decode(self, worker: _Worker, message: DecodeRequest) -> None:
        peer = message.peer
        if peer is not None:
            worker.peers[message.attempt_id] = peer
        self._tell(
            worker,
            Decode(
                request=message.request,
                attempt=message.attempt,
                has_source=False,
                num_peer_tokens=peer.num_tokens if peer is not None else 0,
            ),
        )

    def _tell(self, worker: _Worker, command: Command) -> None:
        worker.commands.append(command)
        if worker.plan is None:
            self._step(worker)

    def _step(self, worker: _Worker) -> None:
        """The engine's loop, once: commands, plan, frame."""
        commands, worker.commands = worker.commands, []
        for command in commands:
            worker.core.handle(command, self._now)
        worker.plan = worker.core.schedule(self._now)
        self._on_frame(worker, worker.core.take_frame())
        if worker.plan is not None:
            self._later(self._pace.step(worker.plan.num_tokens), partial(self._computed, worker))

    def _computed(self, worker: _Worker) -> None:
        plan, worker.plan = worker.plan, None
        assert plan is not None
        tokens = tuple((1,) for row in plan.rows if row.sample is not None)
        worker.core.update(StepResult(step=plan.step, tokens=tokens), self._now)
        self._step(worker)

    def _on_frame(self, worker: _Worker, frame: CoreFrame) -> None:
        batch = worker.published.apply(frame.cache_events)
        if batch is not None:
            self._later(self._pace.message_s, partial(self._follow, worker.key, batch))
        for reply in frame.replies:
            match reply:
                case FetchReserved():
                    self._open(worker, reply)
                case PrefixLocked():
                    self._read(reply)
                case Revoked(attempt_id=attempt_id):
                    self._tell_soon(worker, ReadEnded(attempt_id=attempt_id))
                case TokensReady() | Refused() | HandedBack():
                    self._later(self._pace.message_s, partial(self._on_reply, worker, reply))
                case _:
                    pass
        ledger = frame.ledger
        load = WorkerLoad(
            num_total_blocks=ledger.num_total,
            num_available_blocks=ledger.num_free + ledger.num_cached,
            num_free_blocks=ledger.num_free,
            num_requests=ledger.num_running + ledger.num_waiting + ledger.num_reserved,
            num_queued_tokens=frame.num_queued_tokens,
        )
        self._later(
            self._pace.message_s, partial(self._dispatch, LoadReported(key=worker.key, load=load))
        )

    def _follow(self, key: WorkerKey, batch: EventBatch) -> None:
        needs_snapshot = self._index.apply(key, batch)
        assert not needs_snapshot, "nothing is lost here, so nothing can be missing"

    def _on_reply(self, worker: _Worker, reply: TokensReady | Refused | HandedBack) -> None:
        if isinstance(reply, TokensReady) and reply.num_cached_tokens is not None:
            worker.peers.pop(reply.attempt_id, None)
            num_peer_tokens = reply.num_peer_tokens or 0
            tally = self.tally
            tally.num_peer_hits += num_peer_tokens // BLOCK_TOKENS
            tally.num_device_hits += (reply.num_cached_tokens - num_peer_tokens) // BLOCK_TOKENS
            tally.ttft_s.append(self._now - self._arrived_s[reply.attempt_id.request_id])
        self._dispatch(WorkerMessageReceived(key=worker.key, message=reply))

    # -- reads of a peer's prefix --

    def _open(self, worker: _Worker, reserved: FetchReserved) -> None:
        peer = worker.peers.pop(reserved.attempt_id)
        holder = self._workers[peer.key]
        read_id = next(self._read_ids)
        self._fetches[read_id] = (worker, holder, reserved)
        command = LockPrefix(read_id=read_id, hashes=reserved.hashes)
        self._later(self._pace.message_s, partial(self._tell, holder, command))

    def _read(self, locked: PrefixLocked) -> None:
        worker, holder, reserved = self._fetches.pop(locked.read_id)
        num_tokens = max(len(locked.block_ids) * BLOCK_TOKENS, reserved.num_cached_tokens)

        def end() -> None:
            self._tell(holder, UnlockPrefix(read_id=locked.read_id))
            self._tell(worker, FetchEnded(attempt_id=reserved.attempt_id, num_tokens=num_tokens))

        num_bytes = (num_tokens - reserved.num_cached_tokens) * _BYTES_PER_TOKEN
        self._later(self._pace.fetch.predict(num_bytes), end)

    # -- time --

    def _tell_soon(self, worker: _Worker, command: Command) -> None:
        self._later(0.0, partial(self._tell, worker, command))

    def _later(self, delay_s: float, act: Callable[[], None]) -> None:
        self._at(self._now + delay_s, act)

    def _at(self, time_s: float, act: Callable[[], None]) -> None:
        heapq.heappush(self._events, (time_s, next(self._order), act))
