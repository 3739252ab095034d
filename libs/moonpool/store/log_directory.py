"""LogDirectory: the directory of a segment log, opened for one process. All calls block.

    PATH/                      0700, ours, no link; made if it is missing
        lock                   flock: two nodes never share a directory
        <identity, 32 hex>/    one folder per LogIdentity, so that another model finds its own blocks,
            identity.json          or none, and nobody has to remove anything to try one
            segment-*.kv       0600
        write-budget.json      0600, see budget_keeper.py

The capacity is a promise about the whole directory. Segments of other identities count, and go first
when room is needed: they are of no use to this node. No other file is ever touched.
"""

from __future__ import annotations

import errno
import fcntl
import os
import re
import stat
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from moonpool.errors import ConfigError
from moonpool.store.disk_errors import explain
from moonpool.store.log_identity import LogIdentity
from moonpool.store.segment_files import PosixFiles, segment_names

_FOLDER = re.compile(r"[0-9a-f]{32}")
_DESCRIPTION = "identity.json"
_NOT_OURS = (errno.ENOTDIR, errno.ELOOP, errno.EACCES)
_DIRECTORY_FLAGS = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


@dataclass(frozen=True, slots=True, kw_only=True)
class ForeignSegment:
    """A segment that another identity left."""

    folder: str
    name: str
    num_bytes: int


def unusable(path: Path, what: str) -> ConfigError:
    """The directory cannot be a segment log's."""
    return ConfigError(f"the SSD directory {path} cannot be used: {what}", code="ssd_unusable")


class LogDirectory:
    """An open and locked directory.

    Attributes:
        files: The segments of the identity it was opened for.
    """

    def __init__(self, path: Path, root_fd: int, lock_fd: int, folder_fd: int, own: str) -> None:
        self.path = path
        self.files = PosixFiles(folder_fd)
        self._fds = [folder_fd, root_fd, lock_fd]
        self._root_fd = root_fd
        self._own = own

    @classmethod
    def open(cls, path: Path, identity: LogIdentity) -> LogDirectory:
        """Open, or make, and lock.

        Raises:
            ConfigError: It cannot be used: missing parent, a link, another owner, open to others,
                read-only, locked by another node. The message says what to do.
        """
        fds: list[int] = []
        try:
            fds.append(_open_private(path, str(path), None))
            (root_fd,) = fds
            fds.append(_lock(path, root_fd))
            own = identity.digest.hex()
            fds.append(_open_private(path, own, root_fd))
            _describe(fds[-1], identity)
            return cls(path, root_fd, fds[1], fds[2], own)
        except OSError as error:
            _close_all(fds)
            raise unusable(path, explain(error)) from error
        except BaseException:
            _close_all(fds)
            raise

    def foreign_segments(self) -> list[ForeignSegment]:
        """What other identities left, longest unchanged first; raises OSError."""
        found: list[tuple[float, ForeignSegment]] = []
        for folder in sorted(os.listdir(self._root_fd)):
            if folder == self._own or not _FOLDER.fullmatch(folder):
                continue
            try:
                folder_fd = os.open(folder, _DIRECTORY_FLAGS, dir_fd=self._root_fd)
            except OSError as error:
                if error.errno in _NOT_OURS:
                    continue
                raise
            try:
                for name in segment_names(folder_fd):
                    status = os.stat(name, dir_fd=folder_fd, follow_symlinks=False)
                    segment = ForeignSegment(folder=folder, name=name, num_bytes=status.st_size)
                    found.append((status.st_mtime, segment))
            finally:
                os.close(folder_fd)
        return [segment for _, segment in sorted(found, key=lambda pair: pair[0])]

    def remove_foreign(self, segment: ForeignSegment) -> None:
        """Delete it, and its folder with the last one; raises OSError."""
        folder_fd = os.open(segment.folder, _DIRECTORY_FLAGS, dir_fd=self._root_fd)
        try:
            os.unlink(segment.name, dir_fd=folder_fd)
            if not segment_names(folder_fd):
                # What is left takes no room, and a file that is not the log's keeps its folder.
                with suppress(OSError):
                    os.unlink(_DESCRIPTION, dir_fd=folder_fd)
                with suppress(OSError):
                    os.rmdir(segment.folder, dir_fd=self._root_fd)
        finally:
            os.close(folder_fd)

    def close(self) -> None:
        """Give up the lock. May be called twice."""
        _close_all(self._fds)


def _open_private(path: Path, name: str, parent_fd: int | None) -> int:
    with suppress(FileExistsError):
        os.mkdir(name, 0o700, dir_fd=parent_fd)
    fd = os.open(name, _DIRECTORY_FLAGS, dir_fd=parent_fd)
    status = os.fstat(fd)
    if status.st_uid == os.geteuid() and not stat.S_IMODE(status.st_mode) & 0o077:
        return fd
    os.close(fd)
    if status.st_uid != os.geteuid():
        raise unusable(path, f"it belongs to user {status.st_uid}; name a directory of your own")
    mode = stat.S_IMODE(status.st_mode)
    raise unusable(path, f"others can look into it (mode {mode:04o}); run: chmod 700 {path}")


def _lock(path: Path, root_fd: int) -> int:
    flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
    fd = os.open("lock", flags, 0o600, dir_fd=root_fd)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        owner = os.pread(fd, 20, 0).decode(errors="replace").strip() or "unknown"
        os.close(fd)
        raise unusable(
            path, f"another store node uses it (process {owner}); give each node its own"
        ) from None
    except BaseException:
        os.close(fd)
        raise
    # A full disk can be read: that it cannot hold these few bytes is no reason not to.
    with suppress(OSError):
        os.ftruncate(fd, 0)
        os.pwrite(fd, f"{os.getpid()}\n".encode(), 0)
    return fd


def _describe(folder_fd: int, identity: LogIdentity) -> None:
    """Say in the folder what it holds. Only people read that: each record names its identity."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC
    fd = os.open(_DESCRIPTION, flags, 0o600, dir_fd=folder_fd)
    try:
        with suppress(OSError):
            os.write(fd, identity.describe().encode())
    finally:
        os.close(fd)


def _close_all(fds: list[int]) -> None:
    while fds:
        os.close(fds.pop())
