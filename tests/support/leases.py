"""A lease on a prefix as a stream of its own, for who waits for what the holder says."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator

from moonpool.errors import MoonpoolError
from moonpool.handoff.messages import HolderMessage, PrefixOpen
from moonpool.worker.reader_leases import ReaderLeases


async def read_lease(
    leases: ReaderLeases, first: PrefixOpen, tasks: asyncio.TaskGroup
) -> AsyncGenerator[HolderMessage, None]:
    """Open a lease; yields what the holder says of it. It is given back when this is closed.

    Raises:
        MoonpoolError: The stream broke, or the holder's words cannot be read.
    """
    told: asyncio.Queue[HolderMessage | MoonpoolError | None] = asyncio.Queue()
    number = leases.open(
        first, traceparent="", tasks=tasks, on_message=told.put_nowait, on_end=told.put_nowait
    )
    try:
        while (item := await told.get()) is not None:
            if isinstance(item, MoonpoolError):
                raise item
            yield item
    finally:
        leases.give_back(number)
