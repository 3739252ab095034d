"""ClusterConfig: everything an operator can say about a cluster.

Frozen, unknown keys refused, every value checked when it is made. Names are vLLM's where the concept
exists there. What a single process needs of it is cut out in process.py.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    StringConstraints,
    field_validator,
    model_validator,
)

from moonpool.config.api_keys import ApiKeys, key_digest
from moonpool.config.values import (
    Address,
    CpuList,
    DeviceName,
    Host,
    SizeBytes,
    TenantName,
    is_loopback,
    is_wildcard,
)
from moonpool.inference.request import DEFAULT_TENANT

Dtype = Literal["float32", "bfloat16"]
ComputeDtype = Literal["auto", "float32", "bfloat16"]
Quantization = Literal["none", "int8"]
KvCacheDtype = Literal["auto", "fp8_e4m3"]
RoleName = Literal["prefill", "decode", "both"]
#: moonpool.routing.config.PolicyName
RouterMode = Literal[
    "min_ttft", "random", "round_robin", "least_loaded", "prefix_affinity", "dynamo_linear"
]
TransportName = Literal["cuda_ipc", "shm", "nixl", "grpc"]
#: moonpool.kv.eviction.EvictionName
EvictionPolicyName = Literal["lru", "s3_fifo", "lfu_aged"]
#: moonpool.tiering.config.DiskAdmission
DiskAdmissionName = Literal["all", "second_hit", "budget"]
_BLOCK_SIZES = (8, 16, 32, 64, 128)
Port = Annotated[int, Field(ge=0, le=65_535)]
ClusterName = Annotated[str, StringConstraints(pattern=r"^[a-z0-9][a-z0-9_-]{0,39}$")]
KeyText = Annotated[str, StringConstraints(min_length=8, max_length=512)]


def default_data_dir(environ: Mapping[str, str]) -> Path:
    """`$MOONPOOL_HOME`, else `$XDG_DATA_HOME/moonpool`, else `~/.local/share/moonpool`."""
    if home := environ.get("MOONPOOL_HOME"):
        return Path(home).expanduser()
    base = environ.get("XDG_DATA_HOME") or "~/.local/share"
    return Path(base).expanduser() / "moonpool"


class Section(BaseModel):
    """Base of all parts of the schema."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", validate_default=True, allow_inf_nan=False
    )


def _split_names(value: object) -> object:
    return tuple(part.strip() for part in value.split(",")) if isinstance(value, str) else value


def _check_transports(transports: tuple[TransportName, ...], *, device: str = "cpu") -> None:
    if len(set(transports)) != len(transports):
        raise ValueError(f"transports = {list(transports)}: each may be named once")
    if "cuda_ipc" in transports and device == "cpu":
        raise ValueError(
            f"transports = {list(transports)}: cuda_ipc is only for workers with device = 'cuda'"
        )


def _check_address(host: str, advertise_host: str | None) -> None:
    if is_wildcard(host) and advertise_host is None:
        raise ValueError(f"host = {host!r} is no address to dial: set advertise_host")


class NatsSettings(Section):
    """The control bus. Without a url the local cluster starts a broker of its own."""

    #: `nats://host:port`, several separated by commas; None starts an embedded broker.
    url: str | None = Field(default=None, repr=False)
    #: Port of the embedded broker on 127.0.0.1; 0 takes a free one.
    port: Port = 0

    @field_validator("url")
    @classmethod
    def _is_nats_url(cls, value: str | None) -> str | None:
        for part in (value or "").split(","):
            if part and not part.strip().startswith(("nats://", "tls://")):
                raise ValueError("allowed are urls like nats://127.0.0.1:4222")
        return value or None

    @property
    def is_embedded(self) -> bool:
        return self.url is None


class PlacementSettings(Section):
    """Which workers a request goes to, and the numbers of each policy."""

    #: Hyphens may stand for underscores.
    mode: RouterMode = "min_ttft"
    #: Prefill on the decode worker or elsewhere: `measured` by what both are predicted to take (and by
    #: the threshold until something is measured), `threshold` always by `local_prefill_tokens`.
    disagg: Literal["measured", "threshold"] = "measured"
    #: min_ttft, and where `disagg` is measured: time per token that a decode worker may be predicted to
    #: reach; 0: any.
    slo_tpot_ms: float = Field(default=100.0, ge=0, le=3_600_000)
    #: min_ttft: predictions this close to the best one are equal; the lower time per token decides.
    ttft_slack: float = Field(default=0.05, ge=0, le=10)
    #: How long an answer is expected to become, if its client does not bound it lower.
    expected_output_tokens: int = Field(default=256, ge=1, le=2**20)
    #: Name the peer that holds more of a request's prefix than the worker that prefills it.
    reads_from_peers: bool = True
    #: prefix_affinity: share of a prompt that must match for the match to decide.
    cache_threshold: float = Field(default=0.5, ge=0, le=1)
    #: prefix_affinity: the load is out of balance beyond both this difference and this ratio.
    balance_abs_threshold: int = Field(default=32, ge=0, le=1_000_000)
    balance_rel_threshold: float = Field(default=1.1, ge=1, le=1_000)
    #: dynamo_linear: what a cached block counts against a block to prefill.
    kv_overlap_score_weight: float = Field(default=1.0, ge=0, le=1_000)
    #: dynamo_linear: 0 takes the best worker, more draws by softmax.
    router_temperature: float = Field(default=0.0, ge=0, le=1_000)
    #: Of what policies draw.
    seed: int = Field(default=0, ge=0, le=2**63 - 1)
    #: Requests whose placements a router keeps for `moonpool explain`.
    num_kept_decisions: int = Field(default=256, ge=0, le=100_000)

    @field_validator("mode", mode="before")
    @classmethod
    def _allow_hyphens(cls, value: object) -> object:
        return value.replace("-", "_") if isinstance(value, str) else value


class ApiKeySettings(Section):
    """A key of the doors, and whose requests are those that come with it."""

    tenant: TenantName
    #: As clients send it; or, so that this file does not hold it, ...
    key: KeyText | None = Field(default=None, repr=False)
    #: ... its SHA-256 in hex.
    key_sha256: Annotated[str, StringConstraints(pattern=r"^[0-9a-fA-F]{64}$")] | None = Field(
        default=None, repr=False
    )

    @property
    def digest(self) -> bytes:
        """SHA-256 of the key."""
        if self.key is not None:
            return key_digest(self.key.encode())
        assert self.key_sha256 is not None, self
        return bytes.fromhex(self.key_sha256)

    @model_validator(mode="after")
    def _has_one_key(self) -> Self:
        if (self.key is None) == (self.key_sha256 is None):
            problem = "neither is set" if self.key is None else "both are set"
            raise ValueError(f"key, key_sha256: {problem}; allowed is exactly one of them")
        return self


class RouterSettings(Section):
    """The front door."""

    #: Address of both doors. Anything but loopback needs a key.
    host: Host = "127.0.0.1"
    http_port: Port = 8000
    grpc_port: Port = 8001
    #: Bearer key that clients must send, for the tenant `default`. Without any key everyone is that tenant who
    #: can reach the address.
    api_key: KeyText | None = Field(default=None, repr=False)
    #: More keys, each with its tenant, which may have several. They say nothing about the cluster: metrics, status
    #: and caches are for `api_key`.
    api_keys: tuple[ApiKeySettings, ...] = Field(default=(), max_length=256)
    #: The model's name at the door; the cluster's `model` if None.
    served_model_name: str | None = None
    #: Refuse unknown fields of a request instead of warning about them.
    is_strict: bool = False
    max_queued_requests: int = Field(default=256, ge=1, le=1_000_000)
    #: How much one tenant may take of the router's places for requests and of its queue. None: everything where the
    #: keys are of one tenant or there are none, else half.
    tenant_share: float | None = Field(default=None, gt=0, le=1)
    max_body_bytes: SizeBytes = Field(default=8 * 2**20, ge=1_024, le=64 * 2**20)
    #: Deadline of a request whose client sets none.
    request_timeout_s: float = Field(default=600.0, gt=0, le=86_400)
    #: How long a request may wait for a worker.
    queue_timeout_s: float = Field(default=60.0, gt=0, le=86_400)
    drain_timeout_s: float = Field(default=30.0, ge=0, le=3_600)
    #: Workers (host:port) to connect to beside those that announce themselves on the bus.
    seeds: tuple[Address, ...] = ()
    placement: PlacementSettings = PlacementSettings()
    cpus: CpuList = ()

    @property
    def has_keys(self) -> bool:
        """Clients must send one."""
        return self.api_key is not None or bool(self.api_keys)

    @property
    def max_tenant_share(self) -> float:
        """`tenant_share`, or what holds where it is not set."""
        if self.tenant_share is not None:
            return self.tenant_share
        tenants = {one.tenant for one in self.api_keys}
        if self.api_key is not None:
            tenants.add(DEFAULT_TENANT)
        return 1.0 if len(tenants) <= 1 else 0.5

    def door_keys(self, cluster_key: str) -> ApiKeys | None:
        """The keys that both doors take; None: there are none, and everyone may come in.

        Args:
            cluster_key: That of internal calls. With it whoever runs the cluster comes in, as the tenant
                `default`, also where only digests of keys are known.
        """
        if not self.has_keys:
            return None
        operators = {key_digest(cluster_key.encode()): DEFAULT_TENANT}
        if self.api_key is not None:
            operators[key_digest(self.api_key.encode())] = DEFAULT_TENANT
        tenants = {one.digest: one.tenant for one in self.api_keys}
        return ApiKeys(operators | tenants, operators=tuple(operators))

    @model_validator(mode="after")
    def _has_each_key_once(self) -> Self:
        names: dict[bytes, str] = {}
        if self.api_key is not None:
            names[key_digest(self.api_key.encode())] = "api_key"
        for index, one in enumerate(self.api_keys):
            name = f"api_keys[{index}]"
            earlier = names.setdefault(one.digest, name)
            if earlier != name:
                raise ValueError(f"{earlier} and {name} have the same key: each may be named once")
        return self

    @model_validator(mode="after")
    def _has_key_if_reachable(self) -> Self:
        if not self.has_keys and not is_loopback(self.host):
            raise ValueError(
                f"host = {self.host!r} can be reached by others: allowed with an api_key, "
                "without one only 127.0.0.1, ::1 and localhost"
            )
        return self


class WorkerSettings(Section):
    """A worker's limits; `[worker]` holds the defaults of all, `[[workers]]` overrides."""

    host: Host = "127.0.0.1"
    port: Port = 0
    #: Of /metrics and /livez on 127.0.0.1; 0 takes a free one (logged when ready), `off` opens none.
    metrics_port: Port | Literal["off"] = 0
    #: What peers dial; `host` if None.
    advertise_host: Host | None = None
    #: What the engine computes on: `cpu`, `cuda`, or one of several GPUs, `cuda:1`. A GPU has a pool of its own;
    #: the one in memory, which others read, is as large.
    device: DeviceName = "cpu"
    #: Take what has never run where it is meant to run: ARCHITECTURE.md says what that is.
    allow_unverified: bool = False
    #: Tokens of a KV block: part of the cache key, equal on all workers.
    block_size: int = 16
    #: Blocks of the pool. None: as many as fit in `kv_cache_memory_bytes`.
    num_blocks: int | None = Field(default=None, ge=2, le=2**31 - 1)
    kv_cache_memory_bytes: SizeBytes = Field(default=512 * 2**20, ge=2**16)
    #: Which cached block goes first when the pool is full: the least recently used; by S3-FIFO, which keeps
    #: what is used again from being pushed out by what is used once; or by `lfu_aged`, for which each time that
    #: it was found is a later use.
    kv_eviction_policy: EvictionPolicyName = "lru"
    #: Token budget of one step.
    max_num_batched_tokens: int = Field(default=2_048, ge=1, le=2**20)
    #: Most requests in one step.
    max_num_seqs: int = Field(default=64, ge=1, le=4_096)
    #: Longest prompt + answer; the model's own limit if None.
    max_model_len: int | None = Field(default=None, ge=2, le=2**20)
    #: A prefill queue of this many steps of work is full.
    max_queued_steps: int = Field(default=2, ge=1, le=64)
    #: Expected growth of a running request, kept free when a new one is taken.
    headroom_tokens: int = Field(default=32, ge=0, le=65_536)
    #: Layers that a prefill announces at once.
    layers_per_group: int = Field(default=1, ge=1, le=1_024)
    #: In order of preference. The one that is taken is announced. On a GPU `cuda_ipc` comes first by default.
    transports: tuple[TransportName, ...] = Field(default=("shm", "grpc"), min_length=1)
    #: Fail instead of falling back to a later transport.
    is_transport_strict: bool = False
    #: Read prefixes that a peer holds: `auto` when that is believed to be faster than computing them,
    #: `always` whenever the router names a peer, `never`.
    kv_peer_reads: Literal["auto", "always", "never"] = "auto"
    #: Offer blocks to the cluster's stores, if there are any.
    kv_offload: bool = True
    #: CPUs of the engine process and of the service process; empty: the supervisor decides.
    engine_cpus: CpuList = ()
    service_cpus: CpuList = ()
    drain_timeout_s: float = Field(default=120.0, ge=0, le=3_600)
    #: Check all invariants after every step (tests, debugging).
    is_checked: bool = False

    @field_validator("block_size")
    @classmethod
    def _is_block_size(cls, value: int) -> int:
        if value not in _BLOCK_SIZES:
            raise ValueError(f"allowed are {', '.join(map(str, _BLOCK_SIZES))}")
        return value

    @model_validator(mode="before")
    @classmethod
    def _reads_gpus(cls, data: Any) -> Any:  # Any: pydantic gives what it was given
        if isinstance(data, dict) and data.get("device", "cpu") != "cpu":
            return {"transports": ("cuda_ipc", "shm", "grpc"), **data}
        return data

    @field_validator("transports", mode="before")
    @classmethod
    def _split_names(cls, value: object) -> object:
        return _split_names(value)

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        _check_transports(self.transports, device=self.device)
        _check_address(self.host, self.advertise_host)
        if self.device != "cpu" and not self.allow_unverified:
            raise ValueError(
                f"device = {self.device!r}: nobody has run this path on a GPU yet; allowed only with "
                "allow_unverified = true (--allow-unverified)"
            )
        if self.max_num_seqs > self.max_num_batched_tokens:
            raise ValueError(
                f"max_num_seqs = {self.max_num_seqs}: allowed is at most max_num_batched_tokens "
                f"= {self.max_num_batched_tokens}, since each running request takes a token a step"
            )
        if self.max_num_batched_tokens < self.block_size:
            raise ValueError(
                f"max_num_batched_tokens = {self.max_num_batched_tokens}: allowed is at least "
                f"block_size = {self.block_size}, since a chunk of a prompt ends on a block's edge"
            )
        return self


class TenantSettings(Section):
    """What one tenant may count on, and at most hold, of each store's memory. The others share the rest."""

    tenant: TenantName
    #: Nobody else's blocks push it below this.
    floor_bytes: SizeBytes = Field(default=0, ge=0)
    #: It holds at most this; None: whatever the others leave.
    max_bytes: SizeBytes | None = Field(default=None, ge=0)

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        if self.max_bytes is not None and self.max_bytes < self.floor_bytes:
            raise ValueError(
                f"max_bytes = {self.max_bytes}: allowed is at least floor_bytes = {self.floor_bytes}"
            )
        return self


class StoreSettings(Section):
    """A store node's limits; `[store]` holds the defaults of all, `[[stores]]` overrides."""

    host: Host = "127.0.0.1"
    port: Port = 0
    #: As a worker's.
    metrics_port: Port | Literal["off"] = 0
    advertise_host: Host | None = None
    #: Memory that holds blocks. All of it is taken at the start.
    host_bytes: SizeBytes = Field(default=2**30, ge=2**16)
    #: An existing directory on an SSD, in which each node makes one of its own; None: memory only.
    ssd_dir: Path | None = None
    ssd_bytes: SizeBytes = Field(default=4 * 2**30, ge=2**20)
    #: What may be written to the SSD in a day, since writing wears it out; 0: without a limit.
    ssd_write_bytes_per_day: SizeBytes = Field(default=256 * 2**30, ge=0)
    #: Which blocks are written to the SSD: `all`, `second_hit` (what is seen twice), or `budget` (all while
    #: plenty may be written, then only what is seen often).
    ssd_admission: DiskAdmissionName = "budget"
    #: Refuse to start without the SSD, instead of serving from memory alone.
    is_ssd_strict: bool = False
    #: Tenants that have a part of the memory of their own.
    tenants: tuple[TenantSettings, ...] = Field(default=(), max_length=64)
    #: As a worker's: how blocks are read from workers that offer them, in order of preference.
    transports: tuple[TransportName, ...] = Field(default=("shm", "grpc"), min_length=1)
    is_transport_strict: bool = False
    #: As a worker's: the order in which blocks leave the memory.
    kv_eviction_policy: EvictionPolicyName = "lfu_aged"
    #: `redis://[user:password@]host:port/db`, where several nodes find each other (`rediss://` for TLS, or
    #: `unix://`); None: each is alone. Whoever may write there may name addresses that nodes connect to.
    redis_url: str | None = Field(default=None, repr=False)
    #: CPUs of the process; empty: the supervisor decides.
    cpus: CpuList = ()
    drain_timeout_s: float = Field(default=30.0, ge=0, le=3_600)
    #: Check all invariants after every step (tests, debugging).
    is_checked: bool = False

    @field_validator("redis_url")
    @classmethod
    def _is_redis_url(cls, value: str | None) -> str | None:
        if value and not value.startswith(("redis://", "rediss://", "unix://")):
            raise ValueError("allowed is a url like redis://127.0.0.1:6379/0")
        return value or None

    @field_validator("ssd_dir", mode="before")
    @classmethod
    def _is_named(cls, value: object) -> object:
        return None if value == "" else value

    @field_validator("ssd_dir")
    @classmethod
    def _expand(cls, value: Path | None) -> Path | None:
        return value.expanduser().absolute() if value is not None else None

    @field_validator("transports", mode="before")
    @classmethod
    def _split_names(cls, value: object) -> object:
        return _split_names(value)

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        _check_transports(self.transports)
        _check_address(self.host, self.advertise_host)
        names = [one.tenant for one in self.tenants]
        if len(set(names)) != len(names):
            raise ValueError(f"tenants = {names}: each may be named once")
        floors = sum(one.floor_bytes for one in self.tenants)
        if floors > self.host_bytes:
            raise ValueError(
                f"tenants: their floor_bytes are {floors} together; allowed is at most host_bytes "
                f"= {self.host_bytes}"
            )
        return self


class StoreGroup(Section):
    """Store nodes that are alike. `settings` is `[store]` with this group's own keys over it."""

    count: int = Field(default=1, ge=1, le=256)
    #: Node ids are `<name>-<index>`.
    name: ClusterName = "store"
    settings: StoreSettings = StoreSettings()


class WorkerGroup(Section):
    """Workers of one role. `settings` is `[worker]` with this group's own keys over it."""

    role: RoleName
    count: int = Field(default=1, ge=1, le=256)
    #: Worker ids are `<name>-<index>`; the role if None.
    name: ClusterName | None = None
    settings: WorkerSettings = WorkerSettings()


class TelemetrySettings(Section):
    """Logs, metrics, traces."""

    #: OTLP/gRPC endpoint (vLLM's --otlp-traces-endpoint); None keeps traces in memory only.
    otlp_traces_endpoint: str | None = None
    #: Requests whose traces a router keeps for `moonpool trace`.
    num_kept_traces: int = Field(default=256, ge=0, le=100_000)
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    #: `auto`: text on a terminal, JSON lines elsewhere.
    log_format: Literal["auto", "console", "json"] = "auto"

    @field_validator("otlp_traces_endpoint")
    @classmethod
    def _is_http_url(cls, value: str | None) -> str | None:
        if value and not value.startswith(("http://", "https://")):
            raise ValueError("allowed is a url like http://127.0.0.1:4317")
        return value or None


class ClusterConfig(Section):
    """The whole file."""

    #: Part of every bus subject: clusters with different names can share a broker.
    name: ClusterName = "local"
    #: Models and the cluster's secret.
    data_dir: Path = Field(default_factory=lambda: default_data_dir(os.environ))
    #: A name that `moonpool pull` knows, or a directory.
    model: Annotated[str, StringConstraints(min_length=1, max_length=4_096)] = "smollm2-135m"
    dtype: Dtype = "bfloat16"
    #: What is computed in. auto: the dtype, but float32 where this machine's CPU has no bfloat16 products.
    compute_dtype: ComputeDtype = "auto"
    #: int8: linears' weights in 1 byte each, and a scale for each output.
    quantization: Quantization = "none"
    #: What KV is kept in: as the model is (auto), or in 1 byte a value, which only GPUs compute with.
    kv_cache_dtype: KvCacheDtype = "auto"
    #: Uncached tokens up to which a decode worker prefills itself.
    local_prefill_tokens: int = Field(default=256, ge=0, le=2**20)
    nats: NatsSettings = NatsSettings()
    router: RouterSettings = RouterSettings()
    worker: WorkerSettings = WorkerSettings()
    workers: tuple[WorkerGroup, ...] = Field(
        default=(WorkerGroup(role="prefill"), WorkerGroup(role="decode"))
    )
    store: StoreSettings = StoreSettings()
    #: None: what workers evict is gone. A number stands for so many nodes that are alike.
    stores: tuple[StoreGroup, ...] = ()
    telemetry: TelemetrySettings = TelemetrySettings()
    #: Places at which processes break on purpose; refused unless `unsafe_failpoints` is set.
    failpoints: str = ""
    unsafe_failpoints: bool = False

    @property
    def is_any_worker_on_gpu(self) -> bool:
        return any(group.settings.device != "cpu" for group in self.workers)

    @field_validator("data_dir")
    @classmethod
    def _expand(cls, value: Path) -> Path:
        return value.expanduser().absolute()

    @model_validator(mode="before")
    @classmethod
    def _spread_defaults(cls, data: Any) -> Any:  # Any: pydantic gives what it was given
        """A group's own keys over `[worker]` or `[store]`: the merged table is what is checked."""
        if not isinstance(data, dict):
            return data
        workers = data.get("workers", [{"role": "prefill"}, {"role": "decode"}])
        stores = _counted(data.get("stores", ()))
        return {
            **data,
            "workers": _spread_all(workers, data.get("worker", {}), WorkerSettings),
            "stores": _spread_all(stores, data.get("store", {}), StoreSettings),
        }

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        if self.failpoints and not self.unsafe_failpoints:
            raise ValueError("failpoints are set: allowed only with unsafe_failpoints = true")
        if not self.workers:
            raise ValueError("workers: a cluster needs at least one")
        names = [group.name or group.role for group in self.workers]
        for name in names:
            if names.count(name) > 1:
                raise ValueError(f"workers: two groups are named {name!r}: give each its own name")
        for group in self.stores:
            names.append(group.name)
            if names.count(group.name) > 1:
                raise ValueError(
                    f"stores: another group is named {group.name!r}: give each its own name"
                )
        if self.kv_cache_dtype != "auto" and any(
            group.settings.device == "cpu" for group in self.workers
        ):
            raise ValueError(
                f"kv_cache_dtype = {self.kv_cache_dtype!r}: allowed only if all workers are on a GPU"
            )
        if self.dtype == "float32" and self.compute_dtype == "bfloat16":
            raise ValueError("compute_dtype = 'bfloat16': allowed only with dtype = 'bfloat16'")
        if self.is_any_worker_on_gpu:
            if self.compute_dtype == "float32":
                raise ValueError("compute_dtype = 'float32': allowed only for workers on CPUs")
            if self.dtype != "bfloat16":
                raise ValueError(
                    f"dtype = {self.dtype!r}: workers on a GPU compute in bfloat16 only"
                )
            if self.quantization != "none":
                raise ValueError(
                    f"quantization = {self.quantization!r}: allowed only for workers on CPUs"
                )
        sizes = {group.settings.block_size for group in self.workers}
        if len(sizes) > 1:
            raise ValueError(
                f"block_size = {sorted(sizes)}: all workers need the same, it is part of the key"
            )
        return self


#: Of groups of workers and of stores; all others are settings.
GROUP_KEYS = frozenset({"role", "count", "name", "settings"})


def _counted(stores: Any) -> Any:  # Any: unchecked input
    """`stores = 2`: that many, as `[store]` says."""
    if isinstance(stores, str) and stores.strip().isdecimal():
        stores = int(stores)
    if isinstance(stores, int) and not isinstance(stores, bool):
        return [{"count": stores}] if stores else []
    return stores


def _spread_all(groups: Any, base: Any, settings: type[Section]) -> Any:  # Any: unchecked input
    if isinstance(base, settings):
        base = base.model_dump()
    if not isinstance(base, dict) or not isinstance(groups, list | tuple):
        return groups
    return [_spread(group, base) for group in groups]


def _spread(group: Any, base: dict[str, Any]) -> Any:  # Any: unchecked input
    if not isinstance(group, dict):
        return group
    own = {key: value for key, value in group.items() if key not in GROUP_KEYS}
    given = group.get("settings", {})
    if isinstance(given, Section):
        given = given.model_dump(exclude_unset=True)
    kept = {key: value for key, value in group.items() if key in GROUP_KEYS}
    if not isinstance(given, dict):
        return kept
    return {**kept, "settings": {**base, **given, **own}}
