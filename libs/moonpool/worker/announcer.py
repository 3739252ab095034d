"""Announcer: says over the bus, each second and when asked, that this worker lives and where."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable

from moonpool.bus.protocol import Bus
from moonpool.bus.subjects import Subjects
from moonpool.kv.published_set import SetHead
from moonpool.wire.control import Announce, encode_announce
from moonpool.wire.worker import LoadValues, WorkerHello

INTERVAL_S = 1.0
#: Three announcements may be lost.
VALID_FOR_S = 4.0


class Announcer:
    """On one loop. A broker that is away is no reason to stop: the next announcement is the news."""

    def __init__(
        self,
        *,
        bus: Bus,
        subjects: Subjects,
        hello: WorkerHello,
        load: Callable[[], LoadValues],
        kv_head: Callable[[], SetHead],
    ) -> None:
        self._bus = bus
        self.subjects = subjects
        self._hello = hello
        self._load = load
        self._kv_head = kv_head
        self._sequence = 0
        self._is_leaving = False
        self._is_due = asyncio.Event()

    async def run(self) -> None:
        """Announce until cancelled."""
        self._bus.on_connection(lambda _is_connected: self._is_due.set())
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._listen())
            while True:
                self._is_due.clear()
                await self._announce()
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(INTERVAL_S):
                        await self._is_due.wait()

    async def leave(self) -> None:
        """Say that this worker takes nothing new, now and from here on."""
        self._is_leaving = True
        await self._announce()

    async def _listen(self) -> None:
        async for _ in await self._bus.subscribe(self.subjects.who):
            self._is_due.set()

    async def _announce(self) -> None:
        self._sequence += 1
        announce = Announce(
            worker=self._hello.worker,
            role=self._hello.role,
            grpc_address=self._hello.grpc_address,
            model=self._hello.model,
            sequence=self._sequence,
            load=self._load(),
            valid_for_s=VALID_FOR_S,
            is_leaving=self._is_leaving,
            kv_head=self._kv_head(),
        )
        subject = self.subjects.announce(self._hello.worker.worker_id)
        await self._bus.publish(subject, encode_announce(announce))
