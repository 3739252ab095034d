"""RouterAdmin over gRPC: what `moonpool status`, `trace`, `explain` and `cache stats` ask."""

from __future__ import annotations

from collections.abc import Callable

import grpc

from moonpool.api.v1 import admin_pb2 as pb
from moonpool.api.v1 import admin_pb2_grpc
from moonpool.dispatch.effects import Placement
from moonpool.errors import NotFoundError
from moonpool.ids import RequestId
from moonpool.telemetry.spans import TraceRing
from moonpool.wire.admin import RouterSnapshot, router_snapshot_to_pb, trace_to_pb
from moonpool.wire.cache_stats import CacheStats, cache_stats_to_pb
from moonpool.wire.explain import explanation_to_pb

SERVICE = pb.DESCRIPTOR.services_by_name["RouterAdmin"].full_name


class AdminDoor(admin_pb2_grpc.RouterAdminServicer):
    """Reads only.

    Args:
        placements: Of one of the newest requests; empty if it is not known.
        now: The clock that `Placement.placed_at` is of.
    """

    def __init__(
        self,
        snapshot: Callable[[], RouterSnapshot],
        traces: TraceRing,
        *,
        placements: Callable[[RequestId], tuple[Placement, ...]],
        cache_stats: Callable[[], CacheStats],
        now: Callable[[], float],
    ) -> None:
        self._snapshot = snapshot
        self._traces = traces
        self._placements = placements
        self._cache_stats = cache_stats
        self._now = now

    async def Status(  # noqa: N802 - the name is the protocol's
        self, request: pb.StatusRequest, context: grpc.aio.ServicerContext
    ) -> pb.StatusReply:
        return router_snapshot_to_pb(self._snapshot())

    async def Trace(  # noqa: N802 - the name is the protocol's
        self, request: pb.TraceRequest, context: grpc.aio.ServicerContext
    ) -> pb.TraceReply:
        spans = self._traces.get(request.request_id)
        if not spans:
            raise NotFoundError(
                f"No trace of request {request.request_id[:64]!r} is kept here.",
                code="trace_not_found",
                param="request_id",
            )
        return trace_to_pb(request.request_id, spans)

    async def Explain(  # noqa: N802 - the name is the protocol's
        self, request: pb.ExplainRequest, context: grpc.aio.ServicerContext
    ) -> pb.ExplainReply:
        placements = self._placements(RequestId(request.request_id))
        if not placements:
            raise NotFoundError(
                f"No placement of request {request.request_id[:64]!r} is kept here.",
                code="placement_not_found",
                param="request_id",
            )
        return explanation_to_pb(request.request_id, placements, now=self._now())

    async def CacheStats(  # noqa: N802 - the name is the protocol's
        self, request: pb.CacheStatsRequest, context: grpc.aio.ServicerContext
    ) -> pb.CacheStatsReply:
        return cache_stats_to_pb(self._cache_stats())
