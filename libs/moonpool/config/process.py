"""What one process is told: its part of the cluster's configuration, as one JSON document.

A document travels in a file that only its owner can read, or on standard input; never as arguments,
which every user of the host can see.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TypeVar

from pydantic import Field, StringConstraints, ValidationError

from moonpool.config.cpu import has_bfloat16_products
from moonpool.config.explain import describe_errors
from moonpool.config.private_file import write_private
from moonpool.config.schema import (
    ClusterConfig,
    ClusterName,
    Dtype,
    KvCacheDtype,
    Quantization,
    RoleName,
    RouterSettings,
    Section,
    StoreSettings,
    TelemetrySettings,
    WorkerSettings,
)
from moonpool.errors import ConfigError

if TYPE_CHECKING:
    # With it numpy comes, which nobody needs in order to read a document.
    from moonpool.kv.layout import KvDtype

#: Largest document.
MAX_DOCUMENT_BYTES = 1 << 20


class CommonSettings(Section):
    """What every process of a cluster knows."""

    cluster: ClusterName
    data_dir: Path
    model: str
    dtype: Dtype
    #: What is computed in, wherever a process runs: another one gives other values.
    compute_dtype: Dtype
    quantization: Quantization = "none"
    kv_cache_dtype: KvCacheDtype = "auto"
    #: With the broker's credentials, if it has any.
    nats_url: str = Field(repr=False)
    local_prefill_tokens: int
    telemetry: TelemetrySettings
    failpoints: str = ""
    unsafe_failpoints: bool = False

    @property
    def kv_dtype(self) -> KvDtype:
        """What KV is kept in."""
        return self.dtype if self.kv_cache_dtype == "auto" else "float8_e4m3"

    @property
    def computed_as(self) -> str:
        """What a model is computed in, as a namespace names it: other weights or products, other KV."""
        weights = self.dtype if self.quantization == "none" else f"{self.dtype}-{self.quantization}"
        return weights if self.compute_dtype == self.dtype else f"{weights}-in-{self.compute_dtype}"


class RouterConfig(Section):
    """A router process."""

    common: CommonSettings
    router: RouterSettings
    router_id: Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9_-]{1,64}$")] = "router-0"

    @property
    def process_name(self) -> str:
        """On every log line."""
        return self.router_id

    @property
    def drain_timeout_s(self) -> float:
        """How long what runs may take to end, once the process is told to stop."""
        return self.router.drain_timeout_s


class WorkerConfig(Section):
    """A worker process of any role."""

    common: CommonSettings
    role: RoleName
    worker_id: Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9_-]{1,64}$")]
    worker: WorkerSettings

    @property
    def process_name(self) -> str:
        """On every log line."""
        return self.worker_id

    @property
    def drain_timeout_s(self) -> float:
        """How long what runs may take to end, once the process is told to stop."""
        return self.worker.drain_timeout_s


class KvStoreConfig(Section):
    """A store node's process."""

    common: CommonSettings
    store_id: Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9_-]{1,64}$")]
    #: The workers': tokens of a block.
    block_size: int
    store: StoreSettings

    @property
    def process_name(self) -> str:
        """On every log line."""
        return self.store_id

    @property
    def drain_timeout_s(self) -> float:
        """How long what runs may take to end, once the process is told to stop."""
        return self.store.drain_timeout_s


def router_config(cluster: ClusterConfig, *, nats_url: str) -> RouterConfig:
    """The router's part. `nats_url` is the broker's real address, embedded or not."""
    return RouterConfig(common=_common(cluster, nats_url), router=cluster.router)


def worker_configs(cluster: ClusterConfig, *, nats_url: str) -> tuple[WorkerConfig, ...]:
    """One per worker, in the order of the file."""
    common = _common(cluster, nats_url)
    return tuple(
        WorkerConfig(
            common=common,
            role=group.role,
            worker_id=f"{group.name or group.role}-{index}",
            worker=group.settings,
        )
        for group in cluster.workers
        for index in range(group.count)
    )


def store_configs(cluster: ClusterConfig, *, nats_url: str) -> tuple[KvStoreConfig, ...]:
    """One per store node, in the order of the file."""
    common = _common(cluster, nats_url)
    return tuple(
        KvStoreConfig(
            common=common,
            store_id=f"{group.name}-{index}",
            block_size=cluster.workers[0].settings.block_size,
            store=group.settings,
        )
        for group in cluster.stores
        for index in range(group.count)
    )


#: What any process of a cluster is told.
ProcessConfig = RouterConfig | WorkerConfig | KvStoreConfig
DocumentT = TypeVar("DocumentT", RouterConfig, WorkerConfig, KvStoreConfig)


def write_document(config: ProcessConfig, path: Path) -> None:
    """Write `config` to a file of mode 0600, replacing what is there."""
    write_private(path, config.model_dump_json().encode())


def read_document(source: str, document_type: type[DocumentT]) -> DocumentT:
    """Read a process's configuration from a file, or from standard input if `source` is `-`.

    Raises:
        ConfigError: Unreadable, too large, or not this kind of document.
    """
    try:
        if source == "-":
            data = sys.stdin.buffer.read(MAX_DOCUMENT_BYTES + 1)
        else:
            with Path(source).open("rb") as file:
                data = file.read(MAX_DOCUMENT_BYTES + 1)
    except OSError as error:
        raise ConfigError(f"--config {source}: {error.strerror}") from error
    if len(data) > MAX_DOCUMENT_BYTES:
        raise ConfigError(f"--config {source}: more than {MAX_DOCUMENT_BYTES} bytes")
    try:
        return document_type.model_validate_json(data)
    except ValidationError as error:
        raise ConfigError(describe_errors(error, document_type, where=source)) from None


def _compute_dtype(cluster: ClusterConfig) -> Dtype:
    if cluster.compute_dtype != "auto":
        return cluster.compute_dtype
    # Emulated products of bfloat16 are many times slower than float32's.
    is_emulated = not (cluster.is_any_worker_on_gpu or has_bfloat16_products())
    return "float32" if is_emulated else cluster.dtype


def _common(cluster: ClusterConfig, nats_url: str) -> CommonSettings:
    return CommonSettings(
        cluster=cluster.name,
        data_dir=cluster.data_dir,
        model=cluster.model,
        dtype=cluster.dtype,
        compute_dtype=_compute_dtype(cluster),
        quantization=cluster.quantization,
        kv_cache_dtype=cluster.kv_cache_dtype,
        nats_url=nats_url,
        local_prefill_tokens=cluster.local_prefill_tokens,
        telemetry=cluster.telemetry,
        failpoints=cluster.failpoints,
        unsafe_failpoints=cluster.unsafe_failpoints,
    )
