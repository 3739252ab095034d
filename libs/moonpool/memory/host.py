"""Which processes can pass descriptors to each other, and whether this system can at all."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from moonpool.errors import ConfigError


def require_linux() -> None:
    """Raise ConfigError where there is no memfd."""
    if sys.platform != "linux" or not hasattr(os, "memfd_create"):
        raise ConfigError(
            f"a worker needs Linux for its KV memory (memfd, seals), and this is {sys.platform}: "
            "run it in a Linux container or virtual machine; router, client and CLI run anywhere",
            code="unsupported_platform",
        )


def host_id() -> str:
    """Equal for two processes exactly if an abstract Unix socket and a descriptor can join them.

    Boot id, pid namespace (SO_PEERCRED names processes in it) and network namespace (abstract
    sockets live in it).
    """
    require_linux()
    boot_id = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    namespaces = (os.stat(f"/proc/self/ns/{kind}").st_ino for kind in ("pid", "net"))
    return ":".join([boot_id, *(str(inode) for inode in namespaces)])
