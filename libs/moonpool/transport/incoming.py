"""IncomingRead: what a caller waits for while the bytes of its read come on a peer's stream.

It has ended for its caller when every byte is written and checked, or when it was abandoned and no byte
of it will be written any more; bytes of an abandoned read that still come are thrown away.
"""

from __future__ import annotations

import asyncio

from moonpool.errors import TransferError
from moonpool.native import StreamRead


class IncomingRead:
    """Belongs to one event loop."""

    __slots__ = ("_loop", "_quiet", "done", "is_done", "planned")

    def __init__(self, planned: StreamRead, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._quiet: asyncio.Future[None] | None = None
        self.planned = planned
        #: All bytes came and were consumed.
        self.is_done = False
        #: Set when all bytes are copied and checked, or to the reason why they never will be.
        self.done: asyncio.Future[None] = loop.create_future()

    def complete(self) -> None:
        """Every byte came and was written, or thrown away if it is abandoned."""
        self.is_done = True
        if not self.done.done():
            self.done.set_result(None)

    def fail(self, error: TransferError) -> None:
        """Its bytes will not come, or come too late."""
        if not self.done.done():
            self.done.set_exception(error)

    async def settle(self) -> None:
        """Wait until no byte will be written any more: for one message at most, however often cancelled."""
        if self.is_done:
            return
        if not self.done.cancel() and not self.done.cancelled():
            # Whoever waited for it may have been cancelled in the same moment.
            self.done.exception()
        cancelled: asyncio.CancelledError | None = None
        while not self.planned.abandon():
            self._quiet = self._loop.create_future()
            try:
                await self._quiet
            except asyncio.CancelledError as error:
                cancelled = error
        if cancelled is not None:
            raise cancelled

    def look(self) -> None:
        """The copy thread may have let go of it."""
        if self._quiet is not None and not self._quiet.done():
            self._quiet.set_result(None)
