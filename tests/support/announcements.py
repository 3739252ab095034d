"""What workers and stores say of themselves over the bus."""

from __future__ import annotations

from moonpool.core.protocol import BlockLedger
from moonpool.ids import Incarnation, WorkerId, WorkerKey
from moonpool.routing.worker_view import WorkerRole
from moonpool.wire.control import Announce
from moonpool.wire.worker import LoadReport

_LEDGER = BlockLedger(num_total=8, num_free=8, num_cached=0, num_referenced=0)


def make_announce(
    worker_id: str = "d0",
    *,
    incarnation: str = "a" * 16,
    role: WorkerRole = WorkerRole.DECODE,
    address: str = "h:1",
    sequence: int = 1,
    is_leaving: bool = False,
) -> Announce:
    return Announce(
        worker=WorkerKey(WorkerId(worker_id), Incarnation(incarnation)),
        role=role,
        grpc_address=address,
        model="m",
        sequence=sequence,
        load=LoadReport(ledger=_LEDGER),
        valid_for_s=4.0,
        is_leaving=is_leaving,
    )
