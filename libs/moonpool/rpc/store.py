"""Questions to a store node, offers to it, and pins of what it holds."""

from __future__ import annotations

from typing import Any

import grpc

from moonpool.api.v1 import store_pb2 as pb
from moonpool.api.v1 import store_pb2_grpc
from moonpool.rpc.calls import call
from moonpool.rpc.channel import open_channel
from moonpool.rpc.metadata import Metadata, call_metadata
from moonpool.wire.store import (
    PinAnswer,
    PinChain,
    PutAnswer,
    PutOffer,
    StoreReport,
    UnpinChain,
    pin_answer_from_pb,
    pin_chain_to_pb,
    put_answer_from_pb,
    put_offer_to_pb,
    store_report_from_pb,
    unpin_chain_to_pb,
)


def store_stub(channel: grpc.aio.Channel) -> Any:  # Any: generated code has no types
    """The methods of a store, for calls that follow each other: making them takes a while."""
    return store_pb2_grpc.StoreStub(channel)  # type: ignore[no-untyped-call]  # generated


async def offer_blocks(
    stub: Any,  # Any: generated code has no types
    offer: PutOffer,
    *,
    metadata: Metadata,
    timeout_s: float,
) -> PutAnswer:
    """Offer a chain to a store, which reads what it wants of it later.

    Args:
        stub: From `store_stub`.
        timeout_s: For the answer, which needs no reading.

    Raises:
        MoonpoolError: It did not answer, is another incarnation, or answers nonsense.
    """
    reply = await call(
        stub.Put,
        put_offer_to_pb(offer),
        pb.PutReply,
        peer=str(offer.store),
        deadline_s=timeout_s,
        metadata=metadata,
    )
    return put_answer_from_pb(reply)


async def pin_blocks(
    channel: grpc.aio.Channel, pin: PinChain, *, metadata: Metadata, timeout_s: float
) -> PinAnswer:
    """Have a store keep a chain in its memory, as far as it lies there.

    If this raises, blocks may be pinned all the same, until their time is over.

    Raises:
        MoonpoolError: It did not answer, is another incarnation, or answers nonsense.
    """
    stub = store_stub(channel)
    reply = await call(
        stub.Pin,
        pin_chain_to_pb(pin),
        pb.PinReply,
        peer=str(pin.store),
        deadline_s=timeout_s,
        metadata=metadata,
    )
    return pin_answer_from_pb(reply)


async def unpin_blocks(
    channel: grpc.aio.Channel, unpin: UnpinChain, *, metadata: Metadata, timeout_s: float
) -> None:
    """End a pin, which may have ended.

    Raises:
        MoonpoolError: It did not answer, or is another incarnation.
    """
    stub = store_stub(channel)
    await call(
        stub.Unpin,
        unpin_chain_to_pb(unpin),
        pb.UnpinReply,
        peer=str(unpin.store),
        deadline_s=timeout_s,
        metadata=metadata,
    )


async def fetch_store_report(address: str, *, key: str, deadline_s: float) -> StoreReport:
    """What a store node says of its tiers.

    Args:
        key: The cluster's RPC key.

    Raises:
        MoonpoolError: It did not answer, or not with a report.
    """
    async with open_channel(address) as channel:
        stub = store_stub(channel)
        reply = await call(
            stub.Stats,
            pb.StoreStatsRequest(),
            pb.StoreStatsReply,
            peer=address,
            deadline_s=deadline_s,
            metadata=call_metadata(key=key),
        )
    return store_report_from_pb(reply)
