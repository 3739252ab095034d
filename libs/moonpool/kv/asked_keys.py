"""AskedKeys: the block keys that were ever asked for, or held, here: a cache that never forgets.

What such a cache would have found is the ceiling of what any real one can. It holds keys, no KV, and its
memory is bounded: up to `max_keys` keys it is exact; then it keeps every second one, every fourth, and so
on, chosen by bits of the key, so that a key is kept always or never.

Whoever knows a block knows the blocks before it: chains are added from their start. So the known part of a
chain is a prefix, and its end lies between the last kept key that is known and the first that is not:
exactly there while all are kept, within about 2^depth blocks otherwise. The middle is taken, and half of
the width is told, which bounds the error.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from moonpool.kv.block_key import KeyArray
from moonpool.kv.key_table import DictKeyTable, KeyTable

#: 16 million tokens in blocks of 16; some 40 MB in C.
MAX_KEYS = 1 << 20
#: Who has the keys in the table.
_HOLDER = 0
#: The bits of a key that choose; tables find their slots by the bits at either end.
_CHOOSING_SHIFT = np.uint64(32)
_MAX_DEPTH = 24
#: Keys that are given up in one call: the loop is everybody's.
_MAX_LEAVING = 16_384


@dataclass(frozen=True, slots=True, kw_only=True)
class KnownPrefix:
    """How much of a chain was known."""

    #: Leading blocks; an estimate within `max_error_blocks`.
    num_blocks: int
    #: 0 if it is exact.
    max_error_blocks: int = 0


class AskedKeys:
    """See the file's head.

    Args:
        table: Empty, and this one's own; in Python if None.
    """

    def __init__(self, table: KeyTable | None = None, *, max_keys: int = MAX_KEYS) -> None:
        assert max_keys > 0, max_keys
        self._table = DictKeyTable() if table is None else table
        self._max_keys = max_keys
        #: One of 2^depth keys is kept.
        self._depth = 0
        #: Keys in the table that are no longer among the chosen.
        self._leaving: KeyArray = np.zeros(0, np.uint64)

    def prefix(self, keys: KeyArray) -> KnownPrefix:
        """How many leading blocks of a chain were asked for before.

        Args:
            keys: uint64[n], the chain's keys from its start.
        """
        if not self._depth:
            return KnownPrefix(num_blocks=self._run(keys))
        (chosen,) = np.nonzero(self._is_chosen(keys))
        run = self._run(keys[chosen])
        low = int(chosen[run - 1]) + 1 if run else 0
        high = int(chosen[run]) if run < len(chosen) else len(keys)
        half = -(-(high - low) // 2)
        return KnownPrefix(num_blocks=high - half, max_error_blocks=half)

    def add(self, keys: KeyArray) -> None:
        """From here on these are known. With a block come the blocks before it, now or earlier."""
        self._table.add(keys[self._is_chosen(keys)] if self._depth else keys, _HOLDER)
        if len(self._leaving):
            self._table.remove(self._leaving[:_MAX_LEAVING], _HOLDER)
            self._leaving = self._leaving[_MAX_LEAVING:]
        while self.num_keys > self._max_keys and self._depth < _MAX_DEPTH:
            self._depth += 1
            kept = self._table.keys_of(_HOLDER)
            self._leaving = kept[~self._is_chosen(kept)]

    @property
    def num_keys(self) -> int:
        """Kept."""
        return self._table.num_held - len(self._leaving)

    @property
    def kept_fraction(self) -> float:
        """Of all keys that were added; 1 while it is exact."""
        return 0.5**self._depth

    def validate(self) -> None:
        """Check every invariant; raises AssertionError. O(size)."""
        self._table.validate()
        held = self._table.keys_of(_HOLDER)
        is_chosen = self._is_chosen(held)
        assert np.array_equal(np.sort(held[~is_chosen]), np.sort(self._leaving))
        assert np.count_nonzero(is_chosen) == self.num_keys
        assert self.num_keys <= self._max_keys or self._depth == _MAX_DEPTH

    # -- parts --

    def _run(self, keys: KeyArray) -> int:
        _, lengths = self._table.runs(keys)
        return lengths[0] if lengths else 0

    def _is_chosen(self, keys: KeyArray) -> npt.NDArray[np.bool_]:
        mask = np.uint64((1 << self._depth) - 1)
        chosen: npt.NDArray[np.bool_] = (keys >> _CHOOSING_SHIFT) & mask == 0
        return chosen
