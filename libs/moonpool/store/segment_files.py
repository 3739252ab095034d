"""SegmentFiles: the seam between the log and the file system. All calls block.

Names are the log's own (`segment-0000002a.kv`); nothing that came from a client is part of one.
"""

from __future__ import annotations

import errno
import os
import re
import stat
from collections.abc import Sequence
from typing import Protocol

from moonpool.store.base import ByteArray

_NAME = re.compile(r"segment-([0-7][0-9a-f]{7})\.kv")


class SegmentFiles(Protocol):
    """The segment files of one folder. Everything here raises OSError."""

    def names(self) -> list[str]:
        """Of all segment files."""
        ...

    def create(self, name: str) -> int:
        """A new, empty file; its descriptor."""
        ...

    def open(self, name: str) -> int: ...

    def size(self, fd: int) -> int: ...

    def file_bytes(self, name: str) -> int | None:
        """How large a file is that need not be openable; None if it is no regular file."""
        ...

    def preadv(self, fd: int, buffers: Sequence[ByteArray], offset: int) -> int:
        """How many bytes were read: fewer than asked for at the end of the file, or at will."""
        ...

    def pwritev(self, fd: int, buffers: Sequence[ByteArray], offset: int) -> int:
        """How many bytes were written: at least one."""
        ...

    def uncache(self, fd: int, offset: int, num_bytes: int) -> None:
        """Let the kernel give up what it has cached of these bytes alone; it may, or not."""
        ...

    def sync(self, fd: int) -> None:
        """Wait until the file's bytes are on the medium."""
        ...

    def close(self, fd: int) -> None: ...

    def unlink(self, name: str) -> None: ...


class PosixFiles:
    """Files below an open directory, which a rename or a link put in its place cannot redirect."""

    def __init__(self, folder_fd: int) -> None:
        self._folder_fd = folder_fd

    def names(self) -> list[str]:
        return segment_names(self._folder_fd)

    def create(self, name: str) -> int:
        return self._open(name, os.O_CREAT | os.O_EXCL)

    def open(self, name: str) -> int:
        return self._open(name, 0)

    def size(self, fd: int) -> int:
        return os.fstat(fd).st_size

    def file_bytes(self, name: str) -> int | None:
        status = os.stat(name, dir_fd=self._folder_fd, follow_symlinks=False)
        return status.st_size if stat.S_ISREG(status.st_mode) else None

    def preadv(self, fd: int, buffers: Sequence[ByteArray], offset: int) -> int:
        return os.preadv(fd, [buffer.data for buffer in buffers], offset)

    def pwritev(self, fd: int, buffers: Sequence[ByteArray], offset: int) -> int:
        return os.pwritev(fd, [buffer.data for buffer in buffers], offset)

    def uncache(self, fd: int, offset: int, num_bytes: int) -> None:
        os.posix_fadvise(fd, offset, num_bytes, os.POSIX_FADV_DONTNEED)

    def sync(self, fd: int) -> None:
        os.fdatasync(fd)

    def close(self, fd: int) -> None:
        os.close(fd)

    def unlink(self, name: str) -> None:
        os.unlink(name, dir_fd=self._folder_fd)

    def _open(self, name: str, flags: int) -> int:
        flags |= os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC
        fd = os.open(name, flags, 0o600, dir_fd=self._folder_fd)
        try:
            if not stat.S_ISREG(os.fstat(fd).st_mode):
                raise OSError(errno.EINVAL, "not a regular file", name)
        except BaseException:
            os.close(fd)
            raise
        return fd


def segment_name(number: int) -> str:
    """For numbers below 2^31."""
    return f"segment-{number:08x}.kv"


def segment_number(name: str) -> int:
    """The inverse of `segment_name`; ValueError for any other name."""
    match = _NAME.fullmatch(name)
    if match is None:
        raise ValueError(f"{name!r} is not a segment's name")
    return int(match[1], 16)


def segment_names(folder_fd: int) -> list[str]:
    """Names of all segment files of a folder, in order of their numbers."""
    return sorted(name for name in os.listdir(folder_fd) if _NAME.fullmatch(name))


def read_fully(files: SegmentFiles, fd: int, buffers: Sequence[ByteArray], offset: int) -> int:
    """Fill the buffers as far as the file goes; how many bytes that were."""
    left, done = list(buffers), 0
    while left:
        num_bytes = files.preadv(fd, left, offset + done)
        if num_bytes == 0:
            break
        done += num_bytes
        left = _behind(left, num_bytes)
    return done


def write_fully(
    files: SegmentFiles, fd: int, buffers: Sequence[ByteArray], offset: int
) -> tuple[int, OSError | None]:
    """Write the buffers; how many bytes of them are in the file, and what kept the rest out."""
    left, done = list(buffers), 0
    while left:
        try:
            num_bytes = files.pwritev(fd, left, offset + done)
        except OSError as error:
            return done, error
        if num_bytes == 0:
            return done, OSError(errno.EIO, "the disk takes no more bytes and does not say why")
        done += num_bytes
        left = _behind(left, num_bytes)
    return done, None


def _behind(buffers: list[ByteArray], num_bytes: int) -> list[ByteArray]:
    """What is left of the buffers behind their first `num_bytes`."""
    for index, buffer in enumerate(buffers):
        if num_bytes < buffer.size:
            return [buffer[num_bytes:], *buffers[index + 1 :]]
        num_bytes -= buffer.size
    return []
