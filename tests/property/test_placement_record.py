"""A placement's record is all that it was decided by: whoever reads it can decide again."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moonpool.cli.explain import placement_json
from moonpool.dispatch.effects import Placement
from moonpool.routing.config import PolicyName
from moonpool.routing.disagg_decider import DisaggConfig
from moonpool.routing.fleet_table import FleetTable
from moonpool.routing.selector import PlacementDecision, Selector
from moonpool.wire.explain import explanation_from_pb, explanation_to_pb
from support.placement_case import PlacementCase, make_case
from support.placement_record import Leg, Rebuilt, legs_of, rebuild

ONLY_REMOTE = DisaggConfig(threshold_tokens=0, busy_threshold_tokens=0, only_thresholds=True)


def explained(case: PlacementCase, policy: PolicyName) -> dict[str, Any] | None:
    """What `moonpool explain --json` prints of it, by way of the router's reply; None if nobody can take it."""
    config = replace(case.config, policy=policy)
    record = Selector(config).place(FleetTable.of(case.fleet), case.query)
    if record.plan is None:
        return None
    return json.loads(json.dumps(placement_json(told(case, record)), allow_nan=False))


def told(case: PlacementCase, record: PlacementDecision) -> Placement:
    placement = Placement(
        request_id=case.query.request_id,
        attempt=case.query.attempt,
        record=record,
        placed_at=0.0,
    )
    message = explanation_to_pb(case.query.request_id, (placement,), now=0.0)
    (read,) = explanation_from_pb(type(message).FromString(message.SerializeToString()))
    return read


def legs(seed: int, policy: PolicyName) -> Iterator[tuple[Leg, Rebuilt]]:
    """Of one placement; every second one is prefilled elsewhere, if anybody is there."""
    case = make_case(seed)
    if seed % 2:
        case = replace(case, config=replace(case.config, disagg=ONLY_REMOTE))
    placement = explained(case, policy)
    for leg in legs_of(placement) if placement is not None else ():
        yield leg, rebuild(leg)


@pytest.mark.parametrize("policy", list(PolicyName))
@given(seed=st.integers(0, 2**32))
@settings(max_examples=80)
def test_scores_and_choice_follow_from_the_record(policy: PolicyName, seed: int) -> None:
    for leg, rebuilt in legs(seed, policy):
        assert rebuilt.scores == pytest.approx(leg.scores, rel=1e-12, abs=0.0), leg
        assert rebuilt.chosen == leg.chosen, leg


@given(seed=st.integers(0, 2**32))
@settings(max_examples=80)
def test_local_or_remote_follows_from_the_terms_of_the_chosen(seed: int) -> None:
    placement = explained(make_case(seed), PolicyName.MIN_TTFT)
    if placement is None or placement["disagg"]["local_s"] is None:
        return
    disagg, by_name = placement["disagg"], {leg.name: leg for leg in legs_of(placement)}
    decode = by_name["decode"].terms[by_name["decode"].chosen]
    assert disagg["local_s"] == pytest.approx(decode["ttft_here_s"] + decode["interference_s"])
    if disagg["is_remote"]:
        prefill = by_name["prefill"].terms[by_name["prefill"].chosen]
        assert disagg["remote_s"] == pytest.approx(prefill["ttft_s"] + prefill["interference_s"])


def test_what_decides_seldom_is_among_the_cases() -> None:
    """Without any of these terms somebody else would be chosen."""
    seen: Counter[str] = Counter()
    for seed in range(300):
        for leg, _ in legs(seed, PolicyName.MIN_TTFT):
            for name in ("evicted_s", "churn", "has_growth_room"):
                without = {worker: {**terms, name: 1.0} for worker, terms in leg.terms.items()}
                chosen = rebuild(replace(leg, terms=without)).chosen
                seen[name] += chosen != leg.chosen
    assert min(seen.values()) >= 5, seen
