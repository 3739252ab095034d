"""The order of work on a device: the main stream, a side stream for copies, and marks in both.

On a CPU there is one order, the program's: whatever was asked for is done. So all that is built on
streams can be tested without a GPU, except for what only runs at the same time there.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import Protocol

import torch


class StreamMark(Protocol):
    """A place in a stream's order."""

    def is_reached(self) -> bool:
        """All work before it is done."""
        ...

    def wait(self) -> None:
        """Returns once all work before it is done."""
        ...

    def seconds_since(self, earlier: StreamMark) -> float:
        """Device time between two marks of the main stream, both reached."""
        ...


class Streams(Protocol):
    """Both streams of one device. Copies go to the side stream, all else to the main one."""

    def mark(self) -> StreamMark:
        """A mark in the stream that work is given to right now."""
        ...

    def side(self, after: StreamMark | None = None) -> AbstractContextManager[None]:
        """Work in this block goes to the side stream, there after `after`."""
        ...

    def hold(self, mark: StreamMark) -> None:
        """What is given to the main stream from here on waits for `mark`; nobody else does."""
        ...


class InlineMark:
    """A mark of a CPU: reached when it is made."""

    __slots__ = ("_made_s",)

    def __init__(self) -> None:
        self._made_s = time.perf_counter()

    def is_reached(self) -> bool:
        return True

    def wait(self) -> None:
        return

    def seconds_since(self, earlier: StreamMark) -> float:
        assert isinstance(earlier, InlineMark), earlier
        return self._made_s - earlier._made_s


class InlineStreams:
    """Streams of a CPU."""

    def mark(self) -> StreamMark:
        return InlineMark()

    def side(self, after: StreamMark | None = None) -> AbstractContextManager[None]:
        return contextlib.nullcontext()

    def hold(self, mark: StreamMark) -> None:
        return


class CudaMark:
    """An event of a GPU."""

    __slots__ = ("event",)

    def __init__(self) -> None:
        self.event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]  # torch has none
        self.event.record()

    def is_reached(self) -> bool:
        return bool(self.event.query())  # type: ignore[no-untyped-call]  # torch has none

    def wait(self) -> None:
        self.event.synchronize()

    def seconds_since(self, earlier: StreamMark) -> float:
        assert isinstance(earlier, CudaMark), earlier
        return float(earlier.event.elapsed_time(self.event)) / 1e3


class CudaStreams:
    """Streams of a GPU: the current one is the main stream."""

    def __init__(self, device: torch.device) -> None:
        self._main = torch.cuda.current_stream(device)
        self._side = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]  # torch has none

    def mark(self) -> StreamMark:
        return CudaMark()

    @contextlib.contextmanager
    def side(self, after: StreamMark | None = None) -> Iterator[None]:
        if after is not None:
            assert isinstance(after, CudaMark), after
            self._side.wait_event(after.event)
        with torch.cuda.stream(self._side):
            yield

    def hold(self, mark: StreamMark) -> None:
        assert isinstance(mark, CudaMark), mark
        self._main.wait_event(mark.event)


def streams_of(device: torch.device) -> Streams:
    """The streams that fit a device."""
    return CudaStreams(device) if device.type == "cuda" else InlineStreams()


@contextlib.contextmanager
def thread_stream(device: torch.device) -> Iterator[None]:
    """What this thread asks of the device meanwhile has an order of its own, beside other threads'."""
    if device.type != "cuda":
        yield
        return
    # A thread begins on the first GPU, and on the stream that all share.
    torch.cuda.set_device(device)
    stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]  # torch has none
    with torch.cuda.stream(stream):
        yield
