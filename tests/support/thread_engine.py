"""An engine in a thread: the real loop, core, link, leaves and control page over a runner without a model.

It stands at the socketpair: the service sees what it would see of an engine process, so that a test of
a worker needs neither torch nor a process. `gate` lets a test stop it between two layers.
"""

from __future__ import annotations

import socket
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from moonpool.clock import SystemClock
from moonpool.core.core import Core
from moonpool.core.protocol import Command
from moonpool.core.step import LayerMark, Runner, StepPlan, StepResult
from moonpool.failpoints import Failpoints
from moonpool.kv.namespace_seeds import NamespaceSeeds
from moonpool.memory.worker_memory import WorkerMemory
from moonpool.native import kernels
from moonpool.wire.engine_messages import EngineReady
from moonpool.worker.engine_channel import EngineChannel, FrameHandler
from moonpool.worker.engine_link import EngineLink
from moonpool.worker.engine_loop import run_engine_loop
from moonpool.worker.engine_process import EngineDiedError, EngineOptions
from moonpool.worker.layer_mark import LayerMarker
from support.fake_runner import FakeRunner
from support.tiny_llama import TinyLlama, write_tiny_llama

#: Called before a layer of a step is marked; may block.
Gate = Callable[[StepPlan, int], None]

#: What an engine computes with, over its worker's memory.
MakeRunner = Callable[[WorkerMemory, EngineOptions], Runner]

#: Its K plane of a block of 16 tokens is 128 bytes: the 16 numbers that FakeRunner keeps.
FAKE_MODEL = TinyLlama(
    num_layers=4,
    hidden_size=4,
    intermediate_size=4,
    num_heads=1,
    num_kv_heads=1,
    head_dim=2,
    vocab_size=320,
)


def write_fake_model(path: Path) -> Path:
    """A model directory whose KV has room for a FakeRunner's numbers."""
    return write_tiny_llama(path, FAKE_MODEL)


class SharedPoolRunner:
    """A FakeRunner over a worker's pool, its numbers repeated in each layer.

    It computes with layer 0, and checks that all layers of what it reads say the same: a layer that
    did not arrive is noticed.
    """

    def __init__(self, memory: WorkerMemory, *, max_num_seqs: int, gate: Gate | None) -> None:
        layout = memory.layout
        assert layout.block_size == 16, layout
        blocks = memory.pool.bytes.view(np.int64).reshape(layout.num_blocks, layout.num_layers, -1)
        #: int64[num_blocks, num_layers, 16]
        self._numbers = blocks[:, :, : layout.block_size]
        self._inner = FakeRunner(
            num_blocks=layout.num_blocks,
            block_size=layout.block_size,
            max_num_seqs=max_num_seqs,
            pool=self._numbers[:, 0],
        )
        self._num_layers = layout.num_layers
        self._gate = gate

    def run(self, plan: StepPlan, mark: LayerMark) -> StepResult:
        self._check_layers(plan)
        return self._inner.run(plan, _LayerSpreader(self, plan, mark))

    def spread(self, plan: StepPlan, mark: LayerMark) -> None:
        """Write every layer of the step's blocks, and mark it."""
        blocks = np.unique(
            np.concatenate([row.block_tables[0][row.start // 16 :] for row in plan.rows])
        )
        for layer in range(self._num_layers):
            self._numbers[blocks, layer] = self._numbers[blocks, 0]
            if self._gate is not None:
                self._gate(plan, layer)
            mark.layer_done(layer)

    def _check_layers(self, plan: StepPlan) -> None:
        for row in plan.rows:
            (table,) = row.block_tables
            held = self._numbers[table].transpose(1, 0, 2).reshape(self._num_layers, -1)
            read = held[:, : row.start]
            assert (read == read[0]).all(), f"a layer is missing in {row}"


class _LayerSpreader:
    def __init__(self, runner: SharedPoolRunner, plan: StepPlan, mark: LayerMark) -> None:
        self._runner, self._plan, self._mark = runner, plan, mark

    def layer_done(self, layer: int) -> None:
        assert layer == 0, layer
        self._runner.spread(self._plan, self._mark)


class ThreadEngine:
    """Implements worker.service.Engine. Made by `ThreadEngines`."""

    def __init__(
        self,
        *,
        memory: WorkerMemory,
        options: EngineOptions,
        on_frame: FrameHandler,
        make_runner: MakeRunner,
    ) -> None:
        self.memory = memory
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        self._channel = EngineChannel(ours, on_frame)
        self._is_stopping = False
        self.core = Core(options.core, NamespaceSeeds(options.namespace, options.secret))
        failpoints = Failpoints.parse(options.failpoints, is_allowed=True)
        self._link = EngineLink(theirs)
        marker = LayerMarker(
            memory=memory,
            kernels=kernels(),
            layer_group=options.layer_group,
            failpoints=failpoints,
        )
        runner = make_runner(memory, options)
        self.failure: BaseException | None = None
        self._thread = threading.Thread(
            target=self._serve, args=(runner, marker, failpoints), name=options.worker_id
        )

    def send(self, command: Command) -> None:
        self._channel.send(command)

    async def boot(self) -> EngineReady:
        self.memory.seal()
        self._thread.start()
        return EngineReady(load_s=0.0)

    async def run(self) -> None:
        what = await self._channel.run()
        if not self._is_stopping:
            raise EngineDiedError(f"The engine thread ended: {self.failure or what}")

    async def stop(self) -> None:
        self._is_stopping = True
        self._channel.close()
        if self._thread.is_alive():
            self._thread.join(timeout=10)
            assert not self._thread.is_alive(), "the engine thread hangs"

    def _serve(self, runner: Runner, mark: LayerMarker, failpoints: Failpoints) -> None:
        try:
            run_engine_loop(
                link=self._link,
                core=self.core,
                runner=runner,
                mark=mark,
                clock=SystemClock(),
                failpoints=failpoints,
            )
        except BaseException as error:  # noqa: BLE001 - the thread's end is the engine's
            self.failure = error
        finally:
            self._link.close()


class ThreadEngines:
    """Starts engines and keeps them for the test. Pass it as `start_engine`."""

    def __init__(self, gate: Gate | None = None, *, make_runner: MakeRunner | None = None) -> None:
        def shared_pool(memory: WorkerMemory, options: EngineOptions) -> Runner:
            return SharedPoolRunner(memory, max_num_seqs=options.core.max_num_seqs, gate=gate)

        self._make_runner = make_runner or shared_pool
        self.engines: list[ThreadEngine] = []

    def __call__(
        self, *, memory: WorkerMemory, options: EngineOptions, on_frame: FrameHandler
    ) -> ThreadEngine:
        engine = ThreadEngine(
            memory=memory, options=options, on_frame=on_frame, make_runner=self._make_runner
        )
        self.engines.append(engine)
        return engine


class LayerGate:
    """Stops engine threads at chosen layers until the test lets them go.

    `at(layer)` blocks the first step with a prompt that gets to `layer`.
    """

    def __init__(self, layers: Sequence[int] = ()) -> None:
        self._layers = set(layers)
        self._is_reached = threading.Event()
        self._may_go = threading.Event()

    def __call__(self, plan: StepPlan, layer: int) -> None:
        has_prompt = any(len(row.token_ids) for row in plan.rows)
        if has_prompt and layer in self._layers and not self._may_go.is_set():
            self._is_reached.set()
            assert self._may_go.wait(timeout=20), "nobody opened the gate"

    @property
    def is_reached(self) -> bool:
        return self._is_reached.is_set()

    def open(self) -> None:
        self._may_go.set()


class StepLog:
    """A gate that notes which positions engines compute; give it to all of a cluster. Holds nobody up."""

    def __init__(self) -> None:
        self._spans: list[tuple[int, int]] = []

    def __call__(self, plan: StepPlan, layer: int) -> None:
        if layer == 0:
            self._spans += [(row.start, row.end) for row in plan.rows]

    def forget(self) -> None:
        self._spans.clear()

    def times_computed(self, num_tokens: int) -> Counter[int]:
        """How often each of a request's first positions was computed, if there was no other request."""
        return Counter(
            position
            for start, end in self._spans
            for position in range(start, min(end, num_tokens))
        )


class Turnstile:
    """A gate behind another one. Once closed it lets an engine take some steps, and then one each time."""

    def __init__(self, inner: Gate) -> None:
        self._inner = inner
        self._is_closed = False
        self._permits = threading.Semaphore(0)
        #: An engine has come to the end of its steps.
        self.is_reached = False

    def close(self, *, num_steps: int) -> None:
        self._permits.release(num_steps)
        self._is_closed = True

    def let_pass(self) -> None:
        self._permits.release()

    def __call__(self, plan: StepPlan, layer: int) -> None:
        self._inner(plan, layer)
        if layer == 0 and self._is_closed and not self._permits.acquire(blocking=False):
            self.is_reached = True
            assert self._permits.acquire(timeout=20), "nobody let the engine pass"
