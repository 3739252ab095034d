"""Order statistics of small and large samples."""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Sequence
from dataclasses import dataclass


def quantile(values: Sequence[float], share: float) -> float:
    """The smallest value that at least `share` of the sample does not exceed (nearest rank)."""
    assert values, "an empty sample has no quantile"
    assert 0.0 < share <= 1.0, share
    return sorted(values)[math.ceil(share * len(values)) - 1]


def ratio_interval(
    values: Sequence[float], base: Sequence[float], share: float
) -> tuple[float, float]:
    """What the ratio of the two quantiles may be by chance: the middle 90 % of 1,000 bootstrap resamples."""
    rng = random.Random(1)

    def resampled(sample: Sequence[float]) -> float:
        return quantile(rng.choices(sample, k=len(sample)), share)

    ratios = sorted(resampled(values) / resampled(base) for _ in range(1_000))
    return ratios[50], ratios[-51]


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """A few repeats of one measurement: what is reported of them."""

    values: tuple[float, ...]

    @property
    def median(self) -> float:
        return statistics.median(self.values)

    def __str__(self) -> str:
        return f"{self.median:.4g} [{min(self.values):.4g} .. {max(self.values):.4g}]"

    def as_json(self) -> dict[str, object]:
        return {
            "median": self.median,
            "min": min(self.values),
            "max": max(self.values),
            "values": list(self.values),
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Distribution:
    """Very many gaps of one kind."""

    num: int
    p50: float
    p99: float
    p999: float
    longest: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Distribution:
        return cls(
            num=len(values),
            p50=quantile(values, 0.5),
            p99=quantile(values, 0.99),
            p999=quantile(values, 0.999),
            longest=max(values),
        )

    def as_json(self) -> dict[str, float]:
        return {
            "num": self.num,
            "p50": self.p50,
            "p99": self.p99,
            "p999": self.p999,
            "longest": self.longest,
        }
