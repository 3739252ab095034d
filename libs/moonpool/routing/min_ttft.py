"""MinTtft: the lowest predicted time to the first token, under a TPOT and a capacity constraint.

The objective is that of Mooncake's Conductor (FAST'25, algorithm 1), in one unit (llm-d): everything is
seconds out of uncached tokens, so that a long queue outweighs a long match by itself.

Decode   1. who has room for the answer that is expected, if anybody has
         2. whose predicted TPOT stays within the SLO, its own chunks included if it would prefill
            here; if nobody's does, those near the lowest
         3. the soonest first token, be it prefilled here or elsewhere, and what is pushed out of the cache
            that will have to be computed again (so a prefix is rather used where it lies than copied)
         4. among those within `slack` of it the lowest TPOT
         5. among those within `slack` of that the one whose cache was filled least of late: it gives up
            the least, and caches that are filled equally fast are worth the most together
Prefill  the soonest first token, handoff included; within `slack` of it as in 5.
"""

from __future__ import annotations

import numpy as np

from moonpool.routing.config import MinTtftConfig
from moonpool.routing.disagg_decider import DisaggConfig
from moonpool.routing.fleet_table import BoolArray, FloatArray, IntArray
from moonpool.routing.forecast import Forecast
from moonpool.routing.policy import Choice
from moonpool.routing.selection import Input, Term

#: If nobody meets the SLO: a TPOT of so many times the lowest will do.
_NEAR_LOWEST = 1.25


class MinTtft:
    """See the file's head. Implements PlacementPolicy."""

    def __init__(self, config: MinTtftConfig, disagg: DisaggConfig) -> None:
        self._config = config
        self._disagg = disagg
        self._inputs: tuple[Input, ...] = (
            ("eviction_weight", config.eviction_weight),
            ("slack", config.slack),
        )
        slo: tuple[Input, ...] = (
            (("slo_tpot_s", config.slo_tpot_s),) if config.slo_tpot_s is not None else ()
        )
        self._decode_inputs = (*self._inputs, *slo)
        self._threshold_inputs: tuple[Input, ...] = (
            *self._decode_inputs,
            ("threshold_tokens", float(disagg.threshold_tokens)),
        )

    def choose_decode(
        self, forecast: Forecast, is_open: BoolArray, *, remote_s: FloatArray
    ) -> Choice:
        inputs = self._decode_inputs
        local_s = forecast.ready_s + forecast.interference_s
        if forecast.has_growth_room[is_open].any():
            is_open = is_open & forecast.has_growth_room
        if not forecast.table.is_measured or self._disagg.only_thresholds:
            # What thresholds will say of each.
            inputs = self._threshold_inputs
            num_uncached_tokens = forecast.query.num_tokens - forecast.num_cached_tokens
            is_local = num_uncached_tokens <= self._disagg.threshold_tokens
            is_local |= np.isinf(remote_s)
            local_s = np.where(is_local, local_s, np.inf)
            remote_s = np.where(is_local, np.inf, remote_s)
        evicted_s = self._config.eviction_weight * forecast.evicted_s
        local_s, remote_s = local_s + evicted_s, remote_s + evicted_s
        scores = self._within_slo(forecast, local_s, remote_s)
        if not np.isfinite(scores[is_open]).any():
            scores = np.minimum(local_s, remote_s)
            lowest_tpot_s = forecast.tpot_s[is_open].min()
            is_open = is_open & (forecast.tpot_s <= lowest_tpot_s * _NEAR_LOWEST)
        best = scores[is_open].min()
        rows = np.flatnonzero(is_open & (scores <= best * (1.0 + self._config.slack)))
        tpot_s = forecast.tpot_s[rows]
        rows = rows[tpot_s <= tpot_s.min() * (1.0 + self._config.slack)]
        return Choice(
            row=_least_filled(forecast, rows),
            scores=scores,
            terms=(("has_growth_room", forecast.has_growth_room), *_terms(forecast)),
            inputs=inputs,
        )

    def choose_prefill(
        self, forecast: Forecast, is_open: BoolArray, *, exposed_s: FloatArray
    ) -> Choice:
        evicted_s = self._config.eviction_weight * forecast.evicted_s
        scores = forecast.ready_s + forecast.interference_s + exposed_s + evicted_s
        best = scores[is_open].min()
        rows = np.flatnonzero(is_open & (scores <= best * (1.0 + self._config.slack)))
        return Choice(
            row=_least_filled(forecast, rows),
            scores=scores,
            terms=_terms(forecast),
            inputs=self._inputs,
        )

    def _within_slo(
        self, forecast: Forecast, local_s: FloatArray, remote_s: FloatArray
    ) -> FloatArray:
        slo_s = self._config.slo_tpot_s
        if slo_s is None:
            return np.minimum(local_s, remote_s)
        scores: FloatArray = np.minimum(
            np.where(forecast.chunked_tpot_s <= slo_s, local_s, np.inf),
            np.where(forecast.tpot_s <= slo_s, remote_s, np.inf),
        )
        return scores


def _terms(forecast: Forecast) -> tuple[Term, ...]:
    """What both legs weigh beside what is recorded for every policy."""
    return (("evicted_s", forecast.evicted_s), ("churn", forecast.table.churn))


def _least_filled(forecast: Forecast, rows: IntArray) -> int:
    """Of workers that are as good; ties go to the least loaded, then to the smaller key."""
    churn, load = forecast.table.churn, forecast.table.num_requests + forecast.used_fraction
    return int(rows[np.lexsort((load[rows], churn[rows]))[0]])
