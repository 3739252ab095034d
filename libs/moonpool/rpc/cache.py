"""Questions about the reuse of KV, to a router. (A worker's cache is cleared by rpc/admin.py.)"""

from __future__ import annotations

from moonpool.api.v1 import admin_pb2, admin_pb2_grpc
from moonpool.rpc.calls import call
from moonpool.rpc.channel import open_channel
from moonpool.rpc.metadata import call_metadata
from moonpool.wire.cache_stats import CacheStats, cache_stats_from_pb


async def fetch_cache_stats(address: str, *, key: str | None, deadline_s: float) -> CacheStats:
    """What a router has counted since it started: hits by source, misses by reason, the ceiling.

    Args:
        key: The door's API key, if it has one.

    Raises:
        MoonpoolError: It did not answer, or not with counts.
    """
    async with open_channel(address) as channel:
        stub = admin_pb2_grpc.RouterAdminStub(channel)  # type: ignore[no-untyped-call]  # generated
        reply = await call(
            stub.CacheStats,
            admin_pb2.CacheStatsRequest(),
            admin_pb2.CacheStatsReply,
            peer=address,
            deadline_s=deadline_s,
            metadata=call_metadata(key=key or ""),
        )
    return cache_stats_from_pb(reply)
