"""WorkerShell: a worker's service process between its engine, its routers and its peers.

                     routers (Session)          readers (Handoff, ReadPrefixes)
                          |  ^                      |  ^
    RouterSessions -------+  |     HandoffStreams --+  |         Everything here runs on one loop and
          |                  |     HolderLeases        |         meets in the handoff machines: events
          v   events         |          v              |         in, effects out (HandoffDriver).
    +-------------------------------------------------------+
    | HandoffDriver: WorkerHandoffs (roles, fetches, holds) |
    +-------------------------------------------------------+
       |         ^        ^            |             |
       v commands|frames  |LayersDone  v OpenStream  v StartRead
    EngineChannel     LayerBell     SourceStreams  KvReads ------ PeerDirectory -> transports

It owns no policy: what to do is the machines' and the core's, how to do it is the adapters'.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace

import structlog

from moonpool.clock import Clock
from moonpool.core.protocol import (
    Abort,
    Arrived,
    BlockLedger,
    ClearCache,
    Command,
    Decode,
    Drain,
    HandedBack,
    Prefill,
    PrefillFailed,
    Refused,
    Release,
    TokensReady,
)
from moonpool.failpoints import Failpoints
from moonpool.handoff.effects import (
    CloseStream,
    EndPrefixLease,
    EndStream,
    HandoffEffect,
    OpenStream,
    RecordFetch,
    SendCommand,
    SendOnPrefixLease,
    SendOnStream,
    SendToRouter,
    StagePrefix,
    StartRead,
    StopReads,
    TellAhead,
)
from moonpool.handoff.events import (
    CoreFrameReceived,
    HandoffEvent,
    LayersDone,
    ReadDone,
    RouterMessageReceived,
)
from moonpool.handoff.messages import (
    DecodeRequest,
    HolderMessage,
    LeaseId,
    Open,
    PrefixOpened,
    SourceRef,
)
from moonpool.handoff.room_check import RoomCheck
from moonpool.handoff.worker import WorkerHandoffs
from moonpool.ids import BlockHash
from moonpool.inference.request import InferenceRequest
from moonpool.kv.block_hash import NamespaceSeed
from moonpool.memory.worker_memory import WorkerMemory
from moonpool.native import Kernels
from moonpool.wire.engine_messages import TimedFrame
from moonpool.wire.worker import LedgerReport, WorkerHello
from moonpool.worker.attempt_book import AttemptBook
from moonpool.worker.books import WorkerBooks
from moonpool.worker.handoff_driver import HandoffDriver
from moonpool.worker.handoff_streams import HandoffStreams
from moonpool.worker.holder_leases import HolderLeases
from moonpool.worker.kv_publisher import KvPublisher
from moonpool.worker.kv_reads import KvReads
from moonpool.worker.layer_bell import LayerBell
from moonpool.worker.load import Load
from moonpool.worker.offload import KvOffload
from moonpool.worker.peers import PeerDirectory
from moonpool.worker.router_sessions import RouterSessions
from moonpool.worker.source_streams import SourceStreams
from moonpool.worker.step_fits import StepFits
from moonpool.worker.step_log import StepLog

log = structlog.get_logger("moonpool.worker")

#: `wait_quiet` looks again this often: the service's own counts change without a frame.
_QUIET_POLL_S = 0.05


class WorkerShell:
    """Wires one worker's parts together. Made on the loop, after the engine has been started.

    Args:
        hello: Who this worker is.
        send_command: To the core; never waits.
        peers: Sources that this worker reads from.
        rpc_key: The cluster's, for calls to peers.
        namespace_seed: The start of a request's block hash chain, as the core has it.
        offload: Who offers its blocks to stores; None: nobody.
        is_checked: Validate the machines after every event.
    """

    def __init__(
        self,
        *,
        hello: WorkerHello,
        memory: WorkerMemory,
        kernels: Kernels,
        handoffs: WorkerHandoffs,
        send_command: Callable[[Command], None],
        peers: PeerDirectory,
        rpc_key: str,
        books: WorkerBooks,
        failpoints: Failpoints,
        clock: Clock,
        namespace_seed: Callable[[InferenceRequest], NamespaceSeed],
        offload: KvOffload | None = None,
        stage: Callable[[tuple[BlockHash, ...]], None] | None = None,
        is_checked: bool = False,
    ) -> None:
        self.hello = hello
        self._handoffs = handoffs
        self._send_command = send_command
        self._stage = stage
        #: Sources that this worker reads from.
        self.peers = peers
        self._books = books
        self._failpoints = failpoints
        #: None: nothing is offered to stores.
        self.offload = offload
        self._is_draining = False
        self._ledger = BlockLedger(
            num_total=memory.layout.num_blocks,
            num_free=memory.layout.num_blocks,
            num_cached=0,
            num_referenced=0,
        )
        self._num_queued_tokens = 0
        #: Set at each frame of the core: what waits for a state of the ledger looks again.
        self._frame_seen = asyncio.Event()
        self._tasks: asyncio.TaskGroup | None = None
        self._is_running = asyncio.Event()

        first_layer = memory.layout.groups[0].first_layer
        self._book = AttemptBook(hello.worker.worker_id)
        #: The engine's last steps, for whoever measures it.
        self.steps = StepLog()
        #: What its steps and its reads from peers take.
        self.fits = StepFits(
            max_step_tokens=hello.max_num_batched_tokens,
            transfers=handoffs.fetches.chooser.transfer_costs,
        )
        self._driver = HandoffDriver(
            handoffs=handoffs, perform=self._perform, clock=clock, is_checked=is_checked
        )
        self._bell = LayerBell(memory=memory, kernels=kernels, on_layers=self._on_layers)
        #: What the cache holds, for routers.
        self.kv = KvPublisher(hello.worker, books=books, failpoints=failpoints)
        self._room = RoomCheck(
            namespace_seed=namespace_seed,
            num_held=self.kv.num_held,
            block_size=memory.layout.block_size,
            max_model_len=hello.max_model_len,
        )
        self.sessions = RouterSessions(load=self.load, handle=self._on_router_event, clock=clock)
        self.streams = HandoffStreams(
            leaf_digests=memory.leaf_digests,
            first_layer=first_layer,
            page_step=self._bell.begun_step,
        )
        self.holder_leases = HolderLeases(leaf_digests=memory.leaf_digests)
        self._block_bytes = memory.layout.block_bytes
        self._sources = SourceStreams(
            peers=peers, book=self._book, rpc_key=rpc_key, handle=self._driver.handle
        )
        self._reads = KvReads(
            peers=peers,
            leaf_digests=memory.leaf_digests,
            first_layer=first_layer,
            book=self._book,
            books=books,
            failpoints=failpoints,
            on_done=self._on_read_done,
        )

    async def run(self) -> None:
        """Serve until cancelled. Raises whatever is wrong with us, never with a peer."""
        async with asyncio.TaskGroup() as tasks:
            self._tasks = tasks
            self._bell.start()
            try:
                tasks.create_task(self.peers.run())
                self._is_running.set()
                await self._driver.run()
            finally:
                self._bell.stop()

    async def wait_running(self) -> None:
        """Until `run` has begun."""
        await self._is_running.wait()

    @property
    def tasks(self) -> asyncio.TaskGroup:
        """Where the tasks of streams live. While `run` runs."""
        assert self._tasks is not None, "run() has not begun"
        return self._tasks

    @property
    def book(self) -> AttemptBook:
        return self._book

    @property
    def failpoints(self) -> Failpoints:
        return self._failpoints

    # -- what is told --

    def load(self) -> Load:
        """The load as of the last frame; the step's age as of now."""
        return Load(
            ledger=self._ledger,
            num_queued_tokens=self._num_queued_tokens,
            step_age_ms=self._bell.step_age_ms,
            is_draining=self._is_draining,
            fits=self.fits.value(),
        )

    def ledger_report(self) -> LedgerReport:
        """Everything that is held, in both processes."""
        return LedgerReport(
            worker=self.hello.worker,
            ledger=self._ledger,
            num_handoffs=self._handoffs.num_entries,
            num_open_streams=len(self.streams) + len(self.holder_leases) + len(self._sources),
            num_reads=self._reads.num_open,
            num_router_sessions=len(self.sessions),
        )

    def set_gauges(self) -> None:
        """Bring the books up to date with what is held now."""
        self._books.gauges(self.ledger_report(), num_queued_tokens=self._num_queued_tokens)
        self._books.kv_published(self.kv.head.count)
        if self.offload is not None:
            self.offload.set_gauges()

    def clear_cache(self) -> None:
        """Have the core forget every cached block that nobody references."""
        self._send_command(ClearCache())

    # -- draining --

    def begin_drain(self) -> None:
        """Tell routers that new work should go elsewhere, and have the core refuse it."""
        if not self._is_draining:
            self._is_draining = True
            if self.offload is not None:
                self.offload.stop()
            self._send_command(Drain())
            self.sessions.load_changed()

    def hand_back(self) -> None:
        """Give back what runs, so that its routers place it elsewhere."""
        self._is_draining = True
        self._send_command(Drain(hand_back=True))

    async def wait_quiet(self) -> None:
        """Until nothing is held and nothing waits to be told."""
        while not (self.ledger_report().is_quiet and self.sessions.is_all_told):
            self._frame_seen.clear()
            try:
                async with asyncio.timeout(_QUIET_POLL_S):
                    await self._frame_seen.wait()
            except TimeoutError:
                continue

    # -- from the engine --

    def on_frame(self, timed: TimedFrame) -> None:
        """Take a frame of the core."""
        frame = timed.frame
        self._ledger = frame.ledger
        self._num_queued_tokens = frame.num_queued_tokens
        self.kv.take(frame.cache_events)
        if self.offload is not None and frame.cache_events:
            self.offload.take(frame.cache_events)
        self._book.core_frame(timed)
        overhead_s = self.steps.frame_received(timed)
        if overhead_s is not None:
            self._books.step_overhead(overhead_s, timed.shape)
        self.fits.frame_received(timed)
        self._handoffs.fetches.chooser.prefill_cost = self.fits.prefill_cost
        self._driver.handle(CoreFrameReceived(step=frame.step, replies=frame.replies))
        for reply in frame.replies:
            if isinstance(reply, PrefillFailed):
                self._book.end(reply.attempt_id)
        self.streams.frame_received(frame.step)
        self.sessions.load_changed()
        self._frame_seen.set()
        self._books.frame(frame)

    def _on_layers(self, event: LayersDone) -> None:
        self._driver.handle(event)

    # -- from the routers --

    def _on_router_event(self, event: HandoffEvent) -> None:
        match event:
            case RouterMessageReceived(
                message=DecodeRequest(request=request, source=SourceRef())
            ) if not self._is_draining and self._room.is_hopeless(request, self._ledger):
                event = replace(event, has_room=False)
        self.handle(event)

    # -- from the transports --

    def _on_read_done(self, event: ReadDone) -> None:
        if self._handoffs.fetches.is_reading(event.read_id.attempt_id):
            self._failpoints.hit("fetch.after_read", event.read_id.number + 1)
        else:
            self._failpoints.hit("decode.after_read", event.read_id.number + 1)
        self._driver.handle(event)

    # -- effects --

    def handle(self, event: HandoffEvent) -> None:
        """Give an event to the machines."""
        if self.offload is not None:
            self.offload.saw(event)
        self._driver.handle(event)

    def _tell_reader(self, lease_id: LeaseId, message: HolderMessage) -> None:
        """On its lease."""
        hit = (
            self._failpoints.hit("hold.before_opened")
            if isinstance(message, PrefixOpened)
            else None
        )
        fault, _, argument = (hit or "").partition(":")
        if fault == "delay":
            asyncio.get_running_loop().call_later(
                int(argument) / 1_000, self.holder_leases.send, lease_id, message
            )
        else:
            self.holder_leases.send(lease_id, message)

    def _perform(self, effect: HandoffEffect) -> None:
        match effect:
            case SendToRouter():
                self._report(effect)
            case SendCommand(command=command):
                self._command(command)
            case SendOnStream(stream_id=stream_id, message=message):
                self.streams.send(stream_id, message)
            case EndStream(stream_id=stream_id):
                self.streams.end(stream_id)
            case TellAhead():
                self._sources.tell_ahead(effect, self.tasks)
            case OpenStream(open=open_):
                if isinstance(open_, Open):
                    self._failpoints.hit("decode.after_reserve")
                else:
                    self._failpoints.hit("fetch.before_open")
                self._sources.open(effect, self.tasks)
            case CloseStream(attempt_id=attempt_id):
                self._sources.close(attempt_id)
            case StartRead():
                self._reads.start(effect, self.tasks)
            case StopReads(attempt_id=attempt_id):
                self._reads.stop(attempt_id)
            case SendOnPrefixLease(lease_id=lease_id, message=holder_message):
                self._tell_reader(lease_id, holder_message)
            case EndPrefixLease(lease_id=lease_id):
                self.holder_leases.end(lease_id)
                if self.offload is not None:
                    self.offload.read_ended(lease_id)
            case StagePrefix(hashes=hashes):
                if self._stage is not None:
                    self._stage(hashes)
            case RecordFetch():
                self._record_fetch(effect)

    def _record_fetch(self, fetch: RecordFetch) -> None:
        self._book.fetched(fetch)
        self._books.fetch(fetch, block_bytes=self._block_bytes)
        log.info(
            "kv.fetched",
            attempt=str(fetch.attempt_id),
            source=str(fetch.holder),
            outcome=fetch.outcome.value,
            num_wanted_blocks=fetch.num_wanted_blocks,
            num_blocks=fetch.num_blocks,
            elapsed_ms=round(fetch.elapsed_s * 1e3, 1),
            predicted_ms=round(fetch.predicted_s * 1e3, 1),
            recompute_ms=round(fetch.recompute_s * 1e3, 1),
            message=fetch.message,
        )

    def _command(self, command: Command) -> None:
        if isinstance(command, Prefill | Decode):
            self._book.begin(command)
        elif isinstance(command, Arrived):
            self._failpoints.hit("decode.before_admit")
            self._book.admitted(command.attempt_id)
        elif isinstance(command, Abort | Release):
            self._book.end(command.attempt_id)
        self._send_command(command)

    def _report(self, effect: SendToRouter) -> None:
        message = effect.message
        reported = self._book.reported(message)
        self.sessions.report(
            effect.router,
            message,
            is_prefill_side=reported.is_prefill_side,
            spans=reported.spans,
        )
        match message:
            case TokensReady(run=run):
                if not reported.is_prefill_side:
                    self._failpoints.hit("decode.after_token", run.end_position - 1)
            case Refused(reason=reason):
                self._books.refused(reason)
            case HandedBack(reason=back):
                self._books.handed_back(back)
                log.info("worker.handed_back", attempt=str(message.attempt_id), why=back.value)
