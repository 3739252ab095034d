"""What every wire struct of engine frames is made of: msgpack arrays, numbers as raw uint32."""

from __future__ import annotations

import array
import sys
from collections.abc import Iterable

import msgspec

from moonpool.ids import BlockHash, BlockId
from moonpool.wire.engine_messages import EngineFrameError

_IS_LITTLE_ENDIAN = sys.byteorder == "little"
_HASH_BYTES = 32


class Wire(msgspec.Struct, array_like=True, forbid_unknown_fields=True, gc=False):
    """Base of all wire structs: an array, whose first element is the tag if there is one."""


def pack_u32(values: Iterable[int]) -> bytes:
    """Little-endian, 4 bytes each."""
    packed = array.array("I", values)
    if not _IS_LITTLE_ENDIAN:
        packed.byteswap()
    return packed.tobytes()


def unpack_u32(data: bytes) -> tuple[int, ...]:
    """Raises EngineFrameError."""
    if len(data) % 4:
        raise EngineFrameError(f"{len(data)} bytes are not a list of uint32")
    values = array.array("I")
    values.frombytes(data)
    if not _IS_LITTLE_ENDIAN:
        values.byteswap()
    return tuple(values)


def unpack_blocks(data: bytes) -> tuple[BlockId, ...]:
    """Raises EngineFrameError."""
    return unpack_u32(data)  # type: ignore[return-value]  # BlockId is an int


def pack_hashes(hashes: Iterable[BlockHash]) -> bytes:
    """32 bytes each, in order."""
    return b"".join(hashes)


def unpack_hashes(data: bytes) -> tuple[BlockHash, ...]:
    """Raises EngineFrameError."""
    if len(data) % _HASH_BYTES:
        raise EngineFrameError(f"{len(data)} bytes are not a list of block hashes")
    return tuple(
        [BlockHash(data[start : start + _HASH_BYTES]) for start in range(0, len(data), _HASH_BYTES)]
    )
