"""NixlLink: this process's reading NIXL agent, as its event loop sees it. A thread drives it (nixl_driver.py).

Life of a read
1. The loop submits a NixlJob and waits for its end.
2. The thread posts it, asks for it until it is done or has failed, and checks its copy.
3. The loop is told. From here on no byte of it will be written.

A job may be dropped at any time. It still ends by 3; what is done about a peer that stands still, and what
that costs, stands in nixl_driver.py.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, TypeVar

import numpy as np

from moonpool.errors import TransferError
from moonpool.kv.region import NixlAccess
from moonpool.transport.base import ByteArray, peer_lost, read_timed_out
from moonpool.transport.nixl_agent import (
    Descriptors,
    NixlAgent,
    NixlError,
    NixlUnusableError,
    address_of,
)
from moonpool.transport.nixl_driver import NixlDriver
from moonpool.transport.nixl_job import NixlConnection, NixlJob, Verify, settled

#: How much is read to see that a peer answers.
_PROBE_BYTES = 64

T = TypeVar("T")


class NixlLink:
    """Made and used on one event loop; `start` first, `stop` last.

    Args:
        name: Of the agent: unique among all that meet.
        pool: The target of reads.
        ucx: See NixlAgent.
        agent_type: NixlAgent, or what stands in for it.
    """

    def __init__(
        self,
        *,
        name: str,
        pool: ByteArray,
        ucx: Mapping[str, str] | None = None,
        agent_type: Callable[..., NixlAgent] = NixlAgent,
    ) -> None:
        self._loop = asyncio.get_running_loop()
        #: Where probes go: nobody looks at it, so a probe need not end.
        self._scratch: ByteArray = np.zeros(_PROBE_BYTES, np.uint8)
        self._driver = NixlDriver(
            name=name,
            targets=[pool, self._scratch],
            ucx=ucx,
            news=self,
            tell=self._loop.call_soon_threadsafe,
            agent_type=agent_type,
        )
        self._jobs: set[NixlJob] = set()
        #: Under way, by the agent that is asked.
        self._probes: dict[str, NixlJob] = {}
        self._asked: set[asyncio.Future[Any]] = set()
        self._over: asyncio.Future[None] = self._loop.create_future()

    async def start(self) -> None:
        """Make the agent. Call `stop` afterwards, also if this raises.

        Raises:
            NixlUnusableError: In words.
        """
        self._driver.start()
        await self._ask(self._driver.make_agent)

    async def connect(self, access: NixlAccess, name: str, *, timeout_s: float) -> NixlConnection:
        """Connect to the agent `name` and read a few bytes, so that it is known to answer.

        Raises:
            TransferError: Another agent, nobody there, or too slow.
        """
        opened = self._ask(partial(self._driver.open, access.agent_metadata, name))
        try:
            await asyncio.wait((opened,))
        except asyncio.CancelledError:
            opened.add_done_callback(self._close_unwanted)
            raise
        try:
            connection = opened.result()
        except (NixlError, NixlUnusableError) as error:
            raise peer_lost(f"{name}: {error}") from error
        probe = self._probe(connection, access)
        try:
            done, _ = await asyncio.wait((probe.ended,), timeout=timeout_s)
            if not done:
                raise read_timed_out(name, timeout_s)
            if probe.error is not None:
                raise TransferError(probe.error.message, code=probe.error.code)
        except BaseException:
            self.close(connection)
            raise
        return connection

    @property
    def num_reads(self) -> int:
        """READs that have not ended."""
        return len(self._jobs)

    def read(
        self,
        connection: NixlConnection,
        remote: Descriptors,
        local: Descriptors,
        verify: Verify | None = None,
    ) -> NixlJob:
        """Begin a READ of parallel descriptors that lie in registered memory; none are none.

        Args:
            verify: Called in the thread when all bytes are here. None: a probe.
        """
        ended = self._loop.create_future()
        job = NixlJob(connection, remote, local, verify, ended, self._send_drop)
        if connection.lost is not None or self._over.done():
            job.error = peer_lost(connection.lost or f"{connection.name}: NIXL was stopped")
            job.ended.set_result(None)
        else:
            self._jobs.add(job)
            self._send(partial(self._driver.post, job))
        return job

    def close(self, connection: NixlConnection) -> None:
        """Let go of a peer whose reads have ended. May be called twice."""
        if connection.lost is None:
            connection.lost = f"{connection.name} was closed"
            self._send(partial(self._driver.forget, connection))

    async def stop(self) -> None:
        """End everything, then the agent. May be called twice."""
        if not self._driver.has_started:
            return
        self._send(self._driver.stop)
        await settled(self._over)
        self._driver.join()

    # -- NixlNews --

    def on_ended(self, job: NixlJob, error: TransferError | None) -> None:
        if job in self._jobs:
            self._jobs.discard(job)
            job.error = error
            job.ended.set_result(None)

    def on_lost(self, connection: NixlConnection, why: str) -> None:
        if connection.lost is None:
            connection.lost = why

    def on_over(self) -> None:
        self._over.set_result(None)
        for job in list(self._jobs):
            self.on_ended(job, peer_lost(f"{job.connection.name}: NIXL was stopped"))
        for answer in list(self._asked):
            self._on_refused(answer, NixlError("NIXL was stopped"))

    # -- parts --

    def _probe(self, connection: NixlConnection, access: NixlAccess) -> NixlJob:
        """A READ of a few bytes, one at a time for each agent: that of one that stands still may never end."""
        probe = self._probes.get(connection.name)
        if probe is None or probe.ended.done():
            probe = self._probes[connection.name] = self.read(
                connection,
                np.array([[access.base_address, _PROBE_BYTES, 0]], np.uint64),
                np.array([[address_of(self._scratch), _PROBE_BYTES, 0]], np.uint64),
            )
            probe.ended.add_done_callback(partial(self._on_probed, probe))
        return probe

    def _on_probed(self, probe: NixlJob, _ended: asyncio.Future[None]) -> None:
        if self._probes.get(probe.connection.name) is probe:
            del self._probes[probe.connection.name]

    def _send_drop(self, job: NixlJob) -> None:
        self._send(partial(self._driver.drop, job))

    def _send(self, command: Callable[[], None]) -> None:
        """Have the thread do it, in order."""
        if not self._over.done():
            self._driver.send(command)

    def _ask(self, function: Callable[[], T]) -> asyncio.Future[T]:
        """Run it in the thread. The future has its result, or NIXL's error."""
        answer: asyncio.Future[T] = self._loop.create_future()

        def run() -> None:
            try:
                news = partial(self._on_answer, answer, function())
            except (NixlError, NixlUnusableError) as error:
                news = partial(self._on_refused, answer, error)
            self._loop.call_soon_threadsafe(news)

        if self._over.done():
            answer.set_exception(NixlError("NIXL was stopped"))
        else:
            self._asked.add(answer)
            self._send(run)
        return answer

    def _on_answer(self, answer: asyncio.Future[T], value: T) -> None:
        self._asked.discard(answer)
        if not answer.done():
            answer.set_result(value)

    def _on_refused(self, answer: asyncio.Future[Any], error: Exception) -> None:
        self._asked.discard(answer)
        if not answer.done():
            answer.set_exception(error)

    def _close_unwanted(self, opened: asyncio.Future[NixlConnection]) -> None:
        if opened.exception() is None:
            self.close(opened.result())
