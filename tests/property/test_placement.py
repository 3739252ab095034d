"""What holds for every placement, whatever the fleet, the request and the policy."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from moonpool.routing.config import MinTtftConfig, PolicyName
from moonpool.routing.fleet_table import FleetTable
from moonpool.routing.forecast import Forecast
from moonpool.routing.selector import PlacementDecision, Selector
from moonpool.routing.worker_view import WorkerFits, WorkerRole
from support.fleet import make_key, make_view
from support.placement_case import BLOCK, make_case

seeds = st.integers(0, 2**32)


def summary(decision: PlacementDecision) -> object:
    """All of it as one comparable value."""
    prefill = decision.prefill
    return (
        decision.decode.key,
        decision.decode.candidates,
        decision.disagg,
        (prefill.key, prefill.candidates) if prefill is not None else None,
        decision.plan,
    )


@given(seed=seeds)
@settings(max_examples=150)
def test_nobody_is_chosen_who_may_not_be(seed: int) -> None:
    case = make_case(seed)
    fleet, query, config = case.fleet, case.query, case.config
    table = FleetTable.of(fleet)
    table.validate()
    decision = Selector(config).place(table, query)
    by_key = {view.key: view for view in fleet}
    open_decode = [c for c in decision.decode.candidates if c.filtered is None]
    assert {c.key for c in decision.decode.candidates} == {
        view.key for view in fleet if view.info.role.can_decode
    }
    if decision.decode.key is None:
        assert not open_decode
        assert decision.plan is decision.disagg is decision.prefill is None
        return
    assert decision.decode.key in {c.key for c in open_decode}
    chosen = by_key[decision.decode.key]
    assert chosen.info.role.can_decode
    assert not chosen.load.is_draining
    assert not chosen.is_full
    assert chosen.key not in query.unfit
    if chosen.load.num_total_blocks:
        assert -(-query.num_tokens // BLOCK) <= chosen.num_available_blocks
    assert decision.disagg is not None
    assert decision.disagg.is_remote == (decision.prefill is not None)
    if decision.prefill is not None and decision.prefill.key is not None:
        source = by_key[decision.prefill.key]
        assert source.info.role.can_prefill
        assert source.key != chosen.key
        assert not source.load.is_draining
        assert not source.is_full
        assert source.key not in query.unfit | query.lost
    assert decision.lacks_prefill_room == (decision.plan is None)
    if decision.plan is None:
        return
    plan = decision.plan
    prefilling = chosen.key if decision.prefill is None else decision.prefill.key
    assert plan.key == prefilling
    assert by_key[plan.key].info.role.computes
    limit = (query.num_tokens - 1) // BLOCK * BLOCK
    believed = query.num_cached_tokens
    assert plan.num_cached_tokens == min(believed.get(plan.key, 0), limit)
    total = plan.num_cached_tokens + plan.num_read_tokens + plan.num_computed_tokens
    assert total == query.num_tokens
    assert plan.num_computed_tokens >= 1
    assert min(plan.queue_s, plan.load_s, plan.compute_s, plan.exposed_s) >= 0.0
    if plan.peer is not None:
        assert config.reads_from_peers
        assert plan.peer.key != plan.key
        assert plan.peer.num_tokens == min(believed[plan.peer.key], limit)
        assert plan.num_cached_tokens + plan.num_read_tokens <= plan.peer.num_tokens
        assert plan.peer.is_store == (by_key[plan.peer.key].info.role is WorkerRole.STORE)
        assert not by_key[plan.peer.key].is_inhibited
        assert not by_key[plan.peer.key].load.is_draining
    else:
        assert plan.num_read_tokens == 0


@given(seed=seeds)
@settings(max_examples=80)
def test_the_same_fleet_gives_the_same_decision_whatever_its_order_and_history(seed: int) -> None:
    case = make_case(seed)
    fleet, query, config = case.fleet, case.query, case.config
    selector = Selector(config)
    expected = summary(selector.place(FleetTable.of(fleet), query))
    table = FleetTable()
    for view in case.rng.sample(fleet, len(fleet)):
        table.put(replace(view, is_full=not view.is_full, fits=WorkerFits()))
    table.put(make_view("zz", total=77))
    for view in case.rng.sample(fleet, len(fleet)):
        table.put(view)
    table.remove(make_key("zz"))
    table.validate()
    assert summary(selector.place(table, query)) == expected
    assert summary(Selector(config).place(table, query)) == expected


@given(seed=seeds)
@settings(max_examples=150)
def test_min_ttft_has_no_better_alternative_by_its_own_prediction(seed: int) -> None:
    """Among decode workers with room for the answer, all ways to prefill included."""
    case = make_case(seed)
    fleet, query = case.fleet, case.query
    config = replace(
        case.config,
        policy=PolicyName.MIN_TTFT,
        disagg=replace(case.config.disagg, only_thresholds=False),
        min_ttft=MinTtftConfig(slo_tpot_s=None, eviction_weight=0.0),
    )
    table = FleetTable.of(fleet)
    decision = Selector(config).place(table, query)
    plan, disagg, key = decision.plan, decision.disagg, decision.decode.key
    if plan is None or disagg is None or key is None or disagg.prediction is None:
        return
    forecast = Forecast(table, query, reads_from_peers=config.reads_from_peers)
    cost_s = forecast.ready_s + forecast.interference_s
    chosen_s = disagg.prediction.remote_s if disagg.is_remote else disagg.prediction.local_s
    is_open = decision.decode.filters == 0
    rows = [
        row
        for candidate_key, is_candidate in zip(decision.decode.keys, is_open, strict=True)
        if is_candidate and (row := table.row(candidate_key)) is not None
    ]
    if any(forecast.has_growth_room[row] for row in rows):
        rows = [row for row in rows if forecast.has_growth_room[row]]
    best_s = math.inf
    for row in rows:
        alternatives = [cost_s[row]]
        exposed_s = forecast.exposed_s(row)
        for source in fleet:
            at = table.row(source.key)
            assert at is not None
            if (
                at != row
                and source.info.role.can_prefill
                and not (source.load.is_draining or source.is_full)
                and source.key not in query.unfit | query.lost
                and not source.is_inhibited
            ):
                alternatives.append(cost_s[at] + exposed_s[at])
        best_s = min(best_s, *alternatives)
    # Either choice may be so much off the best one.
    assert chosen_s <= best_s * (1.0 + config.min_ttft.slack) ** 2 + 1e-9


@given(seed=seeds)
@settings(max_examples=150)
def test_fetching_is_never_worse_than_not_fetching(seed: int) -> None:
    case = make_case(seed)
    table, query = FleetTable.of(case.fleet), case.query
    with_peers = Forecast(table, query)
    alone = Forecast(table, query, reads_from_peers=False)
    assert (with_peers.ready_s <= alone.ready_s + 1e-12).all()
    assert (with_peers.num_computed_tokens <= alone.num_computed_tokens).all()
    assert np.isfinite(with_peers.ready_s).all()
