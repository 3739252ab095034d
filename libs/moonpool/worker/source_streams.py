"""SourceStreams: the reader's end of streams to peers: calls of their own for handoffs, leases on one call to each
peer for prefixes (reader_leases.py).

A stream is open while KV is read; then it is ended. Closing cancels the call, or gives the lease back, which
the peer sees at once. A stream that ends in any other way is told as StreamBroken; the reader's machine
decides what that means. An attempt has at most one stream, so it is named by its attempt.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import grpc
import structlog

from moonpool.errors import MoonpoolError
from moonpool.handoff.effects import OpenStream, TellAhead
from moonpool.handoff.events import (
    HandoffEvent,
    HolderMessageReceived,
    SourceMessageReceived,
    StreamBroken,
)
from moonpool.handoff.messages import Commit, HolderMessage, Open, PrefixOpen
from moonpool.ids import AttemptId, WorkerKey
from moonpool.rpc.errors import error_from
from moonpool.rpc.metadata import call_metadata
from moonpool.wire.handoff import open_to_pb, source_message_from_pb
from moonpool.wire.prefix_read import LeaseNumber
from moonpool.worker.attempt_book import AttemptBook
from moonpool.worker.attempt_record import CommitTimes
from moonpool.worker.peers import Peer, PeerDirectory
from moonpool.worker.reader_leases import ReaderLeases

log = structlog.get_logger("moonpool.worker")

_ENDED = "ended by the source"


@dataclass(frozen=True, slots=True)
class _Lease:
    """One at a peer."""

    leases: ReaderLeases
    number: LeaseNumber


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
        #: The task that connects or listens, or the lease.
        self._streams: dict[AttemptId, asyncio.Task[None] | _Lease] = {}

    def __len__(self) -> int:
        return len(self._streams)

    def open(self, effect: OpenStream, tasks: asyncio.TaskGroup) -> None:
        """Connect to the source if need be, and open the stream."""
        attempt_id = effect.attempt_id
        assert attempt_id not in self._streams, attempt_id
        if isinstance(effect.open, Open):
            self._book.opening(attempt_id, effect.source.key)
        else:
            peer = self._peers.connected(effect.source.key)
            if peer is not None:
                self._open_lease(effect.open, peer, tasks)
                return
        self._streams[attempt_id] = tasks.create_task(self._run(effect, tasks))

    def close(self, attempt_id: AttemptId) -> None:
        """End the stream; nothing more of it is told."""
        match self._streams.pop(attempt_id, None):
            case _Lease(leases=leases, number=number):
                leases.give_back(number)
            case asyncio.Task() as task:
                task.cancel()
            case None:
                pass

    def tell_ahead(self, effect: TellAhead, tasks: asyncio.TaskGroup) -> None:
        """Connect to the peer if need be, and tell it. It ends the lease itself; a peer that is lost is not told."""
        tasks.create_task(self._tell_ahead(effect, tasks))

    async def _tell_ahead(self, effect: TellAhead, tasks: asyncio.TaskGroup) -> None:
        attempt_id = effect.open.attempt_id
        try:
            peer = await self._peers.get(effect.source)
        except MoonpoolError as error:
            log.info("kv.ahead_untold", attempt=str(attempt_id), why=error.message)
            return
        peer.prefixes.open(
            effect.open,
            traceparent=self._book.traceparent(attempt_id),
            tasks=tasks,
            on_message=_ignore,
            on_end=_ignore,
        )

    async def _run(self, effect: OpenStream, tasks: asyncio.TaskGroup) -> None:
        attempt_id, source = effect.attempt_id, effect.source
        try:
            peer = await self._peers.get(source)
            if not isinstance(effect.open, Open):
                self._open_lease(effect.open, peer, tasks)
                return
            self._book.connected(attempt_id, peer.transport)
            await self._listen(effect.open, peer)
            reason = _ENDED
        except MoonpoolError as error:
            reason = error.message
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is None or task.cancelling():
                raise
            # grpc raises the same in a reader whose channel is closed: the peer was dropped.
            reason = "the peer was dropped"
        if self._streams.get(attempt_id) is asyncio.current_task():
            self._ended(attempt_id, source.key, reason)

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

    def _open_lease(self, opened: PrefixOpen, peer: Peer, tasks: asyncio.TaskGroup) -> None:
        attempt_id = opened.attempt_id
        self._book.connected(attempt_id, peer.transport)
        number = peer.prefixes.open(
            opened,
            traceparent=self._book.traceparent(attempt_id),
            tasks=tasks,
            on_message=self._on_holder_message,
            on_end=partial(self._on_lease_ended, attempt_id, peer.key),
        )
        self._streams[attempt_id] = _Lease(peer.prefixes, number)

    def _on_holder_message(self, message: HolderMessage) -> None:
        self._handle(HolderMessageReceived(message=message))

    def _on_lease_ended(
        self, attempt_id: AttemptId, source: WorkerKey, error: MoonpoolError | None
    ) -> None:
        self._ended(attempt_id, source, _ENDED if error is None else error.message)

    def _ended(self, attempt_id: AttemptId, source: WorkerKey, reason: str) -> None:
        """A stream has ended that was not closed here."""
        del self._streams[attempt_id]
        log.info("kv.stream_ended", attempt=str(attempt_id), source=str(source), why=reason)
        self._handle(StreamBroken(attempt_id=attempt_id))

    def _from_source(self, attempt_id: AttemptId, item: Any) -> HandoffEvent:
        message = source_message_from_pb(item, attempt_id)
        if isinstance(message, Commit):
            times = CommitTimes(
                last_layer_unix_ns=item.commit.last_layer_unix_ns,
                first_token_unix_ns=item.commit.first_token_unix_ns,
            )
            self._book.committed(attempt_id, times)
        return SourceMessageReceived(message=message)


def _ignore(_what: object) -> None:
    """Nobody waits for it."""
