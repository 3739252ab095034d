"""glibc's heap, told to keep what is freed.

By default glibc gives large freed buffers back to the kernel and takes new pages for the next ones: a
page fault for every 4 KiB. Whether it does depends on what the process happened to free before. For a
process that builds a message of half a megabyte, frees it and builds the next, that can cost more than
all copies of the message together (1.2 of 2.9 ms of processor time a MiB were measured at a source).
"""

from __future__ import annotations

import ctypes

_M_TRIM_THRESHOLD, _M_TOP_PAD, _M_MMAP_THRESHOLD = -1, -2, -3

#: Buffers below this come from the heap: the largest value that glibc takes.
_MMAP_THRESHOLD_BYTES = 32 << 20
#: Most free memory that each heap keeps at its end.
_TRIM_THRESHOLD_BYTES = 256 << 20
_TOP_PAD_BYTES = 4 << 20


def keep_freed_memory() -> bool:
    """Let this process reuse the memory of large buffers. May be called again.

    Returns:
        False if the C library is another one, which is left as it is.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    return all(
        mallopt(parameter, value) == 1
        for parameter, value in (
            (_M_MMAP_THRESHOLD, _MMAP_THRESHOLD_BYTES),
            (_M_TRIM_THRESHOLD, _TRIM_THRESHOLD_BYTES),
            (_M_TOP_PAD, _TOP_PAD_BYTES),
        )
    )
