"""How a worker and a router introduce themselves, and a worker's load and ledger <-> protobuf."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from moonpool.api.v1 import worker_pb2 as pb
from moonpool.core.protocol import BlockLedger
from moonpool.errors import FailedPreconditionError
from moonpool.ids import WorkerKey
from moonpool.kv.block_hash import ModelNamespace
from moonpool.kv.region import KvRegion
from moonpool.routing.worker_view import WorkerFits, WorkerLoad, WorkerRole
from moonpool.wire.fields import address, between, invalid, name, text
from moonpool.wire.fits import fits_from_pb, fits_to_pb
from moonpool.wire.layout import region_from_pb, region_to_pb
from moonpool.wire.request import worker_key_from_pb, worker_key_to_pb

#: A peer with another major is refused; a higher minor only adds.
PROTOCOL_MAJOR = 1
PROTOCOL_MINOR = 0

_MAX_REGIONS = 64

_PB_BY_ROLE: dict[WorkerRole, pb.Role] = {
    WorkerRole.PREFILL: pb.ROLE_PREFILL,
    WorkerRole.DECODE: pb.ROLE_DECODE,
    WorkerRole.BOTH: pb.ROLE_BOTH,
    WorkerRole.STORE: pb.ROLE_STORE,
}
_ROLE_BY_PB: dict[int, WorkerRole] = {value: role for role, value in _PB_BY_ROLE.items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterHello:
    """First on a Session stream."""

    router_id: str
    #: What the router believes is served; None if it has no opinion (it adopts the worker's).
    namespace: ModelNamespace | None
    secret_fingerprint: str


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerHello:
    """Who lives at an address: the answer to a router's hello, and to Describe."""

    worker: WorkerKey
    role: WorkerRole
    #: Name at the door; the namespace has the fingerprint.
    model: str
    namespace: ModelNamespace
    secret_fingerprint: str
    #: One per rank.
    regions: tuple[KvRegion, ...]
    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    grpc_address: str
    version: str
    #: Which cached block goes first; empty if it does not say.
    kv_eviction_policy: str = ""


class LoadValues(Protocol):
    """What is needed of a worker's own load value."""

    @property
    def ledger(self) -> BlockLedger: ...
    @property
    def num_queued_tokens(self) -> int: ...
    @property
    def step_age_ms(self) -> int: ...
    @property
    def is_draining(self) -> bool: ...
    @property
    def fits(self) -> WorkerFits | None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadReport:
    """A worker's load as a router reads it. Quarantined blocks count as referenced."""

    ledger: BlockLedger
    num_queued_tokens: int = 0
    step_age_ms: int = 0
    is_draining: bool = False
    #: None: those that were told before still hold.
    fits: WorkerFits | None = None

    @property
    def worker_load(self) -> WorkerLoad:
        """The part that placement looks at."""
        ledger = self.ledger
        return WorkerLoad(
            num_total_blocks=ledger.num_total,
            num_available_blocks=ledger.num_free + ledger.num_cached,
            num_free_blocks=ledger.num_free,
            num_requests=ledger.num_running + ledger.num_waiting + ledger.num_reserved,
            num_prefills=ledger.num_prefills,
            num_queued_tokens=self.num_queued_tokens,
            is_draining=self.is_draining,
            fits=self.fits,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class LedgerReport:
    """The ledger and the service process's own counts: what is quiet is zero."""

    worker: WorkerKey
    ledger: BlockLedger
    num_handoffs: int = 0
    num_open_streams: int = 0
    num_reads: int = 0
    num_router_sessions: int = 0

    @property
    def is_quiet(self) -> bool:
        """Nothing is held anywhere on this worker. Router sessions may stand."""
        return self.ledger.is_quiet and not (
            self.num_handoffs or self.num_open_streams or self.num_reads
        )


def check_protocol(major: int, peer: str) -> None:
    """Raise FailedPreconditionError unless the peer speaks our major."""
    if major != PROTOCOL_MAJOR:
        raise FailedPreconditionError(
            f"{peer} speaks protocol {major}; this process speaks {PROTOCOL_MAJOR}: "
            "run one version of Moonpool in the cluster",
            code="incompatible_protocol",
            param="protocol_major",
        )


def router_hello_to_pb(hello: RouterHello) -> pb.RouterHello:
    return pb.RouterHello(
        protocol_major=PROTOCOL_MAJOR,
        protocol_minor=PROTOCOL_MINOR,
        router_id=hello.router_id,
        namespace=namespace_to_pb(hello.namespace) if hello.namespace is not None else None,
        secret_fingerprint=hello.secret_fingerprint,
    )


def router_hello_from_pb(message: pb.RouterHello) -> RouterHello:
    """Raises InvalidMessageError, and FailedPreconditionError for another protocol."""
    check_protocol(message.protocol_major, "The router")
    return RouterHello(
        router_id=name(message.router_id, "router_id"),
        namespace=namespace_from_pb(message.namespace, "namespace")
        if message.HasField("namespace")
        else None,
        secret_fingerprint=text(message.secret_fingerprint, "secret_fingerprint", max_length=64),
    )


def worker_hello_to_pb(hello: WorkerHello) -> pb.WorkerHello:
    return pb.WorkerHello(
        protocol_major=PROTOCOL_MAJOR,
        protocol_minor=PROTOCOL_MINOR,
        worker=worker_key_to_pb(hello.worker),
        role=_PB_BY_ROLE[hello.role],
        namespace=namespace_to_pb(hello.namespace, model=hello.model),
        secret_fingerprint=hello.secret_fingerprint,
        regions=[region_to_pb(region) for region in hello.regions],
        max_model_len=hello.max_model_len,
        max_num_seqs=hello.max_num_seqs,
        max_num_batched_tokens=hello.max_num_batched_tokens,
        grpc_address=hello.grpc_address,
        version=hello.version,
        kv_eviction_policy=hello.kv_eviction_policy,
    )


def worker_hello_from_pb(message: pb.WorkerHello) -> WorkerHello:
    """Raises InvalidMessageError, and FailedPreconditionError for another protocol."""
    check_protocol(message.protocol_major, "The worker")
    if not 1 <= len(message.regions) <= _MAX_REGIONS:
        raise invalid("regions", f"are {len(message.regions)}; allowed is 1 to {_MAX_REGIONS}")
    return WorkerHello(
        worker=worker_key_from_pb(message.worker, "worker"),
        role=role_from_pb(message.role, "role"),
        model=text(message.namespace.model, "namespace.model"),
        namespace=namespace_from_pb(message.namespace, "namespace"),
        secret_fingerprint=text(message.secret_fingerprint, "secret_fingerprint", max_length=64),
        regions=tuple(
            region_from_pb(region, f"regions[{index}]")
            for index, region in enumerate(message.regions)
        ),
        max_model_len=between(message.max_model_len, "max_model_len", low=1, high=2**31 - 1),
        max_num_seqs=between(message.max_num_seqs, "max_num_seqs", low=1, high=2**31 - 1),
        max_num_batched_tokens=between(
            message.max_num_batched_tokens, "max_num_batched_tokens", low=1, high=2**31 - 1
        ),
        grpc_address=address(message.grpc_address, "grpc_address"),
        version=text(message.version, "version", max_length=64),
        kv_eviction_policy=text(message.kv_eviction_policy, "kv_eviction_policy", max_length=64),
    )


def namespace_to_pb(namespace: ModelNamespace, *, model: str = "") -> pb.ModelNamespace:
    return pb.ModelNamespace(
        model=model,
        fingerprint=namespace.model_fingerprint,
        kv_dtype=namespace.kv_dtype,
        block_size=namespace.block_size,
        extra={
            "compute_dtype": namespace.compute_dtype,
            "kv_scales_digest": namespace.kv_scales_digest,
        },
    )


def namespace_from_pb(message: pb.ModelNamespace, path: str = "namespace") -> ModelNamespace:
    """Raises InvalidMessageError; FailedPreconditionError for a fact that is unknown here.

    A fact that changes values and that we do not know cannot be compared: it must not be ignored.
    """
    extra = dict(message.extra)
    namespace = ModelNamespace(
        model_fingerprint=name(message.fingerprint, f"{path}.fingerprint"),
        compute_dtype=name(extra.pop("compute_dtype", ""), f"{path}.extra.compute_dtype"),
        kv_dtype=name(message.kv_dtype, f"{path}.kv_dtype"),
        kv_scales_digest=text(
            extra.pop("kv_scales_digest", ""), f"{path}.extra.kv_scales_digest", max_length=128
        ),
        block_size=between(message.block_size, f"{path}.block_size", low=1, high=1_024),
    )
    unknown = sorted(key for key, value in extra.items() if value)
    if unknown:
        raise FailedPreconditionError(
            f"{path}.extra has {unknown[0][:64]!r}, which changes KV values in a way that this version "
            "does not know",
            param=f"{path}.extra",
        )
    return namespace


def role_to_pb(role: WorkerRole) -> pb.Role:
    return _PB_BY_ROLE[role]


def role_from_pb(value: int, path: str = "role") -> WorkerRole:
    """Raises InvalidMessageError."""
    role = _ROLE_BY_PB.get(value)
    if role is None:
        raise invalid(path, f"is {value}, which this version does not know")
    return role


def load_to_pb(load: LoadValues, *, tells_fits: bool = False) -> pb.Load:
    """Args: tells_fits: Take along what was learnt of times, if there is news of it."""
    ledger = load.ledger
    return pb.Load(
        num_total_blocks=ledger.num_total,
        num_free_blocks=ledger.num_free,
        num_cached_blocks=ledger.num_cached,
        num_running=ledger.num_running,
        num_waiting=ledger.num_waiting,
        num_reserved=ledger.num_reserved,
        num_prefills=ledger.num_prefills,
        num_queued_tokens=load.num_queued_tokens,
        step_age_ms=load.step_age_ms,
        is_draining=load.is_draining,
        fits=fits_to_pb(load.fits) if tells_fits and load.fits is not None else None,
    )


def load_from_pb(message: pb.Load, path: str = "load") -> LoadReport:
    """Raises InvalidMessageError."""
    total = message.num_total_blocks
    free = between(message.num_free_blocks, f"{path}.num_free_blocks", low=0, high=total)
    cached = between(
        message.num_cached_blocks, f"{path}.num_cached_blocks", low=0, high=total - free
    )
    return LoadReport(
        ledger=BlockLedger(
            num_total=total,
            num_free=free,
            num_cached=cached,
            num_referenced=total - free - cached,
            num_running=message.num_running,
            num_waiting=message.num_waiting,
            num_reserved=message.num_reserved,
            num_prefills=message.num_prefills,
        ),
        num_queued_tokens=message.num_queued_tokens,
        step_age_ms=message.step_age_ms,
        is_draining=message.is_draining,
        fits=fits_from_pb(message.fits, f"{path}.fits") if message.HasField("fits") else None,
    )


def ledger_to_pb(report: LedgerReport) -> pb.LedgerReply:
    ledger = report.ledger
    return pb.LedgerReply(
        worker=worker_key_to_pb(report.worker),
        num_total=ledger.num_total,
        num_free=ledger.num_free,
        num_cached=ledger.num_cached,
        num_referenced=ledger.num_referenced,
        num_running=ledger.num_running,
        num_waiting=ledger.num_waiting,
        num_reserved=ledger.num_reserved,
        num_prefills=ledger.num_prefills,
        num_quarantined=ledger.num_quarantined,
        num_handoffs=report.num_handoffs,
        num_open_streams=report.num_open_streams,
        num_reads=report.num_reads,
        num_router_sessions=report.num_router_sessions,
        is_quiet=report.is_quiet,
        num_prefix_locks=ledger.num_prefix_locks,
    )


def ledger_from_pb(message: pb.LedgerReply) -> LedgerReport:
    """Raises InvalidMessageError: also for a ledger that does not add up."""
    ledger = BlockLedger(
        num_total=message.num_total,
        num_free=message.num_free,
        num_cached=message.num_cached,
        num_referenced=message.num_referenced,
        num_running=message.num_running,
        num_waiting=message.num_waiting,
        num_reserved=message.num_reserved,
        num_prefills=message.num_prefills,
        num_quarantined=message.num_quarantined,
        num_prefix_locks=message.num_prefix_locks,
    )
    if ledger.num_free + ledger.num_cached + ledger.num_referenced != ledger.num_total:
        raise invalid("num_total", "is not the sum of free, cached and referenced blocks")
    report = LedgerReport(
        worker=worker_key_from_pb(message.worker, "worker"),
        ledger=ledger,
        num_handoffs=message.num_handoffs,
        num_open_streams=message.num_open_streams,
        num_reads=message.num_reads,
        num_router_sessions=message.num_router_sessions,
    )
    if report.is_quiet != message.is_quiet:
        raise invalid("is_quiet", "contradicts the counts")
    return report
