"""PrefixStreams: the holder's end of prefix streams (their life: lease_streams.py).

A leaf can be read at any time while the core has the block locked, and it has until the machine says
UnlockPrefix, which comes no sooner than the end of the stream: nobody writes a locked block.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable

import numpy as np
import numpy.typing as npt

from moonpool.handoff.events import HandoffEvent, PrefixOpenReceived, PrefixStreamClosed
from moonpool.handoff.messages import (
    HolderMessage,
    PrefixOpen,
    PrefixOpened,
    StreamId,
    with_digests,
)
from moonpool.worker.lease_streams import LeaseStreams


class PrefixStreams:
    """All open prefix streams of readers. On one loop.

    Args:
        leaf_digests: uint64[num_blocks, num_layers], this worker's.
    """

    def __init__(self, *, leaf_digests: npt.NDArray[np.uint64]) -> None:
        self._leaf_digests = leaf_digests
        self._streams = LeaseStreams[HolderMessage](
            fill=self._filled,
            names_blocks=lambda message: (
                isinstance(message, PrefixOpened) and bool(message.block_ids)
            ),
        )

    def __len__(self) -> int:
        return len(self._streams)

    def send(self, stream_id: StreamId, message: HolderMessage) -> None:
        """Queue a message for a reader; dropped if its stream is gone."""
        self._streams.send(stream_id, message)

    def end(self, stream_id: StreamId) -> None:
        """End a stream after its last words; blocks that were not told are not told any more."""
        self._streams.end(stream_id)

    def serve(
        self,
        open_: PrefixOpen,
        *,
        requests: AsyncIterator[object],
        tasks: asyncio.TaskGroup,
        handle: Callable[[HandoffEvent], None],
    ) -> AsyncGenerator[HolderMessage, None]:
        """Run one stream: PrefixOpenReceived, then what the machine sends, digests filled in."""
        return self._streams.serve(
            opened=lambda stream_id: PrefixOpenReceived(stream_id=stream_id, open=open_),
            closed=lambda stream_id: PrefixStreamClosed(stream_id=stream_id),
            requests=requests,
            tasks=tasks,
            handle=handle,
        )

    def _filled(self, message: HolderMessage) -> HolderMessage:
        if isinstance(message, PrefixOpened):
            blocks = np.asarray(message.block_ids, np.int64)
            return with_digests(message, self._leaf_digests[blocks].astype("<u8").tobytes())
        return message
