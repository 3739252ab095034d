"""PlacementPolicy: the interface of those who choose, and what a choice is."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np

from moonpool.routing.fleet_table import BoolArray, FleetTable, FloatArray
from moonpool.routing.forecast import Forecast
from moonpool.routing.selection import Input, Term


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Choice:
    """Whom a policy chose among those that may be chosen, and why."""

    row: int
    #: float64[worker], the lowest is best; of no meaning for those that may not be chosen.
    scores: FloatArray
    #: What it decided by that the record of every policy does not have (selector.py).
    terms: tuple[Term, ...] = ()
    #: And the numbers that are no worker's: its settings, what it drew.
    inputs: tuple[Input, ...] = ()


class PlacementPolicy(Protocol):
    """Chooses the worker of each leg. Pure: the same forecast gives the same choice.

    The choice follows from the record that is made of it.
    """

    def choose_decode(
        self, forecast: Forecast, is_open: BoolArray, *, remote_s: FloatArray
    ) -> Choice:
        """Who decodes.

        Args:
            is_open: Who may; at least one.
            remote_s: float64[worker]: see Forecast.remote_s.
        """
        ...

    def choose_prefill(
        self, forecast: Forecast, is_open: BoolArray, *, exposed_s: FloatArray
    ) -> Choice:
        """Who prefills for the decode worker, if it is not done there.

        Args:
            is_open: Who may; at least one.
            exposed_s: float64[worker]: see Forecast.exposed_s.
        """
        ...


def lowest(
    scores: FloatArray,
    is_open: BoolArray,
    *,
    terms: tuple[Term, ...] = (),
    inputs: tuple[Input, ...] = (),
) -> Choice:
    """The lowest score; ties go to the smaller key, so that the same views give the same choice."""
    row = int(np.where(is_open, scores, np.inf).argmin())
    return Choice(row=row, scores=scores, terms=terms, inputs=inputs)


def has_prefill_pool(table: FleetTable) -> bool:
    """Whether there are workers that only prefill."""
    return bool((table.can_prefill & ~table.can_decode).any())
