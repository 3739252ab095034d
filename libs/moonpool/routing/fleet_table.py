"""FleetTable: the workers of a router as columns, so that a placement weighs all of them at once.

A row per worker, in order of its key. The owner puts a worker's view whenever it has changed; what a
placement reads are numpy columns. Costs that a worker has not measured are the median of those who
have; without anybody, the nominal ones, and `is_measured` is False.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Mapping

import numpy as np
import numpy.typing as npt

from moonpool.ids import WorkerKey
from moonpool.latency.transfer_fit import PRIOR
from moonpool.routing.worker_view import WorkerFits, WorkerInfo, WorkerView

FloatArray = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.int64]
BoolArray = npt.NDArray[np.bool_]

#: Of prefill, then of decode. With these only the proportion of predictions means something: uncached
#: tokens are the unit.
_NOMINAL = np.array([0.0, 1e-4, 0.0, float(1 << 30), 0.0, 0.0, 0.0])
_NUM_OF_PREFILL = 4

_BOOLS = ("can_decode", "can_prefill", "is_store", "is_draining", "is_full", "is_inhibited")
_COUNTS = (
    "num_total_blocks",
    "num_available_blocks",
    "num_filled_blocks",
    "num_requests",
    "num_prefills",
    "num_queued_tokens",
    "block_size",
    "bytes_per_token",
    "num_layers",
)
_COLUMNS = (*_BOOLS, *_COUNTS, "churn")


class FleetTable:
    """See the file's head. One writer."""

    def __init__(self) -> None:
        self.keys: tuple[WorkerKey, ...] = ()
        self.infos: tuple[WorkerInfo, ...] = ()
        self._row_by_key: dict[WorkerKey, int] = {}
        self._fits: list[WorkerFits] = []
        #: bool[worker] each.
        self.can_decode: BoolArray = np.zeros(0, np.bool_)
        self.can_prefill: BoolArray = np.zeros(0, np.bool_)
        self.is_store: BoolArray = np.zeros(0, np.bool_)
        self.is_draining: BoolArray = np.zeros(0, np.bool_)
        self.is_full: BoolArray = np.zeros(0, np.bool_)
        self.is_inhibited: BoolArray = np.zeros(0, np.bool_)
        #: int64[worker] each.
        self.num_total_blocks: IntArray = np.zeros(0, np.int64)
        self.num_available_blocks: IntArray = np.zeros(0, np.int64)
        #: Blocks that hold KV, in use or not: the size of its cache.
        self.num_filled_blocks: IntArray = np.zeros(0, np.int64)
        self.num_requests: IntArray = np.zeros(0, np.int64)
        self.num_prefills: IntArray = np.zeros(0, np.int64)
        self.num_queued_tokens: IntArray = np.zeros(0, np.int64)
        self.block_size: IntArray = np.zeros(0, np.int64)
        self.bytes_per_token: IntArray = np.zeros(0, np.int64)
        self.num_layers: IntArray = np.zeros(0, np.int64)
        #: float64[worker]: how fast requests fill each cache; only the order means something.
        self.churn: FloatArray = np.zeros(0)
        #: Somebody has measured prefills: predictions are in seconds.
        self.is_measured = False
        #: float64[coefficient, worker]: as measured, NaN where nothing is; and with the gaps filled.
        self._measured: FloatArray = np.zeros((len(_NOMINAL), 0))
        self._costs: FloatArray = np.zeros((len(_NOMINAL), 0))
        #: float64[worker] each; the budget of a step is a count.
        self.prefill_base_s: FloatArray = np.zeros(0)
        self.prefill_per_token_s: FloatArray = np.zeros(0)
        self.prefill_per_work_s: FloatArray = np.zeros(0)
        self.max_step_tokens: FloatArray = np.zeros(0)
        self.decode_base_s: FloatArray = np.zeros(0)
        self.decode_per_context_token_s: FloatArray = np.zeros(0)
        self.decode_per_request_s: FloatArray = np.zeros(0)
        #: float64[reader, peer].
        self.transfer_latency_s: FloatArray = np.zeros((0, 0))
        self.transfer_bytes_per_s: FloatArray = np.ones((0, 0))

    @classmethod
    def of(cls, views: Iterable[WorkerView]) -> FleetTable:
        """A table of these workers."""
        table = cls()
        for view in views:
            table.put(view)
        return table

    def __len__(self) -> int:
        return len(self.keys)

    def row(self, key: WorkerKey) -> int | None:
        """The worker's row; None if it is not here."""
        return self._row_by_key.get(key)

    def rows_of(self, keys: Iterable[WorkerKey]) -> list[int]:
        """The rows of those that are here."""
        return [row for key in keys if (row := self._row_by_key.get(key)) is not None]

    def spread(self, numbers: Mapping[WorkerKey, int]) -> IntArray:
        """int64[worker]: the number of each worker, 0 for those that have none."""
        column = np.zeros(len(self), np.int64)
        for key, number in numbers.items():
            row = self._row_by_key.get(key)
            if row is not None:
                column[row] = number
        return column

    # -- writing --

    def put(self, view: WorkerView) -> None:
        """Add a worker, or change what is known of it."""
        row = self._row_by_key.get(view.key)
        if row is None:
            row = self._insert(view)
        elif view.info is not self.infos[row]:
            self.infos = (*self.infos[:row], view.info, *self.infos[row + 1 :])
        info, load = view.info, view.load
        self.can_decode[row] = info.role.can_decode
        self.can_prefill[row] = info.role.can_prefill
        self.is_store[row] = not info.role.computes
        self.is_draining[row] = load.is_draining
        self.is_full[row] = view.is_full
        self.is_inhibited[row] = view.is_inhibited
        self.num_total_blocks[row] = load.num_total_blocks
        self.num_available_blocks[row] = view.num_available_blocks
        self.num_filled_blocks[row] = load.num_total_blocks - load.num_free_blocks
        self.num_requests[row] = view.num_requests
        self.num_prefills[row] = view.num_prefills
        self.num_queued_tokens[row] = view.num_queued_tokens
        self.block_size[row] = info.block_size
        self.bytes_per_token[row] = info.bytes_per_token
        self.num_layers[row] = info.num_layers
        self.churn[row] = view.churn
        if view.fits is not self._fits[row]:
            self._fits[row] = view.fits
            self._measured[:, row] = _coefficients(view.fits)
            self._fill_gaps()
            self._spread_transfers(row)

    def remove(self, key: WorkerKey) -> None:
        """Forget a worker; nothing happens if it is not here."""
        row = self._row_by_key.get(key)
        if row is None:
            return
        for name in _COLUMNS:
            setattr(self, name, np.delete(getattr(self, name), row))
        self.infos = (*self.infos[:row], *self.infos[row + 1 :])
        del self._fits[row]
        self._measured = np.delete(self._measured, row, axis=1)
        self._index((*self.keys[:row], *self.keys[row + 1 :]))

    def validate(self) -> None:
        """Check every invariant; for tests and debugging."""
        assert list(self.keys) == sorted(set(self.keys)), self.keys
        assert self.keys == tuple(info.key for info in self.infos)
        size = len(self.keys)
        for name in _COLUMNS:
            assert len(getattr(self, name)) == size, name
        assert len(self._fits) == len(self._row_by_key) == size
        assert self.transfer_latency_s.shape == self.transfer_bytes_per_s.shape == (size, size)
        assert self._costs.shape == self._measured.shape == (len(_NOMINAL), size)
        assert np.isfinite(self._costs).all()
        assert (self.num_available_blocks >= 0).all()

    # -- parts --

    def _insert(self, view: WorkerView) -> int:
        row = bisect_left(self.keys, view.key)
        for name in _COLUMNS:
            setattr(self, name, np.insert(getattr(self, name), row, 0))
        self.infos = (*self.infos[:row], view.info, *self.infos[row:])
        self._fits.insert(row, view.fits)
        self._measured = np.insert(self._measured, row, _coefficients(view.fits), axis=1)
        self._index((*self.keys[:row], view.key, *self.keys[row:]))
        return row

    def _index(self, keys: tuple[WorkerKey, ...]) -> None:
        self.keys = keys
        self._row_by_key = {key: row for row, key in enumerate(keys)}
        self._fill_gaps()
        size = len(keys)
        self.transfer_latency_s = np.full((size, size), PRIOR.latency_s)
        self.transfer_bytes_per_s = np.full((size, size), PRIOR.bytes_per_s)
        for row in range(size):
            self._spread_transfers(row)

    def _fill_gaps(self) -> None:
        """Who has not measured is taken to be like those who have."""
        self.is_measured = not bool(np.isnan(self._measured[0]).all())
        self._costs = self._measured.copy()
        for part in (slice(0, _NUM_OF_PREFILL), slice(_NUM_OF_PREFILL, len(_NOMINAL))):
            is_gap = np.isnan(self._costs[part.start])
            if is_gap.any():
                known = self._costs[part][:, ~is_gap]
                typical = np.median(known, axis=1) if known.size else _NOMINAL[part]
                self._costs[part, is_gap] = typical[:, None]
        (
            self.prefill_base_s,
            self.prefill_per_token_s,
            self.prefill_per_work_s,
            self.max_step_tokens,
            self.decode_base_s,
            self.decode_per_context_token_s,
            self.decode_per_request_s,
        ) = self._costs

    def _spread_transfers(self, reader: int) -> None:
        self.transfer_latency_s[reader] = PRIOR.latency_s
        self.transfer_bytes_per_s[reader] = PRIOR.bytes_per_s
        for key, cost in self._fits[reader].transfers:
            peer = self._row_by_key.get(key)
            if peer is not None:
                self.transfer_latency_s[reader, peer] = cost.latency_s
                self.transfer_bytes_per_s[reader, peer] = cost.bytes_per_s


def _coefficients(fits: WorkerFits) -> FloatArray:
    """float64[coefficient]; NaN for what is not measured."""
    column = np.full(len(_NOMINAL), np.nan)
    if (prefill := fits.prefill) is not None:
        column[:_NUM_OF_PREFILL] = (
            prefill.base_s,
            prefill.per_token_s,
            prefill.per_work_s,
            prefill.max_step_tokens,
        )
    if (decode := fits.decode) is not None:
        column[_NUM_OF_PREFILL:] = (
            decode.base_s,
            decode.per_context_token_s,
            decode.per_request_s,
        )
    return column
