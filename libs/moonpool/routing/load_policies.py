"""Random, RoundRobin, LeastLoaded: policies that look at no prefix."""

from __future__ import annotations

import numpy as np

from moonpool.routing.draw import draw
from moonpool.routing.fleet_table import BoolArray, FloatArray
from moonpool.routing.forecast import Forecast
from moonpool.routing.policy import Choice, lowest


class Random:
    """Anybody who may, each as likely. Implements PlacementPolicy."""

    def __init__(self, seed: int) -> None:
        self._seed = seed

    def choose_decode(
        self, forecast: Forecast, is_open: BoolArray, *, remote_s: FloatArray
    ) -> Choice:
        return self._choose(forecast, is_open, "decode")

    def choose_prefill(
        self, forecast: Forecast, is_open: BoolArray, *, exposed_s: FloatArray
    ) -> Choice:
        return self._choose(forecast, is_open, "prefill")

    def _choose(self, forecast: Forecast, is_open: BoolArray, leg: str) -> Choice:
        query = forecast.query
        rows = np.flatnonzero(is_open)
        number = draw(self._seed, query.request_id, query.attempt, leg)
        row = int(rows[int(number * len(rows))])
        scores = np.ones(len(is_open))
        scores[row] = 0.0
        return Choice(row=row, scores=scores, inputs=(("drawn", number),))


class RoundRobin:
    """One after the other, in order of their keys. Implements PlacementPolicy."""

    def choose_decode(
        self, forecast: Forecast, is_open: BoolArray, *, remote_s: FloatArray
    ) -> Choice:
        return self._choose(forecast, is_open)

    def choose_prefill(
        self, forecast: Forecast, is_open: BoolArray, *, exposed_s: FloatArray
    ) -> Choice:
        return self._choose(forecast, is_open)

    def _choose(self, forecast: Forecast, is_open: BoolArray) -> Choice:
        """The score is how many would have their turn before."""
        sequence = forecast.query.sequence
        place = np.cumsum(is_open) - 1
        num_open = int(place[-1]) + 1
        scores = ((place - sequence) % num_open).astype(np.float64)
        return lowest(scores, is_open, inputs=(("num_earlier_placements", float(sequence)),))


class LeastLoaded:
    """Decode: the fewest requests, then the emptier pool. Prefill: the fewest uncached tokens queued.

    Implements PlacementPolicy.
    """

    def choose_decode(
        self, forecast: Forecast, is_open: BoolArray, *, remote_s: FloatArray
    ) -> Choice:
        scores: FloatArray = forecast.table.num_requests + forecast.used_fraction
        return lowest(scores, is_open)

    def choose_prefill(
        self, forecast: Forecast, is_open: BoolArray, *, exposed_s: FloatArray
    ) -> Choice:
        return lowest(forecast.table.num_queued_tokens.astype(np.float64), is_open)
