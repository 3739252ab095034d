"""UnreadableSenders: tells once of each sender on the bus whose messages cannot be read.

The bus is anybody's, and whoever cannot be read says the same again each second: the first time is worth a
warning, since that worker is not seen by anybody, and the rest is not.
"""

from __future__ import annotations

import structlog

from moonpool.bus.protocol import BusMessage
from moonpool.errors import MoonpoolError

log = structlog.get_logger("moonpool.bus")

#: Far more than a cluster has. Those beyond are not warned of.
MAX_SENDERS = 1_024


class UnreadableSenders:
    """A sender is a subject: each has its own."""

    def __init__(self) -> None:
        self._told: set[str] = set()

    def note(self, message: BusMessage, error: MoonpoolError) -> None:
        """Log why `message` is dropped."""
        is_news = message.subject not in self._told and len(self._told) < MAX_SENDERS
        tell = log.warning if is_news else log.debug
        tell("bus.unreadable", subject=message.subject, reason=error.message)
        if is_news:
            self._told.add(message.subject)
