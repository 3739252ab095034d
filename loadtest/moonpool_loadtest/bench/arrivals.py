"""When requests arrive: an absolute schedule, computed before the first is sent."""

from __future__ import annotations

import enum
import itertools
import math
import random
from dataclasses import dataclass


class ArrivalKind(enum.StrEnum):
    POISSON = "poisson"
    #: Gamma-distributed gaps, whose burstiness is free.
    GAMMA = "gamma"
    CONSTANT = "constant"


@dataclass(frozen=True, slots=True, kw_only=True)
class ArrivalProcess:
    """How requests are spread in time."""

    kind: ArrivalKind = ArrivalKind.POISSON
    #: Requests per second; infinite sends all at once.
    rate_rps: float = 1.0
    #: Shape of the gamma distribution, as vLLM's `--burstiness`: the gaps' coefficient of variation is
    #: 1 / sqrt(burstiness). 1 is Poisson, 0.0625 has CV 4, 100 is nearly constant.
    burstiness: float = 1.0

    def schedule(self, num_requests: int, rng: random.Random) -> tuple[float, ...]:
        """Seconds from the start, ascending; the first is 0.

        Gaps are rescaled so that their mean is 1 / rate exactly: runs with different seeds offer the
        same load.
        """
        if num_requests == 0:
            return ()
        if math.isinf(self.rate_rps):
            return (0.0,) * num_requests
        gaps = [self._gap(rng) for _ in range(num_requests - 1)]
        total = math.fsum(gaps)
        # A shape near 0 can draw nothing but zeros: then everything arrives at once.
        scale = len(gaps) / self.rate_rps / total if total > 0 else 0.0
        return tuple(itertools.accumulate((gap * scale for gap in gaps), initial=0.0))

    def _gap(self, rng: random.Random) -> float:
        """One gap of mean 1."""
        match self.kind:
            case ArrivalKind.POISSON:
                return rng.expovariate(1.0)
            case ArrivalKind.GAMMA:
                return rng.gammavariate(self.burstiness, 1.0 / self.burstiness)
            case ArrivalKind.CONSTANT:
                return 1.0
