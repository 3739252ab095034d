"""What a worker learns of its own steps from the frames that tell of them."""

from __future__ import annotations

import numpy as np
import pytest

from moonpool.core.protocol import BlockLedger, CoreFrame
from moonpool.core.step import SampleSpec, StepPlan, StepRow
from moonpool.inference.sampling import SamplingParams
from moonpool.latency.costs import PrefillCost, TransferCost, prefill_work
from moonpool.latency.step_shape import StepShape
from moonpool.wire.engine_messages import TimedFrame
from moonpool.worker.step_fits import StepFits, shape_of
from support.fleet import make_key

LEDGER = BlockLedger(num_total=1, num_free=1, num_cached=0, num_referenced=0)
NO_IDS = np.zeros(0, np.int32)


def row(start: int, num_tokens: int, *, is_sampling: bool = True) -> StepRow:
    return StepRow(
        slot=0,
        start=start,
        num_tokens=num_tokens,
        token_ids=NO_IDS,
        block_tables=(NO_IDS,),
        sample=SampleSpec(sampling=SamplingParams(max_tokens=1), position=0)
        if is_sampling
        else None,
    )


def tell(fits: StepFits, shape: StepShape, elapsed_s: float) -> None:
    frame = CoreFrame(
        step=1, replies=(), ledger=LEDGER, forward_s=elapsed_s / 2, other_s=elapsed_s / 2
    )
    fits.frame_received(TimedFrame(frame=frame, shape=shape))


def chunk(num_tokens: int, num_cached_tokens: int = 0, **decodes: int) -> StepShape:
    return StepShape(
        num_prefill_tokens=num_tokens,
        prefill_work=prefill_work(num_tokens, num_cached_tokens),
        **decodes,
    )


def test_a_plan_is_summed_up() -> None:
    plan = StepPlan(
        step=1,
        rows=(row(99, 1), row(199, 1), row(0, 64, is_sampling=False), row(128, 32), row(0, 1)),
        leaf_block_ids=NO_IDS,
        zero_tails=np.zeros((0, 2), np.int32),
    )
    assert shape_of(plan) == StepShape(
        num_prefill_tokens=64 + 32 + 1,
        prefill_work=64 * 64 + 32 * (32 + 256) + 1,
        num_decodes=2,
        num_context_tokens=300,
    )


def test_steps_teach_both_fits() -> None:
    fits = StepFits(max_step_tokens=512)
    cost = PrefillCost(base_s=0.0, per_token_s=1e-4, per_work_s=0.0, max_step_tokens=512)
    for step in range(40):
        batch = 1 + step % 8
        decodes = StepShape(num_decodes=batch, num_context_tokens=batch * 100)
        tell(fits, decodes, 0.01 + 1e-3 * batch)
        num_tokens = 64 * (1 + step % 5)
        tell(fits, chunk(num_tokens), cost.predict(num_tokens))
        # A step of both: the chunk's own share is what the prefill fit learns.
        mixed = chunk(num_tokens, num_decodes=batch, num_context_tokens=batch * 100)
        tell(fits, mixed, cost.predict(num_tokens) + 1e-3 * batch)
    value = fits.value()
    assert value.prefill is not None
    assert value.decode is not None
    assert value.prefill.predict(512) == pytest.approx(cost.predict(512), rel=0.05)
    assert value.prefill.max_step_tokens == 512
    assert value.decode.predict(8, 800) == pytest.approx(0.018, rel=0.05)


def test_a_mixed_step_teaches_nothing_before_decodes_are_known() -> None:
    fits = StepFits(max_step_tokens=512)
    for _ in range(20):
        tell(fits, chunk(64, num_decodes=1, num_context_tokens=100), 0.05)
    assert fits.prefill_cost is None


def test_an_idle_frame_teaches_nothing() -> None:
    fits = StepFits(max_step_tokens=512)
    for _ in range(20):
        tell(fits, StepShape(), 0.0)
    assert fits.value().prefill is fits.value().decode is None


def test_the_value_is_the_same_object_until_something_is_learnt() -> None:
    transfers = [(make_key("p"), TransferCost(latency_s=1.0, bytes_per_s=1.0))]
    known = tuple(transfers)
    fits = StepFits(max_step_tokens=512, transfers=lambda: known)
    first = fits.value()
    assert first.transfers is known
    assert fits.value() is first
    for _ in range(3):
        tell(fits, chunk(64), 0.05)
    assert fits.value() is not first
    assert fits.value() is fits.value()
