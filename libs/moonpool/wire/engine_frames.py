"""Engine frames: what the engine process and its service process say to each other, as bytes.

Both ends are the same version of the same program, parent and child, over a private socketpair: the
format is free to change, but it is decoded strictly, so that a bug on one side is an error on the
other and never a wrong value.

    frame  = u32 little-endian length of the rest | msgpack array [tag, fields ...]

    service -> engine   EngineBoot                     once, first
                        EngineCommands(commands)       as many as had gathered
    engine -> service   EngineMapped                   its maps stand: the memfds may be sealed now
                        EngineReady | EngineFailed     the model is loaded, or why it is not
                        EngineSteps(frames)            one frame, or several that had to wait

Rules
  1. Token lists travel as raw little-endian uint32, never as msgpack integers: 8k tokens cost
     microseconds.
  2. A value of core/protocol.py maps to exactly one struct here and back; nothing is optional that
     is not optional there.
  3. A frame longer than MAX_FRAME_BYTES, an unknown tag, a missing or an additional field raise
     EngineFrameError.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator

import msgspec

from moonpool.wire.engine_base import Wire
from moonpool.wire.engine_commands import command_from_wire, command_to_wire
from moonpool.wire.engine_messages import (
    EngineCommands,
    EngineFailed,
    EngineFrameError,
    EngineMapped,
    EngineReady,
    EngineSteps,
    FrameTooLongError,
    FromEngine,
    ToEngine,
)
from moonpool.wire.engine_structs import (
    WireBoot,
    WireCommands,
    WireFailed,
    WireFromEngine,
    WireMapped,
    WireReady,
    WireSteps,
    WireToEngine,
    frame_from_wire,
    frame_to_wire,
)

#: Far above the longest prompt; a length beyond it means that the stream is out of step.
MAX_FRAME_BYTES = 64 << 20

_LENGTH = struct.Struct("<I")


_encoder = msgspec.msgpack.Encoder()
_to_engine_decoder: msgspec.msgpack.Decoder[WireToEngine] = msgspec.msgpack.Decoder(WireToEngine)
_from_engine_decoder: msgspec.msgpack.Decoder[WireFromEngine] = msgspec.msgpack.Decoder(
    WireFromEngine
)


def encode_to_engine(message: ToEngine, *, max_bytes: int = MAX_FRAME_BYTES) -> bytes:
    """A whole frame, length first. Raises FrameTooLongError."""
    if isinstance(message, EngineCommands):
        wire = WireCommands([command_to_wire(c) for c in message.commands])
        return framed(wire, max_bytes)
    return framed(WireBoot(message), max_bytes)


def decode_to_engine(payload: bytes | bytearray | memoryview) -> ToEngine:
    """Decode a frame without its length. Raises EngineFrameError."""
    try:
        wire = _to_engine_decoder.decode(payload)
    except msgspec.DecodeError as error:
        raise EngineFrameError(f"not a frame for an engine: {error}") from error
    if isinstance(wire, WireCommands):
        return EngineCommands(commands=tuple([command_from_wire(c) for c in wire.commands]))
    return wire.boot


def encode_from_engine(message: FromEngine) -> bytes:
    """A whole frame, length first. Raises FrameTooLongError."""
    if isinstance(message, EngineSteps):
        return framed(WireSteps([frame_to_wire(frame) for frame in message.frames]))
    if isinstance(message, EngineMapped):
        return framed(WireMapped(message.pid))
    if isinstance(message, EngineReady):
        return framed(WireReady(message.load_s))
    return framed(WireFailed(message.code, message.message))


def decode_from_engine(payload: bytes | bytearray | memoryview) -> FromEngine:
    """Decode a frame without its length. Raises EngineFrameError."""
    try:
        wire = _from_engine_decoder.decode(payload)
    except msgspec.DecodeError as error:
        raise EngineFrameError(f"not a frame of an engine: {error}") from error
    if isinstance(wire, WireSteps):
        return EngineSteps(frames=tuple([frame_from_wire(frame) for frame in wire.frames]))
    if isinstance(wire, WireMapped):
        return EngineMapped(pid=wire.pid)
    if isinstance(wire, WireReady):
        return EngineReady(load_s=wire.load_s)
    return EngineFailed(code=wire.code, message=wire.message)


def framed(wire: Wire, max_bytes: int = MAX_FRAME_BYTES) -> bytes:
    """A whole frame of one struct, length first. Raises FrameTooLongError."""
    buffer = bytearray(_LENGTH.size)
    _encoder.encode_into(wire, buffer, _LENGTH.size)
    num_bytes = len(buffer) - _LENGTH.size
    if num_bytes > max_bytes:
        raise FrameTooLongError(f"a frame of {num_bytes} bytes is longer than {max_bytes}")
    _LENGTH.pack_into(buffer, 0, num_bytes)
    return bytes(buffer)


class FrameBuffer:
    """Cuts a byte stream into frames; bytes of an unfinished one wait for the rest."""

    def __init__(self) -> None:
        self._data = bytearray()

    def feed(self, data: bytes | memoryview) -> None:
        self._data += data

    def frames(self) -> Iterator[bytes]:
        """Yield every complete frame's payload and forget it. Raises EngineFrameError."""
        offset = 0
        data = self._data
        try:
            while len(data) - offset >= _LENGTH.size:
                (num_bytes,) = _LENGTH.unpack_from(data, offset)
                if num_bytes > MAX_FRAME_BYTES:
                    raise EngineFrameError(f"a frame claims {num_bytes} bytes")
                end = offset + _LENGTH.size + num_bytes
                if len(data) < end:
                    break
                payload = bytes(memoryview(data)[offset + _LENGTH.size : end])
                offset = end
                yield payload
        finally:
            if offset:
                del data[:offset]
