"""DeviceLink: the service's end of the socket to the part of its engine that reads peers' device memory.

Rules
1. Nothing here waits for the engine's steps, and no message is lost: each is answered, in order.
2. What was asked for is over when its answer is there, or when the engine has ended: with it ends all that
   it was writing.
3. A peer that is closed while its reads are under way is closed after them: the engine takes one message
   at a time.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import socket
from types import TracebackType
from typing import TypeVar

import numpy as np
import structlog

from moonpool.errors import TransferError
from moonpool.kv.region import DeviceAccess
from moonpool.transport.base import BlockCopy, peer_lost
from moonpool.wire.device_frames import (
    CloseDevice,
    DeviceClosed,
    DeviceOffered,
    DeviceOpened,
    DeviceRead,
    FromDevice,
    OpenDevice,
    ReadDevice,
    ToDevice,
    decode_from_device,
    encode_device,
)
from moonpool.wire.engine_frames import FrameBuffer

log = structlog.get_logger("moonpool.transport")

_READ_BYTES = 1 << 16
_T = TypeVar("_T")
_ENDED = "this worker's engine does not read device memory any more"


class DeviceLink:
    """On one loop, entered for the worker's life.

    Attributes:
        engine_end: For the engine; closed here by `release`, once the engine has it.
        why_not: Why no device memory is read or offered, in words; None if it is. Known if `is_known`.
    """

    def __init__(self) -> None:
        ours, self.engine_end = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        self._sock = ours
        self._sock.setblocking(False)
        self._writer: asyncio.StreamWriter | None = None
        self._tasks = asyncio.TaskGroup()
        self._numbers = itertools.count(1)
        self._offered: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._access: DeviceAccess | None = None
        self.why_not: str | None = "this worker's engine has not begun"
        self._opens: dict[int, asyncio.Future[str]] = {}
        self._reads: dict[int, asyncio.Future[DeviceRead]] = {}
        self._closes: dict[int, asyncio.Future[None]] = {}

    async def __aenter__(self) -> DeviceLink:
        await self._tasks.__aenter__()
        reader, self._writer = await asyncio.open_unix_connection(sock=self._sock)
        self._tasks.create_task(self._receive(reader))
        return self

    async def __aexit__(
        self,
        _kind: type[BaseException] | None,
        _error: BaseException | None,
        _traceback: TracebackType | None,
    ) -> None:
        self.release()
        # The receiving task sees the end of file.
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)
        await self._tasks.__aexit__(None, None, None)

    def release(self) -> None:
        """The engine has its end. May be called twice."""
        self.engine_end.close()

    async def offered(self) -> None:
        """Returns when the engine has said what it offers, or has ended."""
        await asyncio.shield(self._offered)

    @property
    def is_known(self) -> bool:
        """`offered` has returned, or would at once."""
        return self._offered.done()

    @property
    def access(self) -> DeviceAccess | None:
        """Our own device memory, for peers."""
        return self._access

    async def open(self, access: DeviceAccess, num_blocks: int, *, timeout_s: float) -> int:
        """Map a peer's pool; returns its number. The caller closes it.

        Raises:
            TransferError: There is no such memory, or the engine is too slow.
        """
        peer = next(self._numbers)
        opened = self._opens[peer] = asyncio.get_running_loop().create_future()
        self._send(OpenDevice(peer, access.ipc_handle, access.num_bytes, num_blocks))
        try:
            async with asyncio.timeout(timeout_s):
                why = await asyncio.shield(opened)
        except BaseException as error:
            # It may be opened later; that is closed then.
            self._send(CloseDevice(peer))
            if isinstance(error, TimeoutError):
                raise TransferError(
                    f"the engine did not open it in {timeout_s:.3g} s", code="kv_read_timeout"
                ) from error
            raise
        if why:
            raise TransferError(f"the engine cannot open it: {why}", code="kv_transport_unusable")
        return peer

    def read(self, peer: int, copy: BlockCopy) -> asyncio.Future[DeviceRead]:
        """Begin a read; the answer says that nothing of it is written any more. Never fails by itself."""
        number = next(self._numbers)
        ended = self._reads[number] = asyncio.get_running_loop().create_future()
        self._send(
            ReadDevice(
                number,
                peer,
                copy.sources.astype("<u4").tobytes(),
                copy.targets.astype("<u4").tobytes(),
                copy.first_layer,
                copy.expected.shape[1],
                copy.expected.astype("<u8").tobytes(),
            )
        )
        return ended

    async def close(self, peer: int) -> None:
        """Returns when the peer's memory is not mapped any more."""
        closed = self._closes[peer] = asyncio.get_running_loop().create_future()
        self._send(CloseDevice(peer))
        await asyncio.shield(closed)

    def _send(self, message: ToDevice) -> None:
        assert self._writer is not None, "not entered"
        if self._offered.done() and self.why_not is not None:
            self._end(self.why_not)
        else:
            self._writer.write(encode_device(message))

    async def _receive(self, reader: asyncio.StreamReader) -> None:
        incoming = FrameBuffer()
        try:
            with contextlib.suppress(ConnectionResetError, BrokenPipeError):
                while data := await reader.read(_READ_BYTES):
                    incoming.feed(data)
                    for payload in incoming.frames():
                        self._on_message(decode_from_device(payload))
        finally:
            self._end(_ENDED)
            assert self._writer is not None
            self._writer.close()

    def _on_message(self, message: FromDevice) -> None:
        match message:
            case DeviceOffered():
                self._access = message.access
                self.why_not = None if message.access is not None else message.why
                self._offered.set_result(None)
            case DeviceOpened():
                _tell(self._opens.pop(message.peer), message.why)
            case DeviceRead():
                _tell(self._reads.pop(message.read), message)
            case DeviceClosed():
                if message.why:
                    log.warning("kv.device_memory_not_unmapped", why=message.why)
                closed = self._closes.pop(message.peer, None)
                if closed is not None:
                    _tell(closed, None)

    def _end(self, why: str) -> None:
        """Answer all that is asked in the place of an engine that will not."""
        if self.why_not is None or not self._offered.done():
            self.why_not = why
        self._access = None
        _tell(self._offered, None)
        for opened in self._opens.values():
            _tell(opened, why)
        for number, ended in self._reads.items():
            _tell(ended, DeviceRead(number, b"", why))
        for closed in self._closes.values():
            _tell(closed, None)
        self._opens, self._reads, self._closes = {}, {}, {}


def bad_leaves_of(answer: DeviceRead) -> tuple[int, ...]:
    """Ascending. Raises TransferError: It failed."""
    if answer.why:
        raise peer_lost(f"a copy failed: {answer.why}")
    return tuple(np.frombuffer(answer.bad_leaves, "<u4").tolist())


def _tell(future: asyncio.Future[_T], value: _T) -> None:
    if not future.done():
        future.set_result(value)
