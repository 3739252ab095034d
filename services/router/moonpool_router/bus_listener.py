"""BusListener: announcements from the bus to the router's machines, and Who when it has connected.

What cannot be read, or speaks another protocol, is dropped and counted, with a warning for each sender: the bus is
anybody's.
"""

from __future__ import annotations

import asyncio

from moonpool.bus.protocol import Bus
from moonpool.bus.subjects import Subjects
from moonpool.bus.unreadable import UnreadableSenders
from moonpool.dispatch.membership import Announcement
from moonpool.errors import MoonpoolError
from moonpool.wire.control import Who, decode_announce, encode_who
from moonpool_router.books import RouterBooks
from moonpool_router.dispatch_loop import DispatchLoop
from moonpool_router.index_feed import IndexFeed


class BusListener:
    """Two tasks: `listen` and `ask`."""

    def __init__(
        self,
        bus: Bus,
        subjects: Subjects,
        loop: DispatchLoop,
        feed: IndexFeed,
        books: RouterBooks,
        *,
        router_id: str,
    ) -> None:
        self._bus = bus
        self._subjects = subjects
        self._loop = loop
        self._feed = feed
        self._books = books
        self._router_id = router_id
        self._connected = asyncio.Event()
        self._unreadable = UnreadableSenders()

    def watch_connection(self) -> None:
        """Tell the loop of every loss and return of the broker, from now on."""
        self._bus.on_connection(self._on_connection)

    async def listen(self) -> None:
        """Pass on every announcement. For ever."""
        subscription = await self._bus.subscribe(self._subjects.announces)
        async for message in subscription:
            try:
                announce = decode_announce(message.data)
            except MoonpoolError as error:
                self._books.announcement_unreadable()
                self._unreadable.note(message, error)
                continue
            self._loop.on_announced(
                Announcement(
                    key=announce.worker,
                    role=announce.role,
                    address=announce.grpc_address,
                    sequence=announce.sequence,
                    valid_for_s=announce.valid_for_s,
                    is_leaving=announce.is_leaving,
                )
            )
            if announce.kv_head is not None:
                self._feed.on_announced(announce.worker, announce.kv_head)

    async def ask(self) -> None:
        """At every connection, ask who is there. For ever."""
        while True:
            await self._connected.wait()
            self._connected.clear()
            await self._bus.publish(self._subjects.who, encode_who(Who(router_id=self._router_id)))

    def _on_connection(self, is_connected: bool) -> None:
        self._loop.on_bus_changed(is_connected)
        if is_connected:
            self._connected.set()
