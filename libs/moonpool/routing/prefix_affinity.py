"""PrefixAffinity: SGLang's cache-aware rule (sgl-router, policies/cache_aware.rs).

    out of balance (max - min > abs threshold, and max > rel threshold * min): the shortest queue
    else the best match covers more than `cache_threshold` of the prompt:      the best match
    else:                                                                      the smallest cache

Where some workers only prefill, the rule is theirs, and decode goes to the shortest queue.
"""

from __future__ import annotations

import numpy as np

from moonpool.routing.config import PrefixAffinityConfig
from moonpool.routing.fleet_table import BoolArray, FloatArray
from moonpool.routing.forecast import Forecast
from moonpool.routing.policy import Choice, has_prefill_pool, lowest
from moonpool.routing.selection import Input


class PrefixAffinity:
    """See the file's head. Implements PlacementPolicy."""

    def __init__(self, config: PrefixAffinityConfig) -> None:
        self._config = config
        self._inputs: tuple[Input, ...] = (
            ("cache_threshold", config.cache_threshold),
            ("balance_abs_threshold", float(config.balance_abs_threshold)),
            ("balance_rel_threshold", config.balance_rel_threshold),
        )

    def choose_decode(
        self, forecast: Forecast, is_open: BoolArray, *, remote_s: FloatArray
    ) -> Choice:
        if not has_prefill_pool(forecast.table):
            return self._choose(forecast, is_open)
        return lowest(
            _load(forecast),
            is_open,
            terms=(("num_prefills", forecast.table.num_prefills),),
            inputs=(("has_prefill_pool", 1.0),),
        )

    def choose_prefill(
        self, forecast: Forecast, is_open: BoolArray, *, exposed_s: FloatArray
    ) -> Choice:
        return self._choose(forecast, is_open)

    def _choose(self, forecast: Forecast, is_open: BoolArray) -> Choice:
        table = forecast.table
        return lowest(
            self._scores(forecast, is_open),
            is_open,
            terms=(
                ("num_prefills", table.num_prefills),
                ("num_filled_blocks", table.num_filled_blocks),
            ),
            inputs=self._inputs,
        )

    def _scores(self, forecast: Forecast, is_open: BoolArray) -> FloatArray:
        config, load = self._config, _load(forecast)
        largest, smallest = load[is_open].max(), load[is_open].min()
        is_unbalanced = (
            largest - smallest > config.balance_abs_threshold
            and largest > config.balance_rel_threshold * smallest
        )
        if is_unbalanced:
            return load
        match_rate: FloatArray = forecast.num_cached_tokens / forecast.query.num_tokens
        if match_rate[is_open].max() > config.cache_threshold:
            return -match_rate
        return forecast.table.num_filled_blocks.astype(np.float64)


def _load(forecast: Forecast) -> FloatArray:
    """float64[worker]: requests that run or wait there, in either role."""
    table = forecast.table
    load: FloatArray = (table.num_requests + table.num_prefills).astype(np.float64)
    return load
