"""StoreEngine: runs the StoreCore on the service's loop, where a worker has an engine process.

    commands ---> StoreCore ---> frame ---> answers of puts
                      ^            |------> the shell: replies for its machines, cache events, ledger
                      |            '------> disk work ---> BlockLog
                      '--- BlocksLoaded, BlocksWritten, DiskDropped ---'

Rules
  1. `send` never awaits: what comes in one turn of the loop is handled together, and one frame follows.
  2. A put is told to the machine that reads as soon as the core has reserved blocks for it, before the
     frame that says so; from then on it is that machine's, and ends with its FetchEnded or ReadEnded.
     One that takes too long is aborted here. Who offers is told before (`put`), or at the end (`take`).
  3. Every piece of disk work is a task and is answered once, however it went: a disk that fails is a miss.
  4. A store computes nothing: a router that asks for it all the same is refused.
  5. An exception of the core is a bug: `run` raises it, and the process ends.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

import structlog

from moonpool.clock import Clock
from moonpool.core.protocol import (
    Abort,
    Arrived,
    BlocksArrived,
    Command,
    CoreFrame,
    Decode,
    FetchEnded,
    FetchReserved,
    LockPrefix,
    Prefill,
    PrefixLocked,
    ReadEnded,
    Refused,
    RefuseReason,
    Release,
    Reply,
    Revoked,
    UnlockPrefix,
)
from moonpool.errors import UnavailableError
from moonpool.failpoints import Failpoints
from moonpool.handoff.events import AttemptAborted, HandoffEvent, PeerNamed, PrefixDelayed
from moonpool.handoff.messages import LeaseId, PeerPrefix
from moonpool.ids import AttemptId, BlockHash, BlockId, RequestId, WorkerKey
from moonpool.memory.worker_memory import WorkerMemory
from moonpool.store.base import BlockLog, BlockRecord, BlockTarget, DropReason, ReadOutcome
from moonpool.tiering.found_chains import parent_link
from moonpool.tiering.protocol import (
    BlocksLoaded,
    BlocksWritten,
    ClearDisk,
    DiskContents,
    DiskDropped,
    DiskWork,
    DropBlocks,
    LoadBlocks,
    Pin,
    Pinned,
    PrefixLoading,
    Put,
    PutAnswered,
    StageBlocks,
    StoreCommand,
    StoreFrame,
    StoreStats,
    WriteBlocks,
)
from moonpool.tiering.shares import tenant_tag
from moonpool.tiering.store_core import StoreCore
from moonpool.wire.engine_messages import TimedFrame
from moonpool.wire.store import PinAnswer, PinChain, PutAnswer, PutOffer

log = structlog.get_logger("moonpool.store")


class ChainWatcher(Protocol):
    """Is told which chains come to this node and who reads them."""

    def note_put(self, hashes: tuple[BlockHash, ...]) -> None:
        """A chain was offered here and not refused."""
        ...

    def note_lent(self, hashes: tuple[BlockHash, ...], reader: WorkerKey | None) -> None:
        """A reader was lent these leading blocks of a chain; if it is known, `note_returned` follows."""
        ...

    def note_returned(self, reader: WorkerKey) -> None:
        """A stream of that reader, who was lent something, has ended."""
        ...


@dataclass(slots=True, kw_only=True)
class _Put:
    """An offer that was not refused and whose blocks have not all come."""

    peer: PeerPrefix
    deadline_s: float
    #: Set by PutAnswered.
    answered: asyncio.Future[PutAnswer]
    #: Set when nothing more of it will come.
    ended: asyncio.Event = field(default_factory=asyncio.Event)
    #: From FetchReserved on.
    timer: asyncio.TimerHandle | None = None


@dataclass(slots=True, kw_only=True)
class _Lock:
    """A lock on a prefix that was asked for."""

    hashes: tuple[BlockHash, ...]
    reader: WorkerKey | None
    #: How many leading blocks the reader was lent; None: not answered yet.
    num_lent: int | None = None


class StoreEngine:
    """Owned by one loop.

    Args:
        memory: The arena, block-major: a block is one run of it.
        disk: None if there is none.
        on_frame: Takes what the machines and the publisher need of each frame.
        on_event: Takes what the machines are told beside that.
    """

    def __init__(
        self,
        *,
        core: StoreCore,
        memory: WorkerMemory,
        disk: BlockLog | None,
        clock: Clock,
        failpoints: Failpoints,
        on_frame: Callable[[TimedFrame], None],
        on_event: Callable[[HandoffEvent], None],
    ) -> None:
        self._core = core
        self._disk = disk
        self._clock = clock
        self._failpoints = failpoints
        self._on_frame = on_frame
        self._on_event = on_event
        layout = memory.layout
        self._block_size = layout.block_size
        self._blocks = memory.pool.bytes.reshape(layout.num_blocks, layout.block_bytes)
        self._leaves = memory.leaf_digests
        self._loop = asyncio.get_running_loop()
        self._commands: list[Command | StoreCommand] = []
        self._is_flush_planned = False
        self._timer: asyncio.TimerHandle | None = None
        #: Of disk work; None while `run` does not run: then nothing is handled.
        self._tasks: asyncio.TaskGroup | None = None
        self._is_running = asyncio.Event()
        self._failure: asyncio.Future[None] = self._loop.create_future()
        self._puts: dict[AttemptId, _Put] = {}
        self._put_numbers = itertools.count(1)
        #: Set with the next frame: by then the core has heard of their ends.
        self._ended_puts: list[asyncio.Event] = []
        self._num_late_puts = 0
        #: How many blocks are pinned, by the pin that asks.
        self._pinning: dict[int, asyncio.Future[int]] = {}
        self._pin_numbers = itertools.count(1)
        self._watcher: ChainWatcher | None = None
        #: When a disk that a failpoint limits can take the next load.
        self._disk_free_at = 0.0
        #: By their read id.
        self._locks: dict[int, _Lock] = {}

    def watch(self, watcher: ChainWatcher) -> None:
        """Tell of chains from here on."""
        self._watcher = watcher

    async def run(self) -> None:
        """Until cancelled; then what the disk does has ended. Raises what the core raised."""
        try:
            async with asyncio.TaskGroup() as tasks:
                self._tasks = tasks
                try:
                    if self._disk is not None:
                        await self._tell_contents(self._disk)
                    self._is_running.set()
                    await asyncio.shield(self._failure)
                finally:
                    self._tasks = None
        finally:
            if self._timer is not None:
                self._timer.cancel()
            for put in self._puts.values():
                if put.timer is not None:
                    put.timer.cancel()
                if not put.answered.done():
                    put.answered.set_exception(_not_ready())
                put.ended.set()
            self._end_puts()
            for answered in self._pinning.values():
                if not answered.done():
                    answered.set_exception(_not_ready())

    async def wait_running(self) -> None:
        """Until `run` has begun, and the core knows what lies on disk."""
        await self._is_running.wait()

    def stats(self) -> StoreStats:
        """What has been counted, as of now."""
        stats = self._core.stats(self._clock.now())
        return replace(stats, num_expired_puts=stats.num_expired_puts + self._num_late_puts)

    def send(self, command: Command | StoreCommand) -> None:
        """Give the core a command; never waits. Dropped while `run` does not run."""
        if self._tasks is None:
            return
        if isinstance(command, FetchEnded | ReadEnded):
            self._forget_put(command.attempt_id)
        elif isinstance(command, LockPrefix):
            self._locks[command.read_id] = _Lock(hashes=command.hashes, reader=command.reader)
        elif isinstance(command, UnlockPrefix):
            self._on_unlock(command)
        self._commands.append(command)
        if not self._is_flush_planned:
            self._is_flush_planned = True
            self._loop.call_soon(self._flush)

    def stage(self, hashes: tuple[BlockHash, ...]) -> None:
        """A reader will want this chain soon; never waits."""
        self.send(StageBlocks(hashes=hashes))

    async def put(self, offer: PutOffer) -> PutAnswer:
        """Take an offer; the answer comes before anything is read.

        Raises:
            UnavailableError: This node stops.
        """
        return await self._answer(self._begin_put(offer), offer)

    async def take(self, offer: PutOffer) -> PutAnswer:
        """Take an offer; the answer comes when what was wanted of it lies here, or will not.

        Raises:
            UnavailableError: This node stops.
        """
        put = self._begin_put(offer)
        answer = await self._answer(put, offer)
        await put.ended.wait()
        return answer

    def tenant_of(self, block_hash: BlockHash) -> str:
        """On whose account a block is kept; see StoreCore.tenant_of."""
        return self._core.tenant_of(block_hash)

    def num_here(self, hashes: tuple[BlockHash, ...]) -> int:
        """How many leading blocks of a chain lie here; see StoreCore.num_here."""
        return self._core.num_here(hashes)

    def is_on_disk(self, hashes: tuple[BlockHash, ...]) -> bool:
        """Whether all of these lie on disk; see StoreCore.is_on_disk."""
        return self._core.is_on_disk(hashes)

    async def pin(self, pin: PinChain) -> PinAnswer:
        """Keep a chain in memory, as far as it lies here.

        Raises:
            UnavailableError: This node stops.
        """
        if self._tasks is None:
            raise _not_ready()
        pin_id = next(self._pin_numbers)
        answered = self._pinning[pin_id] = self._loop.create_future()
        self.send(Pin(pin_id=pin_id, kind=pin.kind, hashes=pin.hashes, ttl_s=pin.ttl_s))
        try:
            return PinAnswer(pin_id=pin_id, num_blocks=await answered)
        finally:
            del self._pinning[pin_id]

    def on_disk_dropped(self, hashes: Sequence[BlockHash], reason: DropReason) -> None:
        """The log has dropped blocks by itself."""
        is_damaged = reason is not DropReason.RECLAIMED
        if is_damaged:
            log.warning("store.disk_blocks_lost", num_blocks=len(hashes), why=reason.value)
        self.send(DiskDropped(hashes=tuple(hashes), is_damaged=is_damaged))

    def keep_on_disk(self, hashes: Sequence[BlockHash], max_blocks: int) -> tuple[BlockHash, ...]:
        """The log is about to reclaim these: which of them it is to write once more."""
        return self._core.keep_on_disk(hashes, max_blocks, self._clock.now())

    # -- the core --

    def _flush(self) -> None:
        """Handle what has come, or what is due, and pass the frame on."""
        self._is_flush_planned = False
        if self._tasks is None or self._failure.done():
            return
        try:
            now = self._clock.now()
            commands, self._commands = self._commands, []
            refused: list[Reply] = []
            for command in commands:
                match command:
                    case Prefill() | Decode():
                        refused.append(
                            Refused(attempt_id=command.attempt_id, reason=RefuseReason.NEVER_FITS)
                        )
                    case BlocksArrived() | Arrived() | Release():
                        # Of attempts that were refused.
                        continue
                    case _:
                        self._core.handle(command, now)
            self._core.tick(now)
            self._pass_on(self._core.take_frame(), refused)
            self._end_puts()
            self._arm()
        except Exception as error:  # noqa: BLE001 - told once, by run()
            self._failure.set_exception(error)

    def _arm(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        due_at = self._core.next_due()
        if due_at is not None:
            delay_s = max(0.0, due_at - self._clock.now())
            self._timer = self._loop.call_later(delay_s, self._flush)

    def _pass_on(self, frame: StoreFrame, refused: Sequence[Reply]) -> None:
        replies = list(refused)
        for reply in frame.replies:
            if isinstance(reply, PutAnswered):
                self._on_put_answered(reply)
                continue
            if isinstance(reply, Pinned):
                self._on_pinned(reply)
                continue
            if isinstance(reply, PrefixLoading):
                self._on_loading(reply)
                continue
            if isinstance(reply, FetchReserved):
                self._begin_reading(reply)
            elif isinstance(reply, Revoked):
                self._stop_timing(reply.attempt_id)
            elif isinstance(reply, PrefixLocked):
                self._on_locked(reply)
            replies.append(reply)
        self._on_frame(
            TimedFrame(
                frame=CoreFrame(
                    step=0,
                    replies=tuple(replies),
                    ledger=frame.ledger,
                    cache_events=frame.cache_events,
                )
            )
        )
        for work in frame.disk_work:
            self._begin_disk_work(work)

    def _on_pinned(self, reply: Pinned) -> None:
        answered = self._pinning.get(reply.pin_id)
        if answered is not None and not answered.done():
            answered.set_result(reply.num_blocks)

    # -- puts --

    def _begin_put(self, offer: PutOffer) -> _Put:
        if self._tasks is None:
            raise _not_ready()
        number = next(self._put_numbers)
        attempt_id = AttemptId(RequestId(f"put-{number}"), 1)
        put = self._puts[attempt_id] = _Put(
            peer=PeerPrefix(
                key=offer.source.key,
                address=offer.source.address,
                num_tokens=len(offer.hashes) * self._block_size,
            ),
            deadline_s=offer.deadline_s,
            answered=self._loop.create_future(),
        )
        self.send(Put(attempt_id=attempt_id, tenant=offer.tenant, hashes=offer.hashes))
        return put

    async def _answer(self, put: _Put, offer: PutOffer) -> PutAnswer:
        answer = await put.answered
        if answer.refusal is None and self._watcher is not None:
            self._watcher.note_put(offer.hashes)
        return answer

    def _on_put_answered(self, reply: PutAnswered) -> None:
        put = self._puts[reply.attempt_id]
        if not put.answered.done():
            put.answered.set_result(
                PutAnswer(num_wanted_blocks=reply.num_wanted_blocks, refusal=reply.refusal)
            )
        if not reply.num_wanted_blocks:
            self._forget_put(reply.attempt_id)

    def _begin_reading(self, reply: FetchReserved) -> None:
        put = self._puts[reply.attempt_id]
        put.timer = self._loop.call_later(put.deadline_s, self._give_up_put, reply.attempt_id)
        self._on_event(PeerNamed(attempt_id=reply.attempt_id, peer=put.peer))

    def _give_up_put(self, attempt_id: AttemptId) -> None:
        log.info("store.put_late", attempt=str(attempt_id))
        self._num_late_puts += 1
        self.send(Abort(attempt_id=attempt_id))
        self._on_event(AttemptAborted(attempt_id=attempt_id))

    def _stop_timing(self, attempt_id: AttemptId) -> None:
        """The core has given up on it by itself, and counted it."""
        put = self._puts.get(attempt_id)
        if put is not None and put.timer is not None:
            put.timer.cancel()

    def _forget_put(self, attempt_id: AttemptId) -> None:
        put = self._puts.pop(attempt_id, None)
        if put is None:
            return
        self._ended_puts.append(put.ended)
        if put.timer is not None:
            put.timer.cancel()

    def _end_puts(self) -> None:
        for ended in self._ended_puts:
            ended.set()
        self._ended_puts.clear()

    # -- gets --

    def _on_loading(self, reply: PrefixLoading) -> None:
        self._on_event(
            PrefixDelayed(
                lease_id=LeaseId(reply.read_id),
                num_ready_blocks=reply.num_ready_blocks,
                num_blocks=reply.num_blocks,
            )
        )

    def _on_locked(self, reply: PrefixLocked) -> None:
        lock = self._locks.get(reply.read_id)
        if lock is None:
            return
        lock.num_lent = len(reply.block_ids)
        if self._watcher is not None:
            self._watcher.note_lent(lock.hashes[: lock.num_lent], lock.reader)

    def _on_unlock(self, command: UnlockPrefix) -> None:
        lock = self._locks.pop(command.read_id, None)
        if lock is None or lock.num_lent is None or lock.reader is None:
            return
        if self._watcher is not None:
            self._watcher.note_returned(lock.reader)

    # -- the disk --

    def _begin_disk_work(self, work: DiskWork) -> None:
        assert self._tasks is not None, "run() has not begun, or has ended"
        match work:
            case LoadBlocks():
                self._tasks.create_task(self._load(work))
            case WriteBlocks():
                self._tasks.create_task(self._write(work))
            case DropBlocks():
                self._tasks.create_task(self._drop(work))
            case ClearDisk():
                self._tasks.create_task(self._clear())

    async def _tell_contents(self, disk: BlockLog) -> None:
        """Tell the core what the scan has found, a part in each turn of the loop."""
        for part in disk.contents():
            self.send(
                DiskContents(
                    hashes=tuple(record.block_hash for record in part),
                    tags=tuple(record.tag for record in part),
                )
            )
            await asyncio.sleep(0)

    async def _load(self, work: LoadBlocks) -> None:
        assert self._disk is not None
        fault, _, argument = (self._failpoints.hit("store.load") or "").partition(":")
        if fault == "delay":
            await asyncio.sleep(int(argument) / 1_000)
        begun_at = self._loop.time()
        outcomes = await self._disk.read(
            [
                BlockTarget(
                    block_hash=block_hash,
                    payload=self._blocks[block_id],
                    leaves=self._leaves[block_id],
                )
                for block_hash, block_id in work.blocks
            ]
        )
        if fault == "limit":
            num_bytes = len(work.blocks) * self._blocks.shape[1]
            self._disk_free_at = max(self._disk_free_at, begun_at) + num_bytes / int(argument)
            await asyncio.sleep(max(self._disk_free_at - self._loop.time(), 0.0))
        num_blocks = next(
            (index for index, outcome in enumerate(outcomes) if outcome is not ReadOutcome.OK),
            len(outcomes),
        )
        bad = tuple(
            block_hash
            for (block_hash, _), outcome in zip(work.blocks, outcomes, strict=True)
            if outcome in (ReadOutcome.ABSENT, ReadOutcome.CORRUPT)
        )
        self.send(BlocksLoaded(load_id=work.load_id, num_blocks=num_blocks, bad_hashes=bad))

    async def _write(self, work: WriteBlocks) -> None:
        assert self._disk is not None
        self._failpoints.hit("store.before_write")
        result = await self._disk.write(
            [
                self._record(block_hash, block_id, parent)
                for (block_hash, block_id), parent in zip(work.blocks, work.parents, strict=True)
            ]
        )
        self._failpoints.hit("store.after_write")
        self.send(BlocksWritten(write_id=work.write_id, hashes=result.kept))

    def _record(
        self, block_hash: BlockHash, block_id: BlockId, parent: BlockHash | None
    ) -> BlockRecord:
        return BlockRecord(
            block_hash=block_hash,
            payload=self._blocks[block_id],
            leaves=self._leaves[block_id],
            tag=tenant_tag(self._core.tenant_of(block_hash)),
            link=parent_link(parent),
        )

    async def _drop(self, work: DropBlocks) -> None:
        assert self._disk is not None
        await self._disk.drop(work.hashes)

    async def _clear(self) -> None:
        assert self._disk is not None
        await self._disk.clear()


def _not_ready() -> UnavailableError:
    return UnavailableError("The store is starting or stopping.", code="store_not_ready")
