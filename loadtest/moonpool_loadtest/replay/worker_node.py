"""WorkerNode: a worker's core and its offers to stores, under virtual time.

There is no model: steps only take time.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

from moonpool.core.core import Core
from moonpool.core.protocol import (
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
from moonpool.handoff.messages import DecodeRequest
from moonpool.ids import AttemptId, BlockHash, WorkerKey
from moonpool.kv.published_set import EventBatch, PublishedSet
from moonpool.routing.worker_view import WorkerLoad
from moonpool.tiering.homes import HOME_BLOCKS
from moonpool.tiering.live_stores import StoreAnnounced
from moonpool.tiering.offloader import BeginPut, Offloader, OffloaderConfig
from moonpool.tiering.protocol import PutAnswered
from moonpool_loadtest.replay.pace import Pace, Tally
from moonpool_loadtest.replay.prefix_reads import PrefixReads
from moonpool_loadtest.replay.store_node import StoreNode
from moonpool_loadtest.replay.trace import SCALE
from moonpool_loadtest.replay.virtual_time import NEVER_S, Alarm, VirtualTime

#: As many tokens of the unscaled trace as in the product.
_HOME_BLOCKS = HOME_BLOCKS // SCALE

RouterReply = TokensReady | Refused | HandedBack


class WorkerNode:
    """One core, its published set, when it is busy, and what it offers to which store.

    Args:
        stores: Where to offer what it computes; none: it keeps that to itself.
        on_batch, on_load, on_reply: What the router hears; each with this node's key.
    """

    def __init__(
        self,
        key: WorkerKey,
        core: Core,
        *,
        time: VirtualTime,
        pace: Pace,
        reads: PrefixReads,
        tally: Tally,
        stores: Mapping[WorkerKey, StoreNode],
        on_batch: Callable[[WorkerKey, EventBatch], None],
        on_load: Callable[[WorkerKey, WorkerLoad], None],
        on_reply: Callable[[WorkerKey, RouterReply], None],
    ) -> None:
        self._key = key
        self.core = core
        self._time = time
        self._pace = pace
        self._reads = reads
        self._tally = tally
        self._stores = stores
        self._on_batch = on_batch
        self._on_load = on_load
        self._on_reply = on_reply
        self._workers: Mapping[WorkerKey, WorkerNode] = {}
        self._published = PublishedSet()
        self._commands: list[Command] = []
        self._plan: StepPlan | None = None
        #: Who was named for attempts that have not drawn a token.
        self._peers: dict[AttemptId, WorkerKey] = {}
        self._offloader = Offloader(OffloaderConfig(home_blocks=_HOME_BLOCKS))
        self._offers = Alarm(time, self._offer)
        self._offloader.on_bus_changed(True, time.now)
        for store in stores:
            announced = StoreAnnounced(
                key=store, address=store.worker_id, sequence=1, valid_for_s=NEVER_S
            )
            self._offloader.on_announced(announced, time.now)

    @property
    def key(self) -> WorkerKey:
        return self._key

    def meet(self, workers: Mapping[WorkerKey, WorkerNode]) -> None:
        """The other workers, this one among them."""
        self._workers = workers

    def decode(self, message: DecodeRequest) -> None:
        """The router's request has come."""
        peer = message.peer
        if peer is not None:
            self._peers[message.attempt_id] = peer.key
        self.tell(
            Decode(
                request=message.request,
                attempt=message.attempt,
                has_source=False,
                num_peer_tokens=peer.num_tokens if peer is not None else 0,
            )
        )

    def tell(self, command: Command) -> None:
        """Hand the core a command; it is handled when the running step has ended."""
        self._commands.append(command)
        if self._plan is None:
            self._step()

    def lend(self, read_id: int, reader: WorkerKey, hashes: tuple[BlockHash, ...]) -> None:
        self._offloader.on_read_begun(read_id, reader, hashes)
        self.tell(LockPrefix(read_id=read_id, hashes=hashes))

    def take_back(self, read_id: int) -> None:
        self.tell(UnlockPrefix(read_id=read_id))
        self._offloader.on_read_ended(read_id, self._time.now)
        self._offer()

    def end_fetch(self, ended: FetchEnded) -> None:
        self.tell(ended)

    def take_holder(self, attempt_id: AttemptId) -> WorkerKey | None:
        """Who was named for this attempt, which has drawn its first token; forgets it."""
        return self._peers.pop(attempt_id, None)

    # -- parts --

    def _step(self) -> None:
        """The engine's loop, once: commands, plan, frame."""
        commands, self._commands = self._commands, []
        for command in commands:
            self.core.handle(command, self._time.now)
        self._plan = self.core.schedule(self._time.now)
        self._on_frame(self.core.take_frame())
        if self._plan is not None:
            # A row without token ids goes on from the token that it drew.
            self._tally.num_computed_tokens += sum(len(row.token_ids) for row in self._plan.rows)
            self._time.later(self._pace.step(self._plan.num_tokens), self._computed)

    def _computed(self) -> None:
        plan, self._plan = self._plan, None
        assert plan is not None
        tokens = tuple((1,) for row in plan.rows if row.sample is not None)
        self.core.update(StepResult(step=plan.step, tokens=tokens), self._time.now)
        self._step()

    def _on_frame(self, frame: CoreFrame) -> None:
        batch = self._published.apply(frame.cache_events)
        if batch is not None:
            self._on_batch(self._key, batch)
        for reply in frame.replies:
            match reply:
                case FetchReserved():
                    self._reads.open(self, self._holder(self._peers[reply.attempt_id]), reply)
                case PrefixLocked():
                    self._reads.on_locked(reply)
                case Revoked(attempt_id=attempt_id):
                    ended = ReadEnded(attempt_id=attempt_id)
                    self._time.later(0.0, partial(self.tell, ended))
                case TokensReady() | Refused() | HandedBack():
                    self._on_reply(self._key, reply)
                case _:
                    pass
        ledger = frame.ledger
        self._on_load(
            self._key,
            WorkerLoad(
                num_total_blocks=ledger.num_total,
                num_available_blocks=ledger.num_free + ledger.num_cached,
                num_free_blocks=ledger.num_free,
                num_requests=ledger.num_running + ledger.num_waiting + ledger.num_reserved,
                num_queued_tokens=frame.num_queued_tokens,
            ),
        )
        if self._stores:
            self._offloader.on_cache_events(frame.cache_events, self._time.now)
            self._offer()

    def _holder(self, key: WorkerKey) -> WorkerNode | StoreNode:
        store = self._stores.get(key)
        return store if store is not None else self._workers[key]

    def _offer(self) -> None:
        for command in self._offloader.tick(self._time.now):
            self._time.later(self._pace.message_s, partial(self._put, command))
        self._offers.set(self._offloader.next_due(self._time.now))

    def _put(self, command: BeginPut) -> None:
        answered = partial(self._on_put_answered, command.put_id)
        self._stores[command.store.key].put(
            command,
            self,
            lambda answer: self._time.later(self._pace.message_s, partial(answered, answer)),
        )

    def _on_put_answered(self, put_id: int, answered: PutAnswered) -> None:
        self._offloader.on_answered(
            put_id,
            num_wanted_blocks=answered.num_wanted_blocks,
            refusal=answered.refusal,
            now=self._time.now,
        )
        self._offer()
