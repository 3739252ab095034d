"""BudgetKeeper: what is left of the write budget, in a file beside the log, so that a restart does not fill it up.

    PATH/write-budget.json     {"left_bytes": 123, "unix_s": 1700000000.0}

Kept whenever something was written since the last time, and at the end: a node that is killed forgets what it
wrote in the last KEEP_S. The directory is that of the log, which is open meanwhile; so nobody else writes here.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

import msgspec
import structlog

from moonpool.clock import Clock
from moonpool.config.private_file import write_private
from moonpool.store.disk_errors import explain
from moonpool.tiering.write_budget import BudgetLeft

FILE_NAME = "write-budget.json"
KEEP_S = 1.0

log = structlog.get_logger("moonpool.store")


class _Kept(msgspec.Struct, kw_only=True):
    left_bytes: int
    unix_s: float


async def budget_left(path: Path, clock: Clock) -> BudgetLeft | None:
    """What was kept in this directory; None: nothing ever was. What cannot be read counts as an empty budget."""
    try:
        data = await asyncio.to_thread((path / FILE_NAME).read_bytes)
        kept = msgspec.json.decode(data, type=_Kept)
    except FileNotFoundError:
        return None
    except (OSError, msgspec.MsgspecError) as error:
        log.warning("store.write_budget_unreadable", error=type(error).__name__)
        return BudgetLeft(num_bytes=0, age_s=0.0)
    age_s = max(clock.unix() - kept.unix_s, 0.0)
    return BudgetLeft(num_bytes=max(kept.left_bytes, 0), age_s=age_s)


class BudgetKeeper:
    """See the file's head.

    Args:
        path: The log's directory.
        left_bytes: What is left now.
        written_bytes: What has been written since the start.
    """

    def __init__(
        self,
        path: Path,
        *,
        left_bytes: Callable[[], int],
        written_bytes: Callable[[], int],
        clock: Clock,
    ) -> None:
        self._path = path / FILE_NAME
        self._left_bytes = left_bytes
        self._written_bytes = written_bytes
        self._clock = clock
        #: None: nothing was kept yet.
        self._kept_written_bytes: int | None = None

    async def run(self) -> None:
        """Keep it from now on. For ever."""
        while True:
            await self.keep()
            await asyncio.sleep(KEEP_S)

    async def keep(self) -> None:
        """Keep it, if something was written since the last time."""
        written_bytes = self._written_bytes()
        if written_bytes == self._kept_written_bytes:
            return
        kept = _Kept(left_bytes=self._left_bytes(), unix_s=self._clock.unix())
        try:
            await asyncio.to_thread(write_private, self._path, msgspec.json.encode(kept))
        except OSError as error:
            # A disk that takes nothing is not worn out by it.
            log.debug("store.write_budget_not_kept", problem=explain(error))
            return
        self._kept_written_bytes = written_bytes
