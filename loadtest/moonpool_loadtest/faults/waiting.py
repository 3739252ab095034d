"""Waiting for something to become true of a cluster, which does not tell."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

POLL_S = 0.005


async def within(
    timeout_s: float,
    what: str,
    is_true: Callable[[], Awaitable[bool]],
    *,
    poll_s: float = POLL_S,
) -> list[str]:
    """Nothing if it came true in time; else the problem."""
    try:
        async with asyncio.timeout(timeout_s):
            while True:
                if await is_true():
                    return []
                await asyncio.sleep(poll_s)
    except TimeoutError:
        return [f"not within {timeout_s:g} s: {what}"]
