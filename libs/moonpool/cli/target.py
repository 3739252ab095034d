"""Which cluster a command talks to: a flag, the environment, or the one that `up` started last."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from moonpool.cluster.run_file import running_clusters
from moonpool.config.schema import default_data_dir
from moonpool.config.secret import FILE_NAME, load_or_create_secret
from moonpool.errors import ConfigError, UnavailableError


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """A router's gRPC door."""

    address: str
    api_key: str | None
    data_dir: Path
    #: Empty if it is not known.
    http_url: str = ""

    @property
    def rpc_key(self) -> str | None:
        """Key of the cluster's internal calls, if its secret lies on this machine."""
        if not (self.data_dir / FILE_NAME).exists():
            return None
        return load_or_create_secret(self.data_dir).rpc_key


def data_dir_of(data_dir: Path | None) -> Path:
    """What the flag or its variable says, else the default."""
    return (data_dir or default_data_dir(os.environ)).expanduser().absolute()


def find_target(*, address: str | None, api_key: str | None, data_dir: Path | None) -> Target:
    """The cluster to talk to.

    Raises:
        ConfigError: The address is not host:port.
        UnavailableError: No address is given and no cluster of this data directory runs.
    """
    directory = data_dir_of(data_dir)
    if address is not None:
        host, colon, port = address.rpartition(":")
        if not (colon and host and port.isdigit()):
            raise ConfigError(f"--address {address}: must be host:port, like 127.0.0.1:8001")
        return Target(address=address, api_key=api_key, data_dir=directory)
    running = running_clusters(directory)
    if not running:
        raise UnavailableError(
            f"no cluster runs under {directory}: start one with `moonpool up`, or name one with "
            "--address host:port",
            code="no_cluster",
        )
    found = running[0]
    return Target(
        address=found.grpc_address,
        api_key=api_key or found.api_key,
        data_dir=directory,
        http_url=found.http_url,
    )
