"""NixlDriver: the one thread that drives this process's reading NIXL agent. NixlLink gives it its work.

All but `start`, `join` and `send` runs in the thread. What it has to say it tells the link's loop, in order.

How a read goes, from the thread's side
1. It posts the job. Over shared memory that is the copy itself; else UCX has begun to move bytes.
2. It asks for the oldest job of each peer that somebody waits for, so those of one peer end in order, and for
   every one that was dropped. Asking makes progress; the pause between two looks is a fraction of the time since
   something moved.
3. It is done, and its copy is checked, while it is warm in the cache and without another change of threads;
   or it failed: the peer is lost, its agent is removed, and all its jobs end. A READ that could not even be
   posted loses the peer too, but ends no other job: what is in flight may still be written.

A job that is dropped before 1 is not posted. A READ in flight cannot be recalled, so a job that is dropped
later still ends by 3, if it must by the fence: the whole agent is torn down, and with it every connection and
every job; the next connection makes a new agent. That costs other peers' readers theirs, so it comes only to a
peer that is reached through its own software (TCP) and seems to stand still. Only the end of a READ shows that
something moved, so one READ that is long enough may be taken for that:
- nobody waits for anything of it any more, and for FENCE_S none of it has ended; or
- somebody does, who may be waiting for a long READ, but for STANDSTILL_S none of it has ended.
"""

from __future__ import annotations

import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol

import structlog

from moonpool.errors import TransferError
from moonpool.native import RangeError
from moonpool.transport.base import ByteArray, peer_lost
from moonpool.transport.nixl_agent import NixlAgent, NixlError, pause_s
from moonpool.transport.nixl_job import NixlConnection, NixlJob

log = structlog.get_logger("moonpool.transport")

#: Reads of a peer that were all given up and do not end by themselves are ended, with the agent, after this.
FENCE_S = 1.0
#: The same, while others of that peer are not given up.
STANDSTILL_S = 10.0
#: The longest pause between two looks while reads are in flight, and the pause while there are none.
_MAX_BUSY_PAUSE_S = 2e-3
_IDLE_PAUSE_S = 50e-3


class NixlNews(Protocol):
    """What the link's loop is told."""

    def on_ended(self, job: NixlJob, error: TransferError | None) -> None:
        """No byte of this job will be written any more."""
        ...

    def on_lost(self, connection: NixlConnection, why: str) -> None:
        """It can be read no more."""
        ...

    def on_over(self) -> None:
        """The thread has ended, and the agent."""
        ...


@dataclass(slots=True, kw_only=True, eq=False)
class _Remote:
    """One peer's agent."""

    name: str
    connections: set[NixlConnection] = field(default_factory=set)
    #: In flight, in order.
    jobs: deque[NixlJob] = field(default_factory=deque)
    #: When one of them last ended, or the first of them was posted.
    moved_at: float = 0.0

    def is_stuck(self, now: float) -> bool:
        """Somebody waits for a READ to be over that does not end."""
        dropped_at = [job.dropped_at for job in self.jobs if job.dropped_at is not None]
        if not dropped_at:
            return False
        is_any_wanted = any(job.dropped_at is None and not job.is_probe for job in self.jobs)
        if is_any_wanted:
            return now - max(self.moved_at, min(dropped_at)) >= STANDSTILL_S
        return now - max(self.moved_at, *dropped_at) >= FENCE_S


class NixlDriver:
    """See the file's head.

    Args:
        name: Of the agent: unique among all that meet.
        targets: What reads may write.
        ucx: See NixlAgent.
        news: Told on the loop.
        tell: Has the loop do something, in order.
        agent_type: NixlAgent, or what stands in for it.
        monotonic: The time in seconds.
    """

    def __init__(
        self,
        *,
        name: str,
        targets: list[ByteArray],
        ucx: Mapping[str, str] | None,
        news: NixlNews,
        tell: Callable[[Callable[[], None]], object],
        agent_type: Callable[..., NixlAgent] = NixlAgent,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._name = name
        self._targets = targets
        self._ucx = ucx
        self._news = news
        self._tell = tell
        self._agent_type = agent_type
        self._monotonic = monotonic
        self._thread = threading.Thread(target=self._run, name="moonpool-nixl", daemon=True)
        self._inbox: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._agent: NixlAgent | None = None
        self._num_agents = 0
        self._remotes: dict[str, _Remote] = {}
        self._is_stopping = False
        #: When something last moved.
        self._moved_at = self._monotonic()

    # -- from the loop --

    def start(self) -> None:
        """Once."""
        self._thread.start()

    @property
    def has_started(self) -> bool:
        return self._thread.ident is not None

    def join(self) -> None:
        """Wait until it has ended. Requires that it was told to `stop`."""
        self._thread.join()

    def send(self, command: Callable[[], None]) -> None:
        """Have the thread do it, in order."""
        self._inbox.put(command)

    # -- commands --

    def make_agent(self) -> NixlAgent:
        """Raises NixlUnusableError: In words."""
        self._num_agents += 1
        self._agent = self._agent_type(
            f"{self._name}/{self._num_agents}", self._targets, ucx=self._ucx
        )
        return self._agent

    def open(self, metadata: bytes, name: str) -> NixlConnection:
        """Connect to the agent `name`, in an agent that is made if there is none.

        Raises:
            NixlError: It cannot be reached, or is another one.
            NixlUnusableError: There is none to be made.
        """
        agent = self._agent or self.make_agent()
        found = agent.add_peer(metadata)
        if found != name:
            if found not in self._remotes:
                agent.remove_peer(found)
            raise NixlError(f"this is the agent of {found}")
        connection = NixlConnection(name=name)
        self._remotes.setdefault(name, _Remote(name=name)).connections.add(connection)
        return connection

    def post(self, job: NixlJob) -> None:
        """Begin a READ; its end is told."""
        remote = self._remotes.get(job.connection.name)
        if remote is None or job.connection not in remote.connections or job.is_dropped:
            self._end(job, peer_lost(f"{job.connection.name} was closed or lost"))
            return
        assert self._agent is not None
        self._moved_at = self._monotonic()
        try:
            if len(job.remote):
                job.handle = self._agent.read(remote.name, job.remote, job.local)
        except NixlError as error:
            self._read_no_more(remote, str(error))
            self._end(job, peer_lost(f"{remote.name}: {error}"))
            return
        if not remote.jobs:
            remote.moved_at = self._moved_at
        remote.jobs.append(job)
        self._advance(remote)

    def drop(self, job: NixlJob) -> None:
        """Nobody wants it any more."""
        if job.handle is not None:
            job.dropped_at = self._monotonic()

    def forget(self, connection: NixlConnection) -> None:
        """Let go of a peer, once its reads have ended."""
        remote = self._remotes.get(connection.name)
        if remote is not None:
            remote.connections.discard(connection)
            if not remote.connections and not remote.jobs:
                self._remove(remote)

    def stop(self) -> None:
        """After what it does now."""
        self._is_stopping = True

    # -- the thread --

    def _run(self) -> None:
        try:
            while not self._is_stopping:
                self.turn()
        finally:
            try:
                if self._agent is not None:
                    self._agent.close()
            finally:
                self._tell(self._news.on_over)

    def turn(self) -> None:
        """Wait a little for commands and obey them, then have bytes move. An agent that fails is replaced."""
        try:
            was_told = self._obey(self._pause_s)
            if self._is_busy:
                self._look()
            elif not was_told and self._agent is not None:
                self._agent.progress()
        except NixlError as error:
            self._tear_down(str(error))

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
        now = self._monotonic()
        stuck = [name for name, remote in self._remotes.items() if remote.is_stuck(now)]
        if stuck:
            self._tear_down(f"cut off with {', '.join(stuck)}")

    @property
    def _is_busy(self) -> bool:
        return any(remote.jobs for remote in self._remotes.values())

    @property
    def _pause_s(self) -> float:
        if not self._is_busy:
            return _IDLE_PAUSE_S
        return pause_s(self._monotonic() - self._moved_at, most_s=_MAX_BUSY_PAUSE_S)

    def _advance(self, remote: _Remote) -> None:
        """End the jobs that are done: those that somebody waits for from the oldest on, the others as they are."""
        assert self._agent is not None
        is_behind = False
        for job in list(remote.jobs):
            if is_behind and job.dropped_at is None:
                continue
            try:
                is_done = job.handle is None or self._agent.is_done(job.handle)
            except NixlError as error:
                self._lose(remote, str(error))
                return
            if not is_done:
                is_behind |= job.dropped_at is None
                continue
            self._moved_at = remote.moved_at = self._monotonic()
            self._release(job)
            remote.jobs.remove(job)
            self._finish(job)
        if not remote.jobs and not remote.connections:
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

    def _tear_down(self, why: str) -> None:
        """End the agent, so that nothing is in flight any more."""
        remotes = list(self._remotes.values())
        log.warning(
            "kv.nixl_agent_torn_down",
            reason=why,
            peers=[remote.name for remote in remotes],
            num_reads=sum(len(remote.jobs) for remote in remotes),
        )
        if self._agent is not None:
            self._agent.close()
            self._agent = None
        self._remotes.clear()
        self._tell_lost(remotes, why)

    def _tell_lost(self, remotes: list[_Remote], why: str) -> None:
        """Whoever learns of a read's end finds every connection marked that went with it."""
        for remote in remotes:
            self._tell_closed(remote, why)
        for remote in remotes:
            for job in remote.jobs:
                self._end(job, peer_lost(f"{remote.name}: {why}"))

    def _tell_closed(self, remote: _Remote, why: str) -> None:
        for connection in remote.connections:
            self._tell(partial(self._news.on_lost, connection, f"{remote.name}: {why}"))

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
        self._tell(partial(self._news.on_ended, job, error))
