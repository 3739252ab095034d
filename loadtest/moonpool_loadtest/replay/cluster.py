"""A cluster without a model: the product's dispatcher, index, cores and stores under a virtual clock.

    trace -> Dispatcher -> (delay) -> Core of each worker -> frames -> (delay) -> Dispatcher, PrefixIndex
                                        | offers  ^ reads
                                        v         |
                                      StoreCore of each store -> frames -> (delay) -> PrefixIndex

Real here: placement, queues, refusals, the prefix index fed by each node's published set, scheduling,
chunks, caches and their eviction, prefix locks, fetch reservations, offers, homes, puts. Modelled: how
long a step takes and how long bytes travel (Pace), both known to the router as if they had been measured.
Every worker prefills what it decodes; a prefix that another one, or a store, holds is read from it if
the router names it.

What it deliberately leaves out: the workers' own choice to load or recompute (who is named is read
from), handoffs, disks, failures.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial

from moonpool import native
from moonpool.core.config import CoreConfig
from moonpool.core.core import Core
from moonpool.core.protocol import Abort, TokensReady
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
from moonpool.ids import Incarnation, RequestId, WorkerId, WorkerKey
from moonpool.inference.request import InferenceRequest
from moonpool.inference.sampling import SamplingParams
from moonpool.kv.block_hash import ModelNamespace
from moonpool.kv.namespace_seeds import NamespaceSeeds
from moonpool.kv.prefix_index import PrefixIndex
from moonpool.kv.published_set import EventBatch
from moonpool.routing.config import RoutingConfig
from moonpool.routing.prefix_matcher import PrefixMatcher
from moonpool.routing.worker_view import WorkerInfo, WorkerLoad, WorkerRole
from moonpool.tiering.config import StoreConfig
from moonpool.tiering.store_core import StoreCore
from moonpool_loadtest.replay.pace import BYTES_PER_TOKEN, NUM_LAYERS, Pace, Tally
from moonpool_loadtest.replay.prefix_reads import PrefixReads
from moonpool_loadtest.replay.store_node import StoreNode
from moonpool_loadtest.replay.trace import BLOCK_TOKENS, TraceRequest
from moonpool_loadtest.replay.virtual_time import NEVER_S, Alarm, VirtualTime
from moonpool_loadtest.replay.worker_node import RouterReply, WorkerNode

_NAMESPACE = ModelNamespace(
    model_fingerprint="trace", compute_dtype="none", kv_dtype="none", block_size=BLOCK_TOKENS
)
_SECRET = b"replay"
#: Tokens behind the last block of a prompt: the last token is always computed, so that all blocks can hit.
_SPARE_TOKENS = 1


class ReplayCluster:
    """See the file's head.

    Args:
        routing: The policy to try, and whether peers are named.
        stores: One store for each; none: workers have each other only.
    """

    def __init__(
        self,
        *,
        num_workers: int,
        core: CoreConfig,
        routing: RoutingConfig,
        pace: Pace,
        stores: Sequence[StoreConfig] = (),
    ) -> None:
        self._pace = pace
        self._time = VirtualTime()
        self._index = PrefixIndex(native.kernels().key_table())
        self._matcher = PrefixMatcher(self._index, _SECRET)
        self._matcher.adopt(_NAMESPACE)
        self._dispatcher = Dispatcher(
            DispatchConfig(routing=routing, max_queued_requests=1_000_000, max_attempts=1_000_000),
            match=self._matcher,
        )
        self._wakeup = Alarm(self._time, self._wake)
        self._arrived_s: dict[RequestId, float] = {}
        self.tally = Tally()
        reads = PrefixReads(self._time, pace)
        self._stores = {
            key: StoreNode(
                key,
                StoreCore(config),
                time=self._time,
                reads=reads,
                tally=self.tally,
                on_batch=self._on_batch,
            )
            for key, config in zip(_keys("store", len(stores)), stores, strict=True)
        }
        seeds = NamespaceSeeds(_NAMESPACE, _SECRET)
        self._workers = {
            key: WorkerNode(
                key,
                Core(core, seeds),
                time=self._time,
                pace=pace,
                reads=reads,
                tally=self.tally,
                stores=self._stores,
                on_batch=self._on_batch,
                on_load=self._on_load,
                on_reply=self._on_reply,
            )
            for key in _keys("worker", num_workers)
        }
        for key in self._stores:
            self._join(key, WorkerRole.STORE)
        for key, worker in self._workers.items():
            worker.meet(self._workers)
            self._join(key, WorkerRole.DECODE)
            peers = [peer for peer in (*self._workers, *self._stores) if peer != key]
            load = WorkerLoad(
                num_total_blocks=core.num_blocks,
                num_available_blocks=core.num_blocks,
                num_free_blocks=core.num_blocks,
                fits=pace.fits(core, peers),
            )
            self._dispatch(LoadReported(key=key, load=load))

    def run(self, requests: Sequence[TraceRequest], *, on_progress: Callable[[int], None]) -> Tally:
        """Replay all of them; returns what became of them."""
        for number, request in enumerate(requests):
            self._time.at(request.arrived_s, partial(self._arrive, number, request, on_progress))
        self._time.run()
        return self.tally

    def validate(self) -> None:
        """Check every store; raises AssertionError."""
        for store in self._stores.values():
            store.core.validate()

    # -- requests --

    def _join(self, key: WorkerKey, role: WorkerRole) -> None:
        self._index.join(key)
        info = WorkerInfo(
            key=key,
            role=role,
            address=key.worker_id,
            block_size=BLOCK_TOKENS,
            bytes_per_token=BYTES_PER_TOKEN,
            num_layers=NUM_LAYERS,
        )
        self._dispatch(WorkerJoined(info=info))

    def _arrive(
        self, number: int, traced: TraceRequest, on_progress: Callable[[int], None]
    ) -> None:
        prompt = [block_id for block_id in traced.block_ids for _ in range(BLOCK_TOKENS)]
        request = InferenceRequest(
            request_id=RequestId(f"r{number:06}"),
            model="trace",
            prompt_token_ids=(*prompt, *[0] * _SPARE_TOKENS),
            sampling=SamplingParams(max_tokens=traced.num_output_tokens, seed=0),
            arrival_unix_s=self._time.now,
        )
        self._arrived_s[request.request_id] = self._time.now
        self.tally.num_requests += 1
        self.tally.num_blocks += traced.num_blocks
        self.tally.num_tokens += request.num_tokens
        on_progress(number + 1)
        self._dispatch(RequestArrived(request=request, deadline_s=NEVER_S))

    def _dispatch(self, event: DispatchEvent) -> None:
        self._perform(self._dispatcher.handle(event, self._time.now))
        self._wakeup.set(self._dispatcher.next_wakeup(self._time.now))

    def _wake(self) -> None:
        self._perform(self._dispatcher.tick(self._time.now))
        self._wakeup.set(self._dispatcher.next_wakeup(self._time.now))

    def _perform(self, effects: Iterable[DispatchEffect]) -> None:
        for effect in effects:
            match effect:
                case SendDecode(key=key, message=message):
                    self._send(partial(self._workers[key].decode, message))
                case SendAbort(key=key, message=abort):
                    command = Abort(attempt_id=abort.attempt_id)
                    self._send(partial(self._workers[key].tell, command))
                case EndRequest(request_id=request_id, error=error, left=left):
                    self.tally.num_failed += error is not None
                    for prefix in left:
                        keys = self._matcher.keys_of(prefix.request, prefix.num_tokens)
                        self._index.expect(prefix.key, keys)
                    self._matcher.forget(request_id)
                case _:
                    pass

    # -- what the router hears, a message's time later --

    def _send(self, act: Callable[[], None]) -> None:
        self._time.later(self._pace.message_s, act)

    def _on_batch(self, key: WorkerKey, batch: EventBatch) -> None:
        self._send(partial(self._follow, key, batch))

    def _on_load(self, key: WorkerKey, load: WorkerLoad) -> None:
        self._send(partial(self._dispatch, LoadReported(key=key, load=load)))

    def _on_reply(self, key: WorkerKey, reply: RouterReply) -> None:
        self._send(partial(self._hear, key, reply))

    def _follow(self, key: WorkerKey, batch: EventBatch) -> None:
        needs_snapshot = self._index.apply(key, batch)
        assert not needs_snapshot, "nothing is lost here, so nothing can be missing"

    def _hear(self, key: WorkerKey, reply: RouterReply) -> None:
        if isinstance(reply, TokensReady) and reply.num_cached_tokens is not None:
            holder = self._workers[key].take_holder(reply.attempt_id)
            arrived_s = self._arrived_s.pop(reply.attempt_id.request_id, None)
            # A request that was preempted finds again what it computed: that is no hit.
            if arrived_s is not None:
                self.tally.ttft_s.append(self._time.now - arrived_s)
                self._count(holder, reply)
        self._dispatch(WorkerMessageReceived(key=key, message=reply))

    def _count(self, holder: WorkerKey | None, reply: TokensReady) -> None:
        """A request's first token has come: what of its prompt was not computed, and whence."""
        assert reply.num_cached_tokens is not None, reply
        tally, num_read_blocks = self.tally, reply.num_peer_tokens // BLOCK_TOKENS
        if holder in self._stores:
            tally.num_store_hits += num_read_blocks
        else:
            tally.num_peer_hits += num_read_blocks
        tally.num_device_hits += reply.num_cached_tokens // BLOCK_TOKENS - num_read_blocks


def _keys(name: str, number: int) -> list[WorkerKey]:
    return [
        WorkerKey(WorkerId(f"{name}-{index}"), Incarnation(f"{index:016x}"))
        for index in range(number)
    ]
