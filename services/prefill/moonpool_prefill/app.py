"""The prefill worker's composition root: the only file that names the concrete bus.

It serves the role `prefill` (or `both`); everything else is moonpool.worker's.
"""

from __future__ import annotations

from moonpool.bus.nats import NatsBus
from moonpool.bus.protocol import Bus
from moonpool.clock import Clock
from moonpool.config.process import WorkerConfig
from moonpool.worker.build import build_worker
from moonpool.worker.service import StartEngine, WorkerService

ROLES = ("prefill", "both")


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
    name = f"{config.common.cluster} {config.worker_id}"
    return build_worker(
        config,
        roles=ROLES,
        bus=bus or NatsBus(config.common.nats_url, name=name),
        start_engine=start_engine,
        clock=clock,
    )
