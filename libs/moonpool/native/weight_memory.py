"""Memory for packed weights, in huge pages where the kernel gives them.

A decode step reads every weight once, in pages of 4 KiB some fifty thousand of them for 200 MB, and each has
to be looked up again: their entries do not stay in the processor either. In pages of 2 MiB the products of
a step were 1.06 to 1.12 times as fast (docs/performance/engine.md).

Weights of a few megabytes share a mapping, since a huge page of their own each would waste half of it. A
mapping goes when the last array in it does.
"""

from __future__ import annotations

import contextlib
import mmap
from collections.abc import Callable

import numpy as np

from moonpool.native.geometry import ByteArray

#: One mapping; what is not used of it takes no memory.
_MAPPING_BYTES = 64 << 20
_CACHE_LINE_BYTES = 64

#: uint8[num_bytes] that begins at a cache line; it has no set content.
Allocate = Callable[[int], ByteArray]


def of_its_own(num_bytes: int) -> ByteArray:
    """An array that shares no mapping: a read behind it can be noticed."""
    memory = np.empty(num_bytes + _CACHE_LINE_BYTES, np.uint8)
    start = -memory.ctypes.data % _CACHE_LINE_BYTES
    return memory[start : start + num_bytes]


class WeightMemory:
    """Cuts arrays from mappings one after the other."""

    def __init__(self) -> None:
        self._free: ByteArray = np.empty(0, np.uint8)

    def allocate(self, num_bytes: int) -> ByteArray:
        if num_bytes > len(self._free):
            self._free = _map(max(num_bytes, _MAPPING_BYTES))
        array = self._free[:num_bytes]
        self._free = self._free[-(-num_bytes // _CACHE_LINE_BYTES) * _CACHE_LINE_BYTES :]
        return array


def _map(num_bytes: int) -> ByteArray:
    memory = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError):
        # A kernel without huge pages: small ones do as well, only slower.
        memory.madvise(mmap.MADV_HUGEPAGE)
    return np.frombuffer(memory, np.uint8)
