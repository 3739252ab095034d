"""WorkerService: the life of a worker's service process, whatever its role.

Life
  1. Secret and model are read; the pool is made (memfd, pre-faulted); the gRPC server listens, its
     methods answer UNAVAILABLE, health NOT_SERVING.
  2. The engine process starts, maps the pool, and the pool is sealed; the model is loaded.
  3. Peers may map the pool, routers may come: methods answer, health SERVING, announced on the bus
     each second. The bus is tried for ever and never waited for.
  4. Drain: announced as leaving, new work is refused, what runs ends, streams stay open.
  5. Abort: what still runs is handed back. Then streams end, the engine ends, the memory is freed.

The engine's death is the worker's: the process ends with an error. Nothing outlives the process.
What a store node does the same way stands in node.py.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import structlog

from moonpool.config.process import WorkerConfig
from moonpool.core.protocol import Command
from moonpool.handoff.config import FetchConfig, FetchMode, HandoffConfig
from moonpool.kv.layout import KvLayout
from moonpool.memory.worker_memory import WorkerMemory
from moonpool.service.life import Life, ReadyFacts
from moonpool.telemetry.metrics import Metrics
from moonpool.transport.cuda_ipc import CudaIpcTransport
from moonpool.transport.device_link import DeviceLink
from moonpool.wire.engine_messages import EngineReady
from moonpool.worker.books import WORKER_METRICS, WorkerBooks
from moonpool.worker.engine_channel import FrameHandler
from moonpool.worker.engine_process import EngineOptions
from moonpool.worker.node import KvNode, NodeAdapters
from moonpool.worker.settings import core_config, engine_options, pool_layout, worker_hello
from moonpool.worker.shell import WorkerShell

log = structlog.get_logger("moonpool.worker")


class Engine(Protocol):
    """An engine that has been started; EngineProcess, or a test's."""

    def send(self, command: Command) -> None:
        """To the core; never waits."""
        ...

    async def boot(self) -> EngineReady:
        """Until it is ready. Beside `run`. Seals the memory once it is mapped."""
        ...

    async def run(self) -> None:
        """Until `stop`; raises if it ends by itself."""
        ...

    async def stop(self) -> None:
        """May be called twice."""
        ...


class StartEngine(Protocol):
    def __call__(
        self, *, memory: WorkerMemory, options: EngineOptions, on_frame: FrameHandler
    ) -> Engine: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerAdapters:
    """What a composition root chooses."""

    node: NodeAdapters
    start_engine: StartEngine


class WorkerService:
    """Implements service.life.Service; see the file's head."""

    def __init__(self, config: WorkerConfig, adapters: WorkerAdapters) -> None:
        """Raises ConfigError: Failpoints that are not allowed."""
        self._config = config
        self._start_engine = adapters.start_engine
        self._node = KvNode(
            node_id=config.worker_id,
            common=config.common,
            settings=config.worker,
            adapters=adapters.node,
            books=WorkerBooks(Metrics(WORKER_METRICS)),
        )

    @property
    def name(self) -> str:
        return self._config.worker_id

    @property
    def shell(self) -> WorkerShell:
        """After `start`."""
        return self._node.shell

    @property
    def metrics(self) -> Metrics:
        return self._node.books.metrics

    def render_metrics(self) -> bytes:
        """The text that Prometheus scrapes, with gauges as of now."""
        return self._node.render_metrics()

    # -- Service --

    async def start(self, life: Life) -> ReadyFacts:
        config, node = self._config, self._node
        secret, model = await node.load_model()
        layout = pool_layout(config, model)
        core = core_config(config, model, layout)
        parts = await node.listen(life, layout=layout, secret=secret)
        hello = worker_hello(config, parts.key, model, layout, secret, parts.address)
        device = DeviceLink() if CudaIpcTransport.name in config.worker.transports else None
        hello = await node.enter_transports(life, parts, hello, device=device)
        engines: list[Engine] = []
        shell = node.make_shell(
            parts,
            hello,
            handoff=HandoffConfig(
                num_layers=layout.num_layers,
                block_size=layout.block_size,
                layers_per_group=config.worker.layers_per_group,
            ),
            fetch=FetchConfig(
                mode=FetchMode(config.worker.kv_peer_reads), block_bytes=layout.block_bytes
            ),
            send_command=lambda command: engines[0].send(command),
            is_offloading=config.worker.kv_offload,
        )
        engine = self._start_engine(
            memory=parts.memory,
            options=engine_options(
                config,
                parts.key,
                model,
                core,
                hello.namespace,
                secret,
                device_fd=device.engine_end.fileno() if device is not None else -1,
            ),
            on_frame=shell.on_frame,
        )
        if device is not None:
            device.release()
        engines.append(engine)
        life.stack.push_async_callback(engine.stop)
        life.spawn(engine.run(), name="engine")
        ready = await engine.boot()
        log.info("worker.engine_ready", load_s=round(ready.load_s, 3), layout=_words(layout))
        if device is not None:
            await device.offered()
            node.announce_device()
        bus = await node.serve(life, parts)
        node.follow_others(life, bus)
        return parts.facts

    async def announce_drain(self) -> None:
        await self._node.announce_drain()

    async def drain(self) -> None:
        await self._node.drain()

    async def abort(self) -> None:
        await self._node.abort()


def _words(layout: KvLayout) -> str:
    return f"{layout.num_blocks} blocks of {layout.block_bytes} bytes"
