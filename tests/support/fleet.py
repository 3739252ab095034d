"""Workers as a router sees them, with defaults: a test says only what matters to it."""

from __future__ import annotations

from collections.abc import Mapping

from moonpool.ids import Incarnation, RequestId, WorkerId, WorkerKey
from moonpool.latency.costs import DecodeCost, PrefillCost, TransferCost
from moonpool.routing.query import PlacementQuery
from moonpool.routing.worker_view import (
    WorkerFits,
    WorkerInfo,
    WorkerLoad,
    WorkerRole,
    WorkerView,
)

#: A millisecond per token and nothing else: predictions can be reckoned in the head.
PREFILL = PrefillCost(base_s=0.0, per_token_s=1e-3, per_work_s=0.0, max_step_tokens=1_000)
#: 10 ms a step and 1 ms per request.
DECODE = DecodeCost(base_s=0.01, per_context_token_s=0.0, per_request_s=1e-3)
FITS = WorkerFits(prefill=PREFILL, decode=DECODE)
#: A token of KV takes 10 us to read, at 1 GB/s.
BYTES_PER_TOKEN = 10_000


def make_key(name: str) -> WorkerKey:
    return WorkerKey(WorkerId(name), Incarnation("1"))


def make_view(
    name: str,
    role: WorkerRole = WorkerRole.BOTH,
    *,
    total: int = 1_000,
    available: int | None = None,
    free: int | None = None,
    num_requests: int = 0,
    num_prefills: int = 0,
    queued: int = 0,
    own_num_requests: int = 0,
    own_num_new_blocks: int = 0,
    own_num_queued_tokens: int = 0,
    is_draining: bool = False,
    is_inhibited: bool = False,
    is_full: bool = False,
    churn: float = 0.0,
    fits: WorkerFits | None = None,
    transfers: Mapping[str, TransferCost] | None = None,
) -> WorkerView:
    """`transfers` are by the peer's name, beside `FITS`."""
    if available is None:
        available = total
    if transfers is not None:
        fits = WorkerFits(
            prefill=PREFILL,
            decode=DECODE,
            transfers=tuple((make_key(peer), cost) for peer, cost in sorted(transfers.items())),
        )
    return WorkerView(
        info=WorkerInfo(
            key=make_key(name),
            role=role,
            address=f"{name}:1",
            bytes_per_token=BYTES_PER_TOKEN,
            num_layers=10,
        ),
        load=WorkerLoad(
            num_total_blocks=total,
            num_available_blocks=available,
            num_free_blocks=available if free is None else free,
            num_requests=num_requests,
            num_prefills=num_prefills,
            num_queued_tokens=queued,
            is_draining=is_draining,
        ),
        fits=fits or WorkerFits(),
        own_num_requests=own_num_requests,
        own_num_new_blocks=own_num_new_blocks,
        own_num_queued_tokens=own_num_queued_tokens,
        is_inhibited=is_inhibited,
        is_full=is_full,
        churn=churn,
    )


def make_query(
    num_tokens: int = 1_000,
    *,
    cached: Mapping[str, int] | None = None,
    expected: int = 100,
    unfit: tuple[str, ...] = (),
    lost: tuple[str, ...] = (),
    request_id: str = "r",
    attempt: int = 1,
    sequence: int = 0,
) -> PlacementQuery:
    """`cached`: leading tokens by the worker's name."""
    return PlacementQuery(
        request_id=RequestId(request_id),
        attempt=attempt,
        num_tokens=num_tokens,
        num_expected_tokens=expected,
        num_cached_tokens={make_key(name): number for name, number in (cached or {}).items()},
        unfit=frozenset(map(make_key, unfit)),
        lost=frozenset(map(make_key, lost)),
        sequence=sequence,
    )
