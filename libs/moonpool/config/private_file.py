"""Files that hold keys: only their owner reads them, and nobody finds half of one."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path


def write_private(path: Path, data: bytes) -> None:
    """Replace whatever is at `path` by a file of mode 0600 that holds `data`; follows no link.

    For what is written again at each start: after a power cut it may be empty.
    """
    with _file_beside(path) as (descriptor, temporary):
        with open(descriptor, "wb") as file:
            file.write(data)
        os.replace(temporary, path)


def create_private(path: Path, data: bytes) -> None:
    """As `write_private`, unless there is something at `path`: that stays. It is not lost in a power cut.

    Of several processes that do this at once one has its way, and all of them find the same afterwards.
    """
    with _file_beside(path) as (descriptor, temporary):
        with open(descriptor, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        # A link, not a rename: it does not replace.
        with contextlib.suppress(FileExistsError):
            os.link(temporary, path)
        # Also by those who came late: they are about to use what they find.
        _sync_directory(path.parent)


@contextlib.contextmanager
def _file_beside(path: Path) -> Iterator[tuple[int, Path]]:
    """A new file, by descriptor and name; what is left of it after the block is removed."""
    descriptor, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        yield descriptor, Path(name)
    finally:
        Path(name).unlink(missing_ok=True)


def _sync_directory(directory: Path) -> None:
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
