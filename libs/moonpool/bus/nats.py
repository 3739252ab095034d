"""The bus over core NATS (no JetStream).

Life: entering the context starts to connect and returns at once, whether a broker is there or not;
it is tried again for ever, at boot and after each loss (nats-py's own limits would close the connection
for good after two minutes). A broker that sends its client away (`-ERR`) closes it for good all the
same: then a new client takes its place. Each connection after the first restores the subscriptions. On
exit what is queued leaves, within a deadline.

Only composition roots import this module; everything else sees `Bus`.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress
from types import TracebackType
from typing import Self

import nats.errors
import structlog
from nats.aio.client import Client
from nats.aio.msg import Msg
from nats.aio.subscription import Subscription as NatsSubscription

from moonpool.bus.protocol import (
    DEFAULT_QUEUE_SIZE,
    BusMessage,
    ConnectionListener,
    Subscription,
)
from moonpool.errors import InvalidRequestError

#: A silent broker is noticed after two missed pings.
PING_INTERVAL_S = 5
MAX_OUTSTANDING_PINGS = 2
CONNECT_TIMEOUT_S = 2
RECONNECT_WAIT_S = 0.25
CLOSE_TIMEOUT_S = 2.0
#: How long a broker that does not read may hold us up.
FLUSH_TIMEOUT_S = 1
#: How long a broker may take to answer that it has the subscriptions. Longer than nats-py's pings need to find it
#: silent: nats-py does not bear the late answer to a flush that was given up.
GREETING_TIMEOUT_S = PING_INTERVAL_S * (MAX_OUTSTANDING_PINGS + 2)
#: Before a new client comes to a broker that sent the last one away.
SENT_AWAY_PAUSE_S = 0.5

log = structlog.get_logger("moonpool.bus")


class NatsBus:
    """Implements Bus.

    Args:
        url: `nats://host:port`, several separated by commas.
        name: Shown in the broker's monitoring.
    """

    def __init__(self, url: str, *, name: str) -> None:
        self._servers = [part.strip() for part in url.split(",")]
        self._name = name
        self._client = Client()
        self._listeners: list[ConnectionListener] = []
        self._is_connected = False
        #: What is subscribed, and its handle on the broker once it has been connected.
        self._subscriptions: dict[Subscription, NatsSubscription | None] = {}
        self._num_unsent = 0
        self._num_dropped = 0
        self._tasks = asyncio.TaskGroup()
        self._connecting: asyncio.Task[None] | None = None
        self._has_begun = False
        #: The broker's last refusal, so that it is logged once.
        self._refusal = ""
        self._is_closing = False

    @property
    def is_connected(self) -> bool:
        return self._is_connected

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
        task = asyncio.current_task()
        assert task is not None
        num_cancels = task.cancelling()
        try:
            await self._client.publish(subject, data)
            # nats-py swallows a cancellation that comes while it waits for its flusher.
            if task.cancelling() > num_cancels:
                raise asyncio.CancelledError
        except nats.errors.MaxPayloadError as error:
            raise InvalidRequestError(
                f"A message of {len(data)} bytes is more than the broker takes."
            ) from error
        except nats.errors.Error:
            self._num_unsent += 1
            return False
        return True

    async def subscribe(
        self, subject: str, *, queue_size: int = DEFAULT_QUEUE_SIZE
    ) -> Subscription:
        subscription = Subscription(
            subject, queue_size=queue_size, on_close=self._unsubscribe, on_drop=self._note_dropped
        )
        self._subscriptions[subscription] = None
        if self.is_connected:
            await self._register(subscription)
        return subscription

    async def __aenter__(self) -> Self:
        await self._tasks.__aenter__()
        self._connecting = self._tasks.create_task(self._keep_connected(), name="nats-connect")
        return self

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._is_closing = True
        assert self._connecting is not None
        self._connecting.cancel()
        try:
            async with asyncio.timeout(CLOSE_TIMEOUT_S):
                await asyncio.wait((self._connecting,))
                if self.is_connected:
                    await self._client.flush()
                # A client that was never told to connect cannot be closed.
                if self._has_begun:
                    await self._client.close()
        except (TimeoutError, OSError, nats.errors.Error) as error:
            log.warning("bus.close_failed", error=type(error).__name__)
        finally:
            self._set_connected(False)
            for subscription in tuple(self._subscriptions):
                subscription.end()
            self._subscriptions.clear()
            await self._tasks.__aexit__(exc_type, exc, traceback)

    async def _keep_connected(self) -> None:
        self._has_begun = True
        while True:
            closed = asyncio.Event()
            try:
                await self._connect(closed)
                async with asyncio.TaskGroup() as tasks:
                    greeting = tasks.create_task(self._greet(), name="nats-greet")
                    await closed.wait()
                    greeting.cancel()
            except (OSError, nats.errors.Error) as error:
                await self._on_error(error)
            log.warning("bus.sent_away", error=str(self._client.last_error))
            self._set_connected(False)
            self._subscriptions = dict.fromkeys(self._subscriptions)
            await asyncio.sleep(SENT_AWAY_PAUSE_S)
            self._client = Client()

    async def _greet(self) -> None:
        """Begin a new client's first connection; nats-py tells of those that follow."""
        try:
            await self._on_reconnected()
        except nats.errors.FlushTimeoutError as error:
            await self._on_error(error)
            if not self._is_connected:
                await self._client.close()
        except (OSError, nats.errors.Error) as error:
            # It ended again at once: nats-py goes on, or has closed the client.
            log.debug("bus.greeting_failed", error=type(error).__name__)

    async def _connect(self, closed: asyncio.Event) -> None:
        async def on_closed() -> None:
            closed.set()

        await self._client.connect(
            servers=self._servers,
            name=self._name,
            allow_reconnect=True,
            max_reconnect_attempts=-1,
            reconnect_time_wait=RECONNECT_WAIT_S,  # type: ignore[arg-type]  # seconds, may be a fraction
            connect_timeout=CONNECT_TIMEOUT_S,
            ping_interval=PING_INTERVAL_S,
            max_outstanding_pings=MAX_OUTSTANDING_PINGS,
            flush_timeout=FLUSH_TIMEOUT_S,
            error_cb=self._on_error,
            disconnected_cb=self._on_disconnected,
            reconnected_cb=self._on_reconnected,
            closed_cb=on_closed,
        )

    async def _on_reconnected(self) -> None:
        for subscription, handle in tuple(self._subscriptions.items()):
            if handle is None:
                await self._register(subscription)
        # Answered after the broker has taken the subscriptions: whoever publishes next is heard.
        await self._client.flush(timeout=GREETING_TIMEOUT_S)
        log.info("bus.connected", server=self._server_name())
        self._set_connected(True)

    async def _on_disconnected(self) -> None:
        if not self._is_closing:
            log.warning("bus.disconnected")
        self._set_connected(False)

    async def _on_error(self, error: Exception) -> None:
        # Errors come four times a second while the broker is away, or does not take us.
        log.debug("bus.error", error=type(error).__name__)
        if isinstance(error, nats.errors.Error) and str(error) != self._refusal:
            self._refusal = str(error)
            log.warning("bus.refused", why=self._refusal)

    async def _register(self, subscription: Subscription) -> None:
        async def deliver(message: Msg) -> None:
            subscription.put(BusMessage(subject=message.subject, data=bytes(message.data)))

        handle = await self._client.subscribe(subscription.subject, cb=deliver)
        if subscription in self._subscriptions:
            self._subscriptions[subscription] = handle
        else:
            await handle.unsubscribe()

    def _note_dropped(self) -> None:
        self._num_dropped += 1

    async def _unsubscribe(self, subscription: Subscription) -> None:
        handle = self._subscriptions.pop(subscription, None)
        if handle is not None:
            with suppress(nats.errors.Error):
                await handle.unsubscribe()

    def _set_connected(self, is_connected: bool) -> None:
        if is_connected == self._is_connected:
            return
        self._is_connected = is_connected
        for listener in tuple(self._listeners):
            listener(is_connected)

    def _server_name(self) -> str:
        url = self._client.connected_url
        return url.netloc.rpartition("@")[2] if url is not None else ""
