"""A bus that loses messages on their way, as core NATS may."""

from __future__ import annotations

from collections.abc import Callable
from types import TracebackType
from typing import Self

from moonpool.bus.protocol import (
    DEFAULT_QUEUE_SIZE,
    Bus,
    ConnectionListener,
    Subscription,
)


def lose_nothing(subject: str) -> bool:
    return False


class LossyBus:
    """Another bus, of whose sent messages some never arrive. Implements Bus."""

    def __init__(self, inner: Bus) -> None:
        self._inner = inner
        #: Whether the next message to a subject is lost.
        self.loses: Callable[[str], bool] = lose_nothing
        self.num_lost = 0

    @property
    def is_connected(self) -> bool:
        return self._inner.is_connected

    @property
    def num_unsent(self) -> int:
        return self._inner.num_unsent

    @property
    def num_dropped(self) -> int:
        return self._inner.num_dropped

    def on_connection(self, listener: ConnectionListener) -> None:
        self._inner.on_connection(listener)

    async def publish(self, subject: str, data: bytes) -> bool:
        if self.is_connected and self.loses(subject):
            self.num_lost += 1
            return True
        return await self._inner.publish(subject, data)

    async def subscribe(
        self, subject: str, *, queue_size: int = DEFAULT_QUEUE_SIZE
    ) -> Subscription:
        return await self._inner.subscribe(subject, queue_size=queue_size)

    async def __aenter__(self) -> Self:
        await self._inner.__aenter__()
        return self

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self._inner.__aexit__(exc_type, exc, traceback)
