"""A real nats-server for a test: start, kill, start again on the same port."""

from __future__ import annotations

import ctypes
import json
import os
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import urlsplit

from moonpool.cluster.free_port import free_port
from moonpool.cluster.nats_server import nats_server_path

_START_TIMEOUT_S = 5.0
_PR_SET_PDEATHSIG = 1
_libc = ctypes.CDLL(None)


class NatsServer:
    """One broker on loopback. The port is chosen at the first start and kept."""

    def __init__(self, run_dir: Path) -> None:
        self._run_dir = run_dir
        self._port = 0
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        assert self._port, "never started"
        return f"nats://127.0.0.1:{self._port}"

    def reserve_port(self) -> str:
        """The URL that a later `start` will listen on: for a client that comes first."""
        self._port = free_port()
        return self.url

    def start(self) -> str:
        assert self._process is None, "already running"
        if not self._port:
            self.reserve_port()
        ports_dir = self._run_dir / f"ports-{time.monotonic_ns()}"
        ports_dir.mkdir()
        self._process = subprocess.Popen(
            [
                str(nats_server_path()),
                *("-a", "127.0.0.1"),
                *("-p", str(self._port)),
                *("--ports_file_dir", str(ports_dir)),
            ],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
            preexec_fn=die_with_parent,
        )
        self._port = self._read_port(ports_dir)
        return self.url

    def kill(self) -> None:
        """SIGKILL; nothing happens if it does not run."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def _read_port(self, ports_dir: Path) -> int:
        assert self._process is not None
        deadline = time.monotonic() + _START_TIMEOUT_S
        while time.monotonic() < deadline:
            assert self._process.poll() is None, "nats-server ended at its start"
            for path in ports_dir.glob("*.ports"):
                try:
                    port = urlsplit(json.loads(path.read_text())["nats"][0]).port
                except json.JSONDecodeError:
                    continue
                assert port is not None
                return port
            time.sleep(0.002)
        raise AssertionError("nats-server does not listen")


@contextmanager
def nats_server(run_dir: Path) -> Iterator[NatsServer]:
    """A running broker, killed at the end."""
    server = NatsServer(run_dir)
    server.start()
    try:
        yield server
    finally:
        server.kill()


def die_with_parent() -> None:
    """For a child before it runs: it ends when this process does."""
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() == 1:
        os._exit(1)
