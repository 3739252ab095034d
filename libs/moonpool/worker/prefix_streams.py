"""PrefixStreams: the holder's end of prefixes that peers read: one stream of each reader, many leases on it.

    reader    Open(1)  Open(2)              Close(1)  Open(3) ...
    holder             Opened(1)  Failed(2) Ended(2)          ...

Rules
  1. A lease begins with the reader's Open, which goes to the machine under a StreamId of its own. It ends by
     whoever is first: the reader (Close, or the end of the whole stream), which the machine is told, or the
     machine, which the reader is told.
  2. What the machine sends waits here until gRPC takes it; digests are filled in as it leaves. What names blocks
     does not leave once its lease has ended: they may belong to others by then.
  3. A leaf can be read at any time while the core has the block locked, and it has until the machine says
     UnlockPrefix, which comes no sooner than the end of the lease: nobody writes a locked block.
  4. A reader that does not take what it is told is not listened to either.
"""

from __future__ import annotations

import asyncio
import itertools
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Callable

import numpy as np
import numpy.typing as npt
import structlog

from moonpool.errors import MoonpoolError
from moonpool.handoff.events import HandoffEvent, PrefixOpenReceived, PrefixStreamClosed
from moonpool.handoff.messages import (
    HolderMessage,
    PrefixOpen,
    PrefixOpened,
    StreamId,
    with_digests,
)
from moonpool.wire.fields import invalid
from moonpool.wire.prefix_read import LeaseClosed, LeaseEnded, LeaseId

#: Of one lease.
ReaderRequest = tuple[LeaseId, PrefixOpen | LeaseClosed]

log = structlog.get_logger("moonpool.worker")

#: Messages that wait for one reader before it is not listened to: several times the leases that it may have.
_MAX_WAITING = 256


class _Line:
    """One reader's stream."""

    def __init__(self) -> None:
        #: Of its open leases.
        self.stream_ids: dict[LeaseId, StreamId] = {}
        #: In order; those of a lease that has ended name no blocks.
        self.messages: deque[tuple[LeaseId, HolderMessage | LeaseEnded]] = deque()
        #: There is something to say, or the reader has gone.
        self.wakeup = asyncio.Event()
        #: Few enough messages wait.
        self.has_room = asyncio.Event()
        self.has_room.set()
        self.has_reader_gone = False
        #: What the reader sent that no reader means.
        self.failure: MoonpoolError | None = None

    def leave(self, failure: MoonpoolError | None = None) -> None:
        """The reader says no more."""
        self.failure = failure or self.failure
        self.has_reader_gone = True
        self.wakeup.set()

    def say(self, lease: LeaseId, message: HolderMessage | LeaseEnded) -> None:
        self.messages.append((lease, message))
        if len(self.messages) >= _MAX_WAITING:
            self.has_room.clear()
        self.wakeup.set()


class PrefixStreams:
    """All leases of all readers. On one loop.

    Args:
        leaf_digests: uint64[num_blocks, num_layers], this worker's.
    """

    def __init__(self, *, leaf_digests: npt.NDArray[np.uint64]) -> None:
        self._leaf_digests = leaf_digests
        self._leases: dict[StreamId, tuple[_Line, LeaseId]] = {}
        self._ids = itertools.count(1)

    def __len__(self) -> int:
        """Leases that are open."""
        return len(self._leases)

    def send(self, stream_id: StreamId, message: HolderMessage) -> None:
        """Queue a message for a reader; dropped if its lease has ended."""
        line, lease = self._leases.get(stream_id, (None, None))
        if line is not None and lease is not None:
            line.say(lease, message)

    def end(self, stream_id: StreamId) -> None:
        """End a lease after its last words; blocks that were not told are not told any more."""
        line, lease = self._leases.pop(stream_id, (None, None))
        if line is not None and lease is not None:
            del line.stream_ids[lease]
            _drop_blocks(line, lease)
            line.say(lease, LeaseEnded())

    async def serve(
        self,
        *,
        requests: AsyncIterator[ReaderRequest],
        tasks: asyncio.TaskGroup,
        handle: Callable[[HandoffEvent], None],
    ) -> AsyncGenerator[tuple[LeaseId, HolderMessage | LeaseEnded], None]:
        """Run one reader's stream: yield what it is told, digests filled in, until it ends the stream.

        Args:
            requests: What the reader says.
            tasks: Holds the task that listens to it.
            handle: Takes PrefixOpenReceived and PrefixStreamClosed of its leases.

        Raises:
            InvalidMessageError: The reader sent what no reader means; all its leases have ended.
        """
        line = _Line()
        listener = tasks.create_task(self._listen(line, requests, handle))
        try:
            while True:
                line.wakeup.clear()
                while line.messages and not line.has_reader_gone:
                    lease, message = line.messages.popleft()
                    line.has_room.set()
                    yield lease, self._filled(message)
                if line.failure is not None:
                    raise line.failure
                if line.has_reader_gone:
                    return
                await line.wakeup.wait()
        finally:
            listener.cancel()
            while line.stream_ids:
                self._close(line, next(iter(line.stream_ids)), handle)

    async def _listen(
        self,
        line: _Line,
        requests: AsyncIterator[ReaderRequest],
        handle: Callable[[HandoffEvent], None],
    ) -> None:
        try:
            while (request := await _next(line, requests)) is not None:
                lease, message = request
                if isinstance(message, LeaseClosed):
                    self._close(line, lease, handle)
                elif lease in line.stream_ids:
                    line.leave(invalid("lease", f"{lease} is open already"))
                    return
                else:
                    stream_id = StreamId(next(self._ids))
                    line.stream_ids[lease] = stream_id
                    self._leases[stream_id] = (line, lease)
                    handle(PrefixOpenReceived(stream_id=stream_id, open=message))
                await line.has_room.wait()
        finally:
            line.leave()

    def _close(self, line: _Line, lease: LeaseId, handle: Callable[[HandoffEvent], None]) -> None:
        """The reader needs it no more. It may have ended already: both may end it at once."""
        stream_id = line.stream_ids.pop(lease, None)
        if stream_id is not None:
            del self._leases[stream_id]
            _drop_blocks(line, lease)
            handle(PrefixStreamClosed(stream_id=stream_id))

    def _filled(self, message: HolderMessage | LeaseEnded) -> HolderMessage | LeaseEnded:
        if isinstance(message, PrefixOpened):
            blocks = np.asarray(message.block_ids, np.int64)
            return with_digests(message, self._leaf_digests[blocks].astype("<u8").tobytes())
        return message


async def _next(line: _Line, requests: AsyncIterator[ReaderRequest]) -> ReaderRequest | None:
    """What the reader says next; None if it has gone, or sent what cannot be read."""
    try:
        return await anext(requests, None)
    except MoonpoolError as error:
        line.leave(error)
    except Exception as error:  # noqa: BLE001 - however it ends: the reader has gone
        log.debug("worker.reader_gone", why=repr(error))
    return None


def _drop_blocks(line: _Line, lease: LeaseId) -> None:
    """What names blocks of this lease must not leave any more."""
    line.messages = deque(
        (other, message)
        for other, message in line.messages
        if other != lease or not (isinstance(message, PrefixOpened) and message.block_ids)
    )
