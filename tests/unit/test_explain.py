"""A placement on its way to whoever asks why: the wire, the words, the log."""

from __future__ import annotations

import io
import json
import random
from dataclasses import replace

import pytest
from rich.console import Console

from moonpool.cli.explain import placement_json, print_placement
from moonpool.dispatch.decision_log import DecisionLog
from moonpool.dispatch.effects import Placement
from moonpool.ids import RequestId
from moonpool.latency.costs import TransferCost
from moonpool.routing.config import PolicyName, RoutingConfig
from moonpool.routing.disagg_decider import DisaggConfig
from moonpool.routing.fleet_table import FleetTable
from moonpool.routing.selector import PlacementDecision, Selector
from moonpool.routing.worker_view import WorkerRole
from moonpool.wire.explain import explanation_from_pb, explanation_to_pb
from moonpool.wire.fields import InvalidMessageError
from moonpool_router.placement_facts import MAX_CANDIDATES, candidates_json, placement_facts
from support.fleet import FITS, make_query, make_view

PREFILL, DECODE = WorkerRole.PREFILL, WorkerRole.DECODE
ONLY_REMOTE = DisaggConfig(threshold_tokens=0, busy_threshold_tokens=0, only_thresholds=True)


def decide(*, is_measured: bool = True, num_tokens: int = 1_000) -> PlacementDecision:
    """Elsewhere, reading from a peer; one prefill worker is full."""
    fits = FITS if is_measured else None
    views = [
        make_view("d1", DECODE, num_requests=4, fits=fits),
        make_view("d2", DECODE, num_requests=2, fits=fits),
        make_view("p1", PREFILL, queued=500, fits=fits),
        make_view("p2", PREFILL, fits=fits),
        make_view("p3", PREFILL, is_full=True, fits=fits),
    ]
    table = FleetTable.of(views)
    return Selector(RoutingConfig()).place(table, make_query(num_tokens, cached={"p1": 800}))


def make_placement(
    record: PlacementDecision | None = None, *, request_id: str = "r", attempt: int = 1
) -> Placement:
    return Placement(
        request_id=RequestId(request_id),
        attempt=attempt,
        record=record or decide(),
        placed_at=5.0,
        previous_outcome="d1 refused: no_blocks" if attempt > 1 else "",
    )


def printed(placement: Placement) -> str:
    out = io.StringIO()
    console = Console(file=out, width=80, highlight=False, no_color=True)
    print_placement(placement, console)
    return out.getvalue()


@pytest.mark.parametrize("is_measured", [True, False])
@pytest.mark.parametrize("num_tokens", [1_000, 40])
def test_a_placement_survives_the_wire(is_measured: bool, num_tokens: int) -> None:
    first = make_placement(decide(is_measured=is_measured, num_tokens=num_tokens))
    second = make_placement(attempt=2)
    message = explanation_to_pb("r", (first, second), now=7.5)
    read = explanation_from_pb(type(message).FromString(message.SerializeToString()))
    assert [placement.placed_at for placement in read] == [-2.5, -2.5]
    for sent, got in zip((first, second), read, strict=True):
        assert (got.attempt, got.previous_outcome) == (sent.attempt, sent.previous_outcome)
        assert got.decode.key == sent.decode.key
        assert got.decode.candidates == sent.decode.candidates
        assert got.decode.inputs == sent.decode.inputs != ()
        assert (got.prefill is None) == (sent.prefill is None)
        if got.prefill is not None and sent.prefill is not None:
            assert got.prefill.key == sent.prefill.key
            assert got.prefill.candidates == sent.prefill.candidates
            assert got.prefill.inputs == sent.prefill.inputs != ()
        assert got.decision == sent.decision
        assert got.plan == sent.plan


def test_what_is_wrong_on_the_wire_is_refused() -> None:
    message = explanation_to_pb("r", (make_placement(),), now=5.0)
    message.placements[0].policy = "astrology"
    with pytest.raises(InvalidMessageError, match=r"placements\[0\]\.policy"):
        explanation_from_pb(message)
    message = explanation_to_pb("r", (make_placement(),), now=5.0)
    message.placements[0].decode.candidates[0].terms.append(1.0)
    with pytest.raises(InvalidMessageError, match=r"candidates\[0\]\.terms"):
        explanation_from_pb(message)
    message = explanation_to_pb("r", (make_placement(),), now=5.0)
    message.placements[0].decode.inputs[0].name = ""
    with pytest.raises(InvalidMessageError, match=r"decode\.inputs is missing"):
        explanation_from_pb(message)


def test_it_is_told_in_words_and_a_column_per_candidate() -> None:
    text = printed(replace(make_placement(attempt=2), placed_at=-3.0))
    lines = text.splitlines()
    assert lines[0] == "request r  attempt 2  3.0 s ago  policy min_ttft"
    assert lines[1] == "after: d1 refused: no_blocks"
    assert lines[2] == (
        "prefill on a prefill worker: remote_is_sooner; 1000 uncached tokens there, threshold 256, "
        "3 prefill workers; here 414.0 ms, elsewhere 213.0 ms"
    )
    assert lines[3] == (
        "fetch on p2: 0 tokens cached there, 800 read from p1, 200 to compute; queue 0.00 ms, "
        "load 10.0 ms, compute 200.0 ms, handoff 3.00 ms: first token in 213.0 ms"
    )
    decode, prefill = text.split("\n\n")[1:3]
    assert decode.splitlines()[0].split() == ["decode", "*", "d2", "d1"]
    rows = [line.split() for line in decode.splitlines()]
    assert ["tpot", "13.0", "ms", "15.0", "ms"] in rows
    assert ["growth", "room", "yes", "yes"] in rows
    assert ["evicted", "0.00", "ms", "0.00", "ms"] in rows
    assert (
        decode.splitlines()[-1] == "decided by: eviction weight 0.3, slack 0.05, slo tpot 100.0 ms"
    )
    assert prefill.splitlines()[0].split() == ["prefill", "*", "p2", "p1", "p3"]
    assert prefill.splitlines()[1].split() == ["score", "0.213", "0.703", "no", "room"]
    assert max(map(len, decode.splitlines())) <= 80


def test_without_measurements_it_says_so() -> None:
    text = printed(make_placement(decide(is_measured=False, num_tokens=40)))
    assert "not measured yet: uncached tokens are the unit" in text
    assert "prefill on the decode worker: below_threshold" in text


def test_many_candidates_are_cut_short() -> None:
    views = [make_view(f"w{number}", fits=FITS) for number in range(9)]
    record = Selector(RoutingConfig()).place(FleetTable.of(views), make_query(100))
    assert "and 4 more: --json shows all" in printed(make_placement(record))


def test_json_has_every_term_and_no_infinity() -> None:
    table = FleetTable.of([make_view("d", DECODE, fits=FITS), make_view("full", is_full=True)])
    record = Selector(RoutingConfig()).place(table, make_query(100))
    value = json.loads(json.dumps(placement_json(make_placement(record)), allow_nan=False))
    assert value["plan"]["worker"] == "d@1"
    assert value["prefill"] is None
    (first, second) = value["decode"]["candidates"]
    assert first["terms"]["ttft_elsewhere_s"] is None
    assert first["terms"]["compute_s"] == pytest.approx(0.1)
    assert first["terms"]["has_growth_room"] == 1.0
    assert value["decode"]["inputs"]["eviction_weight"] == 0.3
    assert (second["score"], second["filtered"]) == (None, "no_room")


def test_facts_for_log_and_span_are_flat() -> None:
    facts = placement_facts(make_placement(attempt=2))
    assert facts["plan"] == "fetch"
    assert facts["peer"] == "p1@1"
    assert (facts["predicted_ttft_ms"], facts["predicted_tpot_ms"]) == (213.0, 13.0)
    assert (facts["predicted_local_ms"], facts["predicted_remote_ms"]) == (414.0, 213.0)
    assert facts["prefill_scores"] == "p2=0.213 p1=0.703 p3=no_room"
    assert facts["decode_scores"] == "d1=0.213 d2=0.213"
    assert facts["after"] == "d1 refused: no_blocks"
    assert all(isinstance(fact, str | int | float | bool) for fact in facts.values())


def test_a_span_has_every_term_of_the_candidates() -> None:
    record = decide()
    assert record.prefill is not None
    for selection in (record.decode, record.prefill):
        told = json.loads(candidates_json(selection))
        assert (told["num_left_out"], told["inputs"]) == (0, dict(selection.inputs))
        assert told["workers"][0] == str(selection.key)
        assert list(told["terms"]) == list(selection.term_names)
        for row, worker in enumerate(told["workers"]):
            (candidate,) = (c for c in selection.candidates if str(c.key) == worker)
            assert told["filters"][row] == candidate.filtered
            if candidate.score is None:
                assert told["scores"][row] is None
            else:
                assert told["scores"][row] == pytest.approx(candidate.score, rel=1e-5)
            terms = {name: column[row] for name, column in told["terms"].items()}
            assert terms == pytest.approx(dict(candidate.terms), rel=1e-5)
    # The prefill worker that is full, last and without a score.
    assert (told["workers"][-1], told["filters"][-1], told["scores"][-1]) == (
        "p3@1",
        "no_room",
        None,
    )


def test_what_is_not_possible_is_null_on_a_span_and_counts_are_whole() -> None:
    table = FleetTable.of([make_view("d", DECODE, fits=FITS, queued=1_234_567)])
    record = Selector(RoutingConfig()).place(table, make_query(100))
    text = candidates_json(record.decode)
    assert '"ttft_elsewhere_s":[null]' in text
    assert '"num_queued_tokens":[1234567]' in text


@pytest.mark.parametrize(
    ("policy", "num_workers"),
    [*((policy, 64) for policy in PolicyName), (PolicyName.MIN_TTFT, 200)],
)
def test_a_span_stays_small_however_large_the_fleet(policy: PolicyName, num_workers: int) -> None:
    rng = random.Random(num_workers)
    views = [
        make_view(
            f"{role.value}-{number}",
            role,
            total=100_000,
            available=rng.randrange(50_000, 100_000),
            free=rng.randrange(50_000),
            num_requests=rng.randrange(100),
            num_prefills=rng.randrange(100),
            queued=rng.randrange(100_000),
            churn=rng.random() * 1e7,
            fits=FITS,
        )
        for role in (PREFILL, DECODE)
        for number in range(num_workers)
    ]
    cached = {f"prefill-{number}": 16 * rng.randrange(1, 600) for number in range(num_workers)}
    config = RoutingConfig(policy=policy, disagg=ONLY_REMOTE)
    record = Selector(config).place(FleetTable.of(views), make_query(10_000, cached=cached))
    assert record.prefill is not None
    for selection in (record.decode, record.prefill):
        text = candidates_json(selection)
        assert len(text) < 4_096
        told = json.loads(text)
        assert told["workers"][0] == str(selection.key)
        assert len(set(told["workers"])) == 1 + MAX_CANDIDATES
        assert told["num_left_out"] == num_workers - 1 - MAX_CANDIDATES
        others = [c.score for c in selection.candidates if c.key != selection.key]
        best = sorted(score for score in others if score is not None)[:MAX_CANDIDATES]
        assert told["scores"][1:] == pytest.approx(best, rel=1e-5)


def test_a_peer_that_is_too_slow_is_named_in_words() -> None:
    slow = {"a": TransferCost(latency_s=2.0, bytes_per_s=1e9)}
    views = [make_view("a", is_full=True, fits=FITS), make_view("b", transfers=slow)]
    record = Selector(RoutingConfig()).place(
        FleetTable.of(views), make_query(1_000, cached={"a": 800})
    )
    text = printed(make_placement(record))
    assert "recompute on b: 0 tokens cached there, a holds 800, not worth reading" in text


def test_the_log_keeps_the_newest_requests_and_attempts() -> None:
    log = DecisionLog(2)
    record = decide()
    for request_id in ("a", "b", "a", "c"):
        number = len(log.get(RequestId(request_id))) + 1
        log.add(make_placement(record, request_id=request_id, attempt=number))
    assert log.get(RequestId("a")) == ()
    assert [p.attempt for p in log.get(RequestId("b"))] == [1]
    fork = log.fork()
    for number in range(2, 30):
        log.add(make_placement(record, request_id="c", attempt=number))
    assert [p.attempt for p in log.get(RequestId("c"))] == list(range(14, 30))
    assert [p.attempt for p in fork.get(RequestId("c"))] == [1]
    nothing = DecisionLog(0)
    nothing.add(make_placement(record))
    assert nothing.get(RequestId("r")) == ()
