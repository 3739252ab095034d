"""Recording: the work of a function, to be asked for again at once, on the tensors that it used."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor


class Recording(Protocol):
    """Recorded work."""

    @property
    def output(self) -> Tensor:
        """Where the function's result lies after each replay."""
        ...

    def replay(self) -> None:
        """Does the work again, with what its inputs hold by then."""
        ...


class Recorder(Protocol):
    """Makes recordings, which run one after another."""

    def record(self, work: Callable[[], Tensor]) -> Recording:
        """Runs `work`, more than once; it must not wait for the device."""
        ...


class _CudaRecording:
    def __init__(self, graph: torch.cuda.CUDAGraph, output: Tensor) -> None:
        self._graph = graph
        self.output = output

    def replay(self) -> None:
        self._graph.replay()


class CudaRecorder:
    """By CUDA graphs, which share their memory: record the largest work first."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._memory: Any = None  # Any: torch's handle of a graph's memory

    def record(self, work: Callable[[], Tensor]) -> Recording:
        # What libraries set up at their first call must not be recorded.
        main = torch.cuda.current_stream(self._device)
        warm = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]  # torch has none
        warm.wait_stream(main)
        with torch.cuda.stream(warm):
            for _ in range(2):
                work()
        main.wait_stream(warm)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._memory):
            output = work()
        self._memory = graph.pool()
        return _CudaRecording(graph, output)


class _InlineRecording:
    def __init__(self, work: Callable[[], Tensor]) -> None:
        self._work = work
        self.output = work()

    def replay(self) -> None:
        self.output.copy_(self._work())


class InlineRecorder:
    """For a CPU: the function itself is called again."""

    def record(self, work: Callable[[], Tensor]) -> Recording:
        return _InlineRecording(work)


def recorder_of(device: torch.device) -> Recorder:
    """The recorder that fits a device."""
    return CudaRecorder(device) if device.type == "cuda" else InlineRecorder()
