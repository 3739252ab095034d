"""What a router says of itself <-> protobuf: status and traces."""

from __future__ import annotations

from dataclasses import dataclass

from moonpool.api.v1 import admin_pb2 as pb
from moonpool.ids import Incarnation, WorkerId, WorkerKey
from moonpool.routing.worker_view import WorkerRole
from moonpool.wire.spans import Span, span_from_pb, span_to_pb
from moonpool.wire.worker import (
    LoadReport,
    LoadValues,
    load_from_pb,
    load_to_pb,
    role_from_pb,
    role_to_pb,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerSnapshot:
    """One address that a router knows."""

    address: str
    #: `connecting`, `up`, `refused` or `lost`.
    state: str
    #: None for an address that has never said who it is.
    key: WorkerKey | None
    role: WorkerRole | None
    #: As of the last frame; None unless it is up.
    load: LoadValues | None
    #: Why it is refused or lost; empty if it is up.
    because: str

    @property
    def worker_id(self) -> str:
        return self.key.worker_id if self.key is not None else ""

    @property
    def is_live(self) -> bool:
        return self.state == "up"


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterSnapshot:
    router_id: str
    model: str
    #: Empty if requests can be served.
    not_ready_because: str
    is_bus_connected: bool
    num_queued: int
    num_running: int
    workers: tuple[WorkerSnapshot, ...]

    @property
    def is_ready(self) -> bool:
        return not self.not_ready_because


def router_snapshot_to_pb(snapshot: RouterSnapshot) -> pb.StatusReply:
    reply = pb.StatusReply(
        router_id=snapshot.router_id,
        model=snapshot.model,
        is_ready=snapshot.is_ready,
        not_ready_because=snapshot.not_ready_because,
        is_bus_connected=snapshot.is_bus_connected,
        num_queued=snapshot.num_queued,
        num_running=snapshot.num_running,
    )
    for worker in snapshot.workers:
        status = reply.workers.add(
            grpc_address=worker.address, state=worker.state, refused_because=worker.because
        )
        if worker.key is not None:
            status.worker.worker_id = worker.key.worker_id
            status.worker.incarnation = worker.key.incarnation
        if worker.role is not None:
            status.role = role_to_pb(worker.role)
        if worker.load is not None:
            status.load.CopyFrom(load_to_pb(worker.load))
    return reply


def router_snapshot_from_pb(message: pb.StatusReply) -> RouterSnapshot:
    """Raises InvalidMessageError."""
    return RouterSnapshot(
        router_id=message.router_id,
        model=message.model,
        not_ready_because=message.not_ready_because,
        is_bus_connected=message.is_bus_connected,
        num_queued=message.num_queued,
        num_running=message.num_running,
        workers=tuple(
            _worker_from_pb(worker, f"workers[{index}]")
            for index, worker in enumerate(message.workers)
        ),
    )


def trace_to_pb(request_id: str, spans: tuple[Span, ...]) -> pb.TraceReply:
    return pb.TraceReply(request_id=request_id, spans=[span_to_pb(span) for span in spans])


def trace_from_pb(message: pb.TraceReply) -> tuple[Span, ...]:
    """Raises InvalidMessageError."""
    return tuple(span_from_pb(span, f"spans[{index}]") for index, span in enumerate(message.spans))


def _worker_from_pb(message: pb.WorkerStatus, path: str) -> WorkerSnapshot:
    key = None
    if message.HasField("worker"):
        key = WorkerKey(WorkerId(message.worker.worker_id), Incarnation(message.worker.incarnation))
    load: LoadReport | None = None
    if message.HasField("load"):
        load = load_from_pb(message.load, f"{path}.load")
    return WorkerSnapshot(
        address=message.grpc_address,
        state=message.state,
        key=key,
        role=role_from_pb(message.role, f"{path}.role") if message.role else None,
        load=load,
        because=message.refused_because,
    )
