"""FrequencySketch: about how often each of very many blocks has been seen lately, in little memory.

A count-min sketch with conservative update, halved from time to time (Einziger, Friedman, Manes, "TinyLFU: A
highly efficient cache admission policy", ACM ToS 2017). It never says less than the truth since the last
halvings, and seldom more. Block hashes are SHA-256 under the cluster's secret: their bytes are the hash
functions.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from moonpool.ids import BlockHash

_NUM_ROWS = 4
#: Counts end here: more does not matter to anybody.
_MAX_COUNT = 15
#: Sightings per counter of a row until all are halved.
_SAMPLE = 10

Counts = npt.NDArray[np.uint8]


class FrequencySketch:
    """Counts of up to 15.

    Args:
        num_blocks: About how many different blocks there are between two halvings.
    """

    def __init__(self, num_blocks: int) -> None:
        width = 1 << max(num_blocks - 1, 63).bit_length()
        self._mask = np.uint32(width - 1)
        self._counts = np.zeros((_NUM_ROWS, width), np.uint8)
        self._rows = np.arange(_NUM_ROWS)[:, None]
        self._max_seen = _SAMPLE * width
        self._num_seen = 0

    def see(self, hashes: Sequence[BlockHash]) -> None:
        """Count each of these different blocks once more."""
        if not hashes:
            return
        places = self._places(hashes)
        counts = self._counts[self._rows, places]
        counts = np.maximum(counts, np.minimum(counts.min(axis=0) + 1, _MAX_COUNT))
        self._counts[self._rows, places] = counts
        self._num_seen += len(hashes)
        if self._num_seen >= self._max_seen:
            self._counts >>= 1
            self._num_seen //= 2

    def counts(self, hashes: Sequence[BlockHash]) -> Counts:
        """How often each has been seen: uint8[len(hashes)]."""
        if not hashes:
            return np.zeros(0, np.uint8)
        counts: Counts = self._counts[self._rows, self._places(hashes)].min(axis=0)
        return counts

    def _places(self, hashes: Sequence[BlockHash]) -> npt.NDArray[np.uint32]:
        """uint32[rows, len(hashes)]."""
        words = np.frombuffer(b"".join(hashes), np.dtype("<u4")).reshape(len(hashes), -1)
        return words[:, :_NUM_ROWS].T & self._mask
