"""HolderLeases: the holder's end of leases on prefixes: one stream of each reader, many leases on it. The reader's
end: reader_leases.py.

    reader    Open(1)  Open(2)              Close(1)  Open(3) ...
    holder             Opened(1)  Failed(2) Ended(2)          ...

Rules
  1. A lease begins with the reader's Open, which goes to the machine under a LeaseId of its own. It ends by
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
from moonpool.handoff.events import HandoffEvent, PrefixLeaseClosed, PrefixOpenReceived
from moonpool.handoff.messages import (
    HolderMessage,
    LeaseId,
    PrefixOpen,
    PrefixOpened,
    with_digests,
)
from moonpool.wire.fields import invalid
from moonpool.wire.prefix_read import LeaseClosed, LeaseEnded, LeaseNumber

#: Of one lease.
ReaderRequest = tuple[LeaseNumber, PrefixOpen | LeaseClosed]

log = structlog.get_logger("moonpool.worker")

#: Messages that wait for one reader before it is not listened to: several times the leases that it may have.
_MAX_WAITING = 256


class _ReaderStream:
    """One reader's stream."""

    def __init__(self) -> None:
        #: Of its open leases.
        self.lease_ids: dict[LeaseNumber, LeaseId] = {}
        #: In order; those of a lease that has ended name no blocks.
        self.messages: deque[tuple[LeaseNumber, HolderMessage | LeaseEnded]] = deque()
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

    def say(self, number: LeaseNumber, message: HolderMessage | LeaseEnded) -> None:
        self.messages.append((number, message))
        if len(self.messages) >= _MAX_WAITING:
            self.has_room.clear()
        self.wakeup.set()


class HolderLeases:
    """All leases of all readers. On one loop.

    Args:
        leaf_digests: uint64[num_blocks, num_layers], this worker's.
    """

    def __init__(self, *, leaf_digests: npt.NDArray[np.uint64]) -> None:
        self._leaf_digests = leaf_digests
        self._leases: dict[LeaseId, tuple[_ReaderStream, LeaseNumber]] = {}
        self._ids = itertools.count(1)

    def __len__(self) -> int:
        """Leases that are open."""
        return len(self._leases)

    def send(self, lease_id: LeaseId, message: HolderMessage) -> None:
        """Queue a message for a reader; dropped if its lease has ended."""
        stream, number = self._leases.get(lease_id, (None, None))
        if stream is not None and number is not None:
            stream.say(number, message)

    def end(self, lease_id: LeaseId) -> None:
        """End a lease after its last words; blocks that were not told are not told any more."""
        stream, number = self._leases.pop(lease_id, (None, None))
        if stream is not None and number is not None:
            del stream.lease_ids[number]
            _drop_blocks(stream, number)
            stream.say(number, LeaseEnded())

    async def serve(
        self,
        *,
        requests: AsyncIterator[ReaderRequest],
        tasks: asyncio.TaskGroup,
        handle: Callable[[HandoffEvent], None],
    ) -> AsyncGenerator[tuple[LeaseNumber, HolderMessage | LeaseEnded], None]:
        """Run one reader's stream: yield what it is told, digests filled in, until it ends the stream.

        Args:
            requests: What the reader says.
            tasks: Holds the task that listens to it.
            handle: Takes PrefixOpenReceived and PrefixLeaseClosed of its leases.

        Raises:
            InvalidMessageError: The reader sent what no reader means; all its leases have ended.
        """
        stream = _ReaderStream()
        listener = tasks.create_task(self._listen(stream, requests, handle))
        try:
            while True:
                stream.wakeup.clear()
                while stream.messages and not stream.has_reader_gone:
                    number, message = stream.messages.popleft()
                    stream.has_room.set()
                    yield number, self._filled(message)
                if stream.failure is not None:
                    raise stream.failure
                if stream.has_reader_gone:
                    return
                await stream.wakeup.wait()
        finally:
            listener.cancel()
            while stream.lease_ids:
                self._close(stream, next(iter(stream.lease_ids)), handle)

    async def _listen(
        self,
        stream: _ReaderStream,
        requests: AsyncIterator[ReaderRequest],
        handle: Callable[[HandoffEvent], None],
    ) -> None:
        try:
            while (request := await _next(stream, requests)) is not None:
                number, message = request
                if isinstance(message, LeaseClosed):
                    self._close(stream, number, handle)
                elif number in stream.lease_ids:
                    stream.leave(invalid("lease", f"{number} is open already"))
                    return
                else:
                    lease_id = LeaseId(next(self._ids))
                    stream.lease_ids[number] = lease_id
                    self._leases[lease_id] = (stream, number)
                    handle(PrefixOpenReceived(lease_id=lease_id, open=message))
                await stream.has_room.wait()
        finally:
            stream.leave()

    def _close(
        self, stream: _ReaderStream, number: LeaseNumber, handle: Callable[[HandoffEvent], None]
    ) -> None:
        """The reader needs it no more. It may have ended already: both may end it at once."""
        lease_id = stream.lease_ids.pop(number, None)
        if lease_id is not None:
            del self._leases[lease_id]
            _drop_blocks(stream, number)
            handle(PrefixLeaseClosed(lease_id=lease_id))

    def _filled(self, message: HolderMessage | LeaseEnded) -> HolderMessage | LeaseEnded:
        if isinstance(message, PrefixOpened):
            blocks = np.asarray(message.block_ids, np.int64)
            return with_digests(message, self._leaf_digests[blocks].astype("<u8").tobytes())
        return message


async def _next(
    stream: _ReaderStream, requests: AsyncIterator[ReaderRequest]
) -> ReaderRequest | None:
    """What the reader says next; None if it has gone, or sent what cannot be read."""
    try:
        return await anext(requests, None)
    except MoonpoolError as error:
        stream.leave(error)
    except Exception as error:  # noqa: BLE001 - however it ends: the reader has gone
        log.debug("worker.reader_gone", why=repr(error))
    return None


def _drop_blocks(stream: _ReaderStream, number: LeaseNumber) -> None:
    """What names blocks of this lease must not leave any more."""
    stream.messages = deque(
        (other, message)
        for other, message in stream.messages
        if other != number or not (isinstance(message, PrefixOpened) and message.block_ids)
    )
