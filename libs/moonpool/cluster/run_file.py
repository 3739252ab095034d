"""The run file: where a cluster that `moonpool up` started can be found.

`<data dir>/run/<run>/cluster.json`, mode 0600 (it holds the door's key), written when the cluster
serves and removed when it ends. One left behind by a killed supervisor names a process that is gone,
and is not believed.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import msgspec

from moonpool.cluster.process import read_stat
from moonpool.config.private_file import write_private

FILE_NAME = "cluster.json"


class RunFile(msgspec.Struct, frozen=True, kw_only=True):
    """A cluster of this machine that serves."""

    name: str
    model: str
    #: The supervisor, and its start by the kernel's clock: ids are used again.
    pid: int
    pid_start_ticks: int
    started_unix_s: float
    grpc_address: str
    #: Empty if the router opens no HTTP door.
    http_url: str
    nats_url: str
    #: With it whoever runs the cluster comes in.
    api_key: str | None
    run_dir: str

    @property
    def is_alive(self) -> bool:
        """True if its supervisor still runs."""
        return process_start_ticks(self.pid) == self.pid_start_ticks


@contextlib.contextmanager
def published(run_file: RunFile) -> Iterator[Path]:
    """The file is there inside the block."""
    path = Path(run_file.run_dir) / FILE_NAME
    write_private(path, msgspec.json.encode(run_file))
    try:
        yield path
    finally:
        path.unlink(missing_ok=True)


def running_clusters(data_dir: Path) -> tuple[RunFile, ...]:
    """Clusters below `data_dir` whose supervisor lives, the latest first."""
    found = []
    for path in sorted((data_dir / "run").glob(f"*/{FILE_NAME}"), reverse=True):
        try:
            run_file = msgspec.json.decode(path.read_bytes(), type=RunFile)
        except (OSError, msgspec.MsgspecError):
            continue
        if run_file.is_alive:
            found.append(run_file)
    return tuple(sorted(found, key=lambda run_file: -run_file.started_unix_s))


def process_start_ticks(pid: int) -> int:
    """When a process began, in clock ticks since boot; -1 if there is none."""
    stat = read_stat(pid)
    return stat.start_ticks if stat is not None else -1
