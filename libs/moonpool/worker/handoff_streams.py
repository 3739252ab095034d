"""HandoffStreams: the prefill side's end of handoff streams (their life: lease_streams.py).

What waits on a stream is bounded by the prompt: one message per chunk and layer group.

Rule of the leaves
  A leaf must be of the values that were announced. The engine may take a block back and overwrite it
  (values and leaf alike) in a step whose frame this process has not seen; a digest read then would
  vouch for wrong values. So leaves are copied first, and then the control page must not name a step
  later than the last frame's: otherwise the message waits for that frame, which may end the stream.
"""

from __future__ import annotations

import asyncio
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
from moonpool.worker.lease_streams import LeaseStreams


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
        self._streams = LeaseStreams[SourceMessage](
            fill=self._filled,
            names_blocks=lambda message: isinstance(message, Opened | LayersReady),
        )

    def __len__(self) -> int:
        return len(self._streams)

    def send(self, stream_id: StreamId, message: SourceMessage) -> None:
        """Queue a message for a reader; dropped if its stream is gone."""
        self._streams.send(stream_id, message)

    def end(self, stream_id: StreamId) -> None:
        """End a stream after its last words; announcements that have not left are dropped."""
        self._streams.end(stream_id)

    def frame_received(self, step: int) -> None:
        """The machine has taken the frame before plan `step` (0: no plan)."""
        if step:
            self._frame_step = step
            self._streams.wake()

    def serve(
        self,
        open_: Open,
        *,
        requests: AsyncIterator[object],
        tasks: asyncio.TaskGroup,
        handle: Callable[[HandoffEvent], None],
    ) -> AsyncGenerator[SourceMessage, None]:
        """Run one stream: OpenReceived, then what the machine sends, digests filled in."""
        return self._streams.serve(
            opened=lambda stream_id: OpenReceived(stream_id=stream_id, open=open_),
            closed=lambda stream_id: StreamClosed(stream_id=stream_id),
            requests=requests,
            tasks=tasks,
            handle=handle,
        )

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
