"""ReaderLeases: the reader's end of leases on prefixes at one holder: one stream, and a lease on it for each attempt.

The stream is opened by the first lease and stays: a lease is then two small messages each way, where a stream of
its own would cost both processes some milliseconds of work. The holder's end: holder_leases.py.

Life of a lease

    read() -> Open -> what the holder says -> ended by the holder
                                           -> given back: whoever reads stops        Close
                                           -> broken with the stream                 MoonpoolError
"""

from __future__ import annotations

import asyncio
import itertools
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from typing import Any

import grpc

from moonpool.errors import MoonpoolError, TransferError
from moonpool.handoff.messages import HolderMessage, PrefixOpen
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
        #: By lease: what the holder said of it, or why it never will.
        self._inboxes: dict[LeaseNumber, asyncio.Queue[Any]] = {}

    async def read(
        self, first: PrefixOpen, *, traceparent: str, tasks: asyncio.TaskGroup
    ) -> AsyncGenerator[HolderMessage, None]:
        """Open a lease; yields what the holder says of it. It is given back when this is closed.

        Args:
            tasks: Holds the task that listens to the holder.

        Raises:
            MoonpoolError: The stream broke, or the holder's words cannot be read.
        """
        number = LeaseNumber(next(self._numbers))
        inbox = self._inboxes[number] = asyncio.Queue[Any]()
        if self._call is None:
            self._outbox = deque()
            self._has_words = asyncio.Event()
            self._call = self._begin(_words(self._outbox, self._has_words))
            tasks.create_task(self._listen(self._call))
        self._say(reader_message_to_pb(number, first, traceparent=traceparent))
        try:
            while True:
                item = await inbox.get()
                if isinstance(item, MoonpoolError):
                    raise TransferError(item.message, code=item.code)
                message = holder_message_from_pb(item, first.attempt_id)
                if isinstance(message, LeaseEnded):
                    del self._inboxes[number]
                    return
                yield message
        finally:
            if self._inboxes.pop(number, None) is not None:
                self._say(reader_message_to_pb(number, LeaseClosed()))

    def close(self) -> None:
        """Break the stream, and with it all leases."""
        if self._call is not None:
            self._call.cancel()

    # -- parts --

    def _say(self, message: Any | None) -> None:
        self._outbox.append(message)
        self._has_words.set()

    async def _listen(self, call: grpc.aio.StreamStreamCall) -> None:
        error: MoonpoolError = TransferError(f"{self._peer} ended the stream.", code="kv_peer_lost")
        try:
            async for item in call:
                inbox = self._inboxes.get(LeaseNumber(item.lease))
                if inbox is not None:
                    inbox.put_nowait(item)
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
            inboxes, self._inboxes = self._inboxes, {}
            for inbox in inboxes.values():
                inbox.put_nowait(error)


async def _words(outbox: deque[Any | None], has_words: asyncio.Event) -> AsyncIterator[Any]:
    """What the reader says, as gRPC takes it, until None."""
    while True:
        has_words.clear()
        while outbox:
            if (message := outbox.popleft()) is None:
                return
            yield message
        await has_words.wait()
