"""What peers see of a device's KV: digests, progress and the bell, with a worker's own memory and mark."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import xxhash

from moonpool.core.step import StepPlan
from moonpool.failpoints import Failpoints
from moonpool.hub.model_dir import ModelDir
from moonpool.memory.worker_memory import WorkerMemory
from moonpool.native import kernels
from moonpool.worker.layer_mark import LayerMarker
from support.device import DeviceEngine
from support.engine import generate, make_core, make_requests, open_tiny
from support.tiny_llama import TinyLlama, write_tiny_llama


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> ModelDir:
    path: Path = tmp_path_factory.mktemp("leaves") / "tiny"
    return open_tiny(write_tiny_llama(path, TinyLlama()))


@pytest.fixture
def memory(model_dir: ModelDir) -> Iterator[WorkerMemory]:
    created = WorkerMemory.create(model_dir.config.kv_layout(32, "float32"))
    yield created
    created.close()


class MarkedRunner:
    """A DeviceRunner that is marked as the engine's loop does it, whatever mark it is given."""

    def __init__(self, model_dir: ModelDir, memory: WorkerMemory) -> None:
        self._memory = memory
        self._runner = DeviceEngine(
            model_dir, layout=memory.layout, buffer=memory.pool.bytes.data
        ).runner
        self._marker = LayerMarker(
            memory=memory,
            kernels=kernels(),
            layer_group=1,
            failpoints=Failpoints.parse("", is_allowed=False),
        )
        self.num_leaves = 0
        self.rings: list[int] = []

    def run(self, plan: StepPlan, mark: object) -> object:
        self._marker.begin(plan)
        result = self._runner.run(plan, self._marker)
        self._marker.end()
        try:
            self.rings.append(os.eventfd_read(self._memory.bell))
        except BlockingIOError:
            self.rings.append(0)
        pool, layout = self._memory.pool.bytes, self._memory.layout
        for block in plan.leaf_block_ids.tolist():
            for layer in range(layout.num_layers):
                payload = b"".join(
                    pool[start:end].tobytes() for start, end in layout.leaf_ranges(block, layer)
                )
                expected = xxhash.xxh3_64_intdigest(payload)
                assert self._memory.leaf_digests[block, layer] == expected, (block, layer)
                assert np.frombuffer(payload, np.float32).any()
                self.num_leaves += 1
        return result

    def copy_block(self, source: int, target: int) -> None:
        self._runner.copy_block(source, target)


def test_each_final_block_is_digested_as_it_lies_in_host_memory(
    model_dir: ModelDir, memory: WorkerMemory
) -> None:
    runner = MarkedRunner(model_dir, memory)
    prompts = [list(range(length, 2 * length)) for length in (3, 16, 40, 70)]
    answers = generate(make_core(32), runner, make_requests(prompts))
    assert [len(answer) for answer in answers] == [64] * 4
    # All full blocks of prompt and answer, the last token left out, each in three layers.
    assert runner.num_leaves == 3 * sum((len(prompt) + 63) // 16 for prompt in prompts)
    # The bell rings for layers of prompts only.
    assert runner.rings[0] == 3
    assert set(runner.rings[1:]) == {0}
