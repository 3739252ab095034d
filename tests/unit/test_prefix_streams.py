"""Prefix streams of the holder's side, and reads that are stopped before they have begun."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import numpy as np

from moonpool.failpoints import Failpoints
from moonpool.handoff.effects import StartRead
from moonpool.handoff.events import (
    HandoffEvent,
    PrefixOpenReceived,
    PrefixStreamClosed,
    ReadDone,
    ReadId,
)
from moonpool.handoff.messages import (
    HolderMessage,
    PrefixFailed,
    PrefixOpen,
    PrefixOpened,
    PrefixRefusal,
    SourceRef,
    StreamId,
    with_digests,
)
from moonpool.ids import (
    AttemptId,
    BlockHash,
    BlockId,
    Incarnation,
    RequestId,
    WorkerId,
    WorkerKey,
)
from moonpool.telemetry.metrics import Metrics
from moonpool.worker.attempt_book import AttemptBook
from moonpool.worker.books import WorkerBooks
from moonpool.worker.kv_reads import KvReads
from moonpool.worker.peers import Peer, PeerDirectory
from moonpool.worker.prefix_streams import PrefixStreams

A = AttemptId(RequestId("a"), 1)
KEY = WorkerKey(WorkerId("h"), Incarnation("1"))
OPEN = PrefixOpen(
    attempt_id=A,
    reader=KEY,
    holder=KEY,
    namespace="n",
    secret_fingerprint="s",
    hashes=(BlockHash(bytes(32)),),
    first=0,
)
FAILED = PrefixFailed(attempt_id=A, reason=PrefixRefusal.EXPIRED, message="late")


def opened(*blocks: int) -> PrefixOpened:
    return PrefixOpened(attempt_id=A, block_ids=tuple(map(BlockId, blocks)))


class World:
    """One stream and its reader."""

    def __init__(self) -> None:
        #: uint64[3 blocks, 2 layers]
        leaves = np.arange(6, dtype=np.uint64).reshape(3, 2)
        self.streams = PrefixStreams(leaf_digests=leaves)
        self.events: list[HandoffEvent] = []
        self.sent: list[HolderMessage] = []
        self.reader_leaves = asyncio.Event()

    @property
    def stream_id(self) -> StreamId:
        (event,) = [event for event in self.events if isinstance(event, PrefixOpenReceived)]
        return event.stream_id

    async def serve(self, tasks: asyncio.TaskGroup) -> None:
        async for message in self.streams.serve(
            OPEN, requests=self._requests(), tasks=tasks, handle=self.events.append
        ):
            self.sent.append(message)

    async def _requests(self) -> AsyncIterator[object]:
        await self.reader_leaves.wait()
        return
        yield


async def settle() -> None:
    """Let tasks run until they wait."""
    for _ in range(10):
        await asyncio.sleep(0)


async def test_the_reader_gets_blocks_with_their_leaves() -> None:
    world = World()
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(world.serve(tasks))
        await settle()
        world.streams.send(world.stream_id, opened(2, 0))
        await settle()
        world.reader_leaves.set()
    leaves = np.array([[4, 5], [0, 1]], "<u8").tobytes()
    assert world.sent == [with_digests(opened(2, 0), leaves)]
    assert world.events == [
        PrefixOpenReceived(stream_id=world.stream_id, open=OPEN),
        PrefixStreamClosed(stream_id=world.stream_id),
    ]
    assert len(world.streams) == 0


async def test_blocks_are_not_told_once_the_stream_has_ended() -> None:
    world = World()
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(world.serve(tasks))
        await settle()
        world.streams.send(world.stream_id, opened(2))
        world.streams.send(world.stream_id, FAILED)
        world.streams.end(world.stream_id)
    assert world.sent == [FAILED]
    assert len(world.events) == 1


async def test_that_nothing_is_held_is_told_before_the_end() -> None:
    world = World()
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(world.serve(tasks))
        await settle()
        world.streams.send(world.stream_id, opened())
        world.streams.end(world.stream_id)
    assert world.sent == [opened()]


async def test_a_read_that_is_stopped_before_it_begins_tells_its_end() -> None:
    async def connect(_source: SourceRef) -> Peer:
        raise AssertionError("nobody connects")

    done: list[ReadDone] = []
    reads = KvReads(
        peers=PeerDirectory(connect),
        leaf_digests=np.zeros((3, 2), np.uint64),
        first_layer=0,
        book=AttemptBook("r"),
        books=WorkerBooks(Metrics()),
        failpoints=Failpoints.off(),
        on_done=done.append,
    )
    effect = StartRead(
        read_id=ReadId(A, 0),
        source=SourceRef(key=KEY, address="h:1"),
        source_block_ids=(BlockId(1),),
        target_block_ids=(BlockId(2),),
        first_layer=0,
        end_layer=2,
        digests=(bytes(16),),
        is_prefix=True,
    )
    async with asyncio.TaskGroup() as tasks:
        reads.start(effect, tasks)
        assert reads.num_open == 1
        reads.stop(A)
    assert done == [ReadDone(read_id=ReadId(A, 0), is_ok=False)]
    assert reads.num_open == 0
    reads.stop(A)
