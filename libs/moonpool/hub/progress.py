"""Progress of a pull or a conversion, told to whoever draws the bar."""

from __future__ import annotations

from typing import Protocol


class Progress(Protocol):
    """Called often and from the thread that works; must not block."""

    def __call__(self, stage: str, done: int, total: int | None) -> None:
        """`stage` ("download", "verify", "convert") has done `done` of `total` bytes.

        `total` is None where it is not known. A stage is over when `done == total`.
        """
        ...


def no_progress(stage: str, done: int, total: int | None) -> None:
    """For callers that show nothing."""
