"""Every subject, in one place. A cluster's name is part of each: several clusters can share a broker."""

from __future__ import annotations

import re

from moonpool.errors import ConfigError

_TOKEN = re.compile(r"[A-Za-z0-9_-]{1,64}")


class Subjects:
    """The subjects of one cluster.

    moonpool.<cluster>.worker.<worker_id>   Announce, each second, and at once after Who
    moonpool.<cluster>.kv.<worker_id>       KvEvents, when blocks have come or gone
    moonpool.<cluster>.router.who           Who, when a router starts or reconnects
    """

    def __init__(self, cluster: str) -> None:
        self._root = f"moonpool.{token(cluster, 'cluster name')}"

    def announce(self, worker_id: str) -> str:
        return f"{self._root}.worker.{token(worker_id, 'worker_id')}"

    @property
    def announces(self) -> str:
        """Pattern: all workers'."""
        return f"{self._root}.worker.*"

    def kv_events(self, worker_id: str) -> str:
        return f"{self._root}.kv.{token(worker_id, 'worker_id')}"

    @property
    def all_kv_events(self) -> str:
        """Pattern: all workers'."""
        return f"{self._root}.kv.*"

    @property
    def who(self) -> str:
        return f"{self._root}.router.who"


def token(value: str, what: str) -> str:
    """One token of a subject.

    Raises:
        ConfigError: It has a character that would change the subject's meaning.
    """
    if not _TOKEN.fullmatch(value):
        raise ConfigError(f"{what} = {value!r}: allowed are 1 to 64 of A-Z a-z 0-9 _ -")
    return value


def matches(pattern: str, subject: str) -> bool:
    """NATS matching: `*` is one token, a trailing `>` one or more."""
    wanted, given = pattern.split("."), subject.split(".")
    for index, part in enumerate(wanted):
        if part == ">" and index == len(wanted) - 1:
            return len(given) > index
        if index >= len(given) or part not in ("*", given[index]):
            return False
    return len(wanted) == len(given)
