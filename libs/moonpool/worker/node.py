"""KvNode: a process with KV memory that others read, whatever fills it. Workers and stores are nodes.

    listen            memory is made, the gRPC server listens; its methods answer UNAVAILABLE, health
                      NOT_SERVING; /metrics answers
    enter_transports  how its memory is read, and how it reads that of others
    make_shell        the machines that stand between whatever fills the memory, routers and peers
    serve             peers may map the memory (by then it is sealed), routers may come, the bus is told

in this order, once. What a node enters it leaves on the life's stack. Draining and aborting are the same
for all nodes; what comes in between those steps is the service's.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import Literal, Protocol

import structlog

from moonpool import __version__
from moonpool.api.v1 import worker_pb2_grpc
from moonpool.bus.protocol import Bus
from moonpool.bus.subjects import Subjects
from moonpool.clock import Clock
from moonpool.config.process import CommonSettings
from moonpool.config.secret import ClusterSecret, load_or_create_secret
from moonpool.config.values import host_port, is_loopback
from moonpool.core.protocol import Command
from moonpool.errors import ConfigError, FailedPreconditionError
from moonpool.failpoints import Failpoints
from moonpool.handoff.config import FetchConfig, HandoffConfig
from moonpool.handoff.messages import SourceRef
from moonpool.handoff.worker import WorkerHandoffs
from moonpool.hub.model_dir import ModelDir, resolve
from moonpool.ids import BlockHash, Incarnation, WorkerId, WorkerKey
from moonpool.inference.request import InferenceRequest
from moonpool.kv.block_hash import hash_blocks
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
from moonpool.transport.base import ByteArray, LocalPool, Transport
from moonpool.transport.cuda_ipc import CudaIpcTransport
from moonpool.transport.device_link import DeviceLink
from moonpool.transport.grpc_server import kv_read_handler
from moonpool.transport.select import TransportSelector
from moonpool.wire.worker import WorkerHello
from moonpool.worker.announcements import Announcements
from moonpool.worker.announcer import Announcer
from moonpool.worker.books import WorkerBooks
from moonpool.worker.compatibility import handoff_fingerprint
from moonpool.worker.metrics_http import metrics_app
from moonpool.worker.offload import KvOffload
from moonpool.worker.peer_connector import PeerConnector
from moonpool.worker.peer_scout import PeerScout
from moonpool.worker.peers import PeerDirectory
from moonpool.worker.rpc_service import SERVICE_NAME, WorkerServicer
from moonpool.worker.settings import announced
from moonpool.worker.shell import WorkerShell

log = structlog.get_logger("moonpool.worker")

#: Streams that are still open are cut so long after the abort.
_STOP_GRACE_S = 0.5
#: For the frames that hand back, and for the routers to take them.
_HAND_BACK_S = 3.0


class EnterableTransport(Transport, AbstractAsyncContextManager[Transport], Protocol):
    """A Transport, entered for the node's life."""


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
    #: The node's address is loopback: no peer is on another host.
    is_host_only: bool
    layout: KvLayout
    #: To an engine on a GPU that reads peers' memory there.
    device: DeviceLink | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeAdapters:
    """What a composition root chooses."""

    bus: Bus
    #: By the name that the configuration has for it.
    transports: Mapping[str, Callable[[TransportContext], EnterableTransport]]
    clock: Clock


class NodeSettings(Protocol):
    """What workers' and stores' settings have in common."""

    @property
    def host(self) -> str: ...
    @property
    def port(self) -> int: ...
    @property
    def advertise_host(self) -> str | None: ...
    @property
    def metrics_port(self) -> int | Literal["off"]: ...
    @property
    def transports(self) -> Sequence[str]: ...
    @property
    def is_transport_strict(self) -> bool: ...
    @property
    def is_checked(self) -> bool: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeParts:
    """What `listen` has made."""

    key: WorkerKey
    memory: WorkerMemory
    secret: ClusterSecret
    #: host:port for peers and routers.
    address: str
    #: For the supervisor.
    facts: ReadyFacts


class KvNode:
    """See the file's head.

    Args:
        books: All that the node counts.
        set_gauges: Brings the service's own gauges up to date, before metrics are shown.
    """

    def __init__(
        self,
        *,
        node_id: str,
        common: CommonSettings,
        settings: NodeSettings,
        adapters: NodeAdapters,
        books: WorkerBooks,
        set_gauges: Callable[[], None] = lambda: None,
    ) -> None:
        """Raises ConfigError: Failpoints that are not allowed."""
        self.node_id = node_id
        self._common = common
        self._settings = settings
        self._adapters = adapters
        self._set_gauges = set_gauges
        self.failpoints = Failpoints.parse(
            common.failpoints, is_allowed=common.unsafe_failpoints, state_dir=common.data_dir
        )
        self.books = books
        self.books.metrics.set(names.BUILD_INFO, 1, version=__version__, process=node_id)
        self._servicer = WorkerServicer()
        self._server: RpcServer | None = None
        self._shell: WorkerShell | None = None
        self._announcer: Announcer | None = None
        self._transports: list[Transport] = []

    @property
    def shell(self) -> WorkerShell:
        """While it serves."""
        assert self._shell is not None, "start() has not returned"
        return self._shell

    def render_metrics(self) -> bytes:
        """The text that Prometheus scrapes, with gauges as of now."""
        if self._shell is not None:
            self._shell.set_gauges()
            self._set_gauges()
        bus = self._adapters.bus
        self.books.bus_losses(num_unsent=bus.num_unsent, num_dropped=bus.num_dropped)
        return self.books.metrics.render()

    # -- the steps of a start --

    async def load_model(self) -> tuple[ClusterSecret, ModelDir]:
        """The cluster's secret and the model's facts; no weights.

        Raises:
            ConfigError: Others can read the secret.
            ModelError: The model cannot be had.
        """
        native = status()
        log.log(
            logging.INFO if native.is_compiled else logging.WARNING,
            "worker.native",
            what=native.message,
        )
        common = self._common
        secret = await asyncio.to_thread(load_or_create_secret, common.data_dir)
        model = await asyncio.to_thread(resolve, common.model, data_dir=common.data_dir)
        return secret, model

    async def listen(
        self,
        life: Life,
        *,
        layout: KvLayout,
        secret: ClusterSecret,
        add_services: Callable[[RpcServer], None] = lambda _server: None,
    ) -> NodeParts:
        """Make the memory and a new incarnation's server.

        Args:
            add_services: Adds what this kind of node has beside Worker and KvPlane.

        Raises:
            MemoryError: The machine does not have that much.
            UnavailableError: The address cannot be bound.
        """
        memory = await asyncio.to_thread(WorkerMemory.create, layout)
        life.stack.callback(memory.close)
        key = WorkerKey(WorkerId(self.node_id), Incarnation(secrets.token_hex(8)))
        settings = self._settings
        server = RpcServer(host=settings.host, port=settings.port, key=secret.rpc_key)
        server.add(worker_pb2_grpc.add_WorkerServicer_to_server, self._servicer, SERVICE_NAME)

        def pool_of(worker: WorkerKey) -> ByteArray:
            if worker != key:
                raise FailedPreconditionError(f"This is {key}, not {worker}.")
            return memory.pool.bytes

        server.add_generic([kv_read_handler(pool_of, kernels())])
        add_services(server)
        self._server = server
        await server.start()
        life.stack.push_async_callback(server.stop, grace_s=_STOP_GRACE_S)
        address = host_port(settings.advertise_host or settings.host, server.port)
        facts = {"grpc_address": address, "incarnation": key.incarnation}
        return NodeParts(
            key=key,
            memory=memory,
            secret=secret,
            address=address,
            facts={**facts, **await self._listen_http(life)},
        )

    async def enter_transports(
        self,
        life: Life,
        parts: NodeParts,
        hello: WorkerHello,
        *,
        device: DeviceLink | None = None,
    ) -> WorkerHello:
        """The hello with what peers need to read this node's memory by each transport.

        Args:
            device: For the transport by CUDA IPC.

        Raises:
            ConfigError: The one that must be taken, or every one, cannot be used here.
        """
        settings = self._settings
        context = TransportContext(
            pool=LocalPool.of(parts.memory.pool.bytes, parts.memory.layout),
            kernels=kernels(),
            host_id=host_id(),
            metadata=call_metadata(key=parts.secret.rpc_key),
            worker=parts.key,
            pool_fd=parts.memory.pool.fd,
            is_host_only=is_loopback(settings.advertise_host or settings.host),
            layout=parts.memory.layout,
            device=device,
        )
        makers = self._adapters.transports
        transports = [await life.enter(makers[name](context)) for name in settings.transports]
        self._transports = transports
        self._check_usable(transports)
        return announced(hello, transports)

    def announce_device(self) -> None:
        """Once the engine has said what it offers of its GPU: tell peers from here on.

        Raises:
            ConfigError: The transport that must be taken cannot be used here.
        """
        shell = self.shell
        known = [one for one in self._transports if isinstance(one, CudaIpcTransport)]
        self._check_usable(known)
        shell.hello = announced(shell.hello, known)

    def make_shell(
        self,
        parts: NodeParts,
        hello: WorkerHello,
        *,
        handoff: HandoffConfig,
        fetch: FetchConfig,
        send_command: Callable[[Command], None],
        is_offloading: bool = False,
        stage: Callable[[tuple[BlockHash, ...]], None] | None = None,
    ) -> WorkerShell:
        """The shell between whatever takes commands, routers and peers. It does not run yet.

        Args:
            hello: As `enter_transports` gave it.
            send_command: To what decides about the memory's blocks; never waits.
            is_offloading: Offer its blocks to the cluster's stores.
            stage: Brings a chain from a disk into the memory, as far as it lies there only.
        """
        layout, secret = parts.memory.layout, parts.secret
        peers = PeerDirectory(
            PeerConnector(
                hello=hello,
                layout=layout,
                selector=TransportSelector(
                    self._transports, is_strict=self._settings.is_transport_strict
                ),
                rpc_key=secret.rpc_key,
            )
        )
        namespace_seed = NamespaceSeeds(hello.namespace, secret.value)

        def hash_chain(request: InferenceRequest) -> list[BlockHash]:
            return hash_blocks(namespace_seed(request), request.token_ids, layout.block_size)

        offload = KvOffload(
            source=SourceRef(key=parts.key, address=parts.address),
            peers=peers,
            rpc_key=secret.rpc_key,
            books=self.books,
            clock=self._adapters.clock,
            namespace_seed=namespace_seed,
            block_size=layout.block_size,
            is_checked=self._settings.is_checked,
        )
        self._shell = WorkerShell(
            hello=hello,
            memory=parts.memory,
            kernels=kernels(),
            handoffs=WorkerHandoffs(
                key=parts.key,
                namespace=handoff_fingerprint(hello.namespace, secret.value),
                secret_fingerprint=secret.fingerprint,
                config=handoff,
                fetch=fetch,
                hash_chain=hash_chain,
            ),
            send_command=send_command,
            peers=peers,
            rpc_key=secret.rpc_key,
            books=self.books,
            failpoints=self.failpoints,
            clock=self._adapters.clock,
            namespace_seed=namespace_seed,
            offload=offload if is_offloading else None,
            stage=stage,
            is_checked=self._settings.is_checked,
        )
        return self._shell

    async def serve(
        self, life: Life, parts: NodeParts, *, open_services: Callable[[], None] = lambda: None
    ) -> Bus:
        """Run the shell, answer, and announce. Once the memory is sealed. Returns the bus.

        Args:
            open_services: Has what was added by `listen` answer as well.
        """
        assert self._server is not None
        shell = self.shell
        fd_server = FdServer(socket_name(parts.key), {POOL_NAME: parts.memory.pool.fd})
        life.spawn(fd_server.run(), name="fd-server")
        life.spawn(shell.run(), name="shell")
        life.spawn(watch_loop_lag(self.books.loop_lag), name="loop-lag")
        await shell.wait_running()
        self._servicer.open(shell)
        life.stack.callback(self._servicer.close)
        open_services()
        await self._server.set_serving(True)
        bus = await life.enter(self._adapters.bus)
        bus.on_connection(self.books.bus_connection)
        announcer = self._announcer = Announcer(
            bus=bus,
            subjects=self.subjects,
            hello=shell.hello,
            load=shell.load,
            kv_head=lambda: shell.kv.head,
        )
        life.spawn(announcer.run(), name="announcer")
        life.spawn(shell.kv.run(bus, self.subjects), name="kv-events")
        return bus

    def follow_others(self, life: Life, bus: Bus) -> None:
        """Connect to others as soon as they announce themselves, and offer blocks to the stores among them."""
        shell = self.shell
        announcements = Announcements(
            bus, self.subjects, on_unreadable=self.books.announcement_unreadable
        )
        scout = PeerScout(peers=shell.peers, own=shell.hello.worker)
        announcements.add_listener(scout.on_announced)
        life.spawn(scout.run(), name="scout")
        if shell.offload is not None:
            announcements.add_listener(shell.offload.on_announced)
            life.spawn(shell.offload.run(bus), name="offload")
        life.spawn(announcements.run(), name="announcements")

    @property
    def subjects(self) -> Subjects:
        return Subjects(self._common.cluster)

    # -- the steps of a stop --

    async def announce_drain(self) -> None:
        """Say that new work should go elsewhere."""
        assert self._server is not None
        assert self._announcer is not None
        await self._server.set_serving(False)
        await self._announcer.leave()

    async def drain(self) -> None:
        """Refuse what is new, and return when nothing is held."""
        self.shell.begin_drain()
        await self.shell.wait_quiet()

    async def abort(self) -> None:
        """Give back what is still held, and end all streams."""
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

    def _check_usable(self, changed: Sequence[Transport]) -> None:
        """Raise if what must be taken is unusable; else say what of `changed` is."""
        settings = self._settings
        required = self._transports[:1] if settings.is_transport_strict else self._transports
        if all(transport.unusable is not None for transport in required):
            raise ConfigError(
                f"transports = {list(settings.transports)}: "
                f"{'; '.join(f'{one.name}: {one.unusable}' for one in required)}"
            )
        for transport in changed:
            if transport.unusable is not None:
                log.warning(
                    "worker.transport_unusable", transport=transport.name, why=transport.unusable
                )

    async def _listen_http(self, life: Life) -> ReadyFacts:
        port = self._settings.metrics_port
        if port == "off":
            return {}
        server = HttpServer(metrics_app(self.render_metrics), port=port)
        await server.start()
        life.stack.push_async_callback(server.stop, grace_s=_STOP_GRACE_S)
        return {"metrics_port": server.port}
