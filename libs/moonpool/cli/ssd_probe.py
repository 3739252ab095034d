"""What a directory is worth as a store's SSD: whether it can be used, how much is free, how fast it is.

A file of 64 MiB is written, synced, put out of the page cache, read, and removed.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import stat
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

_FILE_BYTES = 64 * 2**20
_CHUNK_BYTES = 2**20


@dataclass(frozen=True, slots=True, kw_only=True)
class SsdProbe:
    """What was found."""

    #: Why it cannot be used, and the command that mends that; empty if it can.
    problem: str = ""
    fix: str = ""
    #: For this user.
    free_bytes: int = 0
    write_bytes_per_s: float = 0.0
    read_bytes_per_s: float = 0.0


def probe_ssd(directory: Path) -> SsdProbe:
    """Look at an existing directory, and leave nothing in it."""
    try:
        status = directory.stat()
    except OSError as error:
        return SsdProbe(problem=f"{error.strerror}", fix=f"mkdir -m 700 -p {directory}")
    if not stat.S_ISDIR(status.st_mode):
        return SsdProbe(problem="it is not a directory", fix="name a directory on an SSD")
    if not os.access(directory, os.W_OK | os.X_OK):
        return SsdProbe(
            problem="it cannot be written", fix=f"make {directory} yours, or name another"
        )
    free_bytes = shutil.disk_usage(directory).free
    if free_bytes < 2 * _FILE_BYTES:
        return SsdProbe(
            problem=f"only {free_bytes // 2**20} MiB are free",
            fix="make room, or name another disk",
            free_bytes=free_bytes,
        )
    try:
        write_s, read_s = _time_file(directory)
    except OSError as error:
        return SsdProbe(
            problem=f"writing fails: {error.strerror}",
            fix="name a directory on another disk",
            free_bytes=free_bytes,
        )
    return SsdProbe(
        free_bytes=free_bytes,
        write_bytes_per_s=_FILE_BYTES / write_s,
        read_bytes_per_s=_FILE_BYTES / read_s,
    )


def own_directory_problem(directory: Path) -> str:
    """Why a store cannot use a directory that an earlier life has made; empty if it can."""
    try:
        status = directory.lstat()
    except FileNotFoundError:
        return ""
    except OSError as error:
        return f"{directory}: {error.strerror}"
    if not stat.S_ISDIR(status.st_mode):
        return f"{directory} is no directory"
    if status.st_uid != os.geteuid():
        return f"{directory} belongs to user {status.st_uid}"
    if stat.S_IMODE(status.st_mode) & 0o077:
        return f"{directory} is open to others"
    return ""


def _time_file(directory: Path) -> tuple[float, float]:
    """Seconds to write and to read; raises OSError."""
    # Random bytes: a file system that compresses must not look faster than the disk.
    chunk = os.urandom(_CHUNK_BYTES)
    with tempfile.TemporaryFile(dir=directory) as file:
        fd = file.fileno()
        started = time.perf_counter()
        for offset in range(0, _FILE_BYTES, _CHUNK_BYTES):
            _write_all(fd, chunk, offset)
        os.fdatasync(fd)
        written = time.perf_counter()
        with contextlib.suppress(OSError):
            os.posix_fadvise(fd, 0, _FILE_BYTES, os.POSIX_FADV_DONTNEED)
        reading = time.perf_counter()
        for offset in range(0, _FILE_BYTES, _CHUNK_BYTES):
            os.pread(fd, _CHUNK_BYTES, offset)
        return written - started, time.perf_counter() - reading


def _write_all(fd: int, data: bytes, offset: int) -> None:
    view = memoryview(data)
    while view:
        num_written = os.pwrite(fd, view, offset)
        view, offset = view[num_written:], offset + num_written
