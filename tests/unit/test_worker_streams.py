"""Handoff streams of the prefill side: what leaves, with which leaves, and what never does."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import numpy as np

from moonpool.handoff.events import HandoffEvent, OpenReceived, StreamClosed
from moonpool.handoff.messages import (
    Commit,
    CommitFailed,
    LayersReady,
    Open,
    Opened,
    SourceMessage,
    StreamId,
    with_digests,
)
from moonpool.ids import AttemptId, BlockId, Incarnation, RequestId, WorkerId, WorkerKey
from moonpool.worker.handoff_streams import HandoffStreams

ATTEMPT = AttemptId(RequestId("r1"), 1)
KEY = WorkerKey(WorkerId("p0"), Incarnation("0" * 16))
OPEN = Open(attempt_id=ATTEMPT, reader=KEY, source=KEY, namespace="n")
OPENED = Opened(attempt_id=ATTEMPT, num_cached_tokens=16, block_ids=(BlockId(2),))
COMMIT = Commit(
    attempt_id=ATTEMPT, first_token=1, position=0, finish_reason=None, num_cached_tokens=0
)
FAILED = CommitFailed(attempt_id=ATTEMPT, reason="revoked")


def layers(first: int, end: int) -> LayersReady:
    return LayersReady(
        attempt_id=ATTEMPT,
        start=0,
        end=32,
        first_layer=first,
        end_layer=end,
        block_ids=(BlockId(3), BlockId(1)),
    )


class World:
    """One stream, its reader and its engine's control page."""

    def __init__(self) -> None:
        #: uint64[5 blocks, 4 layers]
        self.leaves = np.arange(20, dtype=np.uint64).reshape(5, 4)
        self.page_step = 0
        self.streams = HandoffStreams(leaf_digests=self.leaves, page_step=lambda: self.page_step)
        self.events: list[HandoffEvent] = []
        self.sent: list[SourceMessage] = []
        self.reader_leaves = asyncio.Event()

    @property
    def stream_id(self) -> StreamId:
        (opened,) = [event for event in self.events if isinstance(event, OpenReceived)]
        return opened.stream_id

    async def serve(self, tasks: asyncio.TaskGroup) -> None:
        async for message in self.streams.serve(
            OPEN, requests=self._requests(), tasks=tasks, handle=self.events.append
        ):
            self.sent.append(message)

    async def _requests(self) -> AsyncIterator[object]:
        await self.reader_leaves.wait()
        return
        yield

    def filled(self, message: Opened | LayersReady, leaves: list[list[int]]) -> SourceMessage:
        return with_digests(message, np.array(leaves, "<u8").tobytes())


async def settle() -> None:
    """Let tasks run until they wait."""
    for _ in range(10):
        await asyncio.sleep(0)


async def test_messages_leave_in_order_with_their_leaves() -> None:
    world = World()
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(world.serve(tasks))
        await settle()
        for message in (OPENED, layers(0, 1), layers(1, 4), COMMIT):
            world.streams.send(world.stream_id, message)
        await settle()
        world.reader_leaves.set()
    assert world.sent == [
        world.filled(OPENED, [[8, 9, 10, 11]]),
        world.filled(layers(0, 1), [[12], [4]]),
        world.filled(layers(1, 4), [[13, 14, 15], [5, 6, 7]]),
        COMMIT,
    ]
    assert world.events == [
        OpenReceived(stream_id=world.stream_id, open=OPEN),
        StreamClosed(stream_id=world.stream_id),
    ]
    assert len(world.streams) == 0


async def test_a_leaf_waits_for_the_frame_of_the_running_step() -> None:
    world = World()
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(world.serve(tasks))
        await settle()
        world.streams.frame_received(7)
        # Step 8 runs, its frame is not seen: it may write block 3 for somebody else.
        world.page_step = 8
        world.streams.send(world.stream_id, layers(0, 1))
        world.streams.send(world.stream_id, COMMIT)
        await settle()
        assert world.sent == []
        world.streams.frame_received(8)
        await settle()
        assert world.sent == [world.filled(layers(0, 1), [[12], [4]]), COMMIT]
        world.reader_leaves.set()


async def test_what_the_frame_takes_back_is_never_announced() -> None:
    world = World()
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(world.serve(tasks))
        await settle()
        world.streams.frame_received(7)
        world.page_step = 8
        world.streams.send(world.stream_id, layers(0, 4))
        await settle()
        # The frame says that the prefill was revoked, and the blocks have another owner's leaves.
        world.leaves[:] = 99
        world.streams.send(world.stream_id, FAILED)
        world.streams.end(world.stream_id)
        world.streams.frame_received(8)
    assert world.sent == [FAILED]
    # The machine ended the stream: it is not told that it closed.
    assert world.events == [OpenReceived(stream_id=world.stream_id, open=OPEN)]


async def test_nothing_is_kept_for_a_reader_that_has_gone() -> None:
    world = World()
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(world.serve(tasks))
        await settle()
        stream_id = world.stream_id
        world.reader_leaves.set()
        await settle()
        world.streams.send(stream_id, COMMIT)
        world.streams.end(stream_id)
    assert world.sent == []
