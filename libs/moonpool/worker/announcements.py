"""Announcements: what workers and stores say of themselves, read once for all parts of a process."""

from __future__ import annotations

from collections.abc import Callable

from moonpool.bus.protocol import Bus
from moonpool.bus.subjects import Subjects
from moonpool.bus.unreadable import UnreadableSenders
from moonpool.errors import MoonpoolError
from moonpool.wire.control import ReceivedAnnounce, decode_announce

#: Called on the loop, for each announcement; returns at once.
AnnounceListener = Callable[[ReceivedAnnounce], None]


class Announcements:
    """One subscription. What cannot be read is dropped, with a warning for each sender.

    Args:
        on_unreadable: Called for each that is dropped.
    """

    def __init__(
        self,
        bus: Bus,
        subjects: Subjects,
        *,
        on_unreadable: Callable[[], None] = lambda: None,
    ) -> None:
        self._bus = bus
        self._subjects = subjects
        self._listeners: list[AnnounceListener] = []
        self._on_unreadable = on_unreadable
        self._unreadable = UnreadableSenders()

    def add_listener(self, listener: AnnounceListener) -> None:
        """From the next announcement on. Whoever is missed says it again within a second."""
        self._listeners.append(listener)

    async def run(self) -> None:
        """Listen until cancelled. Raises what a listener raises."""
        async for message in await self._bus.subscribe(self._subjects.announces):
            try:
                announce = decode_announce(message.data)
            except MoonpoolError as error:
                self._on_unreadable()
                self._unreadable.note(message, error)
                continue
            for listener in self._listeners:
                listener(announce)
