"""Waiting for processes that are not this one's children."""

from __future__ import annotations

import os
import select


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
