"""HandoffStreams: the prefill side's end of handoff streams, whose lives are their readers' leases on blocks here.

Life of one stream
  1. The reader's first message goes to the machine.
  2. What the machine sends waits here until gRPC takes it. Digests are filled in when it leaves.
  3. The reader ends the stream, or it is cut: the machine is told. Or the machine ends it: messages that
     name blocks and have not left are dropped, since the blocks may belong to others by then.

What waits on a stream is bounded by the prompt: one message per chunk and layer group.

Rule of the leaves
  A leaf must be of the values that were announced. The engine may take a block back and overwrite it
  (values and leaf alike) in a step whose frame this process has not seen; a digest read then would
  vouch for wrong values. So leaves are copied first, and then the control page must not name a step
  later than the last frame's: otherwise the message waits for that frame, which may end the stream.
"""

from __future__ import annotations

import asyncio
import itertools
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Callable

import numpy as np
import numpy.typing as npt
import structlog

from moonpool.handoff.events import HandoffEvent, OpenReceived, StreamClosed
from moonpool.handoff.messages import (
    LayersReady,
    Open,
    Opened,
    SourceMessage,
    StreamId,
    with_digests,
)

log = structlog.get_logger("moonpool.worker")


class _Stream:
    def __init__(self) -> None:
        self.messages: deque[SourceMessage] = deque()
        self.wakeup = asyncio.Event()
        #: The machine ended it: the last words still leave.
        self.is_ended = False
        self.has_reader_gone = False


class HandoffStreams:
    """All open streams of readers. On one loop.

    Args:
        leaf_digests: uint64[num_blocks, num_layers], this worker's.
        first_layer: Of the model; the leaf array's column 0.
        page_step: The last step that the engine has begun, by the control page.
    """

    def __init__(
        self,
        *,
        leaf_digests: npt.NDArray[np.uint64],
        first_layer: int = 0,
        page_step: Callable[[], int],
    ) -> None:
        self._leaf_digests = leaf_digests
        self._first_layer = first_layer
        self._page_step = page_step
        #: The last plan that a frame has told of.
        self._frame_step = 0
        self._streams: dict[StreamId, _Stream] = {}
        self._ids = itertools.count(1)

    def __len__(self) -> int:
        return len(self._streams)

    def send(self, stream_id: StreamId, message: SourceMessage) -> None:
        """Queue a message for a reader; dropped if its stream is gone."""
        stream = self._streams.get(stream_id)
        if stream is not None and not stream.is_ended:
            stream.messages.append(message)
            stream.wakeup.set()

    def end(self, stream_id: StreamId) -> None:
        """End a stream after its last words; announcements that have not left are dropped."""
        stream = self._streams.get(stream_id)
        if stream is not None:
            stream.is_ended = True
            stream.messages = deque(
                message
                for message in stream.messages
                if not isinstance(message, Opened | LayersReady)
            )
            stream.wakeup.set()

    def frame_received(self, step: int) -> None:
        """The machine has taken the frame before plan `step` (0: no plan)."""
        if step:
            self._frame_step = step
            for stream in self._streams.values():
                if stream.messages:
                    stream.wakeup.set()

    async def serve(
        self,
        open_: Open,
        *,
        requests: AsyncIterator[object],
        tasks: asyncio.TaskGroup,
        handle: Callable[[HandoffEvent], None],
    ) -> AsyncGenerator[SourceMessage, None]:
        """Run one stream: yield what the machine sends, digests filled in, until either side ends it.

        Args:
            requests: The rest of what the reader sends: nothing, then its end.
            tasks: Holds the task that waits for that end.
            handle: Takes OpenReceived, and StreamClosed unless the machine ended it.
        """
        stream_id = StreamId(next(self._ids))
        stream = self._streams[stream_id] = _Stream()
        watcher = tasks.create_task(_watch(stream, requests))
        handle(OpenReceived(stream_id=stream_id, open=open_))
        try:
            while True:
                stream.wakeup.clear()
                while stream.messages and not stream.has_reader_gone:
                    message = self._filled(stream.messages[0])
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
                handle(StreamClosed(stream_id=stream_id))

    def _filled(self, message: SourceMessage) -> SourceMessage | None:
        """The message with its leaves; None if it must wait for the frame of the running step."""
        if isinstance(message, Opened):
            columns = slice(None)
        elif isinstance(message, LayersReady):
            columns = slice(
                message.first_layer - self._first_layer, message.end_layer - self._first_layer
            )
        else:
            return message
        blocks = np.asarray(message.block_ids, np.int64)
        leaves = self._leaf_digests[blocks, columns].astype("<u8").tobytes()
        if self._page_step() > self._frame_step:
            return None
        return with_digests(message, leaves)


async def _watch(stream: _Stream, requests: AsyncIterator[object]) -> None:
    try:
        async for _ in requests:
            pass
    except Exception as error:  # noqa: BLE001 - however it ends: the reader has gone
        log.debug("worker.reader_gone", why=repr(error))
    finally:
        stream.has_reader_gone = True
        stream.wakeup.set()
