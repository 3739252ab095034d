"""Waiting for the outside world (another process, a file), which sends no event."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

_POLL_S = 0.01


async def eventually(
    is_true: Callable[[], bool | Awaitable[bool]], *, timeout_s: float, what: str
) -> None:
    """Return as soon as `is_true()` is; AssertionError naming `what` if it is not in time."""
    try:
        async with asyncio.timeout(timeout_s):
            while True:
                answer = is_true()
                if answer if isinstance(answer, bool) else await answer:
                    return
                await asyncio.sleep(_POLL_S)
    except TimeoutError:
        raise AssertionError(f"not within {timeout_s:g} s: {what}") from None
