"""Questions to running processes: a worker's ledger and blocks, a router's status and traces."""

from __future__ import annotations

from contextlib import aclosing

from moonpool.api.v1 import admin_pb2, admin_pb2_grpc, worker_pb2, worker_pb2_grpc
from moonpool.errors import InvalidRequestError
from moonpool.ids import WorkerKey
from moonpool.kv.published_set import SetSnapshot
from moonpool.rpc.calls import call, replies
from moonpool.rpc.channel import open_channel
from moonpool.rpc.metadata import call_metadata
from moonpool.wire.admin import RouterSnapshot, router_snapshot_from_pb, trace_from_pb
from moonpool.wire.kv_events import MAX_PARTS, snapshot_from_pb
from moonpool.wire.request import worker_key_to_pb
from moonpool.wire.spans import Span
from moonpool.wire.steps import StepRecord, steps_from_pb
from moonpool.wire.worker import LedgerReport, ledger_from_pb


async def fetch_ledger(address: str, *, key: str, deadline_s: float) -> LedgerReport:
    """What a worker holds, and for how many.

    Args:
        key: The cluster's RPC key.

    Raises:
        MoonpoolError: It did not answer, or not with a ledger.
    """
    async with open_channel(address) as channel:
        stub = worker_pb2_grpc.WorkerStub(channel)  # type: ignore[no-untyped-call]  # generated
        reply = await call(
            stub.Ledger,
            worker_pb2.LedgerRequest(),
            worker_pb2.LedgerReply,
            peer=address,
            deadline_s=deadline_s,
            metadata=call_metadata(key=key),
        )
    return ledger_from_pb(reply)


async def fetch_steps(
    address: str, *, after_step: int = 0, key: str, deadline_s: float
) -> tuple[StepRecord, ...]:
    """The steps of a worker's engine after number `after_step`, as far as the worker remembers them.

    Args:
        key: The cluster's RPC key.

    Raises:
        MoonpoolError: It did not answer, or not with steps.
    """
    records: list[StepRecord] = []
    async with open_channel(address) as channel:
        stub = worker_pb2_grpc.WorkerStub(channel)  # type: ignore[no-untyped-call]  # generated
        while True:
            reply = await call(
                stub.Steps,
                worker_pb2.StepsRequest(after_step=after_step),
                worker_pb2.StepsReply,
                peer=address,
                deadline_s=deadline_s,
                metadata=call_metadata(key=key),
            )
            page = steps_from_pb(reply)
            if not page:
                return tuple(records)
            records += page
            after_step = page[-1].step


async def fetch_snapshot(
    address: str, worker: WorkerKey, *, key: str, deadline_s: float
) -> SetSnapshot:
    """The blocks that a worker's cache holds, all of them at one moment.

    Args:
        worker: Who is meant: another incarnation refuses.
        key: The cluster's RPC key.

    Raises:
        MoonpoolError: It did not answer in time, or not with a snapshot.
    """
    parts: list[worker_pb2.SnapshotPart] = []
    async with open_channel(address) as channel:
        stub = worker_pb2_grpc.WorkerStub(channel)  # type: ignore[no-untyped-call]  # generated
        stream = stub.Snapshot(
            worker_pb2.SnapshotRequest(worker=worker_key_to_pb(worker)),
            timeout=deadline_s,
            metadata=call_metadata(key=key),
        )
        async with aclosing(replies(stream, worker_pb2.SnapshotPart, peer=address)) as received:
            async for part in received:
                if len(parts) == MAX_PARTS:
                    raise InvalidRequestError(f"{address} sends a snapshot without an end.")
                parts.append(part)
    return snapshot_from_pb(parts)


async def clear_cache(address: str, *, key: str, deadline_s: float) -> None:
    """Have a worker forget every cached block that nobody references.

    Args:
        key: The cluster's RPC key.

    Raises:
        MoonpoolError: It did not answer.
    """
    async with open_channel(address) as channel:
        stub = worker_pb2_grpc.WorkerStub(channel)  # type: ignore[no-untyped-call]  # generated
        await call(
            stub.ClearCache,
            worker_pb2.ClearCacheRequest(),
            worker_pb2.ClearCacheReply,
            peer=address,
            deadline_s=deadline_s,
            metadata=call_metadata(key=key),
        )


async def fetch_status(address: str, *, key: str | None, deadline_s: float) -> RouterSnapshot:
    """What a router says of itself and of the workers it knows.

    Args:
        key: The door's API key, if it has one.

    Raises:
        MoonpoolError: It did not answer, or not with a status.
    """
    async with open_channel(address) as channel:
        stub = admin_pb2_grpc.RouterAdminStub(channel)  # type: ignore[no-untyped-call]  # generated
        reply = await call(
            stub.Status,
            admin_pb2.StatusRequest(),
            admin_pb2.StatusReply,
            peer=address,
            deadline_s=deadline_s,
            metadata=call_metadata(key=key or ""),
        )
    return router_snapshot_from_pb(reply)


async def fetch_trace(
    address: str, request_id: str, *, key: str | None, deadline_s: float
) -> tuple[Span, ...]:
    """The closed spans of one of the last requests, by their start.

    Raises:
        NotFoundError: The router does not know it, or no longer.
        MoonpoolError: It did not answer.
    """
    async with open_channel(address) as channel:
        stub = admin_pb2_grpc.RouterAdminStub(channel)  # type: ignore[no-untyped-call]  # generated
        reply = await call(
            stub.Trace,
            admin_pb2.TraceRequest(request_id=request_id),
            admin_pb2.TraceReply,
            peer=address,
            deadline_s=deadline_s,
            metadata=call_metadata(key=key or ""),
        )
    return trace_from_pb(reply)
