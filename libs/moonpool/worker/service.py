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
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import Protocol

import structlog

from moonpool import __version__
from moonpool.api.v1 import worker_pb2_grpc
from moonpool.bus.protocol import Bus
from moonpool.bus.subjects import Subjects
from moonpool.clock import Clock
from moonpool.config.process import WorkerConfig
from moonpool.config.secret import ClusterSecret, load_or_create_secret
from moonpool.config.values import is_loopback
from moonpool.core.protocol import Command
from moonpool.errors import ConfigError, FailedPreconditionError
from moonpool.failpoints import Failpoints
from moonpool.handoff.config import FetchConfig, FetchMode, HandoffConfig
from moonpool.handoff.worker import WorkerHandoffs
from moonpool.hub.model_dir import resolve
from moonpool.ids import Incarnation, WorkerId, WorkerKey
from moonpool.kv.layout import KvLayout
from moonpool.kv.namespace_seeds import NamespaceSeeds
from moonpool.memory.fd_server import FdServer, socket_name
from moonpool.memory.host import host_id
from moonpool.memory.worker_memory import POOL_NAME, WorkerMemory
from moonpool.native import Kernels, kernels, status
from moonpool.rpc.metadata import Metadata, call_metadata
from moonpool.rpc.server import RpcServer
from moonpool.service.http_server import HttpServer
from moonpool.service.life import Life, ReadyFacts
from moonpool.service.loop_lag import watch_loop_lag
from moonpool.telemetry import names
from moonpool.telemetry.metrics import Metrics
from moonpool.transport.base import ByteArray, LocalPool, Transport
from moonpool.transport.grpc_server import kv_read_handler
from moonpool.transport.select import TransportSelector
from moonpool.wire.engine_messages import EngineReady
from moonpool.worker.announcer import Announcer
from moonpool.worker.books import WORKER_METRICS, WorkerBooks
from moonpool.worker.compatibility import handoff_fingerprint
from moonpool.worker.engine_channel import FrameHandler
from moonpool.worker.engine_process import EngineOptions
from moonpool.worker.metrics_http import metrics_app
from moonpool.worker.peer_connector import PeerConnector
from moonpool.worker.peer_scout import PeerScout
from moonpool.worker.peers import PeerDirectory
from moonpool.worker.rpc_service import SERVICE_NAME, WorkerServicer
from moonpool.worker.settings import (
    announced,
    core_config,
    engine_options,
    pool_layout,
    worker_hello,
)
from moonpool.worker.shell import WorkerShell

log = structlog.get_logger("moonpool.worker")

#: Streams that are still open are cut so long after the abort.
_STOP_GRACE_S = 0.5
#: For the frames that hand back, and for the routers to take them.
_HAND_BACK_S = 3.0


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


class EnterableTransport(Transport, AbstractAsyncContextManager[Transport], Protocol):
    """A Transport, entered for the worker's life."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TransportContext:
    """What a transport is made of."""

    pool: LocalPool
    kernels: Kernels
    host_id: str
    #: Of calls to peers: the cluster's key.
    metadata: Metadata
    #: Whose pool it is, and its memfd, not sealed yet.
    worker: WorkerKey
    pool_fd: int
    #: The worker's address is loopback: no peer is on another host.
    is_host_only: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerAdapters:
    """What a composition root chooses."""

    bus: Bus
    start_engine: StartEngine
    #: By the name that the configuration has for it.
    transports: dict[str, Callable[[TransportContext], EnterableTransport]]
    clock: Clock


class WorkerService:
    """Implements service.life.Service; see the file's head."""

    def __init__(self, config: WorkerConfig, adapters: WorkerAdapters) -> None:
        """Raises ConfigError: Failpoints that are not allowed."""
        self._config = config
        self._adapters = adapters
        common = config.common
        self._failpoints = Failpoints.parse(
            common.failpoints, is_allowed=common.unsafe_failpoints, state_dir=common.data_dir
        )
        self._books = WorkerBooks(Metrics(WORKER_METRICS))
        self._books.metrics.set(names.BUILD_INFO, 1, version=__version__, process=self.name)
        self._servicer = WorkerServicer()
        self._server: RpcServer | None = None
        self._shell: WorkerShell | None = None
        self._announcer: Announcer | None = None

    @property
    def name(self) -> str:
        return self._config.worker_id

    @property
    def shell(self) -> WorkerShell:
        """After `start`."""
        assert self._shell is not None, "start() has not returned"
        return self._shell

    @property
    def metrics(self) -> Metrics:
        return self._books.metrics

    def render_metrics(self) -> bytes:
        """The text that Prometheus scrapes, with gauges as of now."""
        if self._shell is not None:
            self._shell.set_gauges()
        return self.metrics.render()

    # -- Service --

    async def start(self, life: Life) -> ReadyFacts:
        config, common = self._config, self._config.common
        native = status()
        log.log(
            logging.INFO if native.is_compiled else logging.WARNING,
            "worker.native",
            what=native.message,
        )
        secret = await asyncio.to_thread(load_or_create_secret, common.data_dir)
        model = await asyncio.to_thread(resolve, common.model, data_dir=common.data_dir)
        layout = pool_layout(config, model)
        core = core_config(config, model, layout)
        memory = await asyncio.to_thread(WorkerMemory.create, layout)
        life.stack.callback(memory.close)
        key = WorkerKey(WorkerId(config.worker_id), Incarnation(secrets.token_hex(8)))

        server = self._server = self._make_server(key, memory, secret)
        await server.start()
        life.stack.push_async_callback(server.stop, grace_s=_STOP_GRACE_S)
        address = f"{config.worker.advertise_host or config.worker.host}:{server.port}"
        hello = worker_hello(config, key, model, layout, secret, address)
        metrics_fact = await self._listen_http(life)

        transports = await self._enter_transports(life, memory, secret, key)
        hello = announced(hello, transports)
        peers = PeerDirectory(
            PeerConnector(
                hello=hello,
                layout=layout,
                selector=TransportSelector(transports, is_strict=config.worker.is_transport_strict),
                rpc_key=secret.rpc_key,
            )
        )
        engines: list[Engine] = []
        shell = WorkerShell(
            hello=hello,
            memory=memory,
            kernels=kernels(),
            handoffs=WorkerHandoffs(
                key=key,
                namespace=handoff_fingerprint(hello.namespace, secret.value),
                secret_fingerprint=secret.fingerprint,
                config=HandoffConfig(
                    num_layers=layout.num_layers,
                    block_size=layout.block_size,
                    layers_per_group=config.worker.layers_per_group,
                ),
                fetch=FetchConfig(
                    mode=FetchMode(config.worker.kv_peer_reads), block_bytes=layout.block_bytes
                ),
            ),
            send_command=lambda command: engines[0].send(command),
            peers=peers,
            rpc_key=secret.rpc_key,
            books=self._books,
            failpoints=self._failpoints,
            clock=self._adapters.clock,
            namespace_seed=NamespaceSeeds(hello.namespace, secret.value),
            is_checked=config.worker.is_checked,
        )
        engine = self._adapters.start_engine(
            memory=memory,
            options=engine_options(config, key, model, core, hello.namespace, secret),
            on_frame=shell.on_frame,
        )
        engines.append(engine)
        life.stack.push_async_callback(engine.stop)
        life.spawn(engine.run(), name="engine")
        ready = await engine.boot()
        log.info("worker.engine_ready", load_s=round(ready.load_s, 3), layout=_words(layout))

        fd_server = FdServer(socket_name(key), {POOL_NAME: memory.pool.fd})
        life.spawn(fd_server.run(), name="fd-server")
        life.spawn(shell.run(), name="shell")
        life.spawn(watch_loop_lag(self._books.loop_lag), name="loop-lag")
        self._shell = shell
        await shell.wait_running()
        self._servicer.open(shell)
        life.stack.callback(self._servicer.close)
        await server.set_serving(True)
        bus = await life.enter(self._adapters.bus)
        bus.on_connection(self._books.bus_connection)
        announcer = self._announcer = Announcer(
            bus=bus,
            subjects=Subjects(common.cluster),
            hello=hello,
            load=shell.load,
            kv_head=lambda: shell.kv.head,
        )
        life.spawn(announcer.run(), name="announcer")
        life.spawn(shell.kv.run(bus, announcer.subjects), name="kv-events")
        scout = PeerScout(bus=bus, subjects=announcer.subjects, peers=peers, own=key)
        life.spawn(scout.run(), name="scout")
        return {"grpc_address": address, "incarnation": key.incarnation, **metrics_fact}

    async def announce_drain(self) -> None:
        assert self._server is not None
        assert self._announcer is not None
        await self._server.set_serving(False)
        await self._announcer.leave()

    async def drain(self) -> None:
        self.shell.begin_drain()
        await self.shell.wait_quiet()

    async def abort(self) -> None:
        assert self._server is not None
        self.shell.hand_back()
        try:
            async with asyncio.timeout(_HAND_BACK_S):
                await self.shell.wait_quiet()
        except TimeoutError:
            log.warning("worker.stopped_busy")
        self._servicer.close()
        await self._server.stop(grace_s=_STOP_GRACE_S)

    # -- parts --

    def _make_server(
        self, key: WorkerKey, memory: WorkerMemory, secret: ClusterSecret
    ) -> RpcServer:
        settings = self._config.worker
        server = RpcServer(host=settings.host, port=settings.port, key=secret.rpc_key)
        server.add(worker_pb2_grpc.add_WorkerServicer_to_server, self._servicer, SERVICE_NAME)

        def pool_of(worker: WorkerKey) -> ByteArray:
            if worker != key:
                raise FailedPreconditionError(f"This is {key}, not {worker}.")
            return memory.pool.bytes

        server.add_generic([kv_read_handler(pool_of, kernels())])
        return server

    async def _listen_http(self, life: Life) -> ReadyFacts:
        port = self._config.worker.metrics_port
        if port == "off":
            return {}
        server = HttpServer(metrics_app(self.render_metrics), port=port)
        await server.start()
        life.stack.push_async_callback(server.stop, grace_s=_STOP_GRACE_S)
        return {"metrics_port": server.port}

    async def _enter_transports(
        self, life: Life, memory: WorkerMemory, secret: ClusterSecret, key: WorkerKey
    ) -> Sequence[Transport]:
        """Raises ConfigError: The one that must be taken, or every one, cannot be used here."""
        settings = self._config.worker
        context = TransportContext(
            pool=LocalPool.of(memory.pool.bytes, memory.layout),
            kernels=kernels(),
            host_id=host_id(),
            metadata=call_metadata(key=secret.rpc_key),
            worker=key,
            pool_fd=memory.pool.fd,
            is_host_only=is_loopback(settings.advertise_host or settings.host),
        )
        makers = self._adapters.transports
        transports = [await life.enter(makers[name](context)) for name in settings.transports]
        required = transports[:1] if settings.is_transport_strict else transports
        if all(transport.unusable is not None for transport in required):
            raise ConfigError(
                f"transports = {list(settings.transports)}: "
                f"{'; '.join(f'{one.name}: {one.unusable}' for one in required)}"
            )
        for transport in transports:
            if transport.unusable is not None:
                log.warning(
                    "worker.transport_unusable", transport=transport.name, why=transport.unusable
                )
        return transports


def _words(layout: KvLayout) -> str:
    return f"{layout.num_blocks} blocks of {layout.block_bytes} bytes"
