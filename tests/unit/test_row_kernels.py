"""RowKernels against float64, in every variant that this machine runs."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from moonpool import native
from moonpool.native.binding import load_library
from moonpool.native.compiled import CompiledRowKernels
from moonpool.native.loading import LIBRARY_NAME
from support.native_isas import runnable_isas

if not native.status().is_compiled:
    pytest.skip(native.status().message, allow_module_level=True)

LIBRARY = load_library(Path(native.__file__).with_name(LIBRARY_NAME))
SIZES = [1, 3, 8, 15, 16, 31, 64, 576, 1000]

ISAS = runnable_isas()
isas = pytest.mark.parametrize("isa", ISAS)
sizes = pytest.mark.parametrize("size", SIZES)


def guarded(num_rows: int, size: int) -> tuple[np.ndarray, np.ndarray]:
    """Memory with canaries, and the rows within it, at an address that no vector likes."""
    memory = np.full(num_rows * size + 17, 7777.0, np.float32)
    return memory, memory[1 : 1 + num_rows * size].reshape(num_rows, size)


def assert_guarded(memory: np.ndarray, rows: np.ndarray) -> None:
    assert memory[0] == 7777.0
    assert (memory[1 + rows.size :] == 7777.0).all()


@isas
@sizes
def test_rms_norm(isa: str, size: int) -> None:
    rng = np.random.default_rng(size)
    x = rng.standard_normal((5, size)).astype(np.float32) * 3
    weight = rng.standard_normal(size).astype(np.float32)
    memory, y = guarded(5, size)
    CompiledRowKernels(LIBRARY, isa=isa).rms_norm(
        x.ctypes.data, weight.ctypes.data, 1e-5, 5, size, y.ctypes.data
    )
    wide = x.astype(np.float64)
    expected = wide / np.sqrt((wide**2).mean(-1, keepdims=True) + 1e-5) * weight
    np.testing.assert_allclose(y, expected, rtol=2e-6)
    assert_guarded(memory, y)


@isas
@sizes
def test_silu_mul(isa: str, size: int) -> None:
    rng = np.random.default_rng(size)
    x = rng.standard_normal((3, 2 * size)).astype(np.float32) * 8
    x[1, 0], x[2, 0] = 300.0, -300.0
    memory, y = guarded(3, size)
    CompiledRowKernels(LIBRARY, isa=isa).silu_mul(x.ctypes.data, 3, size, y.ctypes.data)
    gate, up = x[:, :size].astype(np.float64), x[:, size:].astype(np.float64)
    np.testing.assert_allclose(y, gate / (1 + np.exp(-gate)) * up, rtol=2e-6, atol=1e-30)
    assert_guarded(memory, y)


@isas
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_what_is_not_finite_is_not_hidden(isa: str, value: float) -> None:
    kernels = CompiledRowKernels(LIBRARY, isa=isa)
    x = np.ones((2, 40), np.float32)
    x[1, 3] = value
    weight = np.ones(40, np.float32)
    _, normed = guarded(2, 40)
    kernels.rms_norm(x.ctypes.data, weight.ctypes.data, 1e-5, 2, 40, normed.ctypes.data)
    assert np.isfinite(normed[0]).all()
    assert not np.isfinite(normed[1, 3])
    _, gated = guarded(2, 20)
    kernels.silu_mul(x.ctypes.data, 2, 20, gated.ctypes.data)
    assert np.isfinite(gated[0]).all()
    assert not np.isfinite(gated[1, 3])
    assert np.isfinite(np.delete(gated[1], 3)).all()
