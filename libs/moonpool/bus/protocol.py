"""Bus: publish and subscribe by subject, at most once, with a broker that may be away.

What a Bus promises: publishing does not wait for a broker and never buffers for later (what is said while
it is away is stale when it is back, so it is dropped and counted); a subscription survives the broker; a
subscriber that falls behind loses the oldest messages, which is counted. What it does not promise:
delivery. Whoever needs a message repeats it.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from types import TracebackType
from typing import Protocol, Self

#: Messages that wait for a subscriber before the oldest is dropped.
DEFAULT_QUEUE_SIZE = 1_024

ConnectionListener = Callable[[bool], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class BusMessage:
    subject: str
    data: bytes


class Subscription:
    """A bounded queue of messages: iterate it. Ends when it or its bus is closed."""

    def __init__(
        self,
        subject: str,
        *,
        queue_size: int,
        on_close: Callable[[Subscription], Awaitable[None]],
        on_drop: Callable[[], None],
    ) -> None:
        assert queue_size > 0, queue_size
        self.subject = subject
        self._messages: deque[BusMessage] = deque()
        self._queue_size = queue_size
        self._on_close = on_close
        self._on_drop = on_drop
        self._wakeup = asyncio.Event()
        self._is_closed = False

    def put(self, message: BusMessage) -> None:
        """Called by the adapter: never blocks, drops the oldest when full."""
        if self._is_closed:
            return
        if len(self._messages) >= self._queue_size:
            self._messages.popleft()
            self._on_drop()
        self._messages.append(message)
        self._wakeup.set()

    def end(self) -> None:
        """Called by the adapter: the iteration ends after what is queued."""
        self._is_closed = True
        self._wakeup.set()

    async def close(self) -> None:
        """Unsubscribe. Idempotent."""
        if not self._is_closed:
            self.end()
            await self._on_close(self)

    async def __aiter__(self) -> AsyncIterator[BusMessage]:
        while True:
            while self._messages:
                yield self._messages.popleft()
            if self._is_closed:
                return
            self._wakeup.clear()
            await self._wakeup.wait()


class Bus(Protocol):
    """Entered as an async context: `async with bus:`; on exit it drains and closes."""

    @property
    def is_connected(self) -> bool: ...

    @property
    def num_unsent(self) -> int:
        """Messages dropped at `publish` because the broker was away."""
        ...

    @property
    def num_dropped(self) -> int:
        """Messages that a subscription lost because its subscriber fell behind."""
        ...

    def on_connection(self, listener: ConnectionListener) -> None:
        """Call `listener(is_connected)` at each change, and once at once if connected."""
        ...

    async def publish(self, subject: str, data: bytes) -> bool:
        """Send now. False: dropped, the broker is away.

        Raises:
            InvalidRequestError: `data` is larger than the broker takes.
        """
        ...

    async def subscribe(
        self, subject: str, *, queue_size: int = DEFAULT_QUEUE_SIZE
    ) -> Subscription:
        """Works while the broker is away: it holds from the next connection on.

        `*` matches one token of a subject, a trailing `>` all that follow.
        """
        ...

    async def __aenter__(self) -> Self: ...

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None: ...
