"""SourceStreams: the reader's end of streams to peers: calls of their own for handoffs, leases on one call to each
peer for prefixes (reader_leases.py).

A stream is open while KV is read; then it is ended. Closing cancels the call, or gives the lease back, which
the peer sees at once. A stream that ends in any other way is told as StreamBroken; the reader's machine
decides what that means. An attempt has at most one stream, so it is named by its attempt.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from typing import Any

import grpc
import structlog

from moonpool.errors import MoonpoolError
from moonpool.handoff.effects import OpenStream
from moonpool.handoff.events import (
    HandoffEvent,
    HolderMessageReceived,
    SourceMessageReceived,
    StreamBroken,
)
from moonpool.handoff.messages import Commit, Open, PrefixOpen
from moonpool.ids import AttemptId
from moonpool.rpc.errors import error_from
from moonpool.rpc.metadata import call_metadata
from moonpool.wire.handoff import open_to_pb, source_message_from_pb
from moonpool.worker.attempt_book import AttemptBook
from moonpool.worker.attempt_record import CommitTimes
from moonpool.worker.peers import Peer, PeerDirectory

log = structlog.get_logger("moonpool.worker")


class SourceStreams:
    """All streams that this worker reads from. On one loop.

    Args:
        rpc_key: The cluster's, for calls to peers.
        handle: Takes what the sources say, and StreamBroken.
    """

    def __init__(
        self,
        *,
        peers: PeerDirectory,
        book: AttemptBook,
        rpc_key: str,
        handle: Callable[[HandoffEvent], None],
    ) -> None:
        self._peers = peers
        self._book = book
        self._rpc_key = rpc_key
        self._handle = handle
        self._streams: dict[AttemptId, asyncio.Task[None]] = {}

    def __len__(self) -> int:
        return len(self._streams)

    def open(self, effect: OpenStream, tasks: asyncio.TaskGroup) -> None:
        """Connect to the source if need be, and open the stream."""
        attempt_id = effect.attempt_id
        assert attempt_id not in self._streams, attempt_id
        if isinstance(effect.open, Open):
            self._book.opening(attempt_id, effect.source.key)
        self._streams[attempt_id] = tasks.create_task(self._run(effect, tasks))

    def close(self, attempt_id: AttemptId) -> None:
        """End the stream; nothing more of it is told."""
        task = self._streams.pop(attempt_id, None)
        if task is not None:
            task.cancel()

    async def _run(self, effect: OpenStream, tasks: asyncio.TaskGroup) -> None:
        attempt_id, source = effect.attempt_id, effect.source
        try:
            peer = await self._peers.get(source)
            self._book.connected(attempt_id, peer.transport)
            if isinstance(effect.open, Open):
                await self._listen(effect.open, peer)
            else:
                await self._read_prefix(effect.open, peer, tasks)
            reason = "ended by the source"
        except MoonpoolError as error:
            reason = error.message
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is None or task.cancelling():
                raise
            # grpc raises the same in a reader whose channel is closed: the peer was dropped.
            reason = "the peer was dropped"
        if self._streams.get(attempt_id) is not asyncio.current_task():
            return
        del self._streams[attempt_id]
        log.info("kv.stream_ended", attempt=str(attempt_id), source=str(source.key), why=reason)
        self._handle(StreamBroken(attempt_id=attempt_id))

    async def _listen(self, opened: Open, peer: Peer) -> None:
        """Raises MoonpoolError for whatever the peer or the way to it did wrong."""
        traceparent = self._book.traceparent(opened.attempt_id)
        call = peer.stub.Handoff(metadata=call_metadata(key=self._rpc_key, traceparent=traceparent))
        try:
            await call.write(open_to_pb(opened, traceparent=traceparent))
            async for item in call:
                self._handle(self._from_source(opened.attempt_id, item))
        except grpc.aio.AioRpcError as failure:
            raise error_from(failure, str(peer.key)) from failure
        finally:
            call.cancel()

    async def _read_prefix(self, opened: PrefixOpen, peer: Peer, tasks: asyncio.TaskGroup) -> None:
        """Raises MoonpoolError for whatever the peer or the way to it did wrong."""
        traceparent = self._book.traceparent(opened.attempt_id)
        async with contextlib.aclosing(
            peer.prefixes.read(opened, traceparent=traceparent, tasks=tasks)
        ) as messages:
            async for message in messages:
                self._handle(HolderMessageReceived(message=message))

    def _from_source(self, attempt_id: AttemptId, item: Any) -> HandoffEvent:
        message = source_message_from_pb(item, attempt_id)
        if isinstance(message, Commit):
            times = CommitTimes(
                last_layer_unix_ns=item.commit.last_layer_unix_ns,
                first_token_unix_ns=item.commit.first_token_unix_ns,
            )
            self._book.committed(attempt_id, times)
        return SourceMessageReceived(message=message)
