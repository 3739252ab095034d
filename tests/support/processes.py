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


def processes_called(*words: object) -> list[int]:
    """Living processes that have each of `words` as a word of their command line."""
    found = []
    for entry in os.scandir("/proc"):
        if entry.name.isdigit():
            try:
                command = Path(entry.path, "cmdline").read_bytes().split(b"\0")
            except OSError:
                continue
            if all(str(word).encode() in command for word in words):
                found.append(int(entry.name))
    return found
