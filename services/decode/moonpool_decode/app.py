"""The decode worker's composition root: the only file that names concrete adapters.

It serves the role `decode` (or `both`); everything else is moonpool.worker's.
"""

from __future__ import annotations

from moonpool.bus.nats import NatsBus
from moonpool.bus.protocol import Bus
from moonpool.clock import Clock, SystemClock
from moonpool.config.process import WorkerConfig
from moonpool.errors import ConfigError
from moonpool.rpc.channel import make_channel
from moonpool.transport.grpc_reader import GrpcTransport
from moonpool.transport.nixl import NixlTransport
from moonpool.transport.shm import ShmTransport
from moonpool.worker.engine_process import EngineProcess
from moonpool.worker.node import NodeAdapters, TransportContext
from moonpool.worker.service import StartEngine, WorkerAdapters, WorkerService

ROLES = ("decode", "both")


def build(
    config: WorkerConfig,
    *,
    bus: Bus | None = None,
    start_engine: StartEngine | None = None,
    clock: Clock | None = None,
) -> WorkerService:
    """The worker as a service.

    Args:
        bus, start_engine, clock: In place of NATS, an engine process and the machine's clocks.

    Raises:
        ConfigError: Another role's configuration, or failpoints that are not allowed.
    """
    if config.role not in ROLES:
        raise ConfigError(f"role = {config.role!r}: allowed here are {', '.join(ROLES)}")
    name = f"{config.common.cluster} {config.worker_id}"
    node = NodeAdapters(
        bus=bus or NatsBus(config.common.nats_url, name=name),
        transports={"shm": _shm, "nixl": _nixl, "grpc": _grpc},
        clock=clock or SystemClock(),
    )
    adapters = WorkerAdapters(node=node, start_engine=start_engine or EngineProcess.start)
    return WorkerService(config, adapters)


def _shm(context: TransportContext) -> ShmTransport:
    return ShmTransport(pool=context.pool, host_id=context.host_id, kernels=context.kernels)


def _nixl(context: TransportContext) -> NixlTransport:
    return NixlTransport(
        pool=context.pool,
        agent=str(context.worker),
        kernels=context.kernels,
        pool_fd=context.pool_fd,
        ucx={"NET_DEVICES": "lo"} if context.is_host_only else None,
    )


def _grpc(context: TransportContext) -> GrpcTransport:
    return GrpcTransport(
        pool=context.pool,
        kernels=context.kernels,
        make_channel=make_channel,
        metadata=context.metadata,
    )
