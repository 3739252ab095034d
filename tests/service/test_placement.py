"""Placement through the router's doors: fits that workers tell, the operator's policy, and `explain`."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from pathlib import Path

import pytest

from moonpool.config.schema import PlacementSettings
from moonpool.core.protocol import BlockLedger
from moonpool.errors import NotFoundError
from moonpool.handoff.messages import DecodeRequest, PrefillRequest
from moonpool.inference.generation import TokenPrompt
from moonpool.inference.output import FinishReason
from moonpool.routing.config import PolicyName
from moonpool.routing.disagg_decider import DisaggReason
from moonpool.routing.forecast import PlanKind
from moonpool.routing.worker_view import WorkerRole
from moonpool.rpc.admin import fetch_trace
from moonpool.rpc.explanation import fetch_explanation
from moonpool.telemetry import names
from support.cli import Ran, cli
from support.eventually import eventually
from support.fake_worker import FakeWorker, fake_worker
from support.fleet import FITS
from support.placement_record import legs_of, rebuild
from support.router import RouterUnderTest, ask, router

#: Longer than the router's threshold of 32.
PROMPT = TokenPrompt(token_ids=(9,) * 100)
OTHER_PROMPT = TokenPrompt(token_ids=(8,) * 100)


async def answer(
    r: RouterUnderTest, worker: FakeWorker, prompt: TokenPrompt = PROMPT
) -> tuple[DecodeRequest, str]:
    """One request with one token; what the decode worker was told, and the request's id."""
    asking = asyncio.create_task(r.client.generate(ask(prompt, max_tokens=1)))
    command = await worker.next(DecodeRequest)
    worker.tokens(command, 0, [65], finish=FinishReason.LENGTH)
    answered = await asking
    assert answered.done is not None
    return command, answered.done.request_id


async def test_why_a_request_went_where_can_be_asked(tmp_path: Path) -> None:
    async with (
        router(tmp_path) as r,
        fake_worker(r.cluster, r.bus) as decode,
        fake_worker(r.cluster, r.bus, "prefill-0", role=WorkerRole.PREFILL) as prefill,
    ):
        await r.ready(2)
        _, first_id = await answer(r, decode)
        (placement,) = await fetch_explanation(r.client.address, first_id, key=None, deadline_s=5)
        assert placement.record.policy is PolicyName.MIN_TTFT
        assert not placement.record.is_measured
        assert placement.decision.reason is DisaggReason.ABOVE_THRESHOLD
        assert placement.decode.key == decode.key
        assert placement.prefill is not None
        assert placement.prefill.key == placement.plan.key == prefill.key
        assert placement.placed_at <= 0.0
        await prefill.next(PrefillRequest)

        # A millisecond a token, both: here it takes 100 ms, elsewhere the handoff in addition.
        decode.load = replace(decode.load, fits=FITS)
        decode.send()
        command, second_id = await answer(r, decode, OTHER_PROMPT)
        assert command.source is None
        (placement,) = await fetch_explanation(r.client.address, second_id, key=None, deadline_s=5)
        assert placement.record.is_measured
        assert placement.decision.reason is DisaggReason.LOCAL_IS_SOONER
        assert placement.decision.prediction is not None
        assert placement.decision.prediction.local_s == pytest.approx(0.1)
        assert placement.decision.prediction.remote_s > 0.1
        assert placement.plan.kind is PlanKind.RECOMPUTE
        assert placement.plan.compute_s == pytest.approx(0.1)

        spans = await fetch_trace(r.client.address, second_id, key=None, deadline_s=5)
        (attempt,) = (span for span in spans if span.name == "attempt")
        assert attempt.attributes["moonpool.policy"] == "min_ttft"
        assert attempt.attributes["moonpool.plan"] == "recompute"
        assert attempt.attributes["moonpool.predicted_ttft_ms"] == pytest.approx(100.0)

        with pytest.raises(NotFoundError, match="No placement"):
            await fetch_explanation(r.client.address, "nobody", key=None, deadline_s=5)


async def run_explain(tmp_path: Path, r: RouterUnderTest, request_id: str, *flags: str) -> Ran:
    """`moonpool explain`, which must go well."""
    address, data_dir = r.client.address, str(tmp_path / "data")
    ran = await asyncio.to_thread(
        cli, "explain", request_id, *flags, "--address", address, "--data-dir", data_dir
    )
    assert (ran.code, ran.err) == (0, "")
    return ran


async def test_the_command_has_every_term_and_so_has_the_span(tmp_path: Path) -> None:
    """Of a decision that pushes five blocks out of each cache."""
    placement = PlacementSettings.model_validate({"disagg": "threshold"})
    async with (
        router(tmp_path, placement=placement) as r,
        fake_worker(r.cluster, r.bus) as decode,
        fake_worker(r.cluster, r.bus, "prefill-0", role=WorkerRole.PREFILL) as prefill,
    ):
        await r.ready(2)
        ledger = BlockLedger(num_total=1_000, num_free=2, num_cached=998, num_referenced=0)
        for worker in (decode, prefill):
            worker.load = replace(worker.load, ledger=ledger, fits=FITS)
            worker.send()

        async def has_told() -> bool:
            loads = [worker.load for worker in (await r.client.status()).workers]
            return all(load is not None and load.ledger.num_free == 2 for load in loads)

        await eventually(has_told, timeout_s=10, what="both workers have told their loads")
        _, request_id = await answer(r, decode)
        printed = (await run_explain(tmp_path, r, request_id, "--json")).json
        words = (await run_explain(tmp_path, r, request_id)).out
        spans = await fetch_trace(r.client.address, request_id, key=None, deadline_s=5)

    assert printed["request_id"] == request_id
    (explained,) = printed["placements"]
    decode_leg, prefill_leg = legs_of(explained)
    assert (decode_leg.chosen, prefill_leg.chosen) == (str(decode.key), str(prefill.key))
    terms = decode_leg.terms[decode_leg.chosen]
    assert terms == pytest.approx(
        {
            "num_cached_tokens": 0,
            "num_read_tokens": 0,
            "num_queued_tokens": 0,
            "num_requests": 0,
            "used_fraction": 0.0,
            "queue_s": 0.0,
            "load_s": 0.0,
            "compute_s": 0.1,
            "interference_s": 0.0,
            "ttft_here_s": 0.1,
            "ttft_elsewhere_s": terms["ttft_elsewhere_s"],
            "tpot_s": 0.011,
            "tpot_with_chunks_s": 0.011,
            "has_growth_room": 1.0,
            "evicted_s": 0.08,
            "churn": 0.0,
        }
    )
    assert 0.1 < terms["ttft_elsewhere_s"] < 0.2
    assert decode_leg.inputs == {
        "eviction_weight": 0.3,
        "slack": 0.05,
        "slo_tpot_s": 0.1,
        "threshold_tokens": 32.0,
    }
    assert decode_leg.scores[decode_leg.chosen] == pytest.approx(
        terms["ttft_elsewhere_s"] + 0.3 * 0.08
    )
    assert prefill_leg.terms[prefill_leg.chosen]["evicted_s"] == pytest.approx(0.08)
    for leg in (decode_leg, prefill_leg):
        rebuilt = rebuild(leg)
        assert (rebuilt.chosen, rebuilt.scores) == (leg.chosen, pytest.approx(leg.scores))

    assert "prefill on a prefill worker: above_threshold; 100 uncached tokens there" in words
    rows = [line.split() for line in words.splitlines()]
    assert ["evicted", "80.0", "ms"] in rows
    assert ["growth", "room", "yes"] in rows
    assert words.count("decided by: eviction weight 0.3, slack 0.05") == 2

    (attempt,) = (span for span in spans if span.name == names.SPAN_ATTEMPT)
    assert attempt.attributes["moonpool.predicted_tpot_ms"] == pytest.approx(11.0)
    for leg, name in (
        (decode_leg, names.ATTR_DECODE_CANDIDATES),
        (prefill_leg, names.ATTR_PREFILL_CANDIDATES),
    ):
        told = json.loads(str(attempt.attributes[name]))
        assert (told["workers"], told["num_left_out"]) == ([leg.chosen], 0)
        assert (told["inputs"], told["filters"]) == (leg.inputs, [None])
        assert told["scores"] == pytest.approx([leg.scores[leg.chosen]], rel=1e-5)
        told_terms = {name: value for name, (value,) in told["terms"].items()}
        assert told_terms == pytest.approx(leg.terms[leg.chosen], rel=1e-5)


async def test_what_was_just_answered_is_expected_to_lie_where_it_ran(tmp_path: Path) -> None:
    async with router(tmp_path) as r, fake_worker(r.cluster, r.bus) as decode:
        await r.ready(1)
        _, first_id = await answer(r, decode)
        # The worker has told of no block, and tells of none.
        _, second_id = await answer(r, decode)
        plans = [
            (await fetch_explanation(r.client.address, request_id, key=None, deadline_s=5))[0].plan
            for request_id in (first_id, second_id)
        ]
    assert [(plan.kind, plan.num_computed_tokens) for plan in plans] == [
        (PlanKind.RECOMPUTE, 100),
        (PlanKind.LOCAL, 4),
    ]


async def test_the_operators_policy_is_followed(tmp_path: Path) -> None:
    placement = PlacementSettings.model_validate({"mode": "round-robin", "num_kept_decisions": 2})
    async with (
        router(tmp_path, placement=placement) as r,
        fake_worker(r.cluster, r.bus, "decode-0") as first,
        fake_worker(r.cluster, r.bus, "decode-1") as second,
    ):
        await r.ready(2)
        ids = [(await answer(r, worker))[1] for worker in (first, second, first)]
        (kept,) = await fetch_explanation(r.client.address, ids[-1], key=None, deadline_s=5)
        assert kept.record.policy is PolicyName.ROUND_ROBIN
        with pytest.raises(NotFoundError):
            await fetch_explanation(r.client.address, ids[0], key=None, deadline_s=5)
