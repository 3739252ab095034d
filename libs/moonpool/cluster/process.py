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
from pathlib import Path

_GROUP_POLL_S = 0.01


class ChildProcess:
    """A running program. Made by `start`; ended by `stop` or `kill`, each of which may run twice."""

    def __init__(self, name: str, process: asyncio.subprocess.Process, log_path: Path) -> None:
        self.name = name
        self.log_path = log_path
        self._process = process

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
        """SIGKILL for it and all its children; returns when none of them is left.

        Raises:
            TimeoutError: A process of the group cannot be killed.
        """
        async with asyncio.timeout(timeout_s):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.pid, signal.SIGKILL)
            # Grandchildren are not ours to wait for: the kernel tells of their end in /proc only.
            while living_group_members(self.pid):  # noqa: ASYNC110
                await asyncio.sleep(_GROUP_POLL_S)
            await self.wait()

    def log_tail(self, *, num_lines: int = 20) -> str:
        """The end of its log, for an error message."""
        try:
            lines = self.log_path.read_text(errors="replace").splitlines()
        except OSError as error:
            return f"(no log: {error})"
        return "\n".join(lines[-num_lines:])


def living_group_members(group_id: int) -> tuple[int, ...]:
    """Processes of a process group that are not zombies, by /proc."""
    members = []
    for entry in os.scandir("/proc"):
        if not entry.name.isdigit():
            continue
        try:
            stat = Path(entry.path, "stat").read_text()
        except (FileNotFoundError, ProcessLookupError):
            continue
        # pid (name) state ppid pgrp ...: the name may hold spaces and parentheses.
        state, _, group = stat[stat.rindex(")") + 2 :].split(" ", 3)[:3]
        if int(group) == group_id and state not in "ZX":
            members.append(int(entry.name))
    return tuple(members)
