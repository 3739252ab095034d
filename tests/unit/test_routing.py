"""The selector and the disagg decider, by table."""

from __future__ import annotations

import pytest

from moonpool.ids import Incarnation, WorkerId, WorkerKey
from moonpool.routing.disagg_decider import DisaggConfig, DisaggReason, decide
from moonpool.routing.selector import FilterReason, select_decode, select_prefill
from moonpool.routing.worker_view import WorkerInfo, WorkerLoad, WorkerRole, WorkerView


def key(name: str) -> WorkerKey:
    return WorkerKey(WorkerId(name), Incarnation("1"))


def view(
    name: str,
    role: WorkerRole = WorkerRole.BOTH,
    *,
    total: int = 100,
    available: int = 100,
    num_requests: int = 0,
    queued: int = 0,
    own_num_requests: int = 0,
    own_num_new_blocks: int = 0,
    own_num_queued_tokens: int = 0,
    is_draining: bool = False,
    is_inhibited: bool = False,
    is_full: bool = False,
) -> WorkerView:
    return WorkerView(
        info=WorkerInfo(key=key(name), role=role, address=f"{name}:1"),
        load=WorkerLoad(
            num_total_blocks=total,
            num_available_blocks=available,
            num_requests=num_requests,
            num_queued_tokens=queued,
            is_draining=is_draining,
        ),
        own_num_requests=own_num_requests,
        own_num_new_blocks=own_num_new_blocks,
        own_num_queued_tokens=own_num_queued_tokens,
        is_inhibited=is_inhibited,
        is_full=is_full,
    )


def test_decode_goes_where_the_fewest_requests_are() -> None:
    views = [
        view("a", num_requests=2),
        view("b", num_requests=1, available=10),
        view("c", queued=9),
    ]
    assert select_decode(views, num_blocks=5).key == key("c")
    assert select_decode(views[:2], num_blocks=5).key == key("b")


def test_ties_go_to_the_emptier_pool_then_to_the_smaller_key() -> None:
    assert select_decode([view("a", available=50), view("b")], num_blocks=5).key == key("b")
    assert select_decode([view("b"), view("a")], num_blocks=5).key == key("a")


def test_what_this_router_placed_counts_until_a_report_does() -> None:
    views = [view("a", own_num_requests=2), view("b", num_requests=1)]
    assert select_decode(views, num_blocks=5).key == key("b")
    views = [view("a", own_num_queued_tokens=100), view("b", queued=60)]
    assert select_prefill(views, decode=key("d")).key == key("b")
    full = [view("a", available=10, own_num_new_blocks=6)]
    assert select_decode(full, num_blocks=5).key is None


def test_filters_say_why() -> None:
    views = [
        view("drains", is_draining=True),
        view("full", is_full=True),
        view("ill", is_inhibited=True),
        view("prefill", WorkerRole.PREFILL),
        view("small", total=4, available=4),
        view("tight", available=4),
        view("unfit"),
        view("well", num_requests=50),
    ]
    selection = select_decode(views, num_blocks=5, unfit=frozenset({key("unfit")}))
    assert selection.key == key("well")
    assert {c.key.worker_id: c.filtered for c in selection.candidates} == {
        "drains": FilterReason.DRAINING,
        "full": FilterReason.NO_ROOM,
        "ill": FilterReason.INHIBITED,
        "small": FilterReason.NEVER_FITS,
        "tight": FilterReason.NO_ROOM,
        "unfit": FilterReason.NEVER_FITS,
        "well": None,
    }


def test_an_inhibited_worker_is_better_than_none() -> None:
    assert select_decode([view("ill", is_inhibited=True)], num_blocks=5).key == key("ill")


def test_never_is_not_the_same_as_not_now() -> None:
    small, tight = view("small", total=4, available=4), view("tight", available=4)
    assert select_decode([small], num_blocks=5).can_never_fit
    assert not select_decode([small, tight], num_blocks=5).can_never_fit
    assert not select_decode([], num_blocks=5).can_never_fit


def test_the_decode_worker_does_not_prefill_for_itself() -> None:
    selection = select_prefill([view("a"), view("b", queued=10)], decode=key("a"))
    assert selection.key == key("b")
    assert selection.num_workers == 1


@pytest.mark.parametrize(
    ("num_tokens", "num_cached_tokens", "num_workers", "least_queued", "is_remote", "reason"),
    [
        (256, 0, 1, 0, False, DisaggReason.BELOW_THRESHOLD),
        (257, 0, 1, 0, True, DisaggReason.ABOVE_THRESHOLD),
        (1_000, 744, 1, 0, False, DisaggReason.BELOW_THRESHOLD),
        (9_000, 0, 0, None, False, DisaggReason.NO_PREFILL_WORKER),
        (1_024, 0, 1, 8_193, False, DisaggReason.PREFILL_POOL_BUSY),
        (1_024, 0, 1, 8_192, True, DisaggReason.ABOVE_THRESHOLD),
        (1_025, 0, 1, 8_193, True, DisaggReason.ABOVE_THRESHOLD),
        (1_024, 0, 1, None, False, DisaggReason.PREFILL_POOL_BUSY),
        (100, 0, 1, None, False, DisaggReason.BELOW_THRESHOLD),
    ],
)
def test_where_to_prefill(
    num_tokens: int,
    num_cached_tokens: int,
    num_workers: int,
    least_queued: int | None,
    is_remote: bool,
    reason: DisaggReason,
) -> None:
    decision = decide(
        DisaggConfig(),
        num_tokens=num_tokens,
        num_cached_tokens=num_cached_tokens,
        num_prefill_workers=num_workers,
        least_queued_tokens=least_queued,
    )
    assert (decision.is_remote, decision.reason) == (is_remote, reason)
    assert decision.num_uncached_tokens == num_tokens - num_cached_tokens
