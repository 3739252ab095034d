"""How a file gets into the data directory: whole or not at all, made by one process at a time."""

from __future__ import annotations

import fcntl
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO, cast


@contextmanager
def exclusive(data_dir: Path, name: str) -> Iterator[None]:
    """One process at a time makes `name`; others wait here and then find it made.

    The lock is the kernel's: it ends with its holder, however that ends.
    """
    directory = data_dir / "locks"
    directory.mkdir(parents=True, exist_ok=True)
    with (directory / f"{name}.lock").open("wb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


@contextmanager
def atomic_write(path: Path) -> Iterator[BinaryIO]:
    """A binary file that appears under `path`, complete and synced, when the block ends well.

    On any exception nothing appears and the temporary file beside it is removed.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(descriptor, "wb") as file:
            yield cast(BinaryIO, file)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(name, 0o644)
        os.replace(name, path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise
