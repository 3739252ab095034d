"""PackedLinear: products with few rows, in every variant that this machine runs."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from moonpool import native
from moonpool.native.binding import load_library
from moonpool.native.compiled_linear import CompiledLinear
from moonpool.native.loading import LIBRARY_NAME
from support.native_isas import runnable_isas

if not native.status().is_compiled:
    pytest.skip(native.status().message, allow_module_level=True)

LIBRARY = load_library(Path(native.__file__).with_name(LIBRARY_NAME))
SHAPES = [(1, 1), (7, 3), (16, 16), (17, 33), (48, 64), (130, 65), (576, 200), (1000, 31)]

ISAS = runnable_isas()
isas = pytest.mark.parametrize("isa", ISAS)
formats = pytest.mark.parametrize("dtype", [np.uint16, np.float32, np.int8])


def bfloat16_bits(values: np.ndarray) -> np.ndarray:
    """The upper halves: values rounded towards zero."""
    return (values.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)


def as_float32(weight: np.ndarray) -> np.ndarray:
    """Without the scale, for int8."""
    if weight.dtype == np.uint16:
        return (weight.astype(np.uint32) << 16).view(np.float32)
    return weight.astype(np.float32)


def random_weight(shape: tuple[int, int], dtype: type, seed: int = 1) -> np.ndarray:
    rng = np.random.default_rng(seed)
    if dtype is np.int8:
        return rng.integers(-127, 128, shape).astype(np.int8)
    values = rng.standard_normal(shape).astype(np.float32)
    return values if dtype is np.float32 else bfloat16_bits(values)


def scale_of(weight: np.ndarray) -> np.ndarray | None:
    """Of some size for each output, for int8."""
    if weight.dtype != np.int8:
        return None
    return np.random.default_rng(5).uniform(0.001, 0.02, len(weight)).astype(np.float32)


def packed(
    weight: np.ndarray, bias: np.ndarray | None = None, isa: str | None = None
) -> CompiledLinear:
    return CompiledLinear(LIBRARY, weight, bias, scale=scale_of(weight), isa=isa)


def rounded(values: np.ndarray) -> np.ndarray:
    """To the nearest bfloat16 and to even, of finite values."""
    bits = values.astype(np.float32).view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000).view(np.float32)


def random_rows(num_rows: int, num_in: int, seed: int = 2) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((num_rows, num_in)).astype(np.float32)


def multiply(linear: CompiledLinear, x: np.ndarray) -> np.ndarray:
    """At addresses that no vector likes, with canaries around the result."""
    num_rows = len(x)
    shifted = np.empty(x.size + 1, np.float32)[1:]
    shifted[:] = x.reshape(-1)
    out = np.full(num_rows * linear.num_out + 17, 7777.0, np.float32)
    y = out[1 : 1 + num_rows * linear.num_out]
    linear.multiply(shifted.ctypes.data, num_rows, y.ctypes.data)
    assert out[0] == 7777.0
    assert (out[1 + y.size :] == 7777.0).all()
    return y.reshape(num_rows, linear.num_out).copy()


@isas
@formats
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_equals_the_product_in_float64(isa: str, dtype: type, shape: tuple[int, int]) -> None:
    weight = random_weight(shape, dtype)
    bias = random_rows(1, shape[0], seed=3)[0]
    linear = packed(weight, bias, isa)
    exact = as_float32(weight).astype(np.float64)
    if weight.dtype == np.int8:
        exact *= scale_of(weight)[:, None]
    for num_rows in (*range(1, 17), 40):
        x = random_rows(num_rows, shape[1])
        expected = x.astype(np.float64) @ exact.T + bias
        size = np.abs(x).astype(np.float64) @ np.abs(exact).T + np.abs(bias)
        error = np.abs(multiply(linear, x) - expected)
        assert (error <= size * shape[1] * 2.0**-24 + 1e-6 * size).all(), num_rows


@isas
@formats
@pytest.mark.parametrize("shape", [(17, 33), (576, 1536), (130, 65)], ids=str)
def test_a_row_is_the_same_bits_in_any_batch(isa: str, dtype: type, shape: tuple[int, int]) -> None:
    linear = packed(random_weight(shape, dtype), isa=isa)
    x = random_rows(100, shape[1])
    alone = np.concatenate([multiply(linear, x[row : row + 1]) for row in range(len(x))])
    for num_rows in (*range(2, 17), 31, 64, 100):
        assert np.array_equal(multiply(linear, x[:num_rows]), alone[:num_rows]), num_rows


@pytest.mark.skipif(len(ISAS) < 3, reason="one variant at most has fused multiply-add here")
@formats
def test_variants_with_fused_multiply_add_give_the_same_bits(dtype: type) -> None:
    weight, x = random_weight((130, 65), dtype), random_rows(9, 65)
    fused = [multiply(packed(weight, isa=isa), x) for isa in ISAS if isa != "baseline"]
    assert all(np.array_equal(one, fused[0]) for one in fused)


@isas
def test_a_format_changes_the_bytes_and_not_the_bits_of_a_result(isa: str) -> None:
    narrow = random_weight((130, 65), np.uint16)
    x = random_rows(9, 65)
    one = CompiledLinear(LIBRARY, narrow, None, isa=isa)
    other = CompiledLinear(LIBRARY, as_float32(narrow), None, isa=isa)
    assert np.array_equal(multiply(one, x), multiply(other, x))
    assert one.size_bytes < 0.52 * other.size_bytes


@isas
def test_int8_is_a_quarter_of_the_bytes_and_scaled_in_the_end(isa: str) -> None:
    weight, x = random_weight((130, 65), np.int8), random_rows(9, 65)
    one, scale = packed(weight, isa=isa), scale_of(weight)
    other = CompiledLinear(LIBRARY, as_float32(weight), None, isa=isa)
    assert np.array_equal(multiply(one, x), multiply(other, x) * scale)
    assert one.size_bytes < 0.27 * other.size_bytes


@isas
@formats
def test_whole_numbers_are_exact(isa: str, dtype: type) -> None:
    rng = np.random.default_rng(4)
    weight = rng.integers(-8, 9, (53, 77)).astype(np.float32)
    x = rng.integers(-8, 9, (11, 77)).astype(np.float32)
    bias = np.arange(53, dtype=np.float32)
    stored = bfloat16_bits(weight) if dtype is np.uint16 else weight.astype(dtype)
    scale = np.full(53, 0.5, np.float32) if dtype is np.int8 else None
    linear = CompiledLinear(LIBRARY, stored, bias, scale=scale, isa=isa)
    if scale is not None:
        weight *= 0.5
    assert np.array_equal(multiply(linear, x), x @ weight.T + bias)


@isas
@formats
def test_a_row_that_is_not_finite_stays_alone(isa: str, dtype: type) -> None:
    linear = packed(random_weight((33, 19), dtype), isa=isa)
    x = random_rows(8, 19)
    expected = multiply(linear, x)
    x[5, 18] = np.inf
    found = multiply(linear, x)
    is_other = np.arange(8) != 5
    assert np.array_equal(found[is_other], expected[is_other])
    assert not np.isfinite(found[5]).any()


needs_bfloat16_products = pytest.mark.skipif(
    "avx512_bf16" not in ISAS, reason="no AVX512-BF16 here, or its compiler did not know it"
)
#: The last ones are longer than a block of inputs, and than two.
ROUNDING_SHAPES = [*SHAPES, (100, 4095), (35, 4097), (20, 9001)]


def rounding(weight: np.ndarray, bias: np.ndarray | None = None) -> CompiledLinear:
    return CompiledLinear(LIBRARY, weight, bias, is_rounding=True, isa="avx512_bf16")


@needs_bfloat16_products
@pytest.mark.parametrize("shape", ROUNDING_SHAPES, ids=str)
def test_rounded_rows_equal_the_product_of_rounded_rows_in_float64(shape: tuple[int, int]) -> None:
    """Each of the sums adds at most half a unit in the last place of float32."""
    weight = random_weight(shape, np.uint16)
    bias = random_rows(1, shape[0], seed=3)[0]
    linear, exact = rounding(weight, bias), as_float32(weight).astype(np.float64)
    for num_rows in (0, *range(1, 18), 40):
        x = random_rows(num_rows, shape[1])
        near = rounded(x).astype(np.float64)
        expected = near @ exact.T + bias
        size = np.abs(near) @ np.abs(exact).T + np.abs(bias)
        found = multiply(linear, x)
        assert (np.abs(found - expected) <= size * (shape[1] + 2) * 2.0**-24).all(), num_rows
        # And so of the rows as they were: rounding is off by 2^-8 of each at most.
        wide = x.astype(np.float64) @ exact.T + bias
        allowed = np.abs(x).astype(np.float64) @ np.abs(exact).T * 2.0**-8
        assert (np.abs(found - wide) <= allowed + size * (shape[1] + 2) * 2.0**-24).all(), num_rows


@needs_bfloat16_products
@pytest.mark.parametrize("shape", [(17, 33), (576, 1536), (130, 65), (35, 4097)], ids=str)
def test_a_rounded_row_is_the_same_bits_in_any_batch(shape: tuple[int, int]) -> None:
    """Also where rows come in several blocks: 700 rows of 576 inputs do."""
    linear = rounding(random_weight(shape, np.uint16), random_rows(1, shape[0], seed=3)[0])
    x = random_rows(700 if shape[0] == 576 else 100, shape[1])
    alone = np.concatenate([multiply(linear, x[row : row + 1]) for row in range(len(x))])
    for num_rows in (*range(2, 26), 31, 64, 100, len(x)):
        assert np.array_equal(multiply(linear, x[:num_rows]), alone[:num_rows]), num_rows


@needs_bfloat16_products
def test_rows_are_rounded_to_the_nearest_and_to_even() -> None:
    """One input at a time, times 1: what comes out is what it was rounded to."""
    one = np.float32(1.0)
    ulp = np.float32(2.0**-7)
    values = [one + ulp / 2, one + ulp * 3 / 2, one + ulp * 0.51, one - ulp / 8, -one - ulp / 2]
    values += [3.0e38, 3.4e38, np.inf, -np.inf, 1e-38, 0.0]
    expected = [1.0, 1.0 + 2 * ulp, 1.0 + ulp, 1.0, -1.0]
    expected += [float(rounded(np.float32([3.0e38]))[0]), np.inf, np.inf, -np.inf]
    # Subnormal: 1e-38 is taken for zero.
    expected += [0.0, 0.0]
    linear = rounding(bfloat16_bits(np.ones((1, 1))))
    found = multiply(linear, np.array(values, np.float32)[:, None])[:, 0]
    np.testing.assert_array_equal(found, np.array(expected, np.float32))
    assert np.isnan(multiply(linear, np.full((1, 1), np.nan, np.float32))).all()


@needs_bfloat16_products
def test_rounded_whole_numbers_are_exact_and_a_flaw_stays_in_its_row() -> None:
    rng = np.random.default_rng(4)
    weight = rng.integers(-8, 9, (53, 77)).astype(np.float32)
    x = rng.integers(-8, 9, (19, 77)).astype(np.float32)
    bias = np.arange(53, dtype=np.float32)
    linear, expected = rounding(bfloat16_bits(weight), bias), x @ weight.T + bias
    assert np.array_equal(multiply(linear, x), expected)
    x[5, 76] = np.inf
    found, is_other = multiply(linear, x), np.arange(19) != 5
    assert np.array_equal(found[is_other], expected[is_other])
    assert not np.isfinite(found[5]).any()


def test_only_weights_of_bfloat16_are_multiplied_by_rounded_rows() -> None:
    for weight in (np.zeros((4, 4), np.float32), np.zeros((4, 4), np.int8)):
        scale = np.ones(4, np.float32) if weight.dtype == np.int8 else None
        with pytest.raises(ValueError, match="rounded"):
            CompiledLinear(LIBRARY, weight, None, scale=scale, is_rounding=True)


def test_this_machine_rounds_rows_where_it_has_the_instruction() -> None:
    assert native.kernels().has_bfloat16_products == ("avx512_bf16" in ISAS)


def test_takes_a_strided_weight() -> None:
    weight = random_weight((64, 48), np.float32)
    x = random_rows(2, 48)
    linear = CompiledLinear(LIBRARY, np.asfortranarray(weight), None)
    assert np.array_equal(multiply(linear, x), multiply(CompiledLinear(LIBRARY, weight, None), x))


@pytest.mark.parametrize(
    ("weight", "bias", "scale", "what"),
    [
        (np.zeros((4, 4), np.float64), None, None, "weight"),
        (np.zeros((0, 4), np.float32), None, None, "weight"),
        (np.zeros((4, 4), np.float32), np.zeros(5, np.float32), None, "bias"),
        (np.zeros((4, 4), np.float32), np.zeros(4, np.float64), None, "bias"),
        (np.zeros((4, 4), np.float32), None, np.ones(4, np.float32), "scale"),
        (np.zeros((4, 4), np.int8), None, None, "scale"),
        (np.zeros((4, 4), np.int8), None, np.ones(3, np.float32), "scale"),
    ],
)
def test_refuses_what_it_cannot_pack(
    weight: np.ndarray, bias: np.ndarray | None, scale: np.ndarray | None, what: str
) -> None:
    with pytest.raises(ValueError, match=what):
        CompiledLinear(LIBRARY, weight, bias, scale=scale)
