"""DynamoLinear: the linear cost of Dynamo's KV router (lib/kv-router, scheduling/selector), in blocks.

    prefill = max(queued + incoming - overlap_score_weight * overlap, 0)
    cost    = prefill_load_scale * prefill + (in use + incoming)

Where some workers only prefill, decode weighs what it holds and who runs there, and the rule is the
prefill workers':

    cost    = max(in use + incoming - overlap, 0) + requests

The lowest cost is taken, ties are drawn; with a temperature, all are drawn by softmax.
"""

from __future__ import annotations

import numpy as np

from moonpool.routing.config import DynamoLinearConfig
from moonpool.routing.draw import draw
from moonpool.routing.filters import num_blocks
from moonpool.routing.fleet_table import BoolArray, FloatArray
from moonpool.routing.forecast import Forecast
from moonpool.routing.policy import Choice, has_prefill_pool
from moonpool.routing.selection import Input

_POOL_RULE: tuple[Input, ...] = (("has_prefill_pool", 1.0),)


class DynamoLinear:
    """See the file's head. Implements PlacementPolicy."""

    def __init__(self, config: DynamoLinearConfig, seed: int) -> None:
        self._config = config
        self._seed = seed
        self._weights: tuple[Input, ...] = (
            ("overlap_score_weight", config.overlap_score_weight),
            ("prefill_load_scale", config.prefill_load_scale),
        )

    def choose_decode(
        self, forecast: Forecast, is_open: BoolArray, *, remote_s: FloatArray
    ) -> Choice:
        if not has_prefill_pool(forecast.table):
            return self._choose(forecast, is_open, self._cost(forecast), "decode", self._weights)
        table = forecast.table
        incoming = num_blocks(table, forecast.query.num_tokens)
        overlap = forecast.num_cached_tokens / table.block_size
        cost: FloatArray = (
            np.maximum(forecast.num_used_blocks + incoming - overlap, 0.0) + table.num_requests
        )
        return self._choose(forecast, is_open, cost, "decode", _POOL_RULE)

    def choose_prefill(
        self, forecast: Forecast, is_open: BoolArray, *, exposed_s: FloatArray
    ) -> Choice:
        return self._choose(forecast, is_open, self._cost(forecast), "prefill", self._weights)

    def _cost(self, forecast: Forecast) -> FloatArray:
        config, table = self._config, forecast.table
        incoming = num_blocks(table, forecast.query.num_tokens)
        queued = table.num_queued_tokens / table.block_size
        overlap = forecast.num_cached_tokens / table.block_size
        prefill = np.maximum(queued + incoming - config.overlap_score_weight * overlap, 0.0)
        cost: FloatArray = config.prefill_load_scale * prefill + forecast.num_used_blocks + incoming
        return cost

    def _choose(
        self,
        forecast: Forecast,
        is_open: BoolArray,
        cost: FloatArray,
        leg: str,
        rule: tuple[Input, ...],
    ) -> Choice:
        query = forecast.query
        rows = np.flatnonzero(is_open)
        open_cost = cost[rows]
        lowest = open_cost.min()
        temperature = self._config.router_temperature
        if temperature > 0.0:
            spread = float(open_cost.max() - lowest) or 1.0
            weights = np.exp((lowest - open_cost) / spread / temperature)
        else:
            weights = (open_cost == lowest).astype(np.float64)
        steps = np.cumsum(weights)
        number = draw(self._seed, query.request_id, query.attempt, leg)
        step = int(np.searchsorted(steps, number * steps[-1], side="right"))
        return Choice(
            row=int(rows[min(step, len(rows) - 1)]),
            scores=cost,
            terms=(
                ("num_used_blocks", forecast.num_used_blocks),
                ("block_size", forecast.table.block_size),
            ),
            inputs=(*rule, ("router_temperature", temperature), ("drawn", number)),
        )
