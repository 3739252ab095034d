"""Who holds a port, as far as this process may know."""

from __future__ import annotations

import errno
import os
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from moonpool.cluster.run_file import RunFile
from moonpool.config.schema import ClusterConfig
from moonpool.errors import ConfigError, UnavailableError

_LISTEN = "0A"


@dataclass(frozen=True, slots=True, kw_only=True)
class Holder:
    """A process that listens on a port."""

    pid: int
    command: str


def check_ports(config: ClusterConfig, running: Sequence[RunFile]) -> None:
    """Raise if a port that the configuration names cannot be had.

    Args:
        running: Clusters of this machine, so that one of them can be named as the holder.

    Raises:
        UnavailableError: It is taken; says by whom, if that can be known.
        ConfigError: It may not be bound at all.
    """
    router = config.router
    wanted = [
        (router.host, router.http_port, "--port"),
        (router.host, router.grpc_port, "--grpc-port"),
    ]
    if config.nats.is_embedded:
        wanted.append(("127.0.0.1", config.nats.port, "--nats-port"))
    named = [port for _, port, _ in wanted if port]
    for host, port, flag in wanted:
        if not port:
            continue
        if named.count(port) > 1:
            raise ConfigError(f"{flag} {port}: two doors cannot share a port")
        problem = why_not_bindable(host, port)
        if problem is None:
            continue
        if problem != errno.EADDRINUSE:
            raise ConfigError(
                f"{flag} {port}: cannot listen on {host}:{port}: {os.strerror(problem)}"
            )
        raise UnavailableError(
            f"port {port} on {host} is in use{_by(port, running)}; choose another with {flag} "
            f"(0 takes a free one)",
            code="address_in_use",
        )


def why_not_bindable(host: str, port: int) -> int | None:
    """The errno of listening there, or None if it works."""
    address = host.strip("[]")
    try:
        family, kind, protocol, _, target = socket.getaddrinfo(
            address, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
    except socket.gaierror:
        return errno.EADDRNOTAVAIL
    with socket.socket(family, kind, protocol) as listener:
        # A port that only lingers in TIME_WAIT can be had; one that is listened on cannot.
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind(target)
            listener.listen(1)
        except OSError as error:
            return error.errno
    return None


def holder_of(port: int) -> Holder | None:
    """The process that listens on `port`; None if there is none or it is someone else's."""
    inodes = _listening_inodes(port)
    if not inodes:
        return None
    wanted = {f"socket:[{inode}]" for inode in inodes}
    for process in Path("/proc").iterdir():
        if process.name.isdigit() and _holds(process, wanted):
            return Holder(pid=int(process.name), command=_command(process))
    return None


def _by(port: int, running: Sequence[RunFile]) -> str:
    for cluster in running:
        ports = {cluster.grpc_address.rpartition(":")[2], cluster.http_url.rpartition(":")[2]}
        if str(port) in ports:
            return (
                f" by the cluster {cluster.name!r} that `moonpool up` started (pid {cluster.pid}): "
                f"talk to it with `moonpool chat`, or stop it with `kill -INT {cluster.pid}`"
            )
    holder = holder_of(port)
    return f" by pid {holder.pid} ({holder.command})" if holder is not None else ""


def _listening_inodes(port: int) -> set[str]:
    inodes = set()
    for table in ("tcp", "tcp6"):
        try:
            lines = Path("/proc/net", table).read_text().splitlines()[1:]
        except OSError:
            continue
        for fields in map(str.split, lines):
            if fields[3] == _LISTEN and int(fields[1].rpartition(":")[2], 16) == port:
                inodes.add(fields[9])
    return inodes


def _holds(process: Path, sockets: set[str]) -> bool:
    try:
        descriptors = os.listdir(process / "fd")
    except OSError:
        return False
    for descriptor in descriptors:
        try:
            if os.readlink(process / "fd" / descriptor) in sockets:
                return True
        except OSError:
            continue
    return False


def _command(process: Path) -> str:
    try:
        words = (process / "cmdline").read_bytes().decode(errors="replace").split("\0")
    except OSError:
        return "?"
    text = " ".join(word for word in words if word)
    return text if len(text) <= 80 else f"{text[:77]}..."
