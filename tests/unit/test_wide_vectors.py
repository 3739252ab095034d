"""The kernels with vectors of 64 bytes on a machine that has none: the compiler takes them apart (vectors.h)."""

from __future__ import annotations

import ctypes
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from moonpool import native
from moonpool.native import build
from moonpool.native.binding import NativeLibrary, load_library
from moonpool.native.compiled import CompiledRowKernels
from moonpool.native.compiled_linear import CompiledLinear
from moonpool.native.loading import LIBRARY_NAME
from support.native_isas import runnable_isas
from support.paged_attention import Sequences, VariantKernels, run

if build.find_compiler() is None or "avx2" not in runnable_isas():
    pytest.skip("needs a C compiler and AVX2", allow_module_level=True)

SOURCES = Path(native.__file__).with_name("src")
KERNELS = ("attention", "chunk_attention", "linear", "rows")
ISA = "wide"
#: Unoptimized: what is tried is which lane goes where.
FLAGS = ("-std=gnu11", "-O0", "-w", "-fPIC", "-shared", "-mavx2", "-mfma", "-DMP_VECTOR_BYTES=64")


class WithVariant:
    """The library that was built, and one more variant of its kernels."""

    def __init__(self, working: Any, variant: Any) -> None:  # Any: ctypes libraries
        self._working = working
        self._variant = variant

    def __getattr__(self, name: str) -> Any:  # Any: a ctypes function
        return getattr(self._variant if name.endswith(f"_{ISA}") else self._working, name)


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> NativeLibrary:
    target = tmp_path_factory.mktemp("wide") / LIBRARY_NAME
    sources = [str(SOURCES / f"{stem}.c") for stem in KERNELS]
    compiler = build.find_compiler()
    assert compiler is not None
    subprocess.run([compiler, *FLAGS, f"-DMP_ISA={ISA}", *sources, "-o", str(target)], check=True)
    built = load_library(Path(native.__file__).with_name(LIBRARY_NAME))
    working: Any = WithVariant(built.working, ctypes.CDLL(str(target)))
    return NativeLibrary(working, built.brief)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(("group", "dim"), [(1, 16), (3, 64), (4, 80)])
def test_attention(library: NativeLibrary, group: int, dim: int, dtype: str) -> None:
    variant = VariantKernels(library, ISA)
    found, expected = run(
        variant, [(0, 1), (61, 1), (5, 11), (16, 20)], dtype, group=group, dim=dim
    )
    torch.testing.assert_close(found, expected, atol=2e-6, rtol=1e-5)
    sequences = Sequences(variant, [40], group=group, dim=dim, dtype=dtype)
    alone = torch.cat([sequences.attend([(0, at, 1)]) for at in range(40)])
    assert torch.equal(sequences.attend([(0, 0, 40)]), alone)
    assert torch.equal(sequences.attend([(0, 21, 19)]), alone[21:])


@pytest.mark.parametrize("dtype", [np.float32, np.uint16, np.int8])
def test_linear(library: NativeLibrary, dtype: type) -> None:
    rng = np.random.default_rng(1)
    whole = rng.integers(-8, 9, (53, 77))
    wide = whole.astype(np.float32)
    weight = (
        (wide.view(np.uint32) >> 16).astype(dtype) if dtype is np.uint16 else wide.astype(dtype)
    )
    scale = np.full(53, 0.5, np.float32) if dtype is np.int8 else None
    linear = CompiledLinear(library, weight, None, scale=scale, isa=ISA)
    for num_rows in (1, 2, 3, 4, 7, 16, 33):
        x = rng.integers(-8, 9, (num_rows, 77)).astype(np.float32)
        y = np.empty((num_rows, 53), np.float32)
        linear.multiply(x.ctypes.data, num_rows, y.ctypes.data)
        # Whole numbers: exact in any order.
        assert np.array_equal(y, x @ wide.T * (1.0 if scale is None else 0.5)), num_rows


@pytest.mark.parametrize("size", [1, 15, 16, 17, 64, 100])
def test_rows(library: NativeLibrary, size: int) -> None:
    x = np.random.default_rng(size).standard_normal((3, 2 * size)).astype(np.float32)
    kernels = CompiledRowKernels(library, isa=ISA)
    gated = np.empty((3, size), np.float32)
    kernels.silu_mul(x.ctypes.data, 3, size, gated.ctypes.data)
    gate, up = np.split(x.astype(np.float64), 2, axis=1)
    np.testing.assert_allclose(gated, gate / (1 + np.exp(-gate)) * up, rtol=4e-6, atol=1e-30)
    weight, normed = np.ones(2 * size, np.float32), np.empty_like(x)
    kernels.rms_norm(x.ctypes.data, weight.ctypes.data, 1e-5, 3, 2 * size, normed.ctypes.data)
    wide = x.astype(np.float64)
    expected = wide / np.sqrt((wide**2).mean(-1, keepdims=True) + 1e-5)
    np.testing.assert_allclose(normed, expected, rtol=4e-6)
