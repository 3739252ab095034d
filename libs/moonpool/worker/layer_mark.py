"""LayerMarker: what the engine does between two layers of a step. No Python per block.

A layer's digest leaves are written and (step, layers done) is published by one native call; then the
bell rings, once per group of layers and after the last, and only in steps that compute a prompt:
nobody waits for the layers of a pure decode step.
"""

from __future__ import annotations

import os
import time

import numpy as np

from moonpool.core.step import StepPlan
from moonpool.failpoints import Failpoints
from moonpool.memory.worker_memory import WorkerMemory
from moonpool.native import Kernels, LeafGeometry

#: The runner zeroes tails itself, before it marks the layer.
_NO_TAILS = np.empty((0, 2), np.int32)


class LayerMarker:
    """The engine's StepMark: one plan at a time, between `begin` and `end`.

    Args:
        memory: This worker's memory, as the engine process maps it.
        layer_group: The bell rings after every so many layers.
    """

    def __init__(
        self, *, memory: WorkerMemory, kernels: Kernels, layer_group: int, failpoints: Failpoints
    ) -> None:
        assert layer_group > 0, layer_group
        self._num_layers = memory.layout.num_layers
        self._layer_group = layer_group
        self._bell = memory.bell
        self._failpoints = failpoints
        self._page = kernels.control_page(memory.control_page)
        self._finisher = kernels.layer_finisher(
            pool=memory.pool.bytes,
            geometry=LeafGeometry.of_layout(memory.layout),
            leaves=memory.leaf_digests,
            page=memory.control_page,
            eventfd=-1,
        )
        self._plan: StepPlan | None = None
        self._has_prompt = False
        #: Wall clock when all layers of the last plan could be read.
        self.last_layer_unix_ns = 0

    def begin(self, plan: StepPlan) -> None:
        assert self._plan is None, self._plan
        self._plan = plan
        self._has_prompt = any(len(row.token_ids) for row in plan.rows)
        self._page.begin_step(plan.step, time.monotonic_ns())

    def layer_done(self, layer: int) -> None:
        plan = self._plan
        assert plan is not None, "no plan runs"
        self._finisher.finish_layer(
            step=plan.step, layer=layer, block_ids=plan.leaf_block_ids, zero_tails=_NO_TAILS
        )
        num_done = layer + 1
        if num_done == self._num_layers:
            self.last_layer_unix_ns = time.time_ns()
        if not self._has_prompt:
            return
        if num_done % self._layer_group == 0 or num_done == self._num_layers:
            os.eventfd_write(self._bell, 1)
        self._failpoints.hit("prefill.after_layer", layer)

    def end(self) -> None:
        self._plan = None
        self._page.end_step()
