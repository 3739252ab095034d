"""Event-loop lag: how late the loop wakes a task that asked for a fixed sleep."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import structlog

INTERVAL_S = 0.1

#: A lag that is worth a log line: the loop's budget for one callback is 10 ms.
WARN_AFTER_S = 0.25

log = structlog.get_logger("moonpool.service")


async def watch_loop_lag(
    observe: Callable[[float], None],
    *,
    interval_s: float = INTERVAL_S,
    warn_after_s: float = WARN_AFTER_S,
) -> None:
    """Call `observe(lag_s)` each interval, for ever. Spawn it with the process's other tasks."""
    loop = asyncio.get_running_loop()
    while True:
        due = loop.time() + interval_s
        await asyncio.sleep(interval_s)
        lag_s = max(0.0, loop.time() - due)
        observe(lag_s)
        if lag_s > warn_after_s:
            log.warning("service.loop_lag", lag_ms=round(lag_s * 1_000))
