"""Waiting for processes that are not this one's children."""

from __future__ import annotations

import os
import select
from pathlib import Path


def wait_for_exit(pid: int, *, timeout_s: float) -> bool:
    """True if `pid` has ended (or is a zombie) within the time."""
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    try:
        ready, _, _ = select.select([descriptor], [], [], timeout_s)
        return bool(ready)
    finally:
        os.close(descriptor)


def processes_with(variable: str, value: str) -> list[int]:
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
