"""HttpExchange: one HTTP request and its response, as the door and its endpoints share it."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Coroutine
from dataclasses import dataclass, field
from typing import Any

from moonpool.errors import CancelledByClientError
from moonpool.ids import RequestId
from moonpool.inference.request import DEFAULT_TENANT
from moonpool.service.http_protocol import STALL_S, Connection, Message, Receive, Scope, Send

#: Where the door leaves it in the scope.
EXTENSION = "moonpool.exchange"


class ClientGoneError(CancelledByClientError):
    """The client left, or takes nothing: there is nobody to tell."""


@dataclass(slots=True, kw_only=True)
class HttpExchange:
    """Mutable; owned by the task that serves the request."""

    connection: Connection
    #: Minted here: on every response, in logs and traces. The client's own name is only a label.
    request_id: RequestId = field(default_factory=lambda: RequestId(uuid.uuid4().hex))
    label: str = ""
    #: Whose it is, by its key.
    tenant: str = DEFAULT_TENANT
    #: 0 until the response has begun.
    status: int = 0
    #: Of the error that was told, also within a stream.
    error_code: str = ""
    #: The last of the response has been handed over.
    is_complete: bool = False
    #: The pipeline has it, and keeps the books of it.
    is_submitted: bool = False
    stall_s: float = STALL_S

    async def send(self, send: Send, message: Message) -> None:
        """Hand a message over as soon as the client has taken enough of what came before.

        Raises:
            ClientGoneError: It took nothing for `stall_s`; the connection is cut.
        """
        while num_unsent_bytes := self.connection.num_unsent_bytes:
            try:
                async with asyncio.timeout(self.stall_s):
                    # It waits for room first and then writes, so giving it up has written nothing.
                    await send(message)
                return
            except TimeoutError:
                if self.connection.num_unsent_bytes >= num_unsent_bytes:
                    self.connection.abort()
                    raise ClientGoneError("The client takes nothing any more.") from None
        # It has taken everything, so there is room.
        await send(message)

    async def while_connected(self, receive: Receive, work: Coroutine[Any, Any, None]) -> None:
        """Run `work`; end it when the client leaves. Raises what it raises, unwrapped.

        Raises:
            ClientGoneError: The client left before the response was complete.
        """
        try:
            async with asyncio.TaskGroup() as tasks:
                watcher = tasks.create_task(self._watch(receive))
                try:
                    await work
                finally:
                    watcher.cancel()
        except BaseExceptionGroup as group:
            gone = [error for error in group.exceptions if isinstance(error, ClientGoneError)]
            raise (gone or group.exceptions)[0] from None

    async def _watch(self, receive: Receive) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        if not self.is_complete:
            raise ClientGoneError("The client went away.")


def exchange_of(scope: Scope) -> HttpExchange:
    """Of a request that came through HttpDoor."""
    exchange = scope["extensions"][EXTENSION]
    assert isinstance(exchange, HttpExchange), exchange
    return exchange
