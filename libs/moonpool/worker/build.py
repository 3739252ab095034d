"""build_worker(): what the composition roots of prefill and decode have in common, all but the bus."""

from __future__ import annotations

from collections.abc import Sequence

from moonpool.bus.protocol import Bus
from moonpool.clock import Clock, SystemClock
from moonpool.config.process import WorkerConfig
from moonpool.errors import ConfigError
from moonpool.worker.engine_process import EngineProcess
from moonpool.worker.node import NodeAdapters
from moonpool.worker.service import StartEngine, WorkerAdapters, WorkerService
from moonpool.worker.transports import TRANSPORTS


def build_worker(
    config: WorkerConfig,
    *,
    roles: Sequence[str],
    bus: Bus,
    start_engine: StartEngine | None = None,
    clock: Clock | None = None,
) -> WorkerService:
    """A worker as a service.

    Args:
        roles: Those that the caller serves.
        start_engine, clock: In place of an engine process and the machine's clocks.

    Raises:
        ConfigError: Another role's configuration, or failpoints that are not allowed.
    """
    if config.role not in roles:
        raise ConfigError(f"role = {config.role!r}: allowed here are {', '.join(roles)}")
    node = NodeAdapters(bus=bus, transports=TRANSPORTS, clock=clock or SystemClock())
    adapters = WorkerAdapters(node=node, start_engine=start_engine or EngineProcess.start)
    return WorkerService(config, adapters)
