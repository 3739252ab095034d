"""NixlLink: this process's reading NIXL agent and the one thread that drives it.

Life of a read
1. The loop submits a NixlJob and waits for its end.
2. The thread posts it. Over shared memory that is the copy itself; else UCX has begun to move bytes.
3. The thread asks for the oldest job of each peer, so the jobs of one peer end in order. Asking makes
   progress; the pause between two looks is a fraction of the time since something moved.
4. It is done, and its copy is checked, while it is warm in the cache and without another change of threads;
   or it failed: the peer is lost, its agent is removed, and all its jobs end. A READ that could not even be
   posted loses the peer too, but ends no other job: what is in flight may still be written.
5. The loop is told. From here on no byte of it will be written.

A job that is dropped before 2 is not posted. A READ in flight cannot be recalled, so a job that is dropped
later still ends by 4, if it must by the fence: FENCE_S after it was dropped the whole agent is torn down, and
with it every connection and every job. Only a peer that is reached through its own software (TCP) and stands
still comes to that; the next `connect` makes a new agent.
"""

from __future__ import annotations

import asyncio
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

import numpy as np
import structlog

from moonpool.errors import TransferError
from moonpool.kv.region import NixlAccess
from moonpool.native import RangeError
from moonpool.native.geometry import BoolArray
from moonpool.transport.base import ByteArray, peer_lost, read_timed_out
from moonpool.transport.nixl_agent import (
    Descriptors,
    NixlAgent,
    NixlError,
    NixlUnusableError,
    address_of,
    pause_s,
)

log = structlog.get_logger("moonpool.transport")

#: A read that was given up and does not end by itself is ended, with the agent, after this.
FENCE_S = 1.0
#: The longest pause between two looks while reads are in flight, and the pause while there are none.
_MAX_BUSY_PAUSE_S = 2e-3
_IDLE_PAUSE_S = 50e-3
#: How much is read to see that a peer answers.
_PROBE_BYTES = 64

T = TypeVar("T")

#: bool[number of checks], True where the copy is bad. Raises RangeError.
Verify = Callable[[], BoolArray]


class NixlJob:
    """One READ. Made by NixlLink, used on its loop."""

    __slots__ = (
        "_send_drop",
        "connection",
        "ended",
        "error",
        "fence_at",
        "handle",
        "is_bad",
        "is_dropped",
        "local",
        "remote",
        "verify",
    )

    def __init__(
        self,
        connection: NixlConnection,
        remote: Descriptors,
        local: Descriptors,
        verify: Verify | None,
        ended: asyncio.Future[None],
        send_drop: Callable[[NixlJob], None],
    ) -> None:
        self.connection = connection
        self.remote = remote
        self.local = local
        self.verify = verify
        #: What `verify` has found, once it has ended well.
        self.is_bad: BoolArray | None = None
        #: Done once no byte will be written any more. Never cancelled, never with an exception.
        self.ended = ended
        #: Why it failed; set before `ended` is done.
        self.error: TransferError | None = None
        #: Do not post it.
        self.is_dropped = False
        #: The thread's: NIXL's handle while it is in flight, and when it has to be over.
        self.handle: object | None = None
        self.fence_at: float | None = None
        self._send_drop = send_drop

    def drop(self) -> None:
        """Nobody wants its bytes: do not post it, or end it within FENCE_S. May be called twice."""
        if not self.is_dropped and not self.ended.done():
            self.is_dropped = True
            self._send_drop(self)

    async def settle(self) -> None:
        """Wait for its end, however often the caller is cancelled; a cancellation is raised then."""
        await settled(self.ended)


@dataclass(slots=True, kw_only=True, eq=False)
class NixlConnection:
    """A peer's agent, known to ours. Several may name one agent; the last to close disconnects."""

    name: str
    #: Why it can be read no more; written on the loop.
    lost: str | None = None


@dataclass(slots=True, kw_only=True, eq=False)
class _Remote:
    """The thread's view of one peer's agent."""

    name: str
    connections: set[NixlConnection] = field(default_factory=set)
    #: In flight, in order.
    jobs: deque[NixlJob] = field(default_factory=deque)


class NixlLink:
    """Made and used on one event loop; `start` first, `stop` last.

    Args:
        name: Of the agent: unique among all that meet.
        pool: The target of reads.
        ucx: See NixlAgent.
    """

    def __init__(self, *, name: str, pool: ByteArray, ucx: Mapping[str, str] | None = None) -> None:
        self._loop = asyncio.get_running_loop()
        self._name = name
        self._pool = pool
        self._ucx = ucx
        #: Where probes go: nobody looks at it, so a probe need not end.
        self._scratch: ByteArray = np.zeros(_PROBE_BYTES, np.uint8)
        self._thread = threading.Thread(target=self._run, name="moonpool-nixl", daemon=True)
        self._inbox: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        # The loop's.
        self._jobs: set[NixlJob] = set()
        #: Under way, by the agent that is asked.
        self._probes: dict[str, NixlJob] = {}
        self._asked: set[asyncio.Future[Any]] = set()
        self._over: asyncio.Future[None] = self._loop.create_future()
        # The thread's.
        self._agent: NixlAgent | None = None
        self._num_agents = 0
        self._remotes: dict[str, _Remote] = {}
        self._is_stopping = False
        #: When something last moved.
        self._moved_at = time.monotonic()

    # -- on the loop --

    async def start(self) -> None:
        """Make the agent. Call `stop` afterwards, also if this raises.

        Raises:
            NixlUnusableError: In words.
        """
        self._thread.start()
        await self._ask(self._make_agent)

    async def connect(self, access: NixlAccess, name: str, *, timeout_s: float) -> NixlConnection:
        """Connect to the agent `name` and read a few bytes, so that it is known to answer.

        Raises:
            TransferError: Another agent, nobody there, or too slow.
        """
        opened = self._ask(partial(self._open, access.agent_metadata, name))
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
            verify: Called in the thread when all bytes are here.
        """
        ended = self._loop.create_future()
        job = NixlJob(connection, remote, local, verify, ended, self._send_drop)
        if connection.lost is not None or self._over.done():
            job.error = peer_lost(connection.lost or f"{connection.name}: NIXL was stopped")
            job.ended.set_result(None)
        else:
            self._jobs.add(job)
            self._send(partial(self._post, job))
        return job

    def close(self, connection: NixlConnection) -> None:
        """Let go of a peer whose reads have ended. May be called twice."""
        if connection.lost is None:
            connection.lost = f"{connection.name} was closed"
            self._send(partial(self._forget, connection))

    async def stop(self) -> None:
        """End everything, then the agent. May be called twice."""
        if self._thread.ident is None:
            return
        self._send(self._stop)
        await settled(self._over)
        self._thread.join()

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
        self._send(partial(self._drop, job))

    def _send(self, command: Callable[[], None]) -> None:
        """Have the thread do it, in order."""
        if not self._over.done():
            self._inbox.put(command)

    def _ask(self, function: Callable[[], T]) -> asyncio.Future[T]:
        """Run it in the thread. The future has its result, or NIXL's error."""
        answer: asyncio.Future[T] = self._loop.create_future()

        def run() -> None:
            try:
                news = partial(self._on_answer, answer, function())
            except (NixlError, NixlUnusableError) as error:
                news = partial(self._on_refused, answer, error)
            self._tell(news)

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

    def _on_ended(self, job: NixlJob, error: TransferError | None) -> None:
        if job in self._jobs:
            self._jobs.discard(job)
            job.error = error
            job.ended.set_result(None)

    def _on_lost(self, connection: NixlConnection, why: str) -> None:
        if connection.lost is None:
            connection.lost = why

    def _on_over(self) -> None:
        self._over.set_result(None)
        for job in list(self._jobs):
            self._on_ended(job, peer_lost(f"{job.connection.name}: NIXL was stopped"))
        for answer in list(self._asked):
            self._on_refused(answer, NixlError("NIXL was stopped"))

    # -- in the thread --

    def _run(self) -> None:
        try:
            while not self._is_stopping:
                was_told = self._obey(self._pause_s)
                if self._is_busy:
                    self._look()
                elif not was_told and self._agent is not None:
                    self._agent.progress()
        finally:
            try:
                if self._agent is not None:
                    self._agent.close()
            finally:
                self._tell(self._on_over)

    def _obey(self, timeout_s: float) -> bool:
        """Wait for a command, at most so long, and do all that are there; False if none came."""
        was_told = False
        try:
            self._inbox.get(timeout=timeout_s)()
            was_told = True
            while not self._is_stopping:
                self._inbox.get_nowait()()
        except queue.Empty:
            pass
        return was_told

    def _look(self) -> None:
        """Have bytes move, and end what is done."""
        for remote in list(self._remotes.values()):
            self._advance(remote)
        now = time.monotonic()
        if any(
            job.fence_at is not None and now >= job.fence_at
            for remote in self._remotes.values()
            for job in remote.jobs
        ):
            self._fence()

    @property
    def _is_busy(self) -> bool:
        return any(remote.jobs for remote in self._remotes.values())

    @property
    def _pause_s(self) -> float:
        if not self._is_busy:
            return _IDLE_PAUSE_S
        return pause_s(time.monotonic() - self._moved_at, most_s=_MAX_BUSY_PAUSE_S)

    def _make_agent(self) -> NixlAgent:
        self._num_agents += 1
        self._agent = NixlAgent(
            f"{self._name}/{self._num_agents}", [self._pool, self._scratch], ucx=self._ucx
        )
        return self._agent

    def _open(self, metadata: bytes, name: str) -> NixlConnection:
        agent = self._agent or self._make_agent()
        found = agent.add_peer(metadata)
        if found != name:
            if found not in self._remotes:
                agent.remove_peer(found)
            raise NixlError(f"this is the agent of {found}")
        connection = NixlConnection(name=name)
        self._remotes.setdefault(name, _Remote(name=name)).connections.add(connection)
        return connection

    def _post(self, job: NixlJob) -> None:
        remote = self._remotes.get(job.connection.name)
        if remote is None or job.connection not in remote.connections or job.is_dropped:
            self._end(job, peer_lost(f"{job.connection.name} was closed or lost"))
            return
        assert self._agent is not None
        self._moved_at = time.monotonic()
        try:
            if len(job.remote):
                job.handle = self._agent.read(remote.name, job.remote, job.local)
        except NixlError as error:
            self._read_no_more(remote, str(error))
            self._end(job, peer_lost(f"{remote.name}: {error}"))
            return
        remote.jobs.append(job)
        self._advance(remote)

    def _advance(self, remote: _Remote) -> None:
        """End the jobs that are done, from the oldest on."""
        while remote.jobs:
            assert self._agent is not None
            job = remote.jobs[0]
            try:
                if job.handle is not None and not self._agent.is_done(job.handle):
                    return
            except NixlError as error:
                self._lose(remote, str(error))
                return
            self._moved_at = time.monotonic()
            remote.jobs.popleft()
            self._release(job)
            self._finish(job)
        if not remote.connections:
            self._remove(remote)

    def _drop(self, job: NixlJob) -> None:
        if job.handle is not None:
            job.fence_at = time.monotonic() + FENCE_S

    def _forget(self, connection: NixlConnection) -> None:
        remote = self._remotes.get(connection.name)
        if remote is not None:
            remote.connections.discard(connection)
            if not remote.connections and not remote.jobs:
                self._remove(remote)

    def _remove(self, remote: _Remote) -> None:
        assert self._agent is not None
        del self._remotes[remote.name]
        self._agent.remove_peer(remote.name)

    def _release(self, job: NixlJob) -> None:
        if job.handle is not None:
            assert self._agent is not None
            self._agent.release(job.handle)

    def _read_no_more(self, remote: _Remote, why: str) -> None:
        """A READ could not be posted. What is in flight may still be written: it ends by itself, or failed."""
        self._tell_closed(remote, why)
        remote.connections.clear()
        if not remote.jobs:
            self._remove(remote)

    def _lose(self, remote: _Remote, why: str) -> None:
        """A transfer failed: UCX has failed the connection, and with it everything on it."""
        for job in remote.jobs:
            self._release(job)
        self._remove(remote)
        self._tell_lost([remote], why)

    def _fence(self) -> None:
        """End the agent, so that nothing is in flight any more."""
        assert self._agent is not None
        stuck = [name for name, remote in self._remotes.items() if remote.jobs]
        log.warning("kv.nixl_agent_torn_down", waited_for=stuck, peers=list(self._remotes))
        self._agent.close()
        self._agent = None
        remotes = list(self._remotes.values())
        self._remotes.clear()
        self._tell_lost(remotes, f"cut off with {', '.join(stuck)}")

    def _tell_lost(self, remotes: list[_Remote], why: str) -> None:
        """Whoever learns of a read's end finds every connection marked that went with it."""
        for remote in remotes:
            self._tell_closed(remote, why)
        for remote in remotes:
            for job in remote.jobs:
                self._end(job, peer_lost(f"{remote.name}: {why}"))

    def _tell_closed(self, remote: _Remote, why: str) -> None:
        for connection in remote.connections:
            self._tell(partial(self._on_lost, connection, f"{remote.name}: {why}"))

    def _finish(self, job: NixlJob) -> None:
        """All bytes are here."""
        error = None
        if job.verify is not None and not job.is_dropped:
            try:
                job.is_bad = job.verify()
            except RangeError as reason:
                error = TransferError(
                    f"a leaf of a read of {job.connection.name} is out of bounds: {reason}",
                    code="kv_out_of_bounds",
                )
        self._end(job, error)

    def _end(self, job: NixlJob, error: TransferError | None) -> None:
        job.handle = None
        self._tell(partial(self._on_ended, job, error))

    def _stop(self) -> None:
        self._is_stopping = True

    def _tell(self, news: Callable[[], None]) -> None:
        """Have the loop do it, in order."""
        self._loop.call_soon_threadsafe(news)


async def settled(future: asyncio.Future[None]) -> None:
    """Wait for it, however often the caller is cancelled; a cancellation is raised then."""
    cancelled: asyncio.CancelledError | None = None
    while not future.done():
        try:
            await asyncio.wait((future,))
        except asyncio.CancelledError as error:
            cancelled = error
    if cancelled is not None:
        raise cancelled
