"""The gRPC transport: one bidirectional stream of raw bytes to each peer, reads pipelined on it.

Life of a peer
1. connect: a channel and a stream of its own; Open is answered, or the peer is not who we mean.
2. Two tasks: one sends requests and credit, one receives bytes and hands them to the copy thread.
3. Credit: at most `window_bytes` are under way or wait to be copied, so a slow reader slows the sender.
4. Any end of the stream (the peer died, refused, or we close) fails every pending read at once; the
   peer is lost, and a new connect is a new stream.

Requests are merged: while LOW_WATER_BYTES are under way the source has work, so what is asked for then
waits and is sent as one message, which costs both ends much less.

A read that is cancelled or too late is abandoned: its bytes still come, in their place in the stream,
and are thrown away. It ends only when its last copy job has.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Sequence
from types import TracebackType

import grpc
import numpy as np

from moonpool.errors import TransferError
from moonpool.kv.region import KvRegion
from moonpool.memory.heap import keep_freed_memory
from moonpool.native import Kernels, RangeError
from moonpool.transport.base import (
    Int64Array,
    KvPeer,
    KvRead,
    LocalPool,
    ReadResult,
    peer_lost,
    read_timed_out,
)
from moonpool.transport.copier import Copier
from moonpool.transport.incoming import IncomingRead
from moonpool.wire import kv_read

#: Most bytes under way or waiting to be copied. Half of it is granted at once, since a message costs
#: both ends more than its bytes do.
WINDOW_BYTES = 32 << 20

#: With less than this under way, the source might run out of work: ask for what waits.
LOW_WATER_BYTES = 1 << 20

ChannelFactory = Callable[[str], grpc.aio.Channel]


class GrpcTransport:
    """Reads from any peer that serves KvPlane.

    Args:
        pool: The reader's own memory.
        make_channel: A new channel to `host:port`, with the cluster's options (rpc.make_channel).
        metadata: Sent with every stream: the cluster's key.
    """

    name = "grpc"

    def __init__(
        self,
        *,
        pool: LocalPool,
        kernels: Kernels,
        make_channel: ChannelFactory,
        metadata: Sequence[tuple[str, str]] = (),
        window_bytes: int = WINDOW_BYTES,
    ) -> None:
        self._pool = pool
        self._kernels = kernels
        self._make_channel = make_channel
        self._metadata = tuple(metadata)
        self._window_bytes = window_bytes
        self._copier: Copier | None = None
        self._tasks = asyncio.TaskGroup()
        self._peers: set[GrpcPeer] = set()

    async def __aenter__(self) -> GrpcTransport:
        # Each message that comes is a new buffer.
        keep_freed_memory()
        await self._tasks.__aenter__()
        self._copier = Copier(self._kernels)
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        assert self._copier is not None
        try:
            for peer in list(self._peers):
                await peer.close()
        finally:
            self._copier.close()
            await self._tasks.__aexit__(kind, error, traceback)

    @property
    def unusable(self) -> str | None:
        return None

    def announce(self, region: KvRegion) -> KvRegion:
        return region

    def why_not(self, region: KvRegion) -> str | None:
        return None if region.grpc_address else f"{region.worker} serves no gRPC reads"

    async def connect(self, region: KvRegion, *, timeout_s: float) -> KvPeer:
        assert self._copier is not None, "not entered"
        reason = self.why_not(region)
        if reason is not None:
            raise TransferError(reason, code="kv_transport_unusable")
        channel = self._make_channel(region.grpc_address)
        try:
            async with asyncio.timeout(timeout_s):
                call = channel.stream_stream(kv_read.METHOD)(metadata=self._metadata)
                opened = kv_read.OpenRead(source=region.worker, credit_bytes=self._window_bytes)
                await call.write(kv_read.encode(opened))
                if await call.read() != b"":
                    raise peer_lost(f"{region.worker} did not answer as a KvPlane")
        except BaseException as error:
            await channel.close()
            if isinstance(error, grpc.aio.AioRpcError):
                raise _transfer_error(region, error) from error
            if isinstance(error, asyncio.InvalidStateError):
                raise peer_lost(f"{region.worker} closed the stream") from error
            if isinstance(error, TimeoutError):
                raise read_timed_out(region.worker, timeout_s) from error
            raise
        peer = GrpcPeer(
            region, channel, call, self._pool, self._copier, self._window_bytes, self._peers.discard
        )
        self._peers.add(peer)
        peer.start(self._tasks)
        return peer


class GrpcPeer:
    """One stream to one incarnation."""

    def __init__(
        self,
        region: KvRegion,
        channel: grpc.aio.Channel,
        call: grpc.aio.StreamStreamCall,
        pool: LocalPool,
        copier: Copier,
        window_bytes: int,
        on_closed: Callable[[GrpcPeer], None],
    ) -> None:
        self._region = region
        self._channel = channel
        self._call = call
        self._pool = pool
        self._copier = copier
        self._stream = copier.stream(pool, self._on_ready)
        self._grant_bytes = window_bytes // 2
        self._on_closed = on_closed
        self._loop = asyncio.get_running_loop()
        self._tasks: list[asyncio.Task[None]] = []
        #: Reads that were asked for and are not done, in the order of their bytes; abandoned ones too.
        self._pending: deque[IncomingRead] = deque()
        #: Reads that were not asked for yet, in order, with their spans.
        self._waiting: dict[IncomingRead, Int64Array] = {}
        #: Reads that have not ended for their caller.
        self._reads: set[IncomingRead] = set()
        #: Something may have to be sent.
        self._wake = asyncio.Event()
        self._num_under_way = 0
        self._num_done = 0
        #: Bytes of credit that were given back since the stream was opened.
        self._num_granted = 0
        self._lost: TransferError | None = None
        self._stream.ring_at(self._grant_bytes)

    @property
    def region(self) -> KvRegion:
        return self._region

    @property
    def is_lost(self) -> bool:
        return self._lost is not None

    def start(self, tasks: asyncio.TaskGroup) -> None:
        """Run the stream's two tasks in `tasks` until close()."""
        self._tasks = [tasks.create_task(self._send()), tasks.create_task(self._receive())]

    async def read(self, read: KvRead, *, timeout_s: float) -> ReadResult:
        started = time.monotonic()
        if self._lost is not None:
            raise _again(self._lost)
        try:
            planned = self._stream.plan(read.spans, read.checks)
        except RangeError as error:
            raise TransferError(
                f"the target is out of bounds: {error}", code="kv_out_of_bounds"
            ) from error
        if not planned.num_bytes:
            return await self._check_only(read, started)
        incoming = IncomingRead(planned, self._loop)
        too_late = self._loop.call_later(timeout_s, self._too_late, incoming, timeout_s)
        self._reads.add(incoming)
        self._waiting[incoming] = read.spans
        self._wake.set()
        try:
            await incoming.done
        finally:
            too_late.cancel()
            self._waiting.pop(incoming, None)
            try:
                await incoming.settle()
            finally:
                self._reads.discard(incoming)
        bad = planned.bad_checks()
        return ReadResult(
            num_bytes=planned.num_bytes,
            bad_leaves=() if bad is None else tuple(sorted(read.order[bad].tolist())),
            elapsed_s=time.monotonic() - started,
        )

    def _too_late(self, incoming: IncomingRead, timeout_s: float) -> None:
        incoming.fail(read_timed_out(self._region.worker, timeout_s))

    async def _check_only(self, read: KvRead, started: float) -> ReadResult:
        """A read without bytes: its leaves are here already."""
        route = self._copier.route(self._pool.bytes, self._pool)
        is_bad = await self._copier.submit(route, read.spans[:0], read.checks).wait()
        return ReadResult(
            num_bytes=0,
            bad_leaves=read.bad_leaves(is_bad),
            elapsed_s=time.monotonic() - started,
        )

    async def close(self) -> None:
        self._lose(peer_lost(f"the stream to {self._region.worker} was closed"))
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks)
        for incoming in list(self._pending):
            await incoming.settle()
        self._copier.forget(self._stream)
        self._on_closed(self)
        self._call.cancel()
        await self._channel.close()

    async def _send(self) -> None:
        try:
            while True:
                await self._wake.wait()
                self._wake.clear()
                await self._grant()
                if self._waiting and self._num_under_way < LOW_WATER_BYTES:
                    await self._ask()
        except (grpc.aio.AioRpcError, asyncio.InvalidStateError):
            # The stream has ended; the receiving task sees why.
            return

    async def _grant(self) -> None:
        """Give back the credit of what was consumed, once it is worth a message."""
        credit = self._stream.ring_at(self._num_granted + self._grant_bytes) - self._num_granted
        if credit < self._grant_bytes:
            return
        self._num_granted += credit
        self._stream.ring_at(self._num_granted + self._grant_bytes)
        await self._call.write(kv_read.encode(kv_read.GrantCredit(credit_bytes=credit)))

    async def _ask(self) -> None:
        """Ask for all that waits."""
        spans = np.concatenate(list(self._waiting.values()))
        for incoming in self._waiting:
            self._stream.expect(incoming.planned)
            self._num_under_way += incoming.planned.num_bytes
        self._pending.extend(self._waiting)
        self._waiting.clear()
        for request in kv_read.requests_for(spans):
            await self._call.write(kv_read.encode(request))

    async def _receive(self) -> None:
        try:
            while True:
                message = await self._call.read()
                if message is grpc.aio.EOF:
                    code, details = await self._call.code(), await self._call.details()
                    self._lose(peer_lost(f"{self._region.worker}: {code.name}: {details}"))
                    return
                if not 0 < len(message) <= self._num_under_way:
                    self._lose(peer_lost(f"{self._region.worker} sent what was not asked for"))
                    return
                self._num_under_way -= len(message)
                self._stream.feed(message)
                if self._waiting and self._num_under_way < LOW_WATER_BYTES:
                    self._wake.set()
        except grpc.aio.AioRpcError as error:
            self._lose(_transfer_error(self._region, error))

    def _on_ready(self) -> None:
        """The copy thread has news: reads are done, credit may be given back, a read may be quiet."""
        num_done = self._stream.num_done()
        while self._num_done < num_done:
            self._num_done += 1
            self._pending.popleft().complete()
        for incoming in self._reads:
            incoming.look()
        limit = self._num_granted + self._grant_bytes
        if self._stream.ring_at(limit) >= limit:
            self._wake.set()

    def _lose(self, error: TransferError) -> None:
        if self._lost is None:
            self._lost = error
            for incoming in self._reads:
                incoming.fail(_again(error))


_CODES = {
    grpc.StatusCode.FAILED_PRECONDITION: "kv_wrong_incarnation",
    grpc.StatusCode.OUT_OF_RANGE: "kv_out_of_bounds",
}


def _transfer_error(region: KvRegion, error: grpc.aio.AioRpcError) -> TransferError:
    return TransferError(
        f"{region.worker}: {error.code().name}: {error.details()}",
        code=_CODES.get(error.code(), "kv_peer_lost"),
    )


def _again(error: TransferError) -> TransferError:
    return TransferError(error.message, code=error.code)
