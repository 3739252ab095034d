"""The store node's composition root: the only file that names the concrete bus, log and directory."""

from __future__ import annotations

from moonpool.bus.nats import NatsBus
from moonpool.bus.protocol import Bus
from moonpool.clock import Clock, SystemClock
from moonpool.config.process import KvStoreConfig
from moonpool.errors import ConfigError
from moonpool.store.directory import Directory, EmbeddedDirectory
from moonpool.store.segment_log import SegmentLog
from moonpool.worker.node import NodeAdapters
from moonpool.worker.transports import TRANSPORTS
from moonpool_kvstore.service import OpenLog, StoreAdapters, StoreService


def build(
    config: KvStoreConfig,
    *,
    bus: Bus | None = None,
    open_log: OpenLog | None = None,
    directory: Directory | None = None,
    clock: Clock | None = None,
) -> StoreService:
    """The store node as a service.

    Args:
        bus, open_log, directory, clock: In place of NATS, a log on disk, what the configuration says,
            and the machine's clocks.

    Raises:
        ConfigError: Failpoints that are not allowed, or a directory that cannot be used.
    """
    clock = clock or SystemClock()
    name = f"{config.common.cluster} {config.store_id}"
    node = NodeAdapters(
        bus=bus or NatsBus(config.common.nats_url, name=name),
        transports=TRANSPORTS,
        clock=clock,
    )
    return StoreService(
        config,
        StoreAdapters(
            node=node,
            open_log=open_log or SegmentLog.open,
            directory=directory or _directory(config, clock),
        ),
    )


def _directory(config: KvStoreConfig, clock: Clock) -> Directory:
    url = config.store.redis_url
    if url is None:
        return EmbeddedDirectory(clock)
    try:
        # An optional extra: whoever has one store node does not need it.
        from moonpool.store.redis_directory import RedisDirectory
    except ModuleNotFoundError as error:
        raise ConfigError(
            "store.redis_url needs the package redis: pip install 'moonpool[redis]'"
        ) from error
    return RedisDirectory(url, cluster=config.common.cluster)
