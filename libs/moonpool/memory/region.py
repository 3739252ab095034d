"""Regions of shared memory backed by a memfd: nothing in the file system, nothing left behind.

Life of a worker's region:

1. The service process creates it: memfd, sized, mapped writable, every page touched.
2. The engine process inherits the descriptor and attaches: mapped writable too.
3. The owner seals it. From then on its size is fixed (a peer that could shrink it would kill its
   readers with SIGBUS) and nobody can map or write it any more, except through the maps of 1 and 2.
4. Peers on the host map it read-only (region.ReadOnlyRegion) from a descriptor that was passed to them.
5. The memory is freed when the last process that maps it has gone, however it went.

A map cannot be revoked: a worker that starts again makes new regions, and what its old peers still
map is an orphan that nobody writes.
"""

from __future__ import annotations

import fcntl
import mmap
import os
from pathlib import Path

import numpy as np
import numpy.typing as npt

from moonpool.errors import TransferError
from moonpool.memory.host import require_linux

#: F_SEAL_FUTURE_WRITE (Linux 5.1); the fcntl module has it from Python 3.13 on.
F_SEAL_FUTURE_WRITE = 0x10
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | F_SEAL_FUTURE_WRITE


class OwnedRegion:
    """A region that this process may write.

    Attributes:
        fd: Kept open until close(), for passing on.
        bytes: uint8[size_bytes], writable. Keeps the map alive for as long as anything refers to it.
    """

    def __init__(self, fd: int, size_bytes: int) -> None:
        self.fd = fd
        self.size_bytes = size_bytes
        self.bytes: npt.NDArray[np.uint8] = np.frombuffer(_map_writable(fd, size_bytes), np.uint8)

    @classmethod
    def create(cls, name: str, size_bytes: int) -> OwnedRegion:
        """New memory, zero, pre-faulted; not sealed yet. `name` shows in /proc/PID/maps.

        Raises:
            ConfigError: Not on this platform.
            MemoryError: The machine does not have that much.
        """
        require_linux()
        assert size_bytes > 0, size_bytes
        available = available_bytes()
        if size_bytes > available:
            # Touching the pages would not fail: it would call the kernel's OOM killer.
            raise MemoryError(
                f"{name} needs {size_bytes} bytes of memory, {available} are available"
            )
        fd = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(fd, size_bytes)
            return cls(fd, size_bytes)
        except BaseException:
            os.close(fd)
            raise

    @classmethod
    def attach(cls, fd: int) -> OwnedRegion:
        """Map a descriptor inherited from the creator, before it is sealed. Takes ownership of `fd`.

        Raises:
            PermissionError: It is sealed already.
        """
        return cls(fd, os.fstat(fd).st_size)

    def seal(self) -> None:
        """Fix the size and refuse every further writable map. May be called twice."""
        fcntl.fcntl(self.fd, fcntl.F_ADD_SEALS, _SEALS)

    @property
    def is_sealed(self) -> bool:
        return has_seals(self.fd)

    def close(self) -> None:
        """Close the descriptor and drop this object's view. Arrays made from it stay valid."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1
            self.bytes = np.empty(0, np.uint8)


class ReadOnlyRegion:
    """Another process's region, mapped read-only.

    Attributes:
        bytes: uint8[size_bytes], not writable: shows the owner's writes as they happen.
    """

    def __init__(self, fd: int, size_bytes: int) -> None:
        """Map `fd`, which stays the caller's.

        Raises:
            TransferError: It is not sealed, or has another size than its owner announced.
        """
        if not has_seals(fd):
            raise TransferError("the peer's memory is not sealed", code="kv_region_unsealed")
        actual = os.fstat(fd).st_size
        if actual != size_bytes:
            raise TransferError(
                f"the peer's memory has {actual} bytes, it announced {size_bytes}",
                code="kv_region_size",
            )
        self.size_bytes = size_bytes
        flags = mmap.MAP_SHARED | mmap.MAP_POPULATE
        mapped = mmap.mmap(fd, size_bytes, flags=flags, prot=mmap.PROT_READ)
        self.bytes: npt.NDArray[np.uint8] = np.frombuffer(mapped, np.uint8)

    def close(self) -> None:
        """Drop this object's view; the map goes with the last array made from it."""
        self.bytes = np.empty(0, np.uint8)


def has_seals(fd: int) -> bool:
    """True if size and future writes of a memfd are sealed; False for anything else."""
    try:
        return fcntl.fcntl(fd, fcntl.F_GET_SEALS) & _SEALS == _SEALS
    except OSError:
        return False


def available_bytes() -> int:
    """What can be allocated now without swapping (MemAvailable, and the cgroup's limit)."""
    available = _fields("/proc/meminfo")["MemAvailable:"] * 1024
    try:
        limit = Path("/sys/fs/cgroup/memory.max").read_text().strip()
        used = int(Path("/sys/fs/cgroup/memory.current").read_text())
        reclaimable = _fields("/sys/fs/cgroup/memory.stat")["inactive_file"]
    except OSError:
        return available
    return available if limit == "max" else min(available, int(limit) - used + reclaimable)


def _fields(path: str) -> dict[str, int]:
    lines = (line.split() for line in Path(path).read_text().splitlines())
    return {words[0]: int(words[1]) for words in lines}


def _map_writable(fd: int, size_bytes: int) -> mmap.mmap:
    try:
        return mmap.mmap(
            fd,
            size_bytes,
            flags=mmap.MAP_SHARED | mmap.MAP_POPULATE,
            prot=mmap.PROT_READ | mmap.PROT_WRITE,
        )
    except PermissionError as error:
        raise PermissionError(
            error.errno, "the region is sealed: only maps made before that can write"
        ) from error
