"""From a worker's configuration and its model to what its parts are made of."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from moonpool import __version__
from moonpool.config.process import WorkerConfig
from moonpool.config.secret import ClusterSecret
from moonpool.core.config import CoreConfig
from moonpool.errors import ConfigError
from moonpool.hub.model_dir import ModelDir
from moonpool.ids import WorkerKey
from moonpool.kv.block_hash import ModelNamespace
from moonpool.kv.digest import DigestKind
from moonpool.kv.eviction import EvictionName
from moonpool.kv.layout import KvLayout
from moonpool.kv.region import KvRegion
from moonpool.memory.fd_server import socket_name
from moonpool.memory.host import host_id
from moonpool.routing.worker_view import WorkerRole
from moonpool.transport.base import Transport
from moonpool.wire.worker import WorkerHello
from moonpool.worker.engine_process import EngineOptions


def pool_layout(config: WorkerConfig, model: ModelDir) -> KvLayout:
    """The pool: as many blocks as asked for, or as fit in the memory that it may have.

    Raises:
        ConfigError: Not even two blocks fit.
    """
    settings, dtype = config.worker, config.common.kv_dtype
    num_blocks = settings.num_blocks
    if num_blocks is None:
        block_bytes = model.config.kv_layout(1, dtype, settings.block_size).block_bytes
        num_blocks = settings.kv_cache_memory_bytes // block_bytes
        if num_blocks < 2:
            raise ConfigError(
                f"kv_cache_memory_bytes = {settings.kv_cache_memory_bytes}: a block of this model "
                f"has {block_bytes} bytes; allowed is at least two blocks"
            )
    return model.config.kv_layout(num_blocks, dtype, settings.block_size)


def max_model_len(config: WorkerConfig, model: ModelDir) -> int:
    """Longest prompt + answer.

    Raises:
        ConfigError: Longer than the model allows.
    """
    limit = model.config.max_positions
    wanted = config.worker.max_model_len or limit
    if wanted > limit:
        raise ConfigError(f"max_model_len = {wanted}: the model's limit is {limit}")
    return wanted


def core_config(config: WorkerConfig, model: ModelDir, layout: KvLayout) -> CoreConfig:
    """The core's limits, for a pool of this layout."""
    settings = config.worker
    return CoreConfig(
        num_blocks=layout.num_blocks,
        block_size=layout.block_size,
        max_num_batched_tokens=settings.max_num_batched_tokens,
        max_num_seqs=settings.max_num_seqs,
        max_model_len=max_model_len(config, model),
        local_prefill_tokens=config.common.local_prefill_tokens,
        max_queued_steps=settings.max_queued_steps,
        headroom_tokens=settings.headroom_tokens,
        eviction=EvictionName(settings.kv_eviction_policy),
        eos_token_ids=model.config.eos_token_ids,
        is_checked=settings.is_checked,
    )


def worker_hello(
    config: WorkerConfig,
    key: WorkerKey,
    model: ModelDir,
    layout: KvLayout,
    secret: ClusterSecret,
    address: str,
) -> WorkerHello:
    """Who this incarnation is: what it tells routers and peers."""
    settings, dtype = config.worker, config.common.kv_dtype
    return WorkerHello(
        worker=key,
        role=WorkerRole(config.role),
        model=model.name,
        namespace=ModelNamespace(
            model_fingerprint=model.fingerprint,
            compute_dtype=config.common.computed_as,
            kv_dtype=dtype,
            block_size=settings.block_size,
        ),
        secret_fingerprint=secret.fingerprint,
        regions=(pool_region(key, layout, address),),
        max_model_len=max_model_len(config, model),
        max_num_seqs=settings.max_num_seqs,
        max_num_batched_tokens=settings.max_num_batched_tokens,
        grpc_address=address,
        version=__version__,
        kv_eviction_policy=settings.kv_eviction_policy,
    )


def pool_region(key: WorkerKey, layout: KvLayout, address: str) -> KvRegion:
    """Where a node's memory can be read, but for what transports add."""
    return KvRegion(
        worker=key,
        layout=layout,
        pool_bytes=layout.pool_bytes,
        digest_kind=DigestKind.XXH3_64,
        host_id=host_id(),
        fd_socket=socket_name(key),
        grpc_address=address,
    )


def announced(hello: WorkerHello, transports: Sequence[Transport]) -> WorkerHello:
    """The same with what peers need to read its pool by each of these."""
    regions = list(hello.regions)
    for transport in transports:
        regions = [transport.announce(region) for region in regions]
    return replace(hello, regions=tuple(regions))


def engine_options(
    config: WorkerConfig,
    key: WorkerKey,
    model: ModelDir,
    core: CoreConfig,
    namespace: ModelNamespace,
    secret: ClusterSecret,
    *,
    device_fd: int = -1,
) -> EngineOptions:
    """How the engine process is started. `device_fd`: see EngineOptions."""
    common = config.common
    return EngineOptions(
        worker_id=key.worker_id,
        incarnation=key.incarnation,
        model_path=str(model.path),
        model_name=model.name,
        data_dir=str(common.data_dir),
        dtype=common.dtype,
        compute_dtype=common.compute_dtype,
        quantization=common.quantization,
        device=config.worker.device,
        device_fd=device_fd,
        core=core,
        namespace=namespace,
        secret=secret.value,
        layer_group=config.worker.layers_per_group,
        cpu_affinity=config.worker.engine_cpus,
        num_threads=max(1, len(config.worker.engine_cpus)),
        failpoints=common.failpoints,
        log_level=common.telemetry.log_level,
    )
