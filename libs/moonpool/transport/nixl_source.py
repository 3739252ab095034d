"""NixlSource: lets peers read a pool by NIXL, out of a process of its own.

Why a process: without RDMA or process_vm_readv (over TCP) UCX answers a READ in the software of the source, and
a reader that dies in the middle of one can crash the process that answers it (UCX answers on a connection
that has failed). It must not be the worker's. Besides, it polls, which costs a thread of the service its turn
at the interpreter.

What it does stands in nixl_source_main.py. It never outlives the worker. If it crashes, the worker cannot be
read by NIXL any more, until it starts again; peers fall back.
"""

from __future__ import annotations

import asyncio
import json
import socket
import sys
from asyncio.subprocess import DEVNULL, Process
from collections.abc import Mapping

import structlog

from moonpool.kv.region import NixlAccess
from moonpool.transport.nixl_agent import NixlUnusableError

log = structlog.get_logger("moonpool.transport")

#: To load NIXL and register the pool.
START_S = 30.0
#: To take leave of readers.
STOP_S = 2.0
#: Metadata names every way to the agent: some KB for each NIC, in hexadecimal.
_MAX_REPORT_BYTES = 1 << 24
_PROCESS = "moonpool.transport.nixl_source_main"


class NixlSource:
    """The process, as its parent sees it. `start` once, `stop` afterwards whatever came of it.

    Args:
        name: Of the agent, and how readers know it: unique per incarnation.
        pool_fd: A memfd, not sealed yet; stays the caller's.
        ucx: See NixlAgent.
        stop_s: How long it may take leave of readers before it is killed.
    """

    def __init__(
        self,
        *,
        name: str,
        pool_fd: int,
        ucx: Mapping[str, str] | None = None,
        stop_s: float = STOP_S,
    ) -> None:
        self._name = name
        self._pool_fd = pool_fd
        self._ucx = dict(ucx or {})
        self._stop_s = stop_s
        self._process: Process | None = None
        self._writer: asyncio.StreamWriter | None = None
        self._is_stopping = False

    @property
    def pid(self) -> int | None:
        """While it has been started."""
        return None if self._process is None else self._process.pid

    async def start(self) -> NixlAccess:
        """Until it can be read; returns what peers need.

        Raises:
            NixlUnusableError: In words.
        """
        ours, theirs = socket.socketpair()
        with theirs:
            reader, self._writer = await asyncio.open_connection(sock=ours, limit=_MAX_REPORT_BYTES)
            fds = (self._pool_fd, theirs.fileno())
            settings = json.dumps(self._ucx)
            self._process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", _PROCESS, *map(str, fds), self._name, settings),
                stdin=DEVNULL,
                pass_fds=fds,
                # Ctrl-C is for the worker, which ends this process.
                start_new_session=True,
            )
        try:
            async with asyncio.timeout(START_S):
                line = await reader.readline()
        except TimeoutError as error:
            raise NixlUnusableError(f"NIXL did not start in {START_S:g} s") from error
        return access_of(line)

    async def watch(self) -> None:
        """Until it has ended, which is told if nobody asked for it."""
        assert self._process is not None
        status = await self._process.wait()
        if not self._is_stopping:
            log.warning("kv.nixl_source_crashed", agent=self._name, status=status)

    async def stop(self) -> None:
        """May be called twice."""
        self._is_stopping = True
        if self._writer is not None:
            self._writer.close()
        if self._process is not None and self._process.returncode is None:
            try:
                async with asyncio.timeout(self._stop_s):
                    await self._process.wait()
            except TimeoutError:
                log.warning("kv.nixl_source_killed", agent=self._name, after_s=self._stop_s)
            finally:
                if self._process.returncode is None:
                    self._process.kill()
            await self._process.wait()


def access_of(report: str | bytes) -> NixlAccess:
    """What the process has reported.

    Raises:
        NixlUnusableError: It could not start, in words.
    """
    if not report:
        raise NixlUnusableError("the process for NIXL ended before it could be used")
    values = json.loads(report)
    if "error" in values:
        raise NixlUnusableError(values["error"])
    return NixlAccess(
        agent_metadata=bytes.fromhex(values["agent_metadata"]),
        base_address=values["base_address"],
    )
