"""Linear: the same product whoever multiplies, and the same bits for a row in any batch in C."""

from __future__ import annotations

import pytest
import torch

from moonpool import native
from moonpool.config.cpu import has_bfloat16_products
from moonpool.engine.linear import Linear, has_native_bfloat16, round_to_int8
from moonpool.native.fallback import FallbackKernels

FORMS = {"native": native.kernels(), "torch": FallbackKernels()}


@pytest.fixture(autouse=True)
def _one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("has_bias", [False, True])
def test_any_number_of_rows(form: str, stored: torch.dtype, has_bias: bool) -> None:
    torch.manual_seed(1)
    weight = torch.randn(72, 40).to(stored)
    bias = torch.randn(72) if has_bias else None
    linear = Linear(weight, bias, dtype=torch.float32, kernels=FORMS[form])
    for num_rows in (1, 2, 7, 33):
        # A slice of wider rows: not contiguous.
        x = torch.randn(num_rows, 50)[:, 3:43]
        expected = x.double() @ weight.double().t() + (0 if bias is None else bias.double())
        torch.testing.assert_close(linear(x), expected.float(), atol=2e-5, rtol=1e-5)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("has_bias", [False, True])
def test_int8_is_the_product_with_rounded_weights(
    form: str, dtype: torch.dtype, has_bias: bool
) -> None:
    torch.manual_seed(2)
    weight = torch.randn(72, 40) * torch.rand(72, 1)
    weight[5] = 0.0
    bias = torch.randn(72, dtype=dtype) if has_bias else None
    rounded, scale = round_to_int8(weight)
    exact = rounded.double() * scale.double()[:, None]
    assert ((exact - weight).abs() <= 0.5001 * scale[:, None]).all()
    assert (rounded.abs().amax(dim=1) == torch.where(torch.arange(72) == 5, 0, 127)).all()
    linear = Linear(weight, bias, dtype=dtype, kernels=FORMS[form], quantization="int8")
    x = torch.randn(7, 40).to(dtype)
    expected = x.double() @ exact.t() + (0 if bias is None else bias.double())
    found = linear(x)
    assert found.dtype is dtype
    tolerance = 2e-5 if dtype is torch.float32 else 4e-2
    torch.testing.assert_close(found.double(), expected, atol=tolerance, rtol=tolerance)


@pytest.mark.skipif(
    not native.kernels().has_bfloat16_products, reason="the C library has no bfloat16 products here"
)
@pytest.mark.parametrize("has_bias", [False, True])
def test_rows_are_rounded_for_the_product_alone(has_bias: bool) -> None:
    torch.manual_seed(3)
    weight = torch.randn(72, 41).bfloat16()
    bias = torch.randn(72) if has_bias else None
    linear = Linear(weight, bias, dtype=torch.float32, kernels=native.kernels(), is_rounding=True)
    for num_rows in (1, 2, 7, 33):
        # A slice of wider rows: not contiguous.
        x = torch.randn(num_rows, 50)[:, 3:44]
        near = x.bfloat16().double()
        expected = near @ weight.double().t() + (0 if bias is None else bias.double())
        found, largest = linear.surveyed(x)
        torch.testing.assert_close(found, expected.float(), atol=2e-5, rtol=1e-5)
        assert torch.equal(linear(x), found)
        assert largest is not None
        assert torch.equal(largest[:, 0], found[:, :16].amax(dim=1))


@pytest.mark.skipif(not native.status().is_compiled, reason="torch multiplies here")
def test_a_row_is_the_same_bits_in_any_batch() -> None:
    torch.manual_seed(2)
    linear = Linear(
        torch.randn(960, 576).bfloat16(), None, dtype=torch.float32, kernels=native.kernels()
    )
    x = torch.randn(300, 576)
    together = linear(x)
    assert all(torch.equal(linear(x[row : row + 1])[0], together[row]) for row in range(300))


def test_the_configuration_knows_this_cpu_as_torch_does() -> None:
    assert has_bfloat16_products() == has_native_bfloat16()


def test_refuses_rows_of_another_size_or_type() -> None:
    linear = Linear(torch.ones(4, 8), None, dtype=torch.float32, kernels=native.kernels())
    for x in (torch.ones(2, 7), torch.ones(2, 8, dtype=torch.float64)):
        with pytest.raises((ValueError, RuntimeError)):
            linear(x)
