"""IndexFeed: workers' KV events and snapshots to the router's prefix index, and what it knows to placement.

    bus ------- KvEvents --------+
    bus ------- announced heads -+-> IndexFollower -> PrefixIndex <- PrefixMatcher <- placement
    dispatch -- joined, lost ----+        |                              |
    workers <-- Worker.Snapshot ----------+  one question at a time each |
    dispatch -- ended: what it left on whom ^                            |
    dispatch -- placed, ended --------------------------> ReuseBooks <---+

When to ask a worker is the machine's to say (dispatch/index_follower.py); this is its IO and its clock.
What cannot be read is dropped and counted, with a warning for each sender: the bus is anybody's.
"""

from __future__ import annotations

import asyncio
import logging
from concurrent.futures import Executor

import structlog

from moonpool.bus.protocol import Bus
from moonpool.bus.subjects import Subjects
from moonpool.bus.unreadable import UnreadableSenders
from moonpool.clock import Clock
from moonpool.dispatch.effects import EndRequest, Placement
from moonpool.dispatch.index_follower import AskReason, AskSnapshot, IndexFollower
from moonpool.dispatch.reuse_books import ReuseBooks, ReuseReport
from moonpool.errors import MoonpoolError
from moonpool.ids import WorkerKey
from moonpool.inference.request import InferenceRequest
from moonpool.kv.block_hash import ModelNamespace
from moonpool.kv.prefix_index import PrefixIndex
from moonpool.kv.published_set import SetHead, SetSnapshot
from moonpool.routing.prefix_matcher import PrefixMatcher
from moonpool.routing.worker_view import WorkerInfo
from moonpool.rpc.admin import fetch_snapshot
from moonpool.wire.kv_events import decode_kv_events
from moonpool_router.books import RouterBooks

#: A million blocks over a slow network.
ASK_TIMEOUT_S = 10.0
#: From here on keys are computed in a thread: on the loop they would take half a millisecond.
LONG_PROMPT_TOKENS = 8_192
#: The loop is everybody's: after so many batches in a row, a large one counted as several, others have
#: their turn.
_BATCHES_PER_TURN = 16
_KEYS_PER_BATCH = 1_024
_KEYS_PER_TURN = 4_096

log = structlog.get_logger("moonpool.router")


class IndexFeed:
    """See the file's head. On one loop.

    Args:
        matcher: Reads the follower's index.
        reuse: What was reused of what was asked; fed from here.
        key: The cluster's RPC key.
    """

    def __init__(
        self,
        follower: IndexFollower,
        matcher: PrefixMatcher,
        reuse: ReuseBooks,
        *,
        bus: Bus,
        subjects: Subjects,
        key: str,
        clock: Clock,
        books: RouterBooks,
    ) -> None:
        self._follower = follower
        self._matcher = matcher
        self._reuse = reuse
        self._bus = bus
        self._subjects = subjects
        self._key = key
        self._clock = clock
        self._books = books
        self._unreadable = UnreadableSenders()
        self._wakeup = asyncio.Event()
        #: Questions under way, by worker.
        self._asking: dict[WorkerKey, asyncio.Task[None]] = {}

    @property
    def index(self) -> PrefixIndex:
        """To be read."""
        return self._follower.index

    @property
    def reuse(self) -> ReuseReport:
        """What was reused of what was asked, since the router started."""
        return self._reuse.report()

    def set_gauges(self) -> None:
        """Bring the books up to date with what is known now."""
        index = self.index
        self._books.index({worker.worker_id: index.head(worker).count for worker in index.workers})

    # -- from the dispatch loop --

    def on_worker_joined(self, info: WorkerInfo, namespace: ModelNamespace) -> None:
        self._matcher.adopt(namespace)
        self._follower.on_joined(info, self._clock.now())
        self._wakeup.set()

    def on_worker_lost(self, key: WorkerKey) -> None:
        self._follower.on_lost(key)
        task = self._asking.pop(key, None)
        if task is not None:
            task.cancel()

    def on_placed(self, placement: Placement, request: InferenceRequest) -> None:
        if self._matcher.block_size:
            self._reuse.on_placed(
                placement,
                num_prompt_tokens=len(request.prompt_token_ids),
                keys=self._matcher.keys(request),
                block_size=self._matcher.block_size,
            )

    def on_request_ended(self, end: EndRequest) -> None:
        for left in end.left:
            self._follower.on_left(left.key, self._matcher.keys_of(left.request, left.num_tokens))
        self._matcher.forget(end.request_id)
        reuse = self._reuse.on_ended(end)
        if reuse is not None:
            self._books.reuse(reuse.counts)

    # -- from the pipeline --

    async def prepare(self, request: InferenceRequest, executor: Executor) -> None:
        """Compute a long prompt's keys off the loop. The request must be dispatched without a wait."""
        if request.num_tokens < LONG_PROMPT_TOKENS:
            return
        job = self._matcher.key_job(request)
        if job is not None:
            chain = await asyncio.get_running_loop().run_in_executor(executor, job.run)
            self._matcher.bring(request.request_id, job, chain)

    # -- from the bus --

    def on_announced(self, key: WorkerKey, head: SetHead) -> None:
        """A worker says what its published set is."""
        self._follower.on_head(key, head, self._clock.now())
        self._wakeup.set()

    async def run(self) -> None:
        """Listen, and ask when that is due. For ever."""
        self._bus.on_connection(self._on_connection)
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._listen(), name="kv events")
            while True:
                self._wakeup.clear()
                now = self._clock.now()
                for effect in self._follower.tick(now):
                    self._asking[effect.key] = tasks.create_task(
                        self._ask(effect), name=f"snapshot {effect.key.worker_id}"
                    )
                due_at = self._follower.next_due()
                try:
                    async with asyncio.timeout(None if due_at is None else max(due_at - now, 0.0)):
                        await self._wakeup.wait()
                except TimeoutError:
                    continue

    # -- parts --

    def _on_connection(self, is_connected: bool) -> None:
        self._follower.on_bus_changed(is_connected)
        self._wakeup.set()

    async def _listen(self) -> None:
        num_in_turn = 0
        async for message in await self._bus.subscribe(self._subjects.all_kv_events):
            try:
                events = decode_kv_events(message.data)
            except MoonpoolError as error:
                self._books.index_batch(is_readable=False)
                self._unreadable.note(message, error)
                continue
            self._books.index_batch(is_readable=True)
            self._follower.on_batch(events.worker, events.batch, self._clock.now())
            self._reuse.on_stored(events.batch.stored_keys)
            if self._follower.index.needs_snapshot(events.worker):
                self._wakeup.set()
            num_in_turn += 1 + events.batch.num_keys // _KEYS_PER_BATCH
            if num_in_turn >= _BATCHES_PER_TURN:
                num_in_turn = 0
                await asyncio.sleep(0)

    async def _ask(self, effect: AskSnapshot) -> None:
        self._note(effect)
        key = effect.key
        try:
            snapshot = await fetch_snapshot(
                effect.address, key, key=self._key, deadline_s=ASK_TIMEOUT_S
            )
        except MoonpoolError as error:
            level = logging.DEBUG if effect.is_repeated else logging.WARNING
            log.log(level, "index.not_answered", worker=str(key), why=error.message)
            self._books.index_snapshot(is_loaded=False)
            self._follower.on_not_answered(key, self._clock.now())
        else:
            await self._take_up(key, snapshot)
        if self._asking.get(key) is asyncio.current_task():
            del self._asking[key]
        self._wakeup.set()

    async def _take_up(self, key: WorkerKey, snapshot: SetSnapshot) -> None:
        """A worker has answered: perhaps with a million blocks, and the loop is everybody's."""
        is_consistent = await asyncio.to_thread(snapshot.is_consistent)
        self._books.index_snapshot(is_loaded=is_consistent)
        if not is_consistent:
            log.warning("index.snapshot_contradicts_itself", worker=str(key))
            self._follower.on_not_answered(key, self._clock.now())
            return
        for _ in self._follower.loading(key, snapshot, self._clock.now()):
            await asyncio.sleep(0)
        for start in range(0, len(snapshot.keys), _KEYS_PER_TURN):
            self._reuse.on_stored(snapshot.keys[start : start + _KEYS_PER_TURN])
            await asyncio.sleep(0)

    def _note(self, effect: AskSnapshot) -> None:
        if effect.is_repeated:
            return
        log.info("index.asks", worker=str(effect.key), why=effect.reason)
        if effect.reason is AskReason.GAP:
            self._books.index_gap()
        elif effect.reason is AskReason.MISMATCH:
            self._books.index_mismatch()
