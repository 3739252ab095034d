"""The latency model: costs, and what the fits make of steps that were observed."""

from __future__ import annotations

import math
import random

import pytest

from moonpool.latency.costs import DecodeCost, PrefillCost, TransferCost, prefill_work
from moonpool.latency.load_or_recompute import load_or_recompute
from moonpool.latency.step_fits import DecodeFit, PrefillFit
from moonpool.latency.transfer_fit import PRIOR, TransferFit

PREFILL = PrefillCost(base_s=0.004, per_token_s=4e-5, per_work_s=2e-9, max_step_tokens=2_048)
DECODE = DecodeCost(base_s=0.01, per_context_token_s=2e-7, per_request_s=5e-4)
MIB = 1 << 20


def prefill_fit(
    *, seed: int, noise: float, num_steps: int = 200, slower: float = 1.0
) -> PrefillFit:
    fit = PrefillFit(max_step_tokens=2_048)
    teach(fit, seed=seed, noise=noise, num_steps=num_steps, slower=slower)
    return fit


def teach(fit: PrefillFit, *, seed: int, noise: float, num_steps: int, slower: float = 1.0) -> None:
    rng = random.Random(seed)
    for _ in range(num_steps):
        num_tokens = rng.choice((16, 64, 200, 512, 1_024, 2_048))
        num_cached_tokens = rng.choice((0, 0, 512, 4_096, 16_384))
        elapsed_s = PREFILL.predict(num_tokens, num_cached_tokens) * slower
        if rng.random() < 0.1 and noise:
            elapsed_s += 1.0
        fit.observe(
            num_tokens=num_tokens,
            work=prefill_work(num_tokens, num_cached_tokens),
            elapsed_s=elapsed_s * (1.0 + rng.uniform(-noise, noise)),
        )
    fit.validate()


def test_the_chunks_of_a_prompt_sum_to_the_prompt() -> None:
    whole = PREFILL.predict(6_144, 1_024)
    chunks = sum(PREFILL.predict(2_048, 1_024 + done) for done in (0, 2_048, 4_096))
    assert whole == pytest.approx(chunks)
    assert PREFILL.predict(0, 100) == 0.0
    assert DECODE.predict(0, 0) == 0.0
    assert TransferCost(latency_s=1.0, bytes_per_s=1.0).predict(0) == 0.0


@pytest.mark.parametrize("noise", [0.0, 0.05])
def test_a_prefill_fit_predicts_what_it_has_not_seen(noise: float) -> None:
    """One step in ten is held up by a second: that moves nothing."""
    cost = prefill_fit(seed=1, noise=noise).cost
    assert cost is not None
    for num_tokens, num_cached_tokens in ((100, 0), (700, 8_192), (6_144, 0), (64, 6_144)):
        expected = PREFILL.predict(num_tokens, num_cached_tokens)
        assert cost.predict(num_tokens, num_cached_tokens) == pytest.approx(expected, rel=0.08)


def test_a_few_steps_of_one_size_give_a_line_through_nothing() -> None:
    fit = PrefillFit(max_step_tokens=2_048)
    for _ in range(2):
        fit.observe(num_tokens=512, work=prefill_work(512, 0), elapsed_s=0.05)
        assert fit.cost is None
    fit.observe(num_tokens=512, work=prefill_work(512, 0), elapsed_s=0.05)
    assert fit.cost is not None
    assert fit.cost.predict(512) == pytest.approx(0.05, rel=0.01)
    assert fit.cost.predict(256) == pytest.approx(0.025, rel=0.1)
    assert fit.cost.predict(2_048) == pytest.approx(0.2, rel=0.1)


def test_a_machine_that_becomes_slow_is_noticed() -> None:
    fit = prefill_fit(seed=2, noise=0.02)
    teach(fit, seed=3, noise=0.02, num_steps=200, slower=3.0)
    assert fit.cost is not None
    assert fit.cost.predict(1_024) == pytest.approx(3.0 * PREFILL.predict(1_024), rel=0.1)


def test_many_small_steps_do_not_push_out_what_is_known_of_large_ones() -> None:
    fit = prefill_fit(seed=4, noise=0.0)
    for _ in range(5_000):
        fit.observe(num_tokens=16, work=prefill_work(16, 0), elapsed_s=PREFILL.predict(16))
    assert fit.cost is not None
    expected = PREFILL.predict(2_048, 16_384)
    assert fit.cost.predict(2_048, 16_384) == pytest.approx(expected, rel=0.05)


def test_a_decode_fit_tells_batch_from_context() -> None:
    fit, rng = DecodeFit(), random.Random(5)
    for _ in range(300):
        batch = rng.randint(1, 32)
        context = batch * rng.randint(100, 8_000)
        elapsed_s = DECODE.predict(batch, context) * rng.uniform(0.97, 1.03)
        fit.observe(batch=batch, num_context_tokens=context, elapsed_s=elapsed_s)
    fit.validate()
    assert fit.cost is not None
    for batch, context in ((1, 100), (8, 40_000), (32, 100_000)):
        expected = DECODE.predict(batch, context)
        assert fit.cost.predict(batch, context) == pytest.approx(expected, rel=0.08)


def test_a_decode_fit_of_one_size_is_constant() -> None:
    fit = DecodeFit()
    for _ in range(10):
        fit.observe(batch=1, num_context_tokens=100, elapsed_s=0.02)
    assert fit.cost is not None
    assert fit.cost.predict(2, 200) == pytest.approx(0.02, rel=0.05)


def test_what_is_no_step_teaches_nothing() -> None:
    prefill, decode = PrefillFit(max_step_tokens=16), DecodeFit()
    for _ in range(9):
        prefill.observe(num_tokens=0, work=0, elapsed_s=1.0)
        prefill.observe(num_tokens=5, work=25, elapsed_s=0.0)
        decode.observe(batch=0, num_context_tokens=0, elapsed_s=1.0)
    assert prefill.cost is decode.cost is None


def test_a_transfer_fit_learns_latency_and_bandwidth() -> None:
    fit = TransferFit()
    assert fit.cost == PRIOR
    for num_mib in (1, 8, 64, 2, 32, 16):
        fit.observe(
            num_bytes=num_mib * MIB, elapsed_s=0.01 + num_mib / 1_000, is_late=False, now=0.0
        )
    fit.validate()
    assert fit.cost.predict(100 * MIB) == pytest.approx(0.11, rel=0.05)
    assert fit.cost.predict(1) == pytest.approx(0.01, rel=0.1)


def test_one_slow_read_counts_at_once() -> None:
    fit = TransferFit()
    for _ in range(20):
        fit.observe(num_bytes=8 * MIB, elapsed_s=0.02, is_late=False, now=0.0)
    fit.observe(num_bytes=8 * MIB, elapsed_s=2.0, is_late=True, now=0.0)
    assert fit.cost.predict(8 * MIB) >= 1.9
    fit.observe(num_bytes=8 * MIB, elapsed_s=0.02, is_late=False, now=0.0)
    assert fit.cost.predict(8 * MIB) <= 0.3
    fit.observe(num_bytes=8 * MIB, elapsed_s=0.02, is_late=False, now=0.0)
    fit.observe(num_bytes=8 * MIB, elapsed_s=0.02, is_late=False, now=0.0)
    assert fit.cost.predict(8 * MIB) == pytest.approx(0.02, rel=0.25)
    fit.validate()


def test_the_first_read_ever_counts_too() -> None:
    fit = TransferFit()
    fit.observe(num_bytes=8 * MIB, elapsed_s=2.0, is_late=True, now=0.0)
    assert fit.cost.predict(8 * MIB) == pytest.approx(2.0, rel=0.05)


def test_a_read_that_was_given_up_would_have_taken_longer() -> None:
    fit = TransferFit()
    fit.observe(num_bytes=8 * MIB, elapsed_s=0.1, is_late=True, now=0.0, is_complete=False)
    assert fit.cost.predict(8 * MIB) == pytest.approx(0.2, rel=0.01)


def test_probes_become_rare_while_they_are_slow() -> None:
    fit = TransferFit()
    assert fit.is_probe_due(0.0)
    now, waits = 0.0, []
    for _ in range(7):
        fit.observe(num_bytes=MIB, elapsed_s=2.0, is_late=True, now=now)
        fit.validate()
        wait_s = next(s for s in range(1, 1_000) if fit.is_probe_due(now + s))
        waits.append(wait_s)
        now += wait_s
    assert waits == [20, 40, 80, 160, 320, 320, 320]
    fit.observe(num_bytes=MIB, elapsed_s=0.01, is_late=False, now=now)
    assert fit.is_probe_due(now + 10.0)


def test_load_or_recompute_weighs_only_what_differs() -> None:
    transfer = TransferCost(latency_s=0.005, bytes_per_s=1e9)
    choice = load_or_recompute(
        PREFILL,
        transfer,
        num_tokens=6_208,
        num_cached_tokens=0,
        num_peer_tokens=6_144,
        bytes_per_token=23_040,
    )
    assert choice.load_s == pytest.approx(0.005 + 6_144 * 23_040 / 1e9)
    assert choice.recompute_s == pytest.approx(PREFILL.predict(6_208) - PREFILL.predict(64, 6_144))
    nothing = load_or_recompute(
        PREFILL,
        transfer,
        num_tokens=64,
        num_cached_tokens=48,
        num_peer_tokens=48,
        bytes_per_token=23_040,
    )
    assert nothing.load_s == 0.0
    assert math.isclose(nothing.recompute_s, 0.0, abs_tol=1e-12)
