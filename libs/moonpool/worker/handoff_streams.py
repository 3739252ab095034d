"""HandoffStreams: the prefill side's end of handoff streams. A stream's life is the reader's lease.

Life of one stream
  1. The reader's Open is checked (secret, namespace); OpenReceived goes to the machine.
  2. What the machine sends waits here until gRPC takes it. That is bounded by the prompt: one
     message per chunk and layer group. Digests are read from the leaf array when a message leaves:
     the blocks are locked for as long as the stream is open.
  3. The reader ends the stream, or it is cut: StreamClosed. Or the machine ends it.
"""

from __future__ import annotations

import asyncio
import itertools
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Callable

import numpy as np
import numpy.typing as npt

from moonpool.handoff.events import HandoffEvent, OpenReceived, StreamClosed
from moonpool.handoff.messages import (
    LayersReady,
    Open,
    Opened,
    SourceMessage,
    StreamId,
    with_digests,
)


class _Stream:
    def __init__(self) -> None:
        self.messages: deque[SourceMessage] = deque()
        self.wakeup = asyncio.Event()
        #: The machine ended it: what waits still leaves.
        self.is_ended = False
        self.has_reader_gone = False


class HandoffStreams:
    """All open streams of readers. On one loop.

    Args:
        leaf_digests: uint64[num_blocks, num_layers], this worker's.
        first_layer: Of the model; the leaf array's column 0.
    """

    def __init__(self, *, leaf_digests: npt.NDArray[np.uint64], first_layer: int = 0) -> None:
        self._leaf_digests = leaf_digests
        self._first_layer = first_layer
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
        """End a stream after what was sent."""
        stream = self._streams.get(stream_id)
        if stream is not None:
            stream.is_ended = True
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
            handle: Takes OpenReceived, and StreamClosed unless the machine ended the stream.
        """
        stream_id = StreamId(next(self._ids))
        stream = self._streams[stream_id] = _Stream()
        watcher = tasks.create_task(_watch(stream, requests))
        handle(OpenReceived(stream_id=stream_id, open=open_))
        try:
            while True:
                while stream.messages and not stream.has_reader_gone:
                    yield self._filled(stream.messages.popleft())
                if stream.is_ended or stream.has_reader_gone:
                    return
                stream.wakeup.clear()
                await stream.wakeup.wait()
        finally:
            watcher.cancel()
            del self._streams[stream_id]
            if not stream.is_ended:
                handle(StreamClosed(stream_id=stream_id))

    def _filled(self, message: SourceMessage) -> SourceMessage:
        if isinstance(message, Opened):
            leaves = self._leaf_digests[_indices(message.block_ids)]
        elif isinstance(message, LayersReady):
            first, end = message.first_layer, message.end_layer
            columns = slice(first - self._first_layer, end - self._first_layer)
            leaves = self._leaf_digests[_indices(message.block_ids), columns]
        else:
            return message
        return with_digests(message, leaves.astype("<u8", copy=False).tobytes())


def _indices(block_ids: tuple[int, ...]) -> npt.NDArray[np.int64]:
    return np.asarray(block_ids, np.int64)


async def _watch(stream: _Stream, requests: AsyncIterator[object]) -> None:
    try:
        async for _ in requests:
            pass
    finally:
        stream.has_reader_gone = True
        stream.wakeup.set()
