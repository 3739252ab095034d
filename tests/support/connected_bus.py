"""Waiting for a bus's broker, which nothing but a test ever does."""

from __future__ import annotations

import asyncio

from moonpool.bus.protocol import Bus


async def connected(bus: Bus) -> None:
    """Return when the broker is there; the caller sets the deadline."""
    is_there = asyncio.Event()
    bus.on_connection(lambda is_connected: is_there.set() if is_connected else is_there.clear())
    await is_there.wait()
