"""A question to a router: why a request went where. One call."""

from __future__ import annotations

from moonpool.api.v1 import admin_pb2, admin_pb2_grpc
from moonpool.dispatch.effects import Placement
from moonpool.rpc.calls import call
from moonpool.rpc.channel import open_channel
from moonpool.rpc.metadata import call_metadata
from moonpool.wire.explain import explanation_from_pb


async def fetch_explanation(
    address: str, request_id: str, *, key: str | None, deadline_s: float
) -> tuple[Placement, ...]:
    """The placements of one of the last requests, the oldest first.

    Args:
        key: The door's API key, if it has one.

    Raises:
        NotFoundError: The router does not know it, or no longer.
        MoonpoolError: It did not answer.
    """
    async with open_channel(address) as channel:
        stub = admin_pb2_grpc.RouterAdminStub(channel)  # type: ignore[no-untyped-call]  # generated
        reply = await call(
            stub.Explain,
            admin_pb2.ExplainRequest(request_id=request_id),
            admin_pb2.ExplainReply,
            peer=address,
            deadline_s=deadline_s,
            metadata=call_metadata(key=key or ""),
        )
    return explanation_from_pb(reply)
