"""Filters: who of a fleet may take a request, before anybody is weighed."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from moonpool.ids import WorkerKey
from moonpool.routing.fleet_table import FleetTable, IntArray
from moonpool.routing.query import PlacementQuery
from moonpool.routing.selection import FILTER_NUMBER, OTHER_ROLE, FilterReason

FilterArray = npt.NDArray[np.int8]

_DRAINING = FILTER_NUMBER[FilterReason.DRAINING]
_NO_ROOM = FILTER_NUMBER[FilterReason.NO_ROOM]
_INHIBITED = FILTER_NUMBER[FilterReason.INHIBITED]
_NEVER_FITS = FILTER_NUMBER[FilterReason.NEVER_FITS]
_LOST_SOURCE = FILTER_NUMBER[FilterReason.LOST_SOURCE]
_IS_DECODE = FILTER_NUMBER[FilterReason.IS_DECODE]


def num_blocks(table: FleetTable, num_tokens: int) -> IntArray:
    """int64[worker]: blocks of so many tokens, whatever is cached."""
    return -(-num_tokens // table.block_size)


def filter_decode(table: FleetTable, query: PlacementQuery) -> FilterArray:
    """int8[worker], indices into FILTERS: why each may not decode the request."""
    filters = _common(table, query.unfit)
    needed = num_blocks(table, query.num_tokens)
    # A worker that has not told its pool may be asked.
    is_told = table.num_total_blocks > 0
    filters[(filters == 0) & is_told & (needed > table.num_available_blocks)] = _NO_ROOM
    filters[is_told & (needed > table.num_total_blocks)] = _NEVER_FITS
    filters[~table.can_decode] = OTHER_ROLE
    _inhibit(table, filters)
    return filters


def filter_prefill(table: FleetTable, query: PlacementQuery) -> FilterArray:
    """int8[worker], indices into FILTERS: why each may not prefill it, whoever decodes."""
    filters = _common(table, query.unfit)
    if query.lost:
        filters[table.rows_of(query.lost)] = _LOST_SOURCE
    filters[~table.can_prefill] = OTHER_ROLE
    return filters


def filter_sources(
    table: FleetTable, prefill_filters: FilterArray, decode_row: int | None
) -> FilterArray:
    """The same for one decode worker, which is not its own source; None: for any."""
    filters = prefill_filters.copy()
    if decode_row is not None and table.can_prefill[decode_row]:
        filters[decode_row] = _IS_DECODE
    _inhibit(table, filters)
    return filters


def _common(table: FleetTable, unfit: frozenset[WorkerKey]) -> FilterArray:
    filters = np.zeros(len(table), np.int8)
    filters[table.is_full] = _NO_ROOM
    filters[table.is_draining] = _DRAINING
    if unfit:
        filters[table.rows_of(unfit)] = _NEVER_FITS
    return filters


def _inhibit(table: FleetTable, filters: FilterArray) -> None:
    """In place. A worker that failed is better than none."""
    if not table.is_inhibited.any():
        return
    is_open = filters == 0
    if (is_open & ~table.is_inhibited).any():
        filters[is_open & table.is_inhibited] = _INHIBITED
