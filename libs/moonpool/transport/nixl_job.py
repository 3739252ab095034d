"""NixlJob and NixlConnection: one READ, and whom it reads. Made by NixlLink, driven by NixlDriver."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

from moonpool.errors import TransferError
from moonpool.native.geometry import BoolArray
from moonpool.transport.nixl_agent import Descriptors

#: bool[number of checks], True where the copy is bad. Raises RangeError.
Verify = Callable[[], BoolArray]


class NixlJob:
    """One READ. Used on the link's loop."""

    __slots__ = (
        "_send_drop",
        "connection",
        "dropped_at",
        "ended",
        "error",
        "handle",
        "is_bad",
        "is_dropped",
        "local",
        "remote",
        "verify",
    )

    def __init__(
        self,
        connection: NixlConnection,
        remote: Descriptors,
        local: Descriptors,
        verify: Verify | None,
        ended: asyncio.Future[None],
        send_drop: Callable[[NixlJob], None],
    ) -> None:
        self.connection = connection
        self.remote = remote
        self.local = local
        self.verify = verify
        #: What `verify` has found, once it has ended well.
        self.is_bad: BoolArray | None = None
        #: Done once no byte will be written any more. Never cancelled, never with an exception.
        self.ended = ended
        #: Why it failed; set before `ended` is done.
        self.error: TransferError | None = None
        #: Do not post it.
        self.is_dropped = False
        #: The thread's: NIXL's handle while it is in flight, and when it learned that nobody wants it.
        self.handle: object | None = None
        self.dropped_at: float | None = None
        self._send_drop = send_drop

    @property
    def is_probe(self) -> bool:
        """Nobody looks at what it reads, so it need not end."""
        return self.verify is None

    def drop(self) -> None:
        """Nobody wants its bytes: do not post it, or see that it ends. May be called twice."""
        if not self.is_dropped and not self.ended.done():
            self.is_dropped = True
            self._send_drop(self)

    async def settle(self) -> None:
        """Wait for its end, however often the caller is cancelled; a cancellation is raised then."""
        await settled(self.ended)


@dataclass(slots=True, kw_only=True, eq=False)
class NixlConnection:
    """A peer's agent, known to ours. Several may name one agent; the last to close disconnects."""

    name: str
    #: Why it can be read no more; written on the loop.
    lost: str | None = None


async def settled(future: asyncio.Future[None]) -> None:
    """Wait for it, however often the caller is cancelled; a cancellation is raised then."""
    cancelled: asyncio.CancelledError | None = None
    while not future.done():
        try:
            await asyncio.wait((future,))
        except asyncio.CancelledError as error:
            cancelled = error
    if cancelled is not None:
        raise cancelled
