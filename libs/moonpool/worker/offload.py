"""KvOffload: offers this worker's blocks to the stores of the cluster. The IO of tiering/offloader.py.

    core's events --------> Offloader <--- announcements --- bus
    readers' leases ------> |       |
                            v       |
                      Store.Put ----+  answers, failures         a few at a time, each with a deadline

Nothing waits for it: it takes no part in any request, and ends with its worker. When that drains, nothing
is offered any more, since nothing is lent to readers either.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable

import structlog

from moonpool.bus.protocol import Bus
from moonpool.clock import Clock
from moonpool.errors import MoonpoolError
from moonpool.handoff.events import (
    HandoffEvent,
    PrefixLeaseClosed,
    PrefixOpenReceived,
    RouterMessageReceived,
)
from moonpool.handoff.messages import DecodeRequest, LeaseId, PrefillRequest, SourceRef
from moonpool.inference.request import InferenceRequest
from moonpool.kv.block_hash import NamespaceSeed, hash_blocks
from moonpool.kv.events import CacheEvent
from moonpool.routing.worker_view import WorkerRole
from moonpool.rpc.metadata import call_metadata
from moonpool.rpc.store import offer_blocks
from moonpool.tiering.live_stores import StoreAnnounced
from moonpool.tiering.offloader import BeginPut, Offloader, OffloaderConfig, PutOutcome
from moonpool.wire.control import ReceivedAnnounce
from moonpool.wire.store import PutOffer
from moonpool.worker.books import WorkerBooks
from moonpool.worker.peers import PeerDirectory

log = structlog.get_logger("moonpool.worker")

#: For a store's answer, the connection to it included: it has nothing to read before.
ANSWER_S = 2.0


class KvOffload:
    """On one loop.

    Args:
        source: This worker, where stores reach it.
        peers: The connections to stores are those by which blocks are read from them.
        namespace_seed: The start of a request's block hash chain, as the core has it.
    """

    def __init__(
        self,
        *,
        source: SourceRef,
        peers: PeerDirectory,
        rpc_key: str,
        books: WorkerBooks,
        clock: Clock,
        namespace_seed: Callable[[InferenceRequest], NamespaceSeed],
        block_size: int,
        config: OffloaderConfig | None = None,
        is_checked: bool = False,
    ) -> None:
        self._config = config or OffloaderConfig()
        self._machine = Offloader(self._config)
        self._source = source
        self._peers = peers
        self._metadata = call_metadata(key=rpc_key)
        self._books = books
        self._clock = clock
        self._namespace_seed = namespace_seed
        self._block_size = block_size
        self._is_checked = is_checked
        self._is_stopped = False
        self._wakeup = asyncio.Event()
        #: When `run` looks again by itself; None: not before it is woken.
        self._due_at: float | None = None
        self._num_missed_blocks = 0

    # -- from the bus and the worker's shell; each returns at once --

    def on_announced(self, announce: ReceivedAnnounce) -> None:
        """Someone lives, or leaves."""
        if announce.role is not WorkerRole.STORE:
            return
        announced = StoreAnnounced(
            key=announce.worker,
            address=announce.grpc_address,
            sequence=announce.sequence,
            valid_for_s=announce.valid_for_s,
            is_leaving=announce.is_leaving or announce.load.is_draining,
        )
        if self._machine.on_announced(announced, self._clock.now()):
            self._wakeup.set()

    def take(self, events: Iterable[CacheEvent]) -> None:
        """The cache has changed."""
        now = self._clock.now()
        self._machine.on_cache_events(events, now)
        # What is new is due no sooner than after a quiet time.
        if self._due_at is None or self._due_at > now + self._config.quiet_s:
            self._wakeup.set()

    def saw(self, event: HandoffEvent) -> None:
        """Something came from a router or a reader, before the machines of the handoff take it."""
        match event:
            case PrefixOpenReceived(lease_id=lease_id, open=open_):
                self._machine.on_read_begun(lease_id, open_.reader, open_.hashes)
            case PrefixLeaseClosed(lease_id=lease_id):
                self.read_ended(lease_id)
            case RouterMessageReceived(message=PrefillRequest() | DecodeRequest() as message):
                self._note_tenant(message.request)
            case _:
                pass

    def read_ended(self, lease_id: LeaseId) -> None:
        """A reader's lease is over. May come twice."""
        self._machine.on_read_ended(lease_id, self._clock.now())
        self._wakeup.set()

    def stop(self) -> None:
        """Offer nothing any more."""
        self._is_stopped = True

    def set_gauges(self) -> None:
        """Bring the books up to date with what waits now."""
        self._note_missed()
        self._books.offload(
            num_waiting=self._machine.num_waiting,
            num_puts=self._machine.num_puts,
            breakers=self._machine.breaker_states(self._clock.now()),
        )

    # -- beside it --

    async def run(self, bus: Bus) -> None:
        """Offer what is due to the stores that `on_announced` has heard of, until cancelled."""
        bus.on_connection(self._on_connection)
        async with asyncio.TaskGroup() as tasks:
            while True:
                self._wakeup.clear()
                now = self._clock.now()
                effects = () if self._is_stopped else self._machine.tick(now)
                for effect in effects:
                    tasks.create_task(self._put(effect), name=f"put {effect.store.key.worker_id}")
                if self._is_checked:
                    self._machine.validate()
                self._note_missed()
                self._due_at = None if self._is_stopped else self._machine.next_due(now)
                wait_s = None if self._due_at is None else max(self._due_at - now, 0.0)
                try:
                    async with asyncio.timeout(wait_s):
                        await self._wakeup.wait()
                except TimeoutError:
                    continue

    def _on_connection(self, is_connected: bool) -> None:
        self._machine.on_bus_changed(is_connected, self._clock.now())
        self._wakeup.set()

    async def _put(self, effect: BeginPut) -> None:
        store = effect.store
        try:
            async with asyncio.timeout(ANSWER_S):
                peer = await self._peers.get(SourceRef(key=store.key, address=store.address))
                answer = await offer_blocks(
                    peer.store_stub,
                    PutOffer(
                        store=store.key,
                        tenant=effect.tenant,
                        hashes=effect.hashes,
                        source=self._source,
                        deadline_s=self._config.read_s,
                    ),
                    metadata=self._metadata,
                    timeout_s=ANSWER_S,
                )
        except MoonpoolError as error:
            self._failed(effect, error.message)
        except TimeoutError:
            self._failed(effect, f"No answer in {ANSWER_S:g} s.")
        except asyncio.CancelledError:
            # The connection was dropped under it, or this worker ends.
            self._failed(effect, "The connection was closed.")
            raise
        else:
            outcome = self._machine.on_answered(
                effect.put_id,
                num_wanted_blocks=answer.num_wanted_blocks,
                refusal=answer.refusal,
                now=self._clock.now(),
            )
            self._books.offloaded(outcome, num_wanted_blocks=answer.num_wanted_blocks)
            if outcome is PutOutcome.REFUSED and answer.refusal is not None:
                log.info("kv.put_refused", store=str(store.key), why=answer.refusal.value)
        self._wakeup.set()

    def _failed(self, effect: BeginPut, why: str) -> None:
        log.info("kv.put_failed", store=str(effect.store.key), why=why)
        outcome = self._machine.on_failed(effect.put_id, self._clock.now())
        self._books.offloaded(outcome, num_wanted_blocks=0)
        self._wakeup.set()

    def _note_tenant(self, request: InferenceRequest) -> None:
        """Whose the chain is that begins with this request's first block."""
        first_tokens = request.prompt_token_ids[: self._block_size]
        if len(first_tokens) < self._block_size:
            first_tokens = request.token_ids[: self._block_size]
        for root in hash_blocks(self._namespace_seed(request), first_tokens, self._block_size):
            self._machine.note_root(root, request.tenant)

    def _note_missed(self) -> None:
        num_missed_blocks = self._machine.num_missed_blocks
        self._books.offload_missed(num_missed_blocks - self._num_missed_blocks)
        self._num_missed_blocks = num_missed_blocks
