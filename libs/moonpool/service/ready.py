"""How a child tells its supervisor that it listens, and where: one JSON line on an inherited pipe.

The pipe's number is in MOONPOOL_READY_FD. End of file without a line means that the child died.
"""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass

from moonpool.errors import UnavailableError

READY_FD_ENV = "MOONPOOL_READY_FD"

#: Key of a sentence about what is not as it was asked for, although the process serves.
WARNING_FACT = "warning"

_MAX_LINE_BYTES = 4_096


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadyReport:
    name: str
    pid: int
    #: `grpc_address`, `http_port` and the like.
    facts: Mapping[str, str | int]


def notify_ready(name: str, facts: Mapping[str, str | int]) -> None:
    """Write the line and close the pipe. Nothing happens in a process without a supervisor."""
    number = os.environ.pop(READY_FD_ENV, "")
    if not number:
        return
    line = json.dumps({"name": name, "pid": os.getpid(), "facts": dict(facts)}) + "\n"
    with os.fdopen(int(number), "wb") as pipe:
        pipe.write(line.encode())


class ReadyPipe:
    """The supervisor's side: pass `child_fd` (pass_fds) and `environment` to the child, then wait."""

    def __init__(self) -> None:
        self._read_fd, self.child_fd = os.pipe()

    @property
    def environment(self) -> dict[str, str]:
        return {READY_FD_ENV: str(self.child_fd)}

    def close_child_end(self) -> None:
        """Call right after the child has been started, else its death is not seen."""
        if self.child_fd >= 0:
            os.close(self.child_fd)
            self.child_fd = -1

    def close(self) -> None:
        """Give up waiting. Idempotent."""
        self.close_child_end()
        if self._read_fd >= 0:
            os.close(self._read_fd)
            self._read_fd = -1

    async def wait(self, *, deadline_s: float) -> ReadyReport:
        """The child's report; closes the pipe.

        Raises:
            UnavailableError: It ended before it was ready, or `deadline_s` passed.
        """
        self.close_child_end()
        loop = asyncio.get_running_loop()
        reader = asyncio.StreamReader(limit=_MAX_LINE_BYTES)
        pipe = os.fdopen(self._read_fd, "rb", buffering=0)
        self._read_fd = -1
        transport, _ = await loop.connect_read_pipe(
            lambda: asyncio.StreamReaderProtocol(reader), pipe
        )
        try:
            async with asyncio.timeout(deadline_s):
                line = await reader.readline()
        except TimeoutError:
            raise UnavailableError(f"The process was not ready within {deadline_s:g} s.") from None
        finally:
            transport.close()
        if not line.endswith(b"\n"):
            raise UnavailableError("The process ended before it was ready.")
        report = json.loads(line)
        return ReadyReport(name=report["name"], pid=report["pid"], facts=report["facts"])
