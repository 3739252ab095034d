"""Device frames: what a worker's service asks of the thread in its engine that reads peers' device memory.

A socketpair of its own, beside that of engine_frames.py: a read waits for no step of the engine. Bytes are
laid out and checked the same way; every message is answered, in order.

    engine -> service   DeviceOffered                      once, first
    service -> engine   OpenDevice     -> DeviceOpened
                        ReadDevice     -> DeviceRead
                        CloseDevice    -> DeviceClosed
"""

from __future__ import annotations

import msgspec

from moonpool.kv.region import DeviceAccess
from moonpool.wire.engine_base import Wire
from moonpool.wire.engine_frames import framed
from moonpool.wire.engine_messages import EngineFrameError


class OpenDevice(Wire, tag=1):
    """Map a peer's pool. `peer` is a number that the service chooses, and never again."""

    peer: int
    ipc_handle: bytes
    num_bytes: int
    num_blocks: int


class ReadDevice(Wire, tag=2):
    """Copy blocks of a peer's pool into our own, and from there to host memory; check them there."""

    read: int
    peer: int
    #: uint32 each, as many as blocks.
    sources: bytes
    targets: bytes
    #: From 0 in the group.
    first_layer: int
    num_layers: int
    #: uint64[blocks, num_layers]
    expected: bytes


class CloseDevice(Wire, tag=3):
    peer: int


class DeviceOffered(Wire, tag=1):
    """This engine's own pool, for peers; or why they cannot have it and it cannot have theirs."""

    access: DeviceAccess | None
    why: str


class DeviceOpened(Wire, tag=2):
    peer: int
    #: Empty: it is open.
    why: str


class DeviceRead(Wire, tag=3):
    """Nothing of this read is written any more."""

    read: int
    #: uint32 each: block * num_layers + layer of what does not match.
    bad_leaves: bytes
    #: Empty: all was copied.
    why: str


class DeviceClosed(Wire, tag=4):
    peer: int
    why: str


ToDevice = OpenDevice | ReadDevice | CloseDevice
FromDevice = DeviceOffered | DeviceOpened | DeviceRead | DeviceClosed

_to_device: msgspec.msgpack.Decoder[ToDevice] = msgspec.msgpack.Decoder(ToDevice)
_from_device: msgspec.msgpack.Decoder[FromDevice] = msgspec.msgpack.Decoder(FromDevice)


def encode_device(message: ToDevice | FromDevice) -> bytes:
    """A whole frame, length first. Raises FrameTooLongError."""
    return framed(message)


def decode_to_device(payload: bytes) -> ToDevice:
    """Decode a frame without its length. Raises EngineFrameError."""
    try:
        return _to_device.decode(payload)
    except msgspec.DecodeError as error:
        raise EngineFrameError(f"not a frame for an engine's device: {error}") from error


def decode_from_device(payload: bytes) -> FromDevice:
    """Decode a frame without its length. Raises EngineFrameError."""
    try:
        return _from_device.decode(payload)
    except msgspec.DecodeError as error:
        raise EngineFrameError(f"not a frame of an engine's device: {error}") from error
