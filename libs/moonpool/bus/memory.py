"""The bus within one process, for tests: a broker that can be stopped and started."""

from __future__ import annotations

from types import TracebackType
from typing import Self

from moonpool.bus.protocol import (
    DEFAULT_QUEUE_SIZE,
    BusMessage,
    ConnectionListener,
    Subscription,
)
from moonpool.bus.subjects import matches


class MemoryBroker:
    """What the buses of a test share. Starts up unless told otherwise."""

    def __init__(self, *, is_up: bool = True) -> None:
        self._is_up = is_up
        self._buses: list[MemoryBus] = []

    @property
    def is_up(self) -> bool:
        return self._is_up

    def start(self) -> None:
        self._set_up(True)

    def stop(self) -> None:
        self._set_up(False)

    def attach(self, bus: MemoryBus) -> None:
        self._buses.append(bus)

    def detach(self, bus: MemoryBus) -> None:
        self._buses.remove(bus)

    def deliver(self, message: BusMessage) -> None:
        for bus in tuple(self._buses):
            bus.deliver(message)

    def _set_up(self, is_up: bool) -> None:
        if self._is_up != is_up:
            self._is_up = is_up
            for bus in tuple(self._buses):
                bus.connection_changed()


class MemoryBus:
    """One client of a MemoryBroker. Implements Bus."""

    def __init__(self, broker: MemoryBroker) -> None:
        self._broker = broker
        self._subscriptions: list[Subscription] = []
        self._listeners: list[ConnectionListener] = []
        self._num_unsent = 0
        self._num_dropped = 0
        self._is_open = False

    @property
    def is_connected(self) -> bool:
        return self._is_open and self._broker.is_up

    @property
    def num_unsent(self) -> int:
        return self._num_unsent

    @property
    def num_dropped(self) -> int:
        return self._num_dropped

    def on_connection(self, listener: ConnectionListener) -> None:
        self._listeners.append(listener)
        if self.is_connected:
            listener(True)

    async def publish(self, subject: str, data: bytes) -> bool:
        if not self.is_connected:
            self._num_unsent += 1
            return False
        self._broker.deliver(BusMessage(subject=subject, data=bytes(data)))
        return True

    async def subscribe(
        self, subject: str, *, queue_size: int = DEFAULT_QUEUE_SIZE
    ) -> Subscription:
        subscription = Subscription(
            subject, queue_size=queue_size, on_close=self._unsubscribe, on_drop=self._note_dropped
        )
        self._subscriptions.append(subscription)
        return subscription

    def deliver(self, message: BusMessage) -> None:
        for subscription in tuple(self._subscriptions):
            if matches(subscription.subject, message.subject):
                subscription.put(message)

    def connection_changed(self) -> None:
        for listener in tuple(self._listeners):
            listener(self.is_connected)

    async def __aenter__(self) -> Self:
        self._is_open = True
        self._broker.attach(self)
        if self._broker.is_up:
            self.connection_changed()
        return self

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._is_open = False
        self._broker.detach(self)
        for subscription in tuple(self._subscriptions):
            await subscription.close()

    def _note_dropped(self) -> None:
        self._num_dropped += 1

    async def _unsubscribe(self, subscription: Subscription) -> None:
        self._subscriptions.remove(subscription)
