"""What must be gone when a cluster has ended: processes, listeners, shared memory, configurations."""

from __future__ import annotations

import contextlib
import os
import socket
import uuid
from dataclasses import dataclass, field
from pathlib import Path

from moonpool.cluster.local_cluster import LocalCluster
from moonpool.errors import UnavailableError

_MARK = "MOONPOOL_FAULTS_MARK"
_SHARED_MEMORY = Path("/dev/shm")


@dataclass(slots=True, kw_only=True)
class Footprint:
    """What one cluster takes while it runs. Made before it starts."""

    #: Its processes have it in their environment, and so have all that they start.
    mark: str = field(default_factory=lambda: uuid.uuid4().hex)
    shared_memory_before: set[str] = field(default_factory=lambda: set(os.listdir(_SHARED_MEMORY)))
    addresses: set[str] = field(default_factory=set)
    run_dir: Path | None = None
    num_processes: int = 0

    @property
    def environment(self) -> dict[str, str]:
        """Of the cluster's processes."""
        return {_MARK: self.mark}

    def note(self, cluster: LocalCluster) -> None:
        """It runs, for the last moments."""
        self.run_dir = cluster.run_dir
        self.num_processes = len(_processes_with(_MARK, self.mark))
        for name in (*cluster.router_names, *cluster.node_ids):
            with contextlib.suppress(UnavailableError):
                self.addresses.add(str(cluster.part(name).fact("grpc_address")))
        with contextlib.suppress(UnavailableError, KeyError):
            self.addresses.add(cluster.endpoints.nats_url.rpartition("@")[2])

    def leftovers(self) -> list[str]:
        """It has ended: what is there of it all the same. Blocks for a moment."""
        assert self.run_dir is not None, "never noted"
        problems = [] if self.num_processes else ["its processes cannot be found"]
        problems += [f"process {pid} still runs" for pid in _processes_with(_MARK, self.mark)]
        problems += [f"{one} is still listened on" for one in self.addresses if _is_listening(one)]
        shared_memory = set(os.listdir(_SHARED_MEMORY)) - self.shared_memory_before
        problems += [f"{_SHARED_MEMORY / name} is left" for name in sorted(shared_memory)]
        # Logs stay, configurations and whatever else was needed to run do not.
        files = sorted(path for path in self.run_dir.iterdir() if path.is_file())
        problems += [f"{path} is left" for path in files if path.suffix != ".log"]
        if self.run_dir.stat().st_mode & 0o077:
            problems.append(f"others may read {self.run_dir}")
        return problems


def _processes_with(variable: str, value: str) -> list[int]:
    """Living processes that were started with this in their environment."""
    wanted = f"{variable}={value}".encode()
    found = []
    for entry in os.scandir("/proc"):
        if not entry.name.isdigit() or int(entry.name) == os.getpid():
            continue
        try:
            environment = Path(entry.path, "environ").read_bytes()
        except OSError:
            continue
        if wanted in environment.split(b"\0"):
            found.append(int(entry.name))
    return found


def _is_listening(address: str) -> bool:
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host, int(port)), timeout=1.0).close()
    except OSError:
        return False
    return True
