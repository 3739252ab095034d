"""SampleWindow: the newest samples of each size, and the non-negative fit of a linear model to them.

    seconds = sum over j of coefficient[j] * feature[j],   coefficients >= 0

Rules
- Forgetting is by size: a stratum (an octave of each size) keeps its newest few samples, so thousands
  of small steps do not push out the one large prompt, and a worker that changes is known anew after a
  few steps of each size that it runs. The stratum that was heard of longest ago goes first.
- Errors are relative: a step of 5 ms counts like one of 500 ms.
- It is robust: the sum of absolute (not squared) errors, by reweighting, so that a pause in the
  machine moves nothing.
- What the samples cannot tell apart goes to the features with the smaller `reluctance`: with one size
  seen, a prefill is linear in its tokens and a decode step is constant.
"""

from __future__ import annotations

import itertools
import math
from collections import OrderedDict, deque
from collections.abc import Sequence

import numpy as np

_NUM_PER_STRATUM = 5
_MAX_STRATA = 48
_NUM_REWEIGHTINGS = 3
#: Relative errors below this are all alike.
_SMALL_ERROR = 0.01


class SampleWindow:
    """See the file's head.

    Args:
        reluctance: Per feature, how much rather another one explains a sample; > 0.
    """

    def __init__(self, reluctance: Sequence[float]) -> None:
        self._reluctance = tuple(reluctance)
        assert min(self._reluctance) > 0.0, reluctance
        self._strata: OrderedDict[tuple[int, ...], deque[tuple[float, ...]]] = OrderedDict()

    def add(self, sizes: Sequence[int], features: Sequence[float], seconds: float) -> None:
        """Note a sample; `sizes` say which stratum it is of. Requires seconds > 0."""
        assert seconds > 0.0, seconds
        assert len(features) == len(self._reluctance), features
        stratum = tuple(size.bit_length() for size in sizes)
        samples = self._strata.get(stratum)
        if samples is None:
            samples = self._strata[stratum] = deque(maxlen=_NUM_PER_STRATUM)
            if len(self._strata) > _MAX_STRATA:
                self._strata.popitem(last=False)
        else:
            self._strata.move_to_end(stratum)
        samples.append((*features, seconds))

    def fit(self) -> tuple[float, ...]:
        """The coefficients. Requires a sample.

        A read of KV has one each time, so arrays do only what grows with the samples: their products,
        [features + 1, features + 1], are solved in plain numbers.
        """
        samples = [sample for samples in self._strata.values() for sample in samples]
        table = np.array(samples, np.float64)
        # Of each sample: features over seconds, and 1, which they should sum up to.
        relative = table / table[:, -1:]
        products: list[list[float]] = (relative.T @ relative).tolist()
        # In these units every feature's column has mean square 1 (or 0): reluctances compare.
        scale = [
            math.sqrt(products[j][j] / len(samples)) or 1.0 for j in range(len(self._reluctance))
        ]
        coefficients = self._solve(products, scale)
        for _ in range(_NUM_REWEIGHTINGS - 1):
            errors = np.abs(relative @ np.array([*coefficients, -1.0]))
            weighted = relative / np.maximum(errors, _SMALL_ERROR)[:, None]
            products = (weighted.T @ relative).tolist()
            coefficients = self._solve(products, scale)
        return coefficients

    def _solve(
        self, products: Sequence[Sequence[float]], scale: Sequence[float]
    ) -> tuple[float, ...]:
        """Coefficients for the (weighted) products of the samples' columns."""
        columns = range(len(scale))
        matrix = [[products[i][j] / (scale[i] * scale[j]) for j in columns] for i in columns]
        sum_of_weights = products[-1][-1]
        for j in columns:
            matrix[j][j] += self._reluctance[j] * sum_of_weights
        solution = _non_negative(matrix, [products[j][-1] / scale[j] for j in columns])
        return tuple(value / unit for value, unit in zip(solution, scale, strict=True))

    def validate(self) -> None:
        """Check every invariant; for tests and debugging."""
        assert len(self._strata) <= _MAX_STRATA
        for samples in self._strata.values():
            assert 0 < len(samples) <= _NUM_PER_STRATUM
            assert all(math.isfinite(value) for sample in samples for value in sample), samples


def _non_negative(matrix: Sequence[Sequence[float]], target: Sequence[float]) -> list[float]:
    """The x >= 0 that minimises x'Mx/2 - t'x, M positive definite: the best of all supports."""
    size = len(target)
    best = [0.0] * size
    best_value = 0.0
    for num_free in range(size, 0, -1):
        for support in itertools.combinations(range(size), num_free):
            part = _solution(
                [[matrix[i][j] for j in support] for i in support], [target[i] for i in support]
            )
            if min(part) < 0.0:
                continue
            if num_free == size:
                return part
            value = -sum(x * target[i] for x, i in zip(part, support, strict=True)) / 2.0
            if value < best_value:
                best = [0.0] * size
                for x, i in zip(part, support, strict=True):
                    best[i] = x
                best_value = value
    return best


def _solution(matrix: list[list[float]], target: list[float]) -> list[float]:
    """The x with Mx = t, M positive definite (so no pivots are sought). Overwrites both."""
    size = len(target)
    for i in range(size):
        for k in range(i + 1, size):
            factor = matrix[k][i] / matrix[i][i]
            for j in range(i + 1, size):
                matrix[k][j] -= factor * matrix[i][j]
            target[k] -= factor * target[i]
    for i in reversed(range(size)):
        for j in range(i + 1, size):
            target[i] -= matrix[i][j] * target[j]
        target[i] /= matrix[i][i]
    return target
