"""The C library's arithmetic against float64 on random shapes, in the variants that this machine runs.

Queries, keys and results lie at addresses that no vector likes, with canaries around what is written; run
with the sanitizers (tests/integration/test_native_sanitized.py), nothing else is touched either.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moonpool import native
from moonpool.inference.rng import uniforms
from moonpool.kv.layout import KvLayout
from moonpool.native import DRAW_DTYPE, LINEAR_PANEL, LeafGeometry
from moonpool.native.binding import load_library
from moonpool.native.compiled import CompiledRowKernels
from moonpool.native.compiled_attention import CompiledAttention
from moonpool.native.compiled_linear import CompiledLinear
from moonpool.native.compiled_sample import CompiledSampleKernel
from moonpool.native.loading import LIBRARY_NAME

if not native.status().is_compiled:
    pytest.skip(native.status().message, allow_module_level=True)

LIBRARY = load_library(Path(native.__file__).with_name(LIBRARY_NAME))
isas = pytest.mark.parametrize("isa", sorted({"baseline", native.status().isa}))
#: Variants of attention, and whether they round.
ARITHMETICS = [(isa, False) for isa in sorted({"baseline", native.status().isa})]
if native.kernels().has_bfloat16_products:
    ARITHMETICS.append((native.status().isa, True))
seeds = st.integers(0, 2**32 - 1)
#: Some are behind the first tokens under one largest score (SEGMENT of bfloat16_attention.c).
starts = st.one_of(st.integers(0, 90), st.integers(240, 530))
CANARY = 7777.0


class Guarded:
    """float32 of a shape at an odd address, between canaries."""

    def __init__(self, *shape: int) -> None:
        size = int(np.prod(shape))
        self._memory = np.full(size + 17, CANARY, np.float32)
        self._size = size
        self.array = self._memory[1 : 1 + size].reshape(shape)

    def check(self) -> None:
        assert self._memory[0] == CANARY
        assert (self._memory[1 + self._size :] == CANARY).all()


def misaligned(values: np.ndarray) -> np.ndarray:
    guarded = Guarded(*values.shape)
    guarded.array[...] = values
    return guarded.array


def bfloat16_bits(values: np.ndarray) -> np.ndarray:
    return (values.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)


def bfloat16_values(bits: np.ndarray) -> np.ndarray:
    return (bits.astype(np.uint32) << 16).view(np.float32)


@isas
@given(
    num_rows=st.integers(0, 12),
    num_in=st.integers(1, 80),
    num_out=st.integers(1, 70),
    kind=st.sampled_from(["bfloat16", "float32", "int8"]),
    has_bias=st.booleans(),
    seed=seeds,
)
@settings(max_examples=25)
def test_products(
    isa: str, num_rows: int, num_in: int, num_out: int, kind: str, has_bias: bool, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    weight = rng.standard_normal((num_out, num_in)).astype(np.float32)
    scale = None
    exact = weight.astype(np.float64)
    if kind == "bfloat16":
        weight = bfloat16_bits(weight)
        exact = bfloat16_values(weight).astype(np.float64)
    elif kind == "int8":
        weight = rng.integers(-127, 128, (num_out, num_in)).astype(np.int8)
        scale = rng.uniform(0.001, 0.02, num_out).astype(np.float32)
        exact = weight * scale[:, None].astype(np.float64)
    bias = rng.standard_normal(num_out).astype(np.float32) if has_bias else None
    x = misaligned(rng.standard_normal((num_rows, num_in)))
    y = Guarded(num_rows, num_out)
    linear = CompiledLinear(LIBRARY, weight, bias, scale=scale, isa=isa)
    linear.multiply(x.ctypes.data, num_rows, y.array.ctypes.data)
    expected = x.astype(np.float64) @ exact.T + (0 if bias is None else bias)
    np.testing.assert_allclose(y.array, expected, rtol=1e-4, atol=1e-4)
    y.check()


@pytest.mark.skipif(
    not native.kernels().has_bfloat16_products, reason="no products in bfloat16 here"
)
@given(
    num_rows=st.integers(0, 30),
    num_in=st.integers(1, 80) | st.integers(4090, 4110),
    num_out=st.integers(1, 70),
    has_bias=st.booleans(),
    seed=seeds,
)
@settings(max_examples=50)
def test_products_of_rounded_rows(
    num_rows: int, num_in: int, num_out: int, has_bias: bool, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    weight = bfloat16_bits(rng.standard_normal((num_out, num_in)))
    exact = bfloat16_values(weight).astype(np.float64)
    bias = rng.standard_normal(num_out).astype(np.float32) if has_bias else None
    x = misaligned(rng.standard_normal((num_rows, num_in)))
    y, largest = Guarded(num_rows, num_out), Guarded(num_rows, -(-num_out // LINEAR_PANEL))
    linear = CompiledLinear(LIBRARY, weight, bias, is_rounding=True)
    linear.multiply(x.ctypes.data, num_rows, y.array.ctypes.data, largest.array.ctypes.data)
    wide = x.astype(np.float64)
    expected = wide @ exact.T + (0 if bias is None else bias)
    # A row is rounded to 8 bits, a sum of `num_in` products and the bias to 24 in each step.
    size = np.abs(wide) @ np.abs(exact).T + (0 if bias is None else np.abs(bias))
    assert (np.abs(y.array - expected) <= size * (2.0**-8 + 1.01 * (num_in + 2) * 2.0**-24)).all()
    starts = range(0, num_out, LINEAR_PANEL)
    assert np.array_equal(largest.array, np.maximum.reduceat(y.array, starts, axis=1))
    y.check()
    largest.check()


@isas
@given(
    num_rows=st.integers(0, 12),
    num_out=st.integers(1, 200),
    flaw=st.sampled_from([None, np.nan, np.inf, -np.inf]),
    is_rounding=st.just(False) if not native.kernels().has_bfloat16_products else st.booleans(),
    seed=seeds,
)
@settings(max_examples=25)
def test_the_largest_of_each_panel(
    isa: str, num_rows: int, num_out: int, flaw: float | None, is_rounding: bool, seed: int
) -> None:
    is_rounding = is_rounding and isa != "baseline"
    rng = np.random.default_rng(seed)
    x = misaligned(rng.standard_normal((num_rows, 5)))
    weight = rng.standard_normal((num_out, 5)).astype(np.float32)
    if flaw is not None:
        weight[seed % num_out, seed % 5] = flaw
    linear = CompiledLinear(
        LIBRARY,
        bfloat16_bits(weight) if is_rounding else weight,
        None,
        is_rounding=is_rounding,
        isa=isa,
    )
    y, same, largest = (
        Guarded(num_rows, size) for size in (num_out, num_out, -(-num_out // LINEAR_PANEL))
    )
    linear.multiply(x.ctypes.data, num_rows, same.array.ctypes.data)
    linear.multiply(x.ctypes.data, num_rows, y.array.ctypes.data, largest.array.ctypes.data)
    np.testing.assert_array_equal(y.array, same.array)
    starts = range(0, num_out, LINEAR_PANEL)
    for row, found in zip(y.array, largest.array, strict=True):
        for start, top in zip(starts, found, strict=True):
            panel = row[start : start + LINEAR_PANEL]
            assert top == panel.max() if np.isfinite(panel).all() else np.isnan(top)
    y.check()
    largest.check()


@pytest.mark.parametrize(("isa", "is_rounding"), ARITHMETICS)
@given(
    rows=st.lists(st.tuples(starts, st.integers(1, 40)), max_size=4),
    decodes=st.lists(starts, max_size=4),
    num_kv_heads=st.integers(1, 3),
    group_size=st.sampled_from([1, 2, 3, 4, 5, 7, 25]),
    block_size=st.sampled_from([1, 5, 8, 16, 24, 64]),
    head_dim=st.sampled_from([16, 48, 64, 80, 256]),
    dtype=st.sampled_from(["bfloat16", "float32"]),
    is_last_only=st.booleans(),
    seed=seeds,
)
@settings(max_examples=30)
def test_attention(
    isa: str,
    is_rounding: bool,
    rows: list[tuple[int, int]],
    decodes: list[int],
    num_kv_heads: int,
    group_size: int,
    block_size: int,
    head_dim: int,
    dtype: str,
    is_last_only: bool,
    seed: int,
) -> None:
    """Rows are (tokens before, tokens that ask); a decode is a row of one."""
    rng = np.random.default_rng(seed)
    if is_rounding:
        dtype = "bfloat16"
    rows = [(start, 1) for start in decodes] + [row for row in rows if row[1] > 1]
    tables, num_blocks = [], 0
    for start, count in rows:
        tables.append(num_blocks + np.arange(-(-(start + count) // block_size)))
        num_blocks += len(tables[-1])
    order = rng.permutation(num_blocks + 1).astype(np.int32)
    layout = KvLayout.block_major(
        num_blocks=num_blocks + 1,
        num_layers=2,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        dtype=dtype,
        block_size=block_size,
    )
    # Blocks, layers, planes, heads, tokens, dimensions.
    shape = (num_blocks + 1, 2, 2, num_kv_heads, block_size, head_dim)
    values = rng.standard_normal(shape).astype(np.float32)
    if dtype == "bfloat16":
        bits = bfloat16_bits(values)
        values = bfloat16_values(bits)
        pool = bits.reshape(-1).view(np.uint8)
    else:
        pool = values.reshape(-1).view(np.uint8)
    assert pool.size == layout.pool_bytes
    attention = CompiledAttention(
        LIBRARY,
        pool,
        LeafGeometry.of_layout(layout),
        group_size=group_size,
        is_bfloat16=dtype == "bfloat16",
        is_rounding=is_rounding,
        isa=isa,
    )
    tables = [order[table] for table in tables]
    counts = [count for _, count in rows]
    qo_indptr = np.cumsum([0, *counts]).astype(np.int32)
    attention.plan(
        qo_indptr,
        np.cumsum([0, *map(len, tables)]).astype(np.int32),
        np.concatenate([*tables, np.empty(0, np.int32)]).astype(np.int32),
        np.array([start + count for start, count in rows], np.int64),
        num_decode_rows=len(decodes),
    )
    num_heads = num_kv_heads * group_size
    query = misaligned(rng.standard_normal((sum(counts), num_heads, head_dim)))
    if is_rounding:  # to the nearest is tried in tests/unit/test_bfloat16_attention.py
        query[...] = bfloat16_values(bfloat16_bits(query))
    out = Guarded(sum(counts), num_heads, head_dim)
    attention.run(
        1,
        query.ctypes.data,
        num_heads * head_dim,
        out.array.ctypes.data,
        is_last_only=is_last_only,
    )
    out.check()
    for (start, count), table, first in zip(rows, tables, qo_indptr, strict=False):
        # Planes, heads, tokens, dimensions.
        kv = values[table, 1].transpose(1, 2, 0, 3, 4).astype(np.float64)
        kv = kv.reshape(2, num_kv_heads, -1, head_dim)
        for token in range(count - 1 if is_last_only else 0, count):
            seen = start + token + 1
            q = query[first + token].reshape(num_kv_heads, group_size, head_dim).astype(np.float64)
            keys, seen_values = kv[0, :, :seen].transpose(0, 2, 1), kv[1, :, :seen]
            scores = q @ keys / np.sqrt(head_dim)
            weights = np.exp(scores - scores.max(-1, keepdims=True))
            weights /= weights.sum(-1, keepdims=True)
            expected = weights @ seen_values
            found = out.array[first + token].reshape(q.shape)
            if is_rounding:
                # A weight is rounded by 2^-8 of it at most; the rest is sums of float32, and 2^x.
                largest = (np.abs(q) @ np.abs(keys)).max() / np.sqrt(head_dim)
                relative = 2.0**-8 + 2.0**-23 * (head_dim * largest + seen) + 1e-5
                assert (np.abs(found - expected) <= weights @ np.abs(seen_values) * relative).all()
            else:
                np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-4)


@isas
@given(num_rows=st.integers(0, 4), size=st.integers(1, 100), seed=seeds)
@settings(max_examples=30)
def test_rows(isa: str, num_rows: int, size: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    kernels = CompiledRowKernels(LIBRARY, isa=isa)
    x = misaligned(rng.standard_normal((num_rows, 2 * size)) * 4)
    weight = misaligned(rng.standard_normal(2 * size))
    normed, gated = Guarded(num_rows, 2 * size), Guarded(num_rows, size)
    kernels.rms_norm(
        x.ctypes.data, weight.ctypes.data, 1e-5, num_rows, 2 * size, normed.array.ctypes.data
    )
    kernels.silu_mul(x.ctypes.data, num_rows, size, gated.array.ctypes.data)
    wide = x.astype(np.float64)
    scale = 1 / np.sqrt((wide**2).mean(-1, keepdims=True) + 1e-5)
    np.testing.assert_allclose(normed.array, wide * scale * weight, rtol=1e-5, atol=1e-6)
    gate, up = wide[:, :size], wide[:, size:]
    np.testing.assert_allclose(gated.array, gate / (1 + np.exp(-gate)) * up, rtol=1e-5, atol=1e-6)
    normed.check()
    gated.check()


@isas
@given(
    size=st.integers(1, 400),
    num_values=st.sampled_from([1, 2, 50, 10_000]),
    temperature=st.sampled_from([0.0, 1e-3, 0.7, 1.0, 50.0]),
    top_k=st.sampled_from([0, 1, 2, 7, 70, 1_000]),
    top_p=st.sampled_from([1.0, 0.999, 0.9, 0.3, 1e-6]),
    seed=seeds,
)
@settings(max_examples=60)
def test_tokens(
    isa: str,
    size: int,
    num_values: int,
    temperature: float,
    top_k: int,
    top_p: float,
    seed: int,
) -> None:
    """With ties, where there are few different values."""
    rng = np.random.default_rng(seed)
    logits = misaligned(rng.standard_normal(num_values)[rng.integers(num_values, size=(3, size))])
    numbers = uniforms([seed] * 3, [0] * 3, range(3))
    draws = np.array([(temperature, top_p, number, top_k) for number in numbers], DRAW_DTYPE)
    if seed % 5 == 0:
        logits[1, seed % size] = (np.nan, np.inf, -np.inf)[seed % 3]
    kernel = CompiledSampleKernel(LIBRARY, isa=isa)
    found = kernel.sample(logits.ctypes.data, size, draws)
    largest = largest_of_panels(logits)
    told = kernel.sample(logits.ctypes.data, size, draws, largest.ctypes.data)
    np.testing.assert_array_equal(told, found)
    for row in range(3):
        wide = logits[row].astype(np.float64)
        if not np.isfinite(wide).all():
            assert found[row] == -1
        elif temperature == 0:
            assert found[row] == wide.argmax()
        else:
            weights = np.exp((wide - wide.max()) / temperature)
            assert is_drawn(int(found[row]), wide, weights, top_k, top_p, numbers[row])


def largest_of_panels(logits: np.ndarray) -> np.ndarray:
    """What the product that made them would tell."""
    starts = range(0, logits.shape[1], LINEAR_PANEL)
    panels = [logits[:, start : start + LINEAR_PANEL] for start in starts]
    tops = [
        np.where(np.isfinite(panel).all(1), panel.max(1), np.nan).astype(np.float32)
        for panel in panels
    ]
    return np.ascontiguousarray(np.stack(tops, 1))


def is_drawn(
    token: int, logits: np.ndarray, weights: np.ndarray, top_k: int, top_p: float, number: float
) -> bool:
    """Whether the definition draws it, or would if a sum were rounded otherwise."""
    order = np.lexsort((np.arange(len(logits)), -logits))
    order = order[: top_k or len(logits)]
    running = weights[order].cumsum()
    for rounding in (-1e-12, 0.0, 1e-12):
        mass = top_p * running[-1] * (1 + rounding)
        num_kept = len(order) if top_p == 1 else int(np.searchsorted(running, mass)) + 1
        kept = np.sort(order[:num_kept])
        cumulative = weights[kept].cumsum()
        place = int((kept < token).sum())
        if place == len(kept) or kept[place] != token or weights[token] == 0:
            continue
        before = cumulative[place - 1] if place else 0.0
        target = number * cumulative[-1]
        margin = 1e-9 * cumulative[-1]
        if before - margin <= target <= cumulative[place] + margin:
            return True
    return False
