"""Channels to peers. A channel connects when first used and reconnects by itself, for ever."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import grpc

from moonpool.rpc.options import INTERNAL_MESSAGE_BYTES, channel_options


def make_channel(
    address: str, *, max_message_bytes: int = INTERNAL_MESSAGE_BYTES
) -> grpc.aio.Channel:
    """A channel to `host:port`; the caller closes it."""
    return grpc.aio.insecure_channel(address, options=channel_options(max_message_bytes))


@asynccontextmanager
async def open_channel(
    address: str, *, max_message_bytes: int = INTERNAL_MESSAGE_BYTES
) -> AsyncIterator[grpc.aio.Channel]:
    """The same, closed on exit: calls in progress are cancelled."""
    channel = make_channel(address, max_message_bytes=max_message_bytes)
    try:
        yield channel
    finally:
        await channel.close()
