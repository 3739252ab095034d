"""From a store's configuration and the cluster's model to what its parts are made of."""

from __future__ import annotations

from moonpool import __version__
from moonpool.config.process import KvStoreConfig
from moonpool.config.secret import ClusterSecret
from moonpool.errors import ConfigError
from moonpool.handoff.config import FetchConfig, FetchMode, HandoffConfig
from moonpool.hub.model_dir import ModelDir
from moonpool.ids import WorkerKey
from moonpool.kv.block_hash import ModelNamespace
from moonpool.kv.digest import DigestKind
from moonpool.kv.eviction import EvictionName
from moonpool.kv.layout import KvLayout
from moonpool.routing.worker_view import WorkerRole
from moonpool.store.log_identity import LogIdentity
from moonpool.tiering.config import DiskAdmission, StoreConfig, TenantQuota
from moonpool.tiering.write_budget import BudgetLeft
from moonpool.wire.store import MAX_DEADLINE_S
from moonpool.wire.worker import WorkerHello
from moonpool.worker.settings import pool_region

#: A reader's time, from the lock to the end of its reading; what it has not read by then is a miss.
LEASE_S = 10.0


def arena_layout(config: KvStoreConfig, model: ModelDir) -> KvLayout:
    """As many blocks as fit into the memory that the node may have.

    Raises:
        ConfigError: Not even two blocks fit.
    """
    dtype, host_bytes = config.common.kv_dtype, config.store.host_bytes
    block_bytes = model.config.kv_layout(1, dtype, config.block_size).block_bytes
    num_blocks = host_bytes // block_bytes
    if num_blocks < 2:
        raise ConfigError(
            f"host_bytes = {host_bytes}: a block of this model has {block_bytes} bytes; allowed is "
            "at least two blocks"
        )
    return model.config.kv_layout(num_blocks, dtype, config.block_size)


def namespace_of(config: KvStoreConfig, model: ModelDir) -> ModelNamespace:
    """What the KV of this cluster's workers is."""
    dtype = config.common.kv_dtype
    return ModelNamespace(
        model_fingerprint=model.fingerprint,
        compute_dtype=config.common.computed_as,
        kv_dtype=dtype,
        block_size=config.block_size,
    )


def store_hello(
    config: KvStoreConfig,
    key: WorkerKey,
    model: ModelDir,
    layout: KvLayout,
    secret: ClusterSecret,
    address: str,
) -> WorkerHello:
    """Who this incarnation is: a worker that can be read from and takes no request."""
    return WorkerHello(
        worker=key,
        role=WorkerRole.STORE,
        model=model.name,
        namespace=namespace_of(config, model),
        secret_fingerprint=secret.fingerprint,
        regions=(pool_region(key, layout, address),),
        max_model_len=model.config.max_positions,
        max_num_seqs=1,
        max_num_batched_tokens=1,
        grpc_address=address,
        version=__version__,
        kv_eviction_policy=config.store.kv_eviction_policy,
    )


def handoff_config(layout: KvLayout) -> HandoffConfig:
    """Sizes of the reading of puts."""
    return HandoffConfig(num_layers=layout.num_layers, block_size=layout.block_size)


def fetch_config(layout: KvLayout) -> FetchConfig:
    """A store computes nothing: what it has said that it wants, it reads, for as long as the offer says."""
    return FetchConfig(
        mode=FetchMode.ALWAYS,
        block_bytes=layout.block_bytes,
        always_s=MAX_DEADLINE_S,
        hold_s=LEASE_S,
    )


def log_identity(hello: WorkerHello, layout: KvLayout) -> LogIdentity:
    """What the blocks of this node's directory are."""
    return LogIdentity(
        model=hello.namespace,
        layout=layout,
        digest_kind=DigestKind.XXH3_64,
        secret_fingerprint=hello.secret_fingerprint,
    )


def core_config(
    config: KvStoreConfig,
    layout: KvLayout,
    *,
    record_bytes: int | None,
    budget_left: BudgetLeft | None = None,
) -> StoreConfig:
    """The core's limits, for an arena of this layout.

    Args:
        record_bytes: What a block takes on the disk; None: there is none.
        budget_left: Of what may be written there, as the last life of this node left it.
    """
    store = config.store
    block_bytes = layout.block_bytes
    return StoreConfig(
        num_blocks=layout.num_blocks,
        block_size=layout.block_size,
        block_bytes=record_bytes or block_bytes,
        has_disk=record_bytes is not None,
        eviction=EvictionName(store.kv_eviction_policy),
        tenants=tuple(
            TenantQuota(
                tenant=one.tenant,
                floor_blocks=one.floor_bytes // block_bytes,
                max_blocks=one.max_bytes // block_bytes if one.max_bytes is not None else None,
            )
            for one in store.tenants
        ),
        admission=DiskAdmission(store.ssd_admission),
        write_budget_bytes_per_day=store.ssd_write_bytes_per_day or None,
        write_budget_left=budget_left,
        is_checked=store.is_checked,
    )
