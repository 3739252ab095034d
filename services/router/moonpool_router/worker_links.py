"""WorkerLinks: the router's streams to workers, one multiplexed gRPC stream per address.

Life of a link
  1. open(): a channel of its own; the Session call starts; the router's hello leaves.
  2. The worker's hello within HELLO_S, else the link is closed.
  3. Messages go out in order; a ping each PING_S when there is nothing else. Frames come in.
  4. close(), the worker's end of stream, a transport error, or a message that cannot be what the
     worker meant: the channel is closed. Unless the loop closed it, the loop is told, once.

A link holds what the worker has not taken yet, at most MAX_UNSENT messages: a worker that does not
read its stream is as dead as one that does not answer.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable
from typing import Protocol

import grpc
import structlog

from moonpool.api.v1 import worker_pb2 as pb
from moonpool.api.v1 import worker_pb2_grpc
from moonpool.errors import FailedPreconditionError, MoonpoolError, UnauthenticatedError
from moonpool.handoff.messages import RouterMessage
from moonpool.ids import WorkerKey
from moonpool.rpc.channel import open_channel
from moonpool.rpc.errors import error_from
from moonpool.rpc.metadata import call_metadata
from moonpool.wire.session import (
    Ping,
    WorkerFrame,
    router_message_to_pb,
    worker_message_from_pb,
)
from moonpool.wire.worker import RouterHello, WorkerHello

HELLO_S = 5.0
PING_S = 1.0
MAX_UNSENT = 4_096

log = structlog.get_logger("moonpool.router")


class LinkListener(Protocol):
    """Who is told what comes on the links. Calls return at once."""

    def on_hello(self, address: str, hello: WorkerHello) -> None: ...

    def on_frame(self, address: str, key: WorkerKey, frame: WorkerFrame) -> None: ...

    def on_closed(self, address: str, reason: str) -> None: ...

    def on_refused(self, address: str, reason: str) -> None: ...


class _Link:
    def __init__(self, address: str) -> None:
        self.address = address
        self.unsent: deque[pb.RouterMessage] = deque()
        self.wakeup = asyncio.Event()
        self.task: asyncio.Task[None] | None = None
        #: Closed by the loop: its end is no news.
        self.is_closed = False


class WorkerLinks:
    """See the file's head. Enter it around everything that opens links.

    Args:
        hello: Made for each link, with what is known then.
        key: The cluster's RPC key.
    """

    def __init__(self, *, hello: Callable[[], RouterHello], key: str) -> None:
        self._hello = hello
        self._key = key
        self._links: dict[str, _Link] = {}
        self._tasks = asyncio.TaskGroup()
        self._listener: LinkListener | None = None

    def listen(self, listener: LinkListener) -> None:
        """Before the first open()."""
        self._listener = listener

    async def __aenter__(self) -> WorkerLinks:
        await self._tasks.__aenter__()
        return self

    async def __aexit__(self, *details: object) -> None:
        for address in tuple(self._links):
            self.close(address)
        await self._tasks.__aexit__(None, None, None)

    # -- what the loop calls --

    def open(self, address: str) -> None:
        self.close(address)
        link = self._links[address] = _Link(address)
        link.task = self._tasks.create_task(self._run(link), name=f"link {address}")

    def close(self, address: str) -> None:
        link = self._links.pop(address, None)
        if link is not None and link.task is not None:
            link.is_closed = True
            # A link that ends itself is on its way out and needs no push.
            if link.task is not asyncio.current_task():
                link.task.cancel()

    def send(self, address: str, message: RouterMessage) -> None:
        """See Links.send."""
        link = self._links.get(address)
        if link is None:
            return
        encoded = router_message_to_pb(message)
        if len(link.unsent) >= MAX_UNSENT:
            log.warning("worker.does_not_read", address=address, num_unsent=len(link.unsent))
            self._end(link, f"{len(link.unsent)} messages were not taken")
            return
        link.unsent.append(encoded)
        link.wakeup.set()

    # -- one link --

    async def _run(self, link: _Link) -> None:
        try:
            await self._converse(link)
        except grpc.aio.AioRpcError as failure:
            error = error_from(failure, link.address)
            if isinstance(error, FailedPreconditionError | UnauthenticatedError):
                self._refuse(link, error.message)
            else:
                self._end(link, f"{error.code}: {failure.details()}")
        except FailedPreconditionError as error:
            self._refuse(link, error.message)
        except MoonpoolError as error:
            self._end(link, error.message)
        except TimeoutError:
            self._end(link, f"no hello within {HELLO_S:g} s")
        else:
            self._end(link, "the worker ended the stream")

    async def _converse(self, link: _Link) -> None:
        assert self._listener is not None, "listen() comes first"
        async with open_channel(link.address) as channel:
            stub = worker_pb2_grpc.WorkerStub(channel)  # type: ignore[no-untyped-call]  # generated
            call = stub.Session(self._outgoing(link), metadata=call_metadata(key=self._key))
            async with asyncio.timeout(HELLO_S):
                first = await call.read()
            if first is grpc.aio.EOF:
                # Raises the status with which the worker ended the call, if it was not OK.
                await _raise_status(call)
                return
            hello = worker_message_from_pb(first)
            if not isinstance(hello, WorkerHello):
                self._end(link, "the worker's first message is no hello")
                return
            if link.is_closed:
                return
            self._listener.on_hello(link.address, hello)
            # What the listener hears may make it close this link, which cannot end its own task.
            while not link.is_closed:
                message = await call.read()
                if link.is_closed:
                    return
                if message is grpc.aio.EOF:
                    await _raise_status(call)
                    return
                frame = worker_message_from_pb(message)
                if not isinstance(frame, WorkerFrame):
                    self._end(link, "the worker said hello twice")
                    return
                self._listener.on_frame(link.address, hello.worker, frame)

    async def _outgoing(self, link: _Link) -> AsyncIterator[pb.RouterMessage]:
        yield router_message_to_pb(self._hello())
        while True:
            while link.unsent:
                yield link.unsent.popleft()
            link.wakeup.clear()
            try:
                async with asyncio.timeout(PING_S):
                    await link.wakeup.wait()
            except TimeoutError:
                yield router_message_to_pb(Ping())

    def _end(self, link: _Link, reason: str) -> None:
        if self._forget(link):
            assert self._listener is not None
            self._listener.on_closed(link.address, reason)

    def _refuse(self, link: _Link, reason: str) -> None:
        if self._forget(link):
            assert self._listener is not None
            self._listener.on_refused(link.address, reason)

    def _forget(self, link: _Link) -> bool:
        """Close the link; True if its end is news."""
        if link.is_closed:
            return False
        self.close(link.address)
        return True


async def _raise_status(call: grpc.aio.StreamStreamCall) -> None:
    """The call has ended: raise AioRpcError unless its status is OK."""
    code = await call.code()
    if code is not grpc.StatusCode.OK:
        raise grpc.aio.AioRpcError(
            code,
            await call.initial_metadata(),
            await call.trailing_metadata(),
            details=await call.details(),
        )
