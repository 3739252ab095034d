"""Writing into another process's KV pool, as no part of the product can: to see who reads it."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np

_WRITABLE_POOL = re.compile(
    r"^([0-9a-f]+)-([0-9a-f]+) rw-s .*/memfd:moonpool-kv-pool\b", re.MULTILINE
)


def poison_pool(pid: int, value: float) -> int:
    """Set every float32 of the pool that process `pid` maps writable; returns how many there are.

    The worker must be quiet. Needs the right to trace the process, as its parent has.
    """
    maps = Path(f"/proc/{pid}/maps").read_text()
    ((start, end),) = [(int(a, 16), int(b, 16)) for a, b in _WRITABLE_POOL.findall(maps)]
    values = np.full((end - start) // 4, value, np.float32)
    with Path(f"/proc/{pid}/mem").open("r+b", buffering=0) as memory:
        memory.seek(start)
        assert memory.write(values.tobytes()) == end - start
    return len(values)
