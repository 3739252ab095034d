"""ReaderLeases: the reader's end of leases on prefixes at one holder: one stream, and a lease on it for each attempt.

The stream is opened by the first lease and stays: a lease is then two small messages each way, where a stream of
its own would cost both processes some milliseconds of work. The holder's end: holder_leases.py.

Life of a lease

    open() -> Open -> what the holder says -> ended by the holder
                                           -> given back                             Close
                                           -> broken with the stream, or by words that cannot be read

Its user is called back from the task that listens to the holder: no task, no queue and no turn of the loop of
its own stands between what the holder says and who it is said to.
"""

from __future__ import annotations

import asyncio
import itertools
from collections import deque
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import Any

import grpc

from moonpool.errors import MoonpoolError, TransferError
from moonpool.handoff.messages import HolderMessage, PrefixOpen
from moonpool.ids import AttemptId
from moonpool.rpc.errors import error_from
from moonpool.wire.prefix_read import (
    LeaseClosed,
    LeaseEnded,
    LeaseNumber,
    holder_message_from_pb,
    reader_message_to_pb,
)

#: Begins the stream: takes what the reader says. Any: generated messages have no common type.
BeginStream = Callable[[AsyncIterator[Any]], grpc.aio.StreamStreamCall]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Lease:
    """One that is open."""

    attempt_id: AttemptId
    on_message: Callable[[HolderMessage], None]
    on_end: Callable[[MoonpoolError | None], None]


class ReaderLeases:
    """See the file's head. On one loop; belongs to the connection to one incarnation.

    Args:
        peer: Named in errors.
    """

    def __init__(self, begin: BeginStream, *, peer: str) -> None:
        self._begin = begin
        self._peer = peer
        self._numbers = itertools.count(1)
        self._call: grpc.aio.StreamStreamCall | None = None
        #: To be said, of the stream that is open; None ends it.
        self._outbox: deque[Any | None] = deque()
        self._has_words = asyncio.Event()
        self._leases: dict[LeaseNumber, _Lease] = {}

    def open(
        self,
        first: PrefixOpen,
        *,
        traceparent: str,
        tasks: asyncio.TaskGroup,
        on_message: Callable[[HolderMessage], None],
        on_end: Callable[[MoonpoolError | None], None],
    ) -> LeaseNumber:
        """Open a lease, to be given back unless it ends before.

        Args:
            tasks: Holds the task that listens to the holder.
            on_message: Takes what the holder says of it. Not called by `open`; must not raise.
            on_end: It has ended, by the holder (None), or because the stream broke, or the holder's words
                cannot be read. Not called for what was given back, nor by `open`; must not raise.
        """
        number = LeaseNumber(next(self._numbers))
        self._leases[number] = _Lease(
            attempt_id=first.attempt_id, on_message=on_message, on_end=on_end
        )
        if self._call is None:
            self._outbox = deque()
            self._has_words = asyncio.Event()
            self._call = self._begin(_words(self._outbox, self._has_words))
            tasks.create_task(self._listen(self._call))
        self._say(reader_message_to_pb(number, first, traceparent=traceparent))
        return number

    def give_back(self, number: LeaseNumber) -> None:
        """End a lease; nothing more of it is told. It may have ended already."""
        if self._leases.pop(number, None) is not None:
            self._say(reader_message_to_pb(number, LeaseClosed()))

    def close(self) -> None:
        """Break the stream, and with it all leases."""
        if self._call is not None:
            self._call.cancel()

    # -- parts --

    def _say(self, message: Any | None) -> None:
        self._outbox.append(message)
        self._has_words.set()

    def _hear(self, item: Any) -> None:
        number = LeaseNumber(item.lease)
        lease = self._leases.get(number)
        if lease is None:
            return
        try:
            message = holder_message_from_pb(item, lease.attempt_id)
        except MoonpoolError as error:
            self.give_back(number)
            lease.on_end(error)
            return
        if isinstance(message, LeaseEnded):
            del self._leases[number]
            lease.on_end(None)
        else:
            lease.on_message(message)

    async def _listen(self, call: grpc.aio.StreamStreamCall) -> None:
        try:
            async for item in call:
                self._hear(item)
            error: MoonpoolError = TransferError(
                f"{self._peer} ended the stream.", code="kv_peer_lost"
            )
        except grpc.aio.AioRpcError as failure:
            error = error_from(failure, self._peer)
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is None or task.cancelling():
                raise
            # grpc raises the same in a reader whose call or channel is closed.
            error = TransferError(f"{self._peer} was dropped.", code="kv_peer_lost")
        finally:
            self._call = None
            call.cancel()
            # gRPC cancels whoever takes the words only if the call has not ended by itself.
            self._say(None)
        # Whoever is told may give others back, or open one on the next stream.
        for number in list(self._leases):
            lease = self._leases.pop(number, None)
            if lease is not None:
                lease.on_end(error)


async def _words(outbox: deque[Any | None], has_words: asyncio.Event) -> AsyncIterator[Any]:
    """What the reader says, as gRPC takes it, until None."""
    while True:
        has_words.clear()
        while outbox:
            if (message := outbox.popleft()) is None:
                return
            yield message
        await has_words.wait()
