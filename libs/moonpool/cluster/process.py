"""ChildProcess: one program with a log file, in a session of its own, that dies with its parent.

A session of its own, so that Ctrl-C in a terminal reaches only the supervisor, which then stops the
parts in their order. Start children from the main thread: the death signal follows the thread.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

_GROUP_POLL_S = 0.01


class ChildProcess:
    """A running program. Made by `start`; ended by `stop` or `kill`, each of which may run twice."""

    def __init__(self, name: str, process: asyncio.subprocess.Process, log_path: Path) -> None:
        self.name = name
        self.log_path = log_path
        self._process = process
        #: It was waited for and nothing of its group runs: its id may become that of another process and group.
        self._is_group_gone = False

    @classmethod
    async def start(
        cls,
        name: str,
        program: Sequence[str],
        *,
        log_path: Path,
        environment: Mapping[str, str],
        cores: Sequence[int] = (),
        pass_fds: Sequence[int] = (),
    ) -> ChildProcess:
        """Start `program` with exactly `environment`; output is appended to `log_path` (mode 0600).

        Args:
            cores: CPU numbers that it may run on; all of the parent's if empty.
            pass_fds: Descriptors that stay open in the program.
        """
        launcher = [sys.executable, "-P", "-m", "moonpool.cluster.child"]
        launcher += ["--parent", str(os.getpid())]
        if cores:
            launcher += ["--cores", ",".join(map(str, cores))]
        log = os.open(log_path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        try:
            process = await asyncio.create_subprocess_exec(
                *launcher,
                "--",
                *program,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=dict(environment),
                start_new_session=True,
                pass_fds=tuple(pass_fds),
            )
        finally:
            os.close(log)
        return cls(name, process, log_path)

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def returncode(self) -> int | None:
        """Exit status, negative for a signal; None while it runs."""
        return self._process.returncode

    @property
    def is_running(self) -> bool:
        return self.returncode is None

    async def wait(self) -> int:
        """Exit status of the program itself; its own children may live a little longer."""
        return await self._process.wait()

    def send_signal(self, number: signal.Signals) -> None:
        """To the program only, not to its children. Nothing happens if it has ended."""
        if self.is_running:
            with contextlib.suppress(ProcessLookupError):
                self._process.send_signal(number)

    async def stop(self, *, timeout_s: float) -> int:
        """SIGTERM, wait, and kill what is left after `timeout_s`. Returns the exit status."""
        self.send_signal(signal.SIGTERM)
        try:
            async with asyncio.timeout(timeout_s):
                await self.wait()
        except TimeoutError:
            pass
        await self.kill()
        return await self.wait()

    async def kill(self, *, timeout_s: float = 5.0) -> None:
        """SIGKILL for it and all that it started; returns when none of them is left.

        Raises:
            TimeoutError: A process cannot be killed.
        """
        descendants = self.kill_now()
        async with asyncio.timeout(timeout_s):
            # Only /proc tells of the end of processes that are not our children.
            while self._has_living_group() or any(one.is_living for one in descendants):  # noqa: ASYNC110
                await asyncio.sleep(_GROUP_POLL_S)
            await self.wait()

    def kill_now(self) -> tuple[ProcessStat, ...]:
        """SIGKILL for it and all that it started, without waiting. Returns what it had started.

        A child of it that began a session of its own (an engine) is found by its parent, which is why
        this looks before it kills.
        """
        descendants = descendants_of(self.pid) if self.is_running else ()
        if self.is_running or self._has_living_group():
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.pid, signal.SIGKILL)
        for process in descendants:
            process.kill()
        return descendants

    def _has_living_group(self) -> bool:
        """Something of its process group runs, itself or what it has left.

        While any of them exists the kernel gives the id to no other process. So whoever has the id once the
        program was waited for is a stranger.
        """
        if self._is_group_gone:
            return False
        is_living = bool(living_group_members(self.pid))
        if not self.is_running and (not is_living or read_stat(self.pid) is not None):
            self._is_group_gone = True
        return is_living and not self._is_group_gone

    def log_tail(self, *, num_lines: int = 20) -> str:
        """The end of its log, for an error message."""
        try:
            lines = self.log_path.read_text(errors="replace").splitlines()
        except OSError as error:
            return f"(no log: {error})"
        return "\n".join(lines[-num_lines:])


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessStat:
    """A line of /proc/PID/stat. The start time tells a process from a later one of the same id."""

    pid: int
    state: str
    parent_pid: int
    group_id: int
    start_ticks: int

    @property
    def is_living(self) -> bool:
        """It still runs (a zombie does not)."""
        now = read_stat(self.pid)
        return now is not None and now.start_ticks == self.start_ticks and now.state not in "ZX"

    def kill(self) -> None:
        if self.is_living:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)


def read_stat(pid: int) -> ProcessStat | None:
    """None if there is no such process."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return None
    # pid (name) state ppid pgrp ...: the name may hold spaces and parentheses.
    fields = stat[stat.rindex(")") + 2 :].split()
    return ProcessStat(
        pid=pid,
        state=fields[0],
        parent_pid=int(fields[1]),
        group_id=int(fields[2]),
        start_ticks=int(fields[19]),
    )


def living_group_members(group_id: int) -> tuple[int, ...]:
    """Processes of a process group that are not zombies."""
    return tuple(
        stat.pid for stat in _all_stats() if stat.group_id == group_id and stat.state not in "ZX"
    )


def descendants_of(pid: int) -> tuple[ProcessStat, ...]:
    """Children of `pid`, theirs, and so on, whatever their session."""
    stats = _all_stats()
    found: list[ProcessStat] = []
    parents = {pid}
    while parents:
        children = [stat for stat in stats if stat.parent_pid in parents]
        found += children
        parents = {stat.pid for stat in children}
    return tuple(found)


def _all_stats() -> list[ProcessStat]:
    stats = (read_stat(int(entry.name)) for entry in os.scandir("/proc") if entry.name.isdigit())
    return [stat for stat in stats if stat is not None]
