"""Placement through the router's doors: fits that workers tell, the operator's policy, and `explain`."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest

from moonpool.config.schema import PlacementSettings
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
from support.fake_worker import FakeWorker, fake_worker
from support.fleet import FITS
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
