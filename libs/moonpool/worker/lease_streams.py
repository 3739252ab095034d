"""LeaseStreams: streams that peers open here, whose lives are their leases on this worker's blocks.

Life of one stream
  1. The reader's first message goes to its machine.
  2. What the machine sends waits here until gRPC takes it. Digests are filled in when it leaves.
  3. The reader ends the stream, or it is cut: the machine is told. Or the machine ends it: messages that
     name blocks and have not left are dropped, since the blocks may belong to others by then.
"""

from __future__ import annotations

import asyncio
import itertools
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from typing import Generic, TypeVar

import structlog

from moonpool.handoff.events import HandoffEvent
from moonpool.handoff.messages import StreamId

log = structlog.get_logger("moonpool.worker")

MessageT = TypeVar("MessageT")


class _Stream(Generic[MessageT]):
    def __init__(self) -> None:
        self.messages: deque[MessageT] = deque()
        self.wakeup = asyncio.Event()
        #: The machine ended it: the last words still leave.
        self.is_ended = False
        self.has_reader_gone = False


class LeaseStreams(Generic[MessageT]):
    """All open streams of one kind. On one loop.

    Args:
        fill: The message as it leaves, with its leaves; None if it must wait for `wake`.
        names_blocks: True for a message that must not leave once its stream has ended.
    """

    def __init__(
        self,
        *,
        fill: Callable[[MessageT], MessageT | None],
        names_blocks: Callable[[MessageT], bool],
    ) -> None:
        self._fill = fill
        self._names_blocks = names_blocks
        self._streams: dict[StreamId, _Stream[MessageT]] = {}
        self._ids = itertools.count(1)

    def __len__(self) -> int:
        return len(self._streams)

    def send(self, stream_id: StreamId, message: MessageT) -> None:
        """Queue a message for a reader; dropped if its stream is gone."""
        stream = self._streams.get(stream_id)
        if stream is not None and not stream.is_ended:
            stream.messages.append(message)
            stream.wakeup.set()

    def end(self, stream_id: StreamId) -> None:
        """End a stream after its last words."""
        stream = self._streams.get(stream_id)
        if stream is not None:
            stream.is_ended = True
            stream.messages = deque(
                message for message in stream.messages if not self._names_blocks(message)
            )
            stream.wakeup.set()

    def wake(self) -> None:
        """Try again to fill what could not be."""
        for stream in self._streams.values():
            if stream.messages:
                stream.wakeup.set()

    async def serve(
        self,
        *,
        opened: Callable[[StreamId], HandoffEvent],
        closed: Callable[[StreamId], HandoffEvent],
        requests: AsyncIterator[object],
        tasks: asyncio.TaskGroup,
        handle: Callable[[HandoffEvent], None],
    ) -> AsyncGenerator[MessageT, None]:
        """Run one stream: yield what the machine sends, until either side ends it.

        Args:
            opened: The event of the reader's first message.
            closed: The event of the stream's end, told unless the machine ended it.
            requests: The rest of what the reader sends: nothing, then its end.
            tasks: Holds the task that waits for that end.
            handle: Takes the events.
        """
        stream_id = StreamId(next(self._ids))
        stream = self._streams[stream_id] = _Stream[MessageT]()
        watcher = tasks.create_task(_watch(stream, requests))
        handle(opened(stream_id))
        try:
            while True:
                stream.wakeup.clear()
                while stream.messages and not stream.has_reader_gone:
                    message = self._fill(stream.messages[0])
                    if message is None:
                        break
                    stream.messages.popleft()
                    yield message
                if stream.has_reader_gone or (stream.is_ended and not stream.messages):
                    return
                await stream.wakeup.wait()
        finally:
            watcher.cancel()
            del self._streams[stream_id]
            if not stream.is_ended:
                handle(closed(stream_id))


async def _watch(stream: _Stream[MessageT], requests: AsyncIterator[object]) -> None:
    try:
        async for _ in requests:
            pass
    except Exception as error:  # noqa: BLE001 - however it ends: the reader has gone
        log.debug("worker.reader_gone", why=repr(error))
    finally:
        stream.has_reader_gone = True
        stream.wakeup.set()
