"""The draw on the device against the CPU's: the same logits give the same tokens."""

from __future__ import annotations

import pytest
import torch

from moonpool.core.step import SampleSpec
from moonpool.engine.device.flashinfer import FlashInferKernels
from moonpool.engine.device.kernels import DeviceKernels, TorchKernels
from moonpool.engine.device.sampling import NOT_FINITE, sample_on_device
from moonpool.engine.sampler import sample
from moonpool.inference.sampling import SamplingParams
from support.flashinfer_stand_in import make_flashinfer

KERNELS = [TorchKernels(), FlashInferKernels(make_flashinfer())]
by_kernels = pytest.mark.parametrize("kernels", KERNELS, ids=lambda kernels: kernels.name)


def specs() -> list[SampleSpec]:
    params = [
        {"temperature": 0.0},
        {},
        {"temperature": 0.3},
        {"temperature": 2.5, "top_k": 3},
        {"top_k": 1},
        {"top_p": 0.5},
        {"top_p": 0.01},
        {"top_k": 40, "top_p": 0.8, "temperature": 0.7},
        {"top_k": 5_000},
    ]
    return [
        SampleSpec(sampling=SamplingParams(seed=seed, **one), position=seed % 7)
        for seed in range(40)
        for one in params
    ]


@by_kernels
def test_draws_what_the_cpu_draws(kernels: DeviceKernels) -> None:
    torch.manual_seed(3)
    wanted = specs()
    logits = torch.randn(len(wanted), 700) * 3
    found = sample_on_device(logits, wanted, kernels).tolist()
    assert found == sample(logits, wanted)


@by_kernels
def test_greedy_takes_the_lowest_id_among_equals(kernels: DeviceKernels) -> None:
    logits = torch.tensor([[0.0, 3.0, 1.0, 3.0], [5.0, 5.0, 5.0, 5.0]], dtype=torch.bfloat16)
    greedy = SampleSpec(sampling=SamplingParams(temperature=0.0), position=0)
    assert sample_on_device(logits, [greedy] * 2, kernels).tolist() == [1, 0]


@by_kernels
def test_rows_that_are_not_finite_have_no_token(kernels: DeviceKernels) -> None:
    logits = torch.zeros(3, 8)
    logits[1, 2] = float("nan")
    logits[2, 5] = float("inf")
    params = SamplingParams(temperature=0.5, top_p=0.9, seed=1)
    found = sample_on_device(logits, [SampleSpec(sampling=params, position=0)] * 3, kernels)
    assert found[0] >= 0
    assert found[1:].tolist() == [NOT_FINITE, NOT_FINITE]


def test_among_equals_at_the_edge_torch_keeps_the_lower_id() -> None:
    probabilities = torch.tensor([[0.1, 0.3, 0.3, 0.3]])
    kept = TorchKernels().keep_likeliest(
        probabilities, torch.tensor([2], dtype=torch.int32), torch.tensor([1.0])
    )
    assert kept.tolist() == [[False, True, True, False]]
