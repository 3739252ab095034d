"""SampleWindow.fit against the same formula written in arrays, for what any worker may have measured."""

from __future__ import annotations

import itertools

import numpy as np
import numpy.typing as npt
from hypothesis import given
from hypothesis import strategies as st

from moonpool.latency.sample_window import SampleWindow

FloatArray = npt.NDArray[np.float64]

RELUCTANCES = ((1e-4, 1e-4), (1e-4, 1e-6, 1e-4), (1e-6, 1e-4, 1e-4))
SECONDS = st.floats(1e-6, 100.0)
SIZES = st.integers(0, 1 << 34)


def fit_in_arrays(table: FloatArray, reluctance: FloatArray) -> FloatArray:
    """Least absolute relative errors by reweighting, a ridge by reluctance, coefficients >= 0."""
    features = table[:, :-1] / table[:, -1:]
    scale = np.sqrt(np.mean(features**2, axis=0))
    scale[scale == 0.0] = 1.0
    features /= scale
    ridge = np.diag(reluctance * len(table))
    weights = np.ones(len(table))
    coefficients = np.zeros(len(scale))
    for _ in range(3):
        weighted = features * weights[:, None]
        coefficients = solve_in_arrays(weighted.T @ features + ridge, weighted.sum(axis=0))
        weights = 1.0 / np.maximum(np.abs(features @ coefficients - 1.0), 0.01)
        weights *= len(table) / weights.sum()
    fitted: FloatArray = coefficients / scale
    return fitted


def solve_in_arrays(matrix: FloatArray, target: FloatArray) -> FloatArray:
    """The best x >= 0 of all supports."""
    size = len(target)
    best, best_value = np.zeros(size), 0.0
    for num_free in range(size, 0, -1):
        for support in itertools.combinations(range(size), num_free):
            index = list(support)
            part = np.linalg.solve(matrix[np.ix_(index, index)], target[index])
            value = -float(part @ target[index]) / 2.0
            if (part >= 0.0).all() and value < best_value:
                best, best_value = np.zeros(size), value
                best[index] = part
        if num_free == size and best_value < 0.0:
            break
    return best


@given(
    reluctance=st.sampled_from(RELUCTANCES),
    samples=st.lists(st.tuples(SIZES, SIZES, SECONDS), min_size=1, max_size=60),
)
def test_a_fit_is_that_of_the_formula(
    reluctance: tuple[float, ...], samples: list[tuple[int, int, float]]
) -> None:
    window = SampleWindow(reluctance)
    rows = []
    # One stratum for every few samples: none is forgotten, and the order stays.
    for number, (first, second, seconds) in enumerate(samples):
        features = (1.0, float(first), float(second))[: len(reluctance)]
        window.add((1 << number // 5,), features, seconds)
        rows.append((*features, seconds))
    window.validate()
    table = np.array(rows, np.float64)
    expected = fit_in_arrays(table, np.array(reluctance))
    fitted = window.fit()
    assert min(fitted) >= 0.0
    # In seconds of the largest sample: coefficients that play no part may differ in all digits.
    largest = np.abs(table[:, :-1] / table[:, -1:]).max(axis=0)
    np.testing.assert_allclose(fitted * largest, expected * largest, rtol=1e-6, atol=1e-9)
