"""The sampler against a plain reference, and its promises about ties, filters and bad rows."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from moonpool.core.step import SampleSpec
from moonpool.engine.native_sampler import Sampler
from moonpool.inference.rng import uniforms
from moonpool.inference.sampling import SamplingParams
from moonpool.native import kernels, status
from moonpool.native.fallback import FallbackKernels

FORMS = [pytest.param(FallbackKernels(), id="torch")]
if status().is_compiled:
    FORMS.append(pytest.param(kernels(), id="native"))


@pytest.fixture(params=FORMS)
def sample(request):
    return Sampler(request.param).sample


def spec(position: int = 0, **params) -> SampleSpec:
    return SampleSpec(sampling=SamplingParams(**params), position=position)


def reference(logits: list[float], params: SamplingParams, position: int) -> int:
    """The definition, token by token."""
    top = max(logits)
    weights = [math.exp((x - top) / params.temperature) for x in logits]
    order = sorted(range(len(logits)), key=lambda i: (-weights[i], i))
    kept = order[: params.top_k] if params.top_k else order
    if params.top_p < 1.0:
        mass = sum(weights[i] for i in kept)
        running, nucleus = 0.0, []
        for i in kept:
            nucleus.append(i)
            running += weights[i]
            if running >= params.top_p * mass:
                break
        kept = nucleus
    target = uniforms([params.seed], [0], [position])[0] * sum(weights[i] for i in sorted(kept))
    running = 0.0
    for i in sorted(kept):
        running += weights[i]
        if running > target:
            return i
    raise AssertionError("no token")


def test_greedy_takes_the_lowest_id_among_equals(sample) -> None:
    logits = torch.tensor([[0.0, 3.0, 1.0, 3.0], [5.0, 5.0, 5.0, 5.0]])
    assert sample(logits, [spec(temperature=0.0)] * 2) == [1, 0]


@pytest.mark.parametrize(
    "params",
    [
        {},
        {"temperature": 0.3},
        {"temperature": 3.0},
        {"top_k": 1},
        {"top_k": 5},
        {"top_p": 0.5},
        {"top_p": 0.01},
        {"top_k": 40, "top_p": 0.8},
        {"top_k": 100_000, "top_p": 0.999},
    ],
)
def test_equals_the_definition(sample, params) -> None:
    rng = np.random.Generator(np.random.PCG64(3))
    for position in range(40):
        logits = (rng.standard_normal(300) * 3).astype(np.float32)
        one = spec(position, seed=11, **params)
        expected = reference([float(x) for x in logits], one.sampling, position)
        assert sample(torch.from_numpy(logits)[None], [one]) == [expected]


def test_top_p_looks_beyond_its_first_candidates(sample) -> None:
    # Nearly flat over 5,000 tokens: the nucleus of 0.9 has thousands of tokens.
    rng = np.random.Generator(np.random.PCG64(4))
    logits = (rng.standard_normal(5000) * 0.1).astype(np.float32)
    specs = [spec(p, seed=p, top_p=0.9) for p in range(20)]
    found = sample(torch.from_numpy(logits).repeat(20, 1), specs)
    assert found == [reference([float(x) for x in logits], s.sampling, s.position) for s in specs]


def test_ties_at_the_edge_of_top_k_go_to_the_lower_id(sample) -> None:
    logits = torch.tensor([[1.0, 2.0, 1.0, 1.0]])
    drawn = {sample(logits, [spec(p, seed=1, top_k=2, temperature=5.0)])[0] for p in range(200)}
    assert drawn == {0, 1}


def test_a_row_does_not_depend_on_the_batch(sample) -> None:
    rng = np.random.Generator(np.random.PCG64(5))
    logits = torch.from_numpy(rng.standard_normal((6, 1000)).astype(np.float32) * 2)
    specs = [
        spec(0, seed=1),
        spec(1, temperature=0.0),
        spec(2, seed=2, top_k=10),
        spec(3, seed=3, top_p=0.7),
        spec(4, seed=4, temperature=0.5),
        spec(5, temperature=0.0),
    ]
    alone = [sample(logits[row : row + 1], [specs[row]])[0] for row in range(6)]
    assert sample(logits, specs) == alone


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_row_that_is_not_finite_yields_nothing(sample, bad: float, temperature: float) -> None:
    logits = torch.zeros(2, 50)
    logits[0, 7] = bad
    logits[1, 9] = 100.0
    assert sample(logits, [spec(temperature=temperature, seed=1)] * 2) == [None, 9]


def test_a_tiny_temperature_is_greedy(sample) -> None:
    logits = torch.tensor([[0.0, 2.0, 1.0]])
    assert sample(logits, [spec(temperature=1e-8, seed=9)]) == [1]


def test_frequencies_follow_the_probabilities(sample) -> None:
    logits = torch.tensor([[0.0, math.log(2.0), math.log(5.0)]])
    specs = [spec(p, seed=2) for p in range(4000)]
    drawn = np.bincount(sample(logits.repeat(4000, 1), specs), minlength=3) / 4000
    assert abs(drawn - np.array([1, 2, 5]) / 8).max() < 0.03


def test_both_forms_draw_the_same_tokens_of_a_whole_vocabulary() -> None:
    """As a model gives them: a few likely tokens before a long tail."""
    rng = np.random.Generator(np.random.PCG64(6))
    logits = torch.from_numpy(rng.standard_normal((24, 49_152)).astype(np.float32) * 3)
    kinds = [
        {"temperature": 0.0},
        {},
        {"temperature": 0.7, "top_p": 0.9},
        {"temperature": 0.7, "top_k": 50, "top_p": 0.95},
        {"top_k": 2_000},
        {"temperature": 1.5, "top_p": 0.99},
    ]
    specs = [spec(row, seed=row, **kinds[row % len(kinds)]) for row in range(24)]
    found = [Sampler(form).sample(logits, specs) for form in (FallbackKernels(), kernels())]
    assert found[0] == found[1]
