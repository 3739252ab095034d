"""A store node's own service <-> protobuf: offers of blocks, pins, and what the node says of its tiers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from moonpool.api.v1 import store_pb2 as pb
from moonpool.handoff.messages import SourceRef
from moonpool.ids import BlockHash, WorkerKey
from moonpool.tiering.breaker import BreakerState
from moonpool.tiering.protocol import PinKind, PutRefusal, StoreStats, TenantUse
from moonpool.wire.fields import (
    MAX_TOKENS,
    address,
    between,
    invalid,
    known,
    name,
    text,
    whole_milliseconds,
)
from moonpool.wire.prefix_read import HASH_BYTES
from moonpool.wire.request import worker_key_from_pb, worker_key_to_pb

#: Beyond it a put is no put any more.
MAX_DEADLINE_S = 600.0
#: Whoever wants longer asks again.
MAX_PIN_S = 86_400.0

_MAX_TENANTS = 1_024
_REFUSALS = {reason.value: reason for reason in PutRefusal}
_PIN_KINDS = {kind.value: kind for kind in PinKind}
_BREAKERS = {state.value: state for state in BreakerState}


@dataclass(frozen=True, slots=True, kw_only=True)
class PutOffer:
    """A worker, or another store, offers a chain of blocks that it holds."""

    #: Who is meant.
    store: WorkerKey
    tenant: str
    #: The chain from its start.
    hashes: tuple[BlockHash, ...]
    #: Who holds it.
    source: SourceRef
    #: Remaining time for all of it, reading included.
    deadline_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class PutAnswer:
    """What will become of an offer."""

    #: Blocks that will be read; 0 if it has them all, or refuses.
    num_wanted_blocks: int
    refusal: PutRefusal | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class PinChain:
    """Somebody wants the leading run of a chain that lies in a store kept in its memory."""

    #: Who is meant.
    store: WorkerKey
    kind: PinKind
    #: The chain from its start.
    hashes: tuple[BlockHash, ...]
    ttl_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class PinAnswer:
    """What was pinned."""

    pin_id: int
    #: Of the chain; 0: none lies there, or too much is pinned.
    num_blocks: int


@dataclass(frozen=True, slots=True, kw_only=True)
class UnpinChain:
    """Nobody wants that any more."""

    store: WorkerKey
    pin_id: int


@dataclass(frozen=True, slots=True, kw_only=True)
class DiskReport:
    """The disk of a store, beside what its core counts."""

    capacity_bytes: int
    #: Of all files.
    file_bytes: int
    #: Since the start; the log's own marks included.
    written_bytes: int
    read_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreReport:
    """All that a store node says of its tiers."""

    store: WorkerKey
    #: KV of one block, all layers.
    block_bytes: int
    #: Of the memory.
    num_total_blocks: int
    stats: StoreStats
    #: None: memory only.
    disk: DiskReport | None = None
    #: Why there is no disk although there should be, or why it takes nothing; empty if all is well.
    problem: str = ""


def put_offer_to_pb(offer: PutOffer) -> pb.PutRequest:
    """As it is sent; its deadline is rounded up to a millisecond."""
    return pb.PutRequest(
        store=worker_key_to_pb(offer.store),
        tenant=offer.tenant,
        hashes=offer.hashes,
        source=worker_key_to_pb(offer.source.key),
        source_address=offer.source.address,
        deadline_ms=max(1, whole_milliseconds(offer.deadline_s)),
    )


def put_offer_from_pb(message: pb.PutRequest) -> PutOffer:
    """Raises InvalidMessageError."""
    deadline_ms = between(
        message.deadline_ms, "deadline_ms", low=1, high=round(MAX_DEADLINE_S * 1_000)
    )
    return PutOffer(
        store=worker_key_from_pb(message.store, "store"),
        tenant=name(message.tenant, "tenant"),
        hashes=_chain(message.hashes),
        source=SourceRef(
            key=worker_key_from_pb(message.source, "source"),
            address=address(message.source_address, "source_address"),
        ),
        deadline_s=deadline_ms / 1_000,
    )


def _chain(values: Sequence[bytes]) -> tuple[BlockHash, ...]:
    if not 1 <= len(values) <= MAX_TOKENS:
        raise invalid("hashes", f"are {len(values)}; allowed is 1 to {MAX_TOKENS}")
    if any(len(value) != HASH_BYTES for value in values):
        raise invalid("hashes", f"has one that is not {HASH_BYTES} bytes long")
    return tuple(map(BlockHash, values))


def put_answer_to_pb(answer: PutAnswer) -> pb.PutReply:
    """As it is sent."""
    return pb.PutReply(
        num_wanted_blocks=answer.num_wanted_blocks,
        refusal=answer.refusal.value if answer.refusal is not None else "",
    )


def put_answer_from_pb(message: pb.PutReply) -> PutAnswer:
    """Raises InvalidMessageError: also for a refusal that wants blocks."""
    refusal = known(_REFUSALS, message.refusal, "refusal") if message.refusal else None
    if refusal is not None and message.num_wanted_blocks:
        raise invalid("num_wanted_blocks", f"is {message.num_wanted_blocks} beside a refusal")
    return PutAnswer(
        num_wanted_blocks=between(
            message.num_wanted_blocks, "num_wanted_blocks", low=0, high=MAX_TOKENS
        ),
        refusal=refusal,
    )


def pin_chain_to_pb(pin: PinChain) -> pb.PinRequest:
    """As it is sent; its time is rounded up to a millisecond."""
    return pb.PinRequest(
        store=worker_key_to_pb(pin.store),
        hashes=pin.hashes,
        kind=pin.kind.value,
        ttl_ms=max(1, whole_milliseconds(pin.ttl_s)),
    )


def pin_chain_from_pb(message: pb.PinRequest) -> PinChain:
    """Raises InvalidMessageError."""
    ttl_ms = between(message.ttl_ms, "ttl_ms", low=1, high=round(MAX_PIN_S * 1_000))
    return PinChain(
        store=worker_key_from_pb(message.store, "store"),
        kind=known(_PIN_KINDS, message.kind, "kind"),
        hashes=_chain(message.hashes),
        ttl_s=ttl_ms / 1_000,
    )


def pin_answer_to_pb(answer: PinAnswer) -> pb.PinReply:
    """As it is sent."""
    return pb.PinReply(pin_id=answer.pin_id, num_blocks=answer.num_blocks)


def pin_answer_from_pb(message: pb.PinReply) -> PinAnswer:
    """Raises InvalidMessageError."""
    return PinAnswer(
        pin_id=message.pin_id,
        num_blocks=between(message.num_blocks, "num_blocks", low=0, high=MAX_TOKENS),
    )


def unpin_chain_to_pb(unpin: UnpinChain) -> pb.UnpinRequest:
    """As it is sent."""
    return pb.UnpinRequest(store=worker_key_to_pb(unpin.store), pin_id=unpin.pin_id)


def unpin_chain_from_pb(message: pb.UnpinRequest) -> UnpinChain:
    """Raises InvalidMessageError."""
    return UnpinChain(store=worker_key_from_pb(message.store, "store"), pin_id=message.pin_id)


def store_report_to_pb(report: StoreReport) -> pb.StoreStatsReply:
    """As it is sent."""
    stats, disk = report.stats, report.disk
    return pb.StoreStatsReply(
        store=worker_key_to_pb(report.store),
        block_bytes=report.block_bytes,
        host=pb.HostTier(
            num_total_blocks=report.num_total_blocks,
            num_blocks=stats.num_host_blocks,
            num_pinned_blocks=stats.num_pinned_blocks,
            num_hit_blocks=stats.num_hit_host_blocks,
            num_evicted_blocks=stats.num_evicted_blocks,
            num_demoted_blocks=stats.num_demoted_blocks,
        ),
        disk=_disk_to_pb(stats, disk) if disk is not None else None,
        problem=report.problem,
        num_gets=stats.num_gets,
        num_missed_gets=stats.num_missed_gets,
        num_short_gets=stats.num_short_gets,
        num_puts=stats.num_puts,
        num_put_blocks=stats.num_put_blocks,
        num_known_puts=stats.num_known_puts,
        num_expired_puts=stats.num_expired_puts,
        refused_puts=[
            pb.RefusedPuts(reason=reason.value, num_puts=num_puts)
            for reason, num_puts in stats.num_refused_puts
        ],
        tenants=[
            pb.TenantUse(
                tenant=use.tenant,
                num_blocks=use.num_blocks,
                floor_blocks=use.floor_blocks,
                max_blocks=use.max_blocks,
            )
            for use in stats.tenants
        ],
    )


def store_report_from_pb(message: pb.StoreStatsReply) -> StoreReport:
    """Raises InvalidMessageError. Without a disk its counts are 0."""
    if len(message.tenants) > _MAX_TENANTS:
        raise invalid("tenants", f"are {len(message.tenants)}; allowed is {_MAX_TENANTS}")
    if len(message.refused_puts) > len(_REFUSALS):
        raise invalid("refused_puts", "has more reasons than there are")
    host, disk = message.host, message.disk
    has_disk = message.HasField("disk")
    return StoreReport(
        store=worker_key_from_pb(message.store, "store"),
        block_bytes=message.block_bytes,
        num_total_blocks=host.num_total_blocks,
        problem=text(message.problem, "problem"),
        disk=DiskReport(
            capacity_bytes=disk.capacity_bytes,
            file_bytes=disk.file_bytes,
            written_bytes=disk.written_bytes,
            read_bytes=disk.read_bytes,
        )
        if has_disk
        else None,
        stats=StoreStats(
            num_host_blocks=host.num_blocks,
            num_pinned_blocks=host.num_pinned_blocks,
            num_hit_host_blocks=host.num_hit_blocks,
            num_evicted_blocks=host.num_evicted_blocks,
            num_demoted_blocks=host.num_demoted_blocks,
            num_disk_blocks=disk.num_blocks,
            num_hit_disk_blocks=disk.num_hit_blocks,
            num_reclaimed_blocks=disk.num_reclaimed_blocks,
            num_unwritten_blocks=disk.num_unwritten_blocks,
            num_loading_blocks=disk.num_loading_blocks,
            num_written_blocks=disk.num_written_blocks,
            num_failed_write_blocks=disk.num_failed_write_blocks,
            num_loaded_blocks=disk.num_loaded_blocks,
            num_failed_load_blocks=disk.num_failed_load_blocks,
            num_bad_blocks=disk.num_bad_blocks,
            num_unadmitted_blocks=disk.num_unadmitted_blocks,
            write_budget_bytes=disk.write_budget_bytes
            if disk.HasField("write_budget_bytes")
            else None,
            write_budget_max_bytes=disk.write_budget_max_bytes
            if disk.HasField("write_budget_max_bytes")
            else None,
            disk_reads=known(_BREAKERS, disk.reads, "disk.reads")
            if has_disk
            else BreakerState.CLOSED,
            disk_writes=known(_BREAKERS, disk.writes, "disk.writes")
            if has_disk
            else BreakerState.CLOSED,
            num_gets=message.num_gets,
            num_missed_gets=message.num_missed_gets,
            num_short_gets=message.num_short_gets,
            num_puts=message.num_puts,
            num_put_blocks=message.num_put_blocks,
            num_known_puts=message.num_known_puts,
            num_expired_puts=message.num_expired_puts,
            num_refused_puts=tuple(
                (
                    known(_REFUSALS, refused.reason, f"refused_puts[{index}].reason"),
                    refused.num_puts,
                )
                for index, refused in enumerate(message.refused_puts)
            ),
            tenants=tuple(
                TenantUse(
                    tenant=text(use.tenant, f"tenants[{index}].tenant", max_length=256),
                    num_blocks=use.num_blocks,
                    floor_blocks=use.floor_blocks,
                    max_blocks=use.max_blocks if use.HasField("max_blocks") else None,
                )
                for index, use in enumerate(message.tenants)
            ),
        ),
    )


def _disk_to_pb(stats: StoreStats, disk: DiskReport) -> pb.DiskTier:
    return pb.DiskTier(
        num_blocks=stats.num_disk_blocks,
        num_hit_blocks=stats.num_hit_disk_blocks,
        num_reclaimed_blocks=stats.num_reclaimed_blocks,
        num_unwritten_blocks=stats.num_unwritten_blocks,
        num_loading_blocks=stats.num_loading_blocks,
        num_written_blocks=stats.num_written_blocks,
        num_failed_write_blocks=stats.num_failed_write_blocks,
        num_loaded_blocks=stats.num_loaded_blocks,
        num_failed_load_blocks=stats.num_failed_load_blocks,
        num_bad_blocks=stats.num_bad_blocks,
        num_unadmitted_blocks=stats.num_unadmitted_blocks,
        write_budget_bytes=stats.write_budget_bytes,
        write_budget_max_bytes=stats.write_budget_max_bytes,
        reads=stats.disk_reads.value,
        writes=stats.disk_writes.value,
        capacity_bytes=disk.capacity_bytes,
        file_bytes=disk.file_bytes,
        written_bytes=disk.written_bytes,
        read_bytes=disk.read_bytes,
    )
