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
import numpy.typing as npt

FloatArray = npt.NDArray[np.float64]

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
        self._reluctance = np.asarray(reluctance, np.float64)
        assert (self._reluctance > 0.0).all(), reluctance
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
        """The coefficients. Requires a sample."""
        table = np.array([s for samples in self._strata.values() for s in samples], np.float64)
        features = table[:, :-1] / table[:, -1:]
        # In these units every feature's column has mean square 1 (or 0): reluctances compare.
        scale = np.sqrt(np.mean(features**2, axis=0))
        scale[scale == 0.0] = 1.0
        features /= scale
        ridge = np.diag(self._reluctance * len(table))
        weights = np.ones(len(table))
        coefficients = np.zeros(len(scale))
        for _ in range(_NUM_REWEIGHTINGS):
            weighted = features * weights[:, None]
            coefficients = _solve(weighted.T @ features + ridge, weighted.sum(axis=0))
            errors = np.abs(features @ coefficients - 1.0)
            weights = 1.0 / np.maximum(errors, _SMALL_ERROR)
            weights *= len(table) / weights.sum()
        return tuple(float(value) for value in coefficients / scale)

    def validate(self) -> None:
        """Check every invariant; for tests and debugging."""
        assert len(self._strata) <= _MAX_STRATA
        for samples in self._strata.values():
            assert 0 < len(samples) <= _NUM_PER_STRATUM
            assert all(math.isfinite(value) for sample in samples for value in sample), samples


def _solve(matrix: FloatArray, target: FloatArray) -> FloatArray:
    """The x >= 0 that minimises x'Mx/2 - t'x, M positive definite: the best of all supports."""
    size = len(target)
    best = np.zeros(size)
    best_value = 0.0
    for num_free in range(size, 0, -1):
        for support in itertools.combinations(range(size), num_free):
            index = list(support)
            part = np.linalg.solve(matrix[np.ix_(index, index)], target[index]).astype(np.float64)
            if (part < 0.0).any():
                continue
            if num_free == size:
                return part
            value = -float(part @ target[index]) / 2.0
            if value < best_value:
                best = np.zeros(size)
                best[index] = part
                best_value = value
    return best
