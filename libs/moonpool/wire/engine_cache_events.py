"""The wire structs of cache events in engine frames, and their conversion: hashes as raw bytes."""

from __future__ import annotations

from moonpool.ids import BlockHash
from moonpool.kv.events import AllBlocksCleared, BlockRemoved, BlockStored, CacheEvent
from moonpool.wire.engine_base import Wire, pack_hashes, unpack_hashes


class WireStored(Wire, tag=50):
    #: Empty at the chain's start.
    parent: bytes
    hashes: bytes


class WireRemoved(Wire, tag=51):
    hashes: bytes


class WireCleared(Wire, tag=52):
    pass


WireCacheEvent = WireStored | WireRemoved | WireCleared


def cache_event_to_wire(event: CacheEvent) -> WireCacheEvent:
    match event:
        case BlockStored(hashes=hashes, parent_hash=parent_hash):
            return WireStored(parent_hash or b"", pack_hashes(hashes))
        case BlockRemoved(hashes=hashes):
            return WireRemoved(pack_hashes(hashes))
        case AllBlocksCleared():
            return WireCleared()


def cache_event_from_wire(wire: WireCacheEvent) -> CacheEvent:
    """Raises EngineFrameError."""
    match wire:
        case WireStored(parent=parent, hashes=hashes):
            return BlockStored(
                hashes=unpack_hashes(hashes), parent_hash=BlockHash(parent) if parent else None
            )
        case WireRemoved(hashes=hashes):
            return BlockRemoved(hashes=unpack_hashes(hashes))
        case WireCleared():
            return AllBlocksCleared()
