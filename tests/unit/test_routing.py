"""Filters, policies and the disagg decider: whole decisions over small fleets."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest

from moonpool.latency.costs import TransferCost
from moonpool.routing.config import (
    DynamoLinearConfig,
    MinTtftConfig,
    PolicyName,
    PrefixAffinityConfig,
    RoutingConfig,
)
from moonpool.routing.disagg_decider import DisaggConfig, DisaggReason, Prediction, decide
from moonpool.routing.fleet_table import FleetTable
from moonpool.routing.forecast import PlanKind
from moonpool.routing.query import PlacementQuery
from moonpool.routing.selection import FilterReason, Selection, num_possible
from moonpool.routing.selector import PeerMatch, PlacementDecision, PrefillPlan, Selector
from moonpool.routing.worker_view import WorkerFits, WorkerRole, WorkerView
from support.fleet import FITS, make_key, make_query, make_view

PREFILL, DECODE = WorkerRole.PREFILL, WorkerRole.DECODE
#: Nothing is prefilled elsewhere.
ONLY_LOCAL = DisaggConfig(
    threshold_tokens=1 << 30, busy_threshold_tokens=1 << 30, only_thresholds=True
)
ONLY_REMOTE = DisaggConfig(threshold_tokens=0, busy_threshold_tokens=0, only_thresholds=True)
NO_READS = RoutingConfig(reads_from_peers=False)


def place(
    views: list[WorkerView],
    query: PlacementQuery,
    policy: PolicyName = PolicyName.MIN_TTFT,
    *,
    disagg: DisaggConfig | None = None,
    config: RoutingConfig | None = None,
) -> PlacementDecision:
    config = replace(config or RoutingConfig(), policy=policy, disagg=disagg or DisaggConfig())
    table = FleetTable.of(views)
    table.validate()
    return Selector(config).place(table, query)


def chosen(selection: Selection | None) -> str | None:
    return selection.key.worker_id if selection is not None and selection.key else None


def terms(selection: Selection, name: str) -> dict[str, float]:
    return {
        candidate.key.worker_id: round(dict(candidate.terms)[name], 6)
        for candidate in selection.candidates
    }


def scores(selection: Selection) -> dict[str, float | None]:
    return {
        candidate.key.worker_id: round(candidate.score, 6) if candidate.score is not None else None
        for candidate in selection.candidates
    }


# -- filters --


def test_filters_say_why() -> None:
    views = [
        make_view("drains", is_draining=True),
        make_view("full", is_full=True),
        make_view("ill", is_inhibited=True),
        make_view("prefill", PREFILL),
        make_view("small", total=4),
        make_view("tight", available=4),
        make_view("unfit"),
        make_view("well", num_requests=50),
    ]
    decision = place(views, make_query(80, unfit=("unfit",)))
    assert chosen(decision.decode) == "well"
    assert {c.key.worker_id: c.filtered for c in decision.decode.candidates} == {
        "drains": FilterReason.DRAINING,
        "full": FilterReason.NO_ROOM,
        "ill": FilterReason.INHIBITED,
        "small": FilterReason.NEVER_FITS,
        "tight": FilterReason.NO_ROOM,
        "unfit": FilterReason.NEVER_FITS,
        "well": None,
    }
    assert num_possible(decision.decode.filters) == 4


def test_prefill_filters_say_why() -> None:
    views = [
        make_view("d", DECODE),
        make_view("drains", PREFILL, is_draining=True),
        make_view("lost", PREFILL),
        make_view("unfit", PREFILL),
        make_view("well", PREFILL, queued=500),
    ]
    query = make_query(unfit=("unfit",), lost=("lost",))
    decision = place(views, query, disagg=ONLY_REMOTE)
    assert (chosen(decision.decode), chosen(decision.prefill)) == ("d", "well")
    assert decision.prefill is not None
    assert {c.key.worker_id: c.filtered for c in decision.prefill.candidates} == {
        "drains": FilterReason.DRAINING,
        "lost": FilterReason.LOST_SOURCE,
        "unfit": FilterReason.NEVER_FITS,
        "well": None,
    }


@pytest.mark.parametrize("policy", list(PolicyName))
@pytest.mark.parametrize("is_measured", [False, True])
def test_a_store_is_a_peer_and_nothing_else(policy: PolicyName, is_measured: bool) -> None:
    fits = FITS if is_measured else None
    views = [
        make_view("d0", DECODE, num_requests=3, fits=fits),
        make_view("d1", DECODE, num_requests=4, fits=fits),
        make_view("p0", PREFILL, queued=50, fits=fits),
        make_view("s0", WorkerRole.STORE),
    ]
    query = make_query(1_000, cached={"s0": 992})
    for disagg in (DisaggConfig(), ONLY_LOCAL, ONLY_REMOTE):
        decision = place(views, query, policy, disagg=disagg)
        assert "s0" not in {c.key.worker_id for c in decision.decode.candidates}
        if decision.prefill is not None:
            assert "s0" not in {c.key.worker_id for c in decision.prefill.candidates}
        assert decision.plan is not None
        assert decision.plan.key != make_key("s0")
        assert decision.plan.peer == PeerMatch(key=make_key("s0"), num_tokens=992, is_store=True)
        assert decision.plan.kind is PlanKind.FETCH
        assert decision.num_held_tokens == 992


def test_a_store_that_drains_is_not_read_from() -> None:
    views = [make_view("d"), make_view("s", WorkerRole.STORE, is_draining=True)]
    plan = place(views, make_query(cached={"s": 992})).plan
    assert plan is not None
    assert plan.peer is None


def test_a_store_that_is_slow_to_read_from_is_named_and_not_planned_with() -> None:
    slow = TransferCost(latency_s=2.0, bytes_per_s=1e6)
    views = [make_view("d", transfers={"s": slow}), make_view("s", WorkerRole.STORE)]
    plan = place(views, make_query(cached={"s": 992})).plan
    assert plan is not None
    assert plan.kind is PlanKind.RECOMPUTE
    assert plan.peer == PeerMatch(key=make_key("s"), num_tokens=992, is_store=True)


def test_only_stores_are_nobody() -> None:
    decision = place([make_view("s", WorkerRole.STORE)], make_query(cached={"s": 992}))
    assert decision.decode.key is None
    assert not decision.decode.candidates
    assert not decision.decode.can_never_fit


def test_an_inhibited_worker_is_better_than_none() -> None:
    assert chosen(place([make_view("ill", is_inhibited=True)], make_query(80)).decode) == "ill"


def test_never_is_not_the_same_as_not_now() -> None:
    small, tight = make_view("small", total=4), make_view("tight", available=4)
    assert place([small], make_query(80)).decode.can_never_fit
    assert not place([small, tight], make_query(80)).decode.can_never_fit
    assert not place([], make_query(80)).decode.can_never_fit
    assert place([], make_query(80)).decode.key is None


def test_the_decode_worker_does_not_prefill_for_itself() -> None:
    views = [make_view("a"), make_view("b", queued=10)]
    decision = place(views, make_query(), disagg=ONLY_REMOTE)
    assert (chosen(decision.decode), chosen(decision.prefill)) == ("a", "b")
    assert decision.prefill is not None
    assert decision.prefill.candidates[0].filtered is FilterReason.IS_DECODE
    assert num_possible(decision.prefill.filters) == 1


def test_nobody_has_room_to_prefill() -> None:
    views = [make_view("d", DECODE), make_view("p", PREFILL, is_full=True)]
    decision = place(views, make_query(2_000))
    assert decision.lacks_prefill_room
    assert decision.plan is None
    assert decision.disagg is not None
    assert decision.disagg.reason is DisaggReason.ABOVE_THRESHOLD


# -- min_ttft --


def test_without_fits_the_unit_is_uncached_tokens() -> None:
    views = [make_view("a", queued=600), make_view("b", queued=300), make_view("c")]
    query = make_query(cached={"a": 992, "b": 496})
    decision = place(views, query, disagg=ONLY_LOCAL, config=NO_READS)
    # A nominal 0.1 ms per token: 608, 804 and 1,000 tokens.
    assert scores(decision.decode) == {"a": 0.0608, "b": 0.0804, "c": 0.1}
    assert chosen(decision.decode) == "a"
    assert not decision.is_measured


def test_without_fits_the_longest_match_is_read_also_from_the_slower_peer() -> None:
    transfers = {
        "near": TransferCost(latency_s=0.002, bytes_per_s=1e9),
        "far": TransferCost(latency_s=0.02, bytes_per_s=1e9),
    }
    fits = WorkerFits(transfers=tuple((make_key(peer), cost) for peer, cost in transfers.items()))
    views = [
        make_view("reader", DECODE, fits=fits),
        make_view("near", WorkerRole.STORE),
        make_view("far", WorkerRole.STORE),
    ]
    longer = place(views, make_query(1_000, cached={"near": 800, "far": 832}))
    assert longer.plan is not None
    assert longer.plan.peer == PeerMatch(key=make_key("far"), num_tokens=832, is_store=True)
    equal = place(views, make_query(1_000, cached={"near": 800, "far": 800}))
    assert equal.plan is not None
    assert equal.plan.peer == PeerMatch(key=make_key("near"), num_tokens=800, is_store=True)


def test_a_whole_decision() -> None:
    """Two prefill workers, two decode workers; the prefix lies on a prefill worker that is busy."""
    views = [
        make_view("d1", DECODE, num_requests=4, fits=FITS),
        make_view("d2", DECODE, num_requests=2, fits=FITS),
        make_view("p1", PREFILL, queued=500, fits=FITS),
        make_view("p2", PREFILL, fits=FITS),
    ]
    decision = place(views, make_query(1_000, cached={"p1": 800}))
    # Reading 800 tokens takes 2 ms and 8 ms; the handoff 2 ms and a tenth of 10 ms.
    assert decision.decode.key == make_key("d2")
    assert decision.prefill is not None
    assert decision.prefill.key == make_key("p2")
    assert terms(decision.prefill, "num_cached_tokens") == {"p1": 800, "p2": 0}
    assert terms(decision.prefill, "num_read_tokens") == {"p1": 0, "p2": 800}
    assert terms(decision.prefill, "queue_s") == {"p1": 0.5, "p2": 0.0}
    assert terms(decision.prefill, "load_s") == {"p1": 0.0, "p2": 0.01}
    assert terms(decision.prefill, "compute_s") == {"p1": 0.2, "p2": 0.2}
    assert terms(decision.prefill, "exposed_s") == {"p1": 0.003, "p2": 0.003}
    assert terms(decision.prefill, "ttft_s") == {"p1": 0.703, "p2": 0.213}
    assert terms(decision.decode, "ttft_elsewhere_s") == {"d1": 0.213, "d2": 0.213}
    # Here: read 800 tokens, compute 200 beside decodes of 4 and 2 ms, which lose as much.
    assert terms(decision.decode, "ttft_here_s") == {"d1": 0.214, "d2": 0.212}
    assert terms(decision.decode, "interference_s") == {"d1": 0.204, "d2": 0.202}
    assert terms(decision.decode, "tpot_s") == {"d1": 0.015, "d2": 0.013}
    assert terms(decision.decode, "tpot_with_chunks_s") == {"d1": 0.015797, "d2": 0.013789}
    assert scores(decision.decode) == {"d1": 0.213, "d2": 0.213}
    assert decision.disagg is not None
    assert decision.disagg.reason is DisaggReason.REMOTE_IS_SOONER
    assert decision.disagg.prediction is not None
    assert decision.disagg.prediction.local_s == pytest.approx(0.414)
    assert decision.disagg.prediction.remote_s == pytest.approx(0.213)
    assert decision.plan == PrefillPlan(
        key=make_key("p2"),
        kind=PlanKind.FETCH,
        num_cached_tokens=0,
        num_read_tokens=800,
        num_computed_tokens=200,
        peer=PeerMatch(key=make_key("p1"), num_tokens=800),
        queue_s=0.0,
        load_s=pytest.approx(0.01),
        compute_s=pytest.approx(0.2),
        exposed_s=pytest.approx(0.003),
    )
    assert decision.plan.ttft_s == pytest.approx(0.213)


def test_a_request_goes_where_its_prefix_is_until_the_queue_is_longer_than_it_saves() -> None:
    views = [make_view("a", queued=700, fits=FITS), make_view("b", fits=FITS)]
    query = make_query(1_000, cached={"a": 800})
    near = place(views, query, disagg=ONLY_LOCAL, config=NO_READS)
    assert chosen(near.decode) == "a"
    views[0] = make_view("a", queued=900, fits=FITS)
    far = place(views, query, disagg=ONLY_LOCAL, config=NO_READS)
    assert chosen(far.decode) == "b"
    assert far.plan is not None
    assert (far.plan.kind, far.plan.peer) == (PlanKind.RECOMPUTE, None)


def test_a_slow_peer_is_named_but_not_counted_on() -> None:
    slow = {"a": TransferCost(latency_s=2.0, bytes_per_s=1e9)}
    views = [make_view("a", queued=5_000, fits=FITS), make_view("b", transfers=slow)]
    decision = place(views, make_query(1_000, cached={"a": 800}), disagg=ONLY_LOCAL)
    assert decision.plan is not None
    assert chosen(decision.decode) == "b"
    assert decision.plan.kind is PlanKind.RECOMPUTE
    assert decision.plan.num_computed_tokens == 1_000
    assert decision.plan.peer == PeerMatch(key=make_key("a"), num_tokens=800)


def test_reading_waits_in_the_queue_and_is_hidden_there() -> None:
    views = [make_view("a", queued=5_000, fits=FITS), make_view("b", queued=300, fits=FITS)]
    decision = place(views, make_query(1_000, cached={"a": 800}), disagg=ONLY_LOCAL)
    plan = decision.plan
    assert plan is not None
    assert (plan.kind, plan.load_s) == (PlanKind.FETCH, pytest.approx(0.01))
    assert plan.ttft_s == pytest.approx(0.5)


@pytest.mark.parametrize("unwilling", ["draining", "inhibited"])
def test_who_will_not_serve_readers_is_not_named_and_hides_nobody_who_does(unwilling: str) -> None:
    gone = [
        make_view(
            f"a{n}",
            fits=FITS,
            available=0,
            is_draining=unwilling == "draining",
            is_inhibited=unwilling == "inhibited",
        )
        for n in range(5)
    ]
    views = [*gone, make_view("b", queued=5_000, fits=FITS), make_view("c", fits=FITS)]
    cached = {f"a{n}": 960 for n in range(5)}
    alone = place(views, make_query(1_000, cached=cached), disagg=ONLY_LOCAL)
    assert alone.plan is not None
    assert (alone.plan.kind, alone.plan.peer) == (PlanKind.RECOMPUTE, None)
    helped = place(views, make_query(1_000, cached=cached | {"b": 800}), disagg=ONLY_LOCAL)
    assert helped.plan is not None
    assert (helped.plan.key, helped.plan.kind) == (make_key("c"), PlanKind.FETCH)
    assert helped.plan.peer == PeerMatch(key=make_key("b"), num_tokens=800)


def test_the_last_token_and_the_block_it_is_in_are_always_computed() -> None:
    views = [make_view("a", fits=FITS), make_view("b", fits=FITS, queued=1)]
    decision = place(views, make_query(64, cached={"a": 64, "b": 48}), disagg=ONLY_LOCAL)
    assert decision.plan is not None
    assert (decision.plan.num_cached_tokens, decision.plan.num_computed_tokens) == (48, 16)
    assert decision.plan.peer is None


def test_decode_keeps_room_for_the_answer_and_its_tpot() -> None:
    query = make_query(1_000, cached={"a": 992}, expected=160)
    idle = make_view("b", fits=FITS)

    def place_beside(other: WorkerView, *rest: WorkerView, config: RoutingConfig = NO_READS) -> str:
        views = [other, *(rest or (idle,))]
        return chosen(place(views, query, disagg=ONLY_LOCAL, config=config).decode) or ""

    assert place_beside(make_view("a", fits=FITS, num_requests=2)) == "a"
    assert place_beside(make_view("a", fits=FITS, num_requests=2, available=70)) == "b"
    too_busy = make_view("a", fits=FITS, num_requests=95)
    assert place_beside(too_busy) == "b"
    any_tpot = replace(NO_READS, min_ttft=MinTtftConfig(slo_tpot_s=None))
    assert place_beside(too_busy, config=any_tpot) == "a"
    other = make_view("b", fits=FITS, num_requests=150)
    assert place_beside(make_view("a", fits=FITS, num_requests=200), other) == "b"
    assert place_beside(make_view("a", fits=FITS, num_requests=155), other) == "a"


def test_equal_predictions_go_to_the_lower_tpot_then_where_less_is_given_up() -> None:
    views = [
        make_view("a", DECODE, num_requests=3, fits=FITS),
        make_view("b", DECODE, num_requests=1, available=500, fits=FITS),
        make_view("c", DECODE, num_requests=1, fits=FITS),
        make_view("d", DECODE, num_requests=1, fits=FITS),
        make_view("p", PREFILL, fits=FITS),
    ]
    assert chosen(place(views, make_query()).decode) == "c"
    views[2] = make_view("c", DECODE, num_requests=1, churn=1.0, fits=FITS)
    assert chosen(place(views, make_query()).decode) == "d"
    views[3] = make_view("d", DECODE, num_requests=1, churn=2.0, fits=FITS)
    views[1] = make_view("b", DECODE, num_requests=1, churn=2.0, available=500, fits=FITS)
    assert chosen(place(views, make_query()).decode) == "c"


def test_a_prefix_is_used_where_it_lies_if_a_copy_would_push_out_others() -> None:
    """To read it from `a` is sooner done than to wait in its queue."""

    def place_with(weight: float, *, free: int) -> str | None:
        views = [
            make_view("a", fits=FITS, free=0, queued=150),
            make_view("b", fits=FITS, free=free),
        ]
        config = RoutingConfig(min_ttft=MinTtftConfig(eviction_weight=weight))
        query = make_query(1_000, cached={"a": 992})
        return chosen(place(views, query, disagg=ONLY_LOCAL, config=config).decode)

    assert place_with(0.0, free=0) == "b"
    assert place_with(0.3, free=0) == "a"
    assert place_with(0.3, free=1_000) == "b"


def test_what_is_pushed_out_of_a_cache_is_in_the_score_and_in_the_record() -> None:
    """`a` holds 30 of 63 blocks and has 10 free ones: 23 others go, of 16 ms each."""
    views = [
        make_view("a", DECODE, fits=FITS, free=10, churn=2.5),
        make_view("b", DECODE, fits=FITS, free=40),
        make_view("p", PREFILL, fits=FITS, free=0, num_requests=1, churn=4.0),
    ]
    query = make_query(1_000, cached={"a": 480}, expected=15_500)
    decision = place(views, query, disagg=ONLY_REMOTE, config=NO_READS)
    assert terms(decision.decode, "evicted_s") == {"a": 0.368, "b": 0.368}
    assert terms(decision.decode, "has_growth_room") == {"a": 0.0, "b": 0.0}
    assert terms(decision.decode, "churn") == {"a": 2.5, "b": 0.0}
    # Elsewhere: 1,001 ms, as much for who runs there, and the handoff of what is lacking here.
    assert terms(decision.decode, "ttft_elsewhere_s") == {"a": 2.00452, "b": 2.005}
    assert scores(decision.decode) == {"a": 2.11492, "b": 2.1154}
    assert dict(decision.decode.inputs) == {
        "eviction_weight": 0.3,
        "slack": 0.05,
        "slo_tpot_s": 0.1,
        "threshold_tokens": 0.0,
    }
    assert chosen(decision.decode) == "b"
    assert decision.prefill is not None
    assert terms(decision.prefill, "evicted_s") == {"p": 1.008}
    assert terms(decision.prefill, "churn") == {"p": 4.0}
    assert terms(decision.prefill, "num_requests") == {"p": 1.0}
    # The handoff to `b`, and 63 blocks of others.
    assert scores(decision.prefill) == {"p": 2.3074}
    assert dict(decision.prefill.inputs) == {"eviction_weight": 0.3, "slack": 0.05}


@pytest.mark.parametrize(
    ("policy", "decode", "prefill"),
    [
        (
            PolicyName.MIN_TTFT,
            {"evicted_s", "has_growth_room", "churn"},
            {"evicted_s", "churn"},
        ),
        (PolicyName.RANDOM, set(), set()),
        (PolicyName.ROUND_ROBIN, set(), set()),
        (PolicyName.LEAST_LOADED, set(), set()),
        (PolicyName.PREFIX_AFFINITY, {"num_prefills"}, {"num_prefills", "num_filled_blocks"}),
        (
            PolicyName.DYNAMO_LINEAR,
            {"num_used_blocks", "block_size"},
            {"num_used_blocks", "block_size"},
        ),
    ],
)
def test_each_policy_records_the_terms_that_it_decides_by(
    policy: PolicyName, decode: set[str], prefill: set[str]
) -> None:
    views = [make_view("d", DECODE, fits=FITS), make_view("p", PREFILL, fits=FITS)]
    decision = place(views, make_query(1_000), policy, disagg=ONLY_REMOTE)
    common = {
        "num_cached_tokens",
        "num_read_tokens",
        "num_queued_tokens",
        "num_requests",
        "used_fraction",
        "queue_s",
        "load_s",
        "compute_s",
        "interference_s",
    }
    ways = {"ttft_here_s", "ttft_elsewhere_s", "tpot_s", "tpot_with_chunks_s"}
    assert set(decision.decode.term_names) == common | ways | decode
    assert decision.prefill is not None
    assert set(decision.prefill.term_names) == common | {"exposed_s", "ttft_s"} | prefill


def test_equal_prefill_workers_are_filled_equally_fast() -> None:
    views = [
        make_view("d", DECODE, fits=FITS),
        make_view("p", PREFILL, churn=1.0, fits=FITS),
        make_view("q", PREFILL, fits=FITS),
    ]
    decision = place(views, make_query(1_000), disagg=ONLY_REMOTE)
    assert decision.prefill is not None
    assert chosen(decision.prefill) == "q"


def test_chunks_that_break_the_tpot_of_others_go_elsewhere() -> None:
    """Ten requests at 21 ms a token; a chunk of a second over the next ten tokens makes it 121."""
    views = [
        make_view("d", DECODE, num_requests=10, fits=FITS),
        make_view("p", PREFILL, queued=10_000, fits=FITS),
    ]
    config = RoutingConfig(expected_output_tokens=10)
    decision = place(views, make_query(1_000), config=config)
    assert decision.disagg is not None
    assert decision.disagg.reason is DisaggReason.KEEPS_TPOT
    decision = place(views, make_query(1_000))
    assert decision.disagg is not None
    assert decision.disagg.reason is DisaggReason.LOCAL_IS_SOONER


def test_a_worker_that_has_measured_nothing_is_taken_to_be_like_the_others() -> None:
    views = [make_view("d", DECODE), make_view("p", PREFILL, fits=FITS)]
    decision = place(views, make_query(1_000))
    assert decision.is_measured
    assert terms(decision.decode, "compute_s") == {"d": 1.0}
    table = FleetTable.of(views)
    table.remove(make_key("p"))
    table.validate()
    assert not table.is_measured


# -- the other policies --


def test_random_is_drawn_by_seed_request_and_attempt() -> None:
    views = [make_view(name) for name in "abcd"]
    queries = [make_query(request_id=f"r{number}") for number in range(400)]
    first = [chosen(place(views, query, PolicyName.RANDOM).decode) for query in queries]
    assert first == [chosen(place(views, query, PolicyName.RANDOM).decode) for query in queries]
    counts = Counter(first)
    assert set(counts) == set("abcd")
    assert min(counts.values()) > 60
    other = RoutingConfig(seed=1)
    assert first != [
        chosen(place(views, query, PolicyName.RANDOM, config=other).decode) for query in queries
    ]


def test_round_robin_passes_over_who_may_not() -> None:
    views = [make_view("a"), make_view("b", is_full=True), make_view("c"), make_view("d")]
    turns = [
        chosen(place(views, make_query(sequence=number), PolicyName.ROUND_ROBIN).decode)
        for number in range(5)
    ]
    assert turns == ["a", "c", "d", "a", "c"]


def test_least_loaded_counts_requests_then_the_pool_and_prefill_queued_tokens() -> None:
    views = [
        make_view("a", num_requests=2),
        make_view("b", num_requests=1, available=100, queued=3),
        make_view("c", queued=9),
    ]
    decision = place(views, make_query(), PolicyName.LEAST_LOADED, disagg=ONLY_REMOTE)
    assert scores(decision.decode) == {"a": 2.0, "b": 1.9, "c": 0.0}
    assert decision.prefill is not None
    assert scores(decision.prefill) == {"a": 0.0, "b": 3.0, "c": None}
    assert (chosen(decision.decode), chosen(decision.prefill)) == ("c", "a")


def test_what_this_router_placed_counts_until_a_report_does() -> None:
    views = [make_view("a", own_num_requests=2), make_view("b", num_requests=1)]
    assert chosen(place(views, make_query(80), PolicyName.LEAST_LOADED).decode) == "b"
    full = [make_view("a", available=10, own_num_new_blocks=6)]
    assert place(full, make_query(80)).decode.key is None


def test_prefix_affinity_is_sglangs_rule() -> None:
    policy = PolicyName.PREFIX_AFFINITY
    views = [make_view("a", num_requests=30), make_view("b", free=100), make_view("c", free=500)]
    matched = place(views, make_query(cached={"a": 608}), policy, disagg=ONLY_LOCAL)
    assert (chosen(matched.decode), scores(matched.decode)["a"]) == ("a", -0.608)
    too_little = place(views, make_query(cached={"a": 496}), policy, disagg=ONLY_LOCAL)
    assert (chosen(too_little.decode), scores(too_little.decode)["b"]) == ("a", 900.0)
    views[0] = make_view("a", num_requests=33)
    unbalanced = place(views, make_query(cached={"a": 992}), policy, disagg=ONLY_LOCAL)
    assert scores(unbalanced.decode) == {"a": 33.0, "b": 0.0, "c": 0.0}
    assert chosen(unbalanced.decode) == "b"
    config = RoutingConfig(prefix_affinity=PrefixAffinityConfig(cache_threshold=0.4))
    lower = place(views[1:], make_query(cached={"c": 496}), policy, config=config)
    assert chosen(lower.decode) == "c"


def test_prefix_affinity_is_the_prefill_workers_where_there_are_some() -> None:
    views = [
        make_view("d1", DECODE, num_requests=1),
        make_view("d2", DECODE),
        make_view("p1", PREFILL, num_prefills=3),
        make_view("p2", PREFILL),
    ]
    query = make_query(cached={"d1": 640, "p1": 960})
    decision = place(views, query, PolicyName.PREFIX_AFFINITY, disagg=ONLY_REMOTE)
    assert (chosen(decision.decode), chosen(decision.prefill)) == ("d2", "p1")


def test_dynamo_linear_is_dynamos_cost() -> None:
    policy = PolicyName.DYNAMO_LINEAR
    views = [make_view("a", available=900, queued=160), make_view("b")]
    decision = place(views, make_query(960, cached={"a": 800}), policy, disagg=ONLY_LOCAL)
    # a: 10 + 60 - 50 to prefill, 100 + 60 in use; b: 60, 60.
    assert scores(decision.decode) == {"a": 180.0, "b": 120.0}
    assert chosen(decision.decode) == "b"
    config = RoutingConfig(dynamo_linear=DynamoLinearConfig(overlap_score_weight=3.0))
    weighted = place(
        [make_view("a", available=990), make_view("b")],
        make_query(960, cached={"a": 800}),
        policy,
        disagg=ONLY_LOCAL,
        config=config,
    )
    assert scores(weighted.decode) == {"a": 70.0, "b": 120.0}


def test_dynamo_linear_draws_among_ties_and_by_temperature() -> None:
    policy = PolicyName.DYNAMO_LINEAR
    views = [make_view("a"), make_view("b"), make_view("c", available=500)]
    queries = [make_query(request_id=f"r{number}") for number in range(200)]
    ties = Counter(chosen(place(views, query, policy).decode) for query in queries)
    assert set(ties) == {"a", "b"}
    assert min(ties.values()) > 60
    config = RoutingConfig(dynamo_linear=DynamoLinearConfig(router_temperature=1.0))
    warm = Counter(chosen(place(views, query, policy, config=config).decode) for query in queries)
    assert set(warm) == {"a", "b", "c"}
    assert warm["c"] < warm["a"]


def test_dynamo_linear_weighs_what_decode_workers_hold_and_who_runs_there() -> None:
    views = [
        make_view("d1", DECODE, available=990, num_requests=1),
        make_view("d2", DECODE, num_requests=5),
        make_view("p", PREFILL, queued=320),
    ]
    query = make_query(960, cached={"d2": 160, "p": 800})
    decision = place(views, query, PolicyName.DYNAMO_LINEAR, disagg=ONLY_REMOTE)
    assert scores(decision.decode) == {"d1": 71.0, "d2": 55.0}
    assert decision.prefill is not None
    assert scores(decision.prefill) == {"p": 90.0}


# -- the disagg decider --


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
def test_where_to_prefill_by_thresholds(
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


@pytest.mark.parametrize(
    ("prediction", "only_thresholds", "is_remote", "reason"),
    [
        (Prediction(local_s=1.0, remote_s=1.0), False, False, DisaggReason.LOCAL_IS_SOONER),
        (Prediction(local_s=1.1, remote_s=1.0), False, True, DisaggReason.REMOTE_IS_SOONER),
        (
            Prediction(local_s=1.0, remote_s=2.0, breaks_tpot=True),
            False,
            True,
            DisaggReason.KEEPS_TPOT,
        ),
        (Prediction(local_s=1.0, remote_s=2.0), True, True, DisaggReason.ABOVE_THRESHOLD),
        (
            Prediction(local_s=1.0, remote_s=float("inf")),
            False,
            True,
            DisaggReason.ABOVE_THRESHOLD,
        ),
    ],
)
def test_where_to_prefill_by_prediction(
    prediction: Prediction, only_thresholds: bool, is_remote: bool, reason: DisaggReason
) -> None:
    decision = decide(
        DisaggConfig(only_thresholds=only_thresholds),
        num_tokens=5_000,
        num_cached_tokens=0,
        num_prefill_workers=1,
        least_queued_tokens=0,
        prediction=prediction,
    )
    assert (decision.is_remote, decision.reason) == (is_remote, reason)
    assert (decision.prediction is not None) == (
        reason not in (DisaggReason.ABOVE_THRESHOLD, DisaggReason.BELOW_THRESHOLD)
    )
