"""DirectoryKeeper: keeps a store node's record in the directory, and the last view of the others.

    every beat: publish(record()) -> read() -> on_view(view)        until the context ends, then withdraw

A directory that does not answer changes nothing here: the last view stays. Who is alive is known from the
bus, sooner than from here.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from types import TracebackType
from typing import Self

from moonpool.store.directory import Directory
from moonpool.tiering.store_record import RingView, StoreRecord

BEAT_S = 1.0
#: Before the next beat, if this one was not heard or heard nothing, or somebody waits for it.
RETRY_S = 0.25


class DirectoryKeeper:
    """See the file's head. An async context within that of its directory.

    Args:
        record: What this node says of itself at this moment.
        on_view: Told each view that was read.
    """

    def __init__(
        self,
        directory: Directory,
        *,
        record: Callable[[], StoreRecord],
        on_view: Callable[[RingView], None],
        beat_s: float = BEAT_S,
    ) -> None:
        self._directory = directory
        self._record = record
        self._on_view = on_view
        self._beat_s = beat_s
        self._is_hasty = False
        self._hurry = asyncio.Event()
        self._tasks = asyncio.TaskGroup()
        self._beating: asyncio.Task[None] | None = None

    def hasten(self, is_hasty: bool) -> None:
        """Beat often from here on, since somebody waits for what others say; or no more."""
        self._is_hasty = is_hasty

    def beat_now(self) -> None:
        """This node's record has changed in a way that others should know at once."""
        self._hurry.set()

    async def __aenter__(self) -> Self:
        await self._tasks.__aenter__()
        self._beating = self._tasks.create_task(self._beat(), name="directory-beat")
        return self

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        assert self._beating is not None
        self._beating.cancel()
        try:
            await asyncio.wait((self._beating,))
            await self._directory.withdraw(self._record().member.key)
        finally:
            await self._tasks.__aexit__(exc_type, exc, traceback)

    async def _beat(self) -> None:
        while True:
            self._hurry.clear()
            is_heard = await self._directory.publish(self._record())
            view = await self._directory.read()
            if view is not None:
                self._on_view(view)
            is_hasty = self._is_hasty or not is_heard or view is None
            try:
                async with asyncio.timeout(
                    min(RETRY_S, self._beat_s) if is_hasty else self._beat_s
                ):
                    await self._hurry.wait()
            except TimeoutError:
                continue
