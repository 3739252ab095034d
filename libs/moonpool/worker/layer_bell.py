"""LayerBell: turns the engine's bell and control page into LayersDone, on the service's loop."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable

from moonpool.handoff.events import LayersDone
from moonpool.memory.worker_memory import WorkerMemory
from moonpool.native import Kernels


class LayerBell:
    """Entered while the service runs.

    Args:
        on_layers: Called with what the page says, once per ring or several.
    """

    def __init__(
        self, *, memory: WorkerMemory, kernels: Kernels, on_layers: Callable[[LayersDone], None]
    ) -> None:
        self._bell = memory.bell
        self._page = kernels.control_page(memory.control_page)
        self._on_layers = on_layers

    def begun_step(self) -> int:
        """The last step that the engine has begun to write; 0 before the first."""
        return self._page.progress().step

    @property
    def step_age_ms(self) -> int:
        """How long the running step takes by now; 0 when none runs."""
        started_ns = self._page.started_ns()
        if started_ns == 0:
            return 0
        return max(0, (time.monotonic_ns() - started_ns) // 1_000_000)

    def start(self) -> None:
        asyncio.get_running_loop().add_reader(self._bell, self._on_ring)

    def stop(self) -> None:
        """May be called twice."""
        asyncio.get_running_loop().remove_reader(self._bell)

    def _on_ring(self) -> None:
        try:
            os.eventfd_read(self._bell)
        except BlockingIOError:
            return
        progress = self._page.progress()
        self._on_layers(LayersDone(step=progress.step, num_layers=progress.layers_done))
