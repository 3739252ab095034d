"""What travels over the bus <-> protobuf: Announce and Who (KV events: wire/kv_events.py)."""

from __future__ import annotations

from dataclasses import dataclass

from moonpool.api.v1 import control_pb2 as pb
from moonpool.ids import WorkerKey
from moonpool.kv.published_set import SetHead
from moonpool.routing.worker_view import WorkerRole
from moonpool.wire.fields import address, between, decode, text
from moonpool.wire.kv_events import head_from_pb, head_to_pb
from moonpool.wire.request import worker_key_from_pb, worker_key_to_pb
from moonpool.wire.worker import (
    PROTOCOL_MAJOR,
    LoadReport,
    LoadValues,
    check_protocol,
    load_from_pb,
    load_to_pb,
    role_from_pb,
    role_to_pb,
)

#: Far more than an announcement ever has.
MAX_CONTROL_BYTES = 16 * 1024

_MAX_VALID_FOR_MS = 3_600_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Announce:
    """A worker says that it lives, where, and how loaded it is."""

    worker: WorkerKey
    role: WorkerRole
    grpc_address: str
    model: str
    #: Counts within an incarnation.
    sequence: int
    #: Any LoadValues when sent; a LoadReport when received.
    load: LoadValues
    valid_for_s: float
    is_leaving: bool = False
    #: Of its published set; None if it publishes none.
    kv_head: SetHead | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ReceivedAnnounce:
    """An Announce as it was read."""

    worker: WorkerKey
    role: WorkerRole
    grpc_address: str
    model: str
    sequence: int
    load: LoadReport
    valid_for_s: float
    is_leaving: bool
    kv_head: SetHead | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Who:
    """A router asks everyone to announce itself."""

    router_id: str


def encode_announce(announce: Announce) -> bytes:
    return pb.Announce(
        protocol_major=PROTOCOL_MAJOR,
        worker=worker_key_to_pb(announce.worker),
        role=role_to_pb(announce.role),
        grpc_address=announce.grpc_address,
        model=announce.model,
        sequence=announce.sequence,
        load=load_to_pb(announce.load),
        valid_for_ms=round(announce.valid_for_s * 1_000),
        is_leaving=announce.is_leaving,
        kv_head=head_to_pb(announce.kv_head) if announce.kv_head is not None else None,
    ).SerializeToString()


def decode_announce(data: bytes) -> ReceivedAnnounce:
    """Raises InvalidMessageError, and FailedPreconditionError for another protocol."""
    message = decode(pb.Announce, data, max_bytes=MAX_CONTROL_BYTES)
    check_protocol(message.protocol_major, "The worker")
    valid_for_ms = between(message.valid_for_ms, "valid_for_ms", low=1, high=_MAX_VALID_FOR_MS)
    return ReceivedAnnounce(
        worker=worker_key_from_pb(message.worker, "worker"),
        role=role_from_pb(message.role, "role"),
        grpc_address=address(message.grpc_address, "grpc_address"),
        model=text(message.model, "model"),
        sequence=message.sequence,
        load=load_from_pb(message.load, "load"),
        valid_for_s=valid_for_ms / 1_000,
        is_leaving=message.is_leaving,
        kv_head=head_from_pb(message.kv_head, "kv_head") if message.HasField("kv_head") else None,
    )


def encode_who(who: Who) -> bytes:
    return pb.Who(router_id=who.router_id).SerializeToString()
