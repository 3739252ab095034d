"""serve_device: the engine's thread that reads peers' device memory for its service.

It takes one message at a time, does what it says to its end, and answers. So a peer's memory is closed only
between two reads, and its service knows of everything that it has asked for when it is over.
"""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator
from typing import Protocol

import numpy as np
import numpy.typing as npt
import structlog

from moonpool.kv.region import DeviceAccess
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
    decode_to_device,
    encode_device,
)
from moonpool.wire.engine_frames import FrameBuffer

log = structlog.get_logger("moonpool.engine")

_READ_BYTES = 1 << 20


class PeerMemory(Protocol):
    """What reads peers' device memory. All of it raises RuntimeError if the device says no, in words."""

    def offer(self) -> DeviceAccess: ...

    def open(self, peer: int, ipc_handle: bytes, num_bytes: int, num_blocks: int) -> None: ...

    def read(
        self,
        peer: int,
        sources: npt.NDArray[np.int64],
        targets: npt.NDArray[np.int64],
        first_layer: int,
        expected: npt.NDArray[np.uint64],
    ) -> npt.NDArray[np.bool_]:
        """bool like `expected`: True where the copy in host memory is another."""
        ...

    def close(self, peer: int) -> None: ...

    def close_all(self) -> None: ...


def serve_device(sock: socket.socket, memory: PeerMemory) -> None:
    """Run until the service closes its end. Takes ownership of `sock`."""
    with sock:
        offered = _offered(memory)
        if offered.access is None:
            refuse_device(sock, offered.why)
            return
        try:
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                sock.sendall(encode_device(offered))
                for message in _messages(sock):
                    sock.sendall(encode_device(_answer(message, memory)))
        finally:
            memory.close_all()


def refuse_device(sock: socket.socket, why: str) -> None:
    """Say that nobody's device memory is read here, nor ours. Takes ownership of `sock`."""
    log.warning("engine.device_not_shared", why=why)
    with sock, contextlib.suppress(BrokenPipeError, ConnectionResetError):
        sock.sendall(encode_device(DeviceOffered(None, why)))


def _offered(memory: PeerMemory) -> DeviceOffered:
    try:
        return DeviceOffered(memory.offer(), "")
    except RuntimeError as error:
        return DeviceOffered(None, _words(error))


def _messages(sock: socket.socket) -> Iterator[ToDevice]:
    incoming = FrameBuffer()
    while data := sock.recv(_READ_BYTES):
        incoming.feed(data)
        for payload in incoming.frames():
            yield decode_to_device(payload)


def _answer(message: ToDevice, memory: PeerMemory) -> FromDevice:
    match message:
        case OpenDevice():
            try:
                memory.open(message.peer, message.ipc_handle, message.num_bytes, message.num_blocks)
            except RuntimeError as error:
                return DeviceOpened(message.peer, _words(error))
            return DeviceOpened(message.peer, "")
        case ReadDevice():
            return _read(message, memory)
        case CloseDevice():
            try:
                memory.close(message.peer)
            except RuntimeError as error:
                return DeviceClosed(message.peer, _words(error))
            return DeviceClosed(message.peer, "")


def _read(message: ReadDevice, memory: PeerMemory) -> DeviceRead:
    sources, targets = (
        np.frombuffer(ids, "<u4").astype(np.int64) for ids in (message.sources, message.targets)
    )
    expected = np.frombuffer(message.expected, "<u8").reshape(len(targets), message.num_layers)
    try:
        is_bad = memory.read(message.peer, sources, targets, message.first_layer, expected)
    except RuntimeError as error:
        return DeviceRead(message.read, b"", _words(error))
    return DeviceRead(message.read, np.flatnonzero(is_bad).astype("<u4").tobytes(), "")


def _words(error: RuntimeError) -> str:
    return str(error).partition("\n")[0] or type(error).__name__
