"""KeyTable: 64-bit keys, each with the set of its holders; and its form in Python.

Most calls are about a few keys: the blocks of one step, or of one prompt. A dict of bit sets serves those
two to six times as fast as numpy over flat arrays did (docs/performance/index.md), since each of numpy's
calls costs more than a handful of keys. The native library has the same in C (native/src/key_table.c),
several times as fast again and in a third of the memory; a router uses that where it is built.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

import numpy as np

from moonpool.kv.block_key import KeyArray, keys_digest

#: Holders, each once, and for each of them a length.
Runs = tuple[list[int], list[int]]

#: A key, as Python's number.
_BYTES_PER_KEY = 36


class KeyChange(NamedTuple):
    """The keys whose holders a call changed."""

    num_keys: int
    #: `keys_digest` of them.
    digest: int


class KeyTable(Protocol):
    """Holders are numbered from 0; low numbers are cheap.

    Keys are uint64[n]; zeros among them are ignored, and so is a key that comes twice.
    """

    def add(self, keys: KeyArray, holder: int) -> KeyChange:
        """Note `holder` for these keys; what changed are those that it did not have."""
        ...

    def remove(self, keys: KeyArray, holder: int) -> KeyChange:
        """Forget `holder` for these keys; what changed are those that it had."""
        ...

    def drop(self, holder: int) -> None:
        """Forget `holder` for every key. One pass over the table."""
        ...

    def runs(self, keys: KeyArray) -> Runs:
        """The holders of keys[0], and how many keys from the first on each has without a gap.

        Looks no further than the longest run. A zero is a key that nobody has.
        """
        ...

    def keys_of(self, holder: int) -> KeyArray:
        """What `holder` has, in no order. One pass over the table."""
        ...

    @property
    def num_held(self) -> int:
        """Keys with at least one holder."""
        ...

    @property
    def num_bytes(self) -> int:
        """Memory that the keys take."""
        ...

    def validate(self) -> None:
        """Check the table's form; raises AssertionError. O(size)."""
        ...


class DictKeyTable:
    """KeyTable in Python: about 130 bytes a key that is held.

    Keys that were added together share one number for their holders: that is less memory, and a run of
    them is known by `is`.
    """

    def __init__(self) -> None:
        #: Key -> its holders: bit h for holder h. None is without.
        self._holders: dict[int, int] = {}

    @property
    def num_held(self) -> int:
        return len(self._holders)

    @property
    def num_bytes(self) -> int:
        return self._holders.__sizeof__() + len(self._holders) * _BYTES_PER_KEY

    def add(self, keys: KeyArray, holder: int) -> KeyChange:
        holders, flag = self._holders, 1 << holder
        changed = []
        before, after = 0, flag
        for key in keys.tolist():
            held_by = holders.get(key, 0)
            if held_by is not before:
                before, after = held_by, held_by | flag
            if after != before and key:
                holders[key] = after
                changed.append(key)
        return _change(changed)

    def remove(self, keys: KeyArray, holder: int) -> KeyChange:
        holders, flag = self._holders, 1 << holder
        changed = []
        for key in keys.tolist():
            held_by = holders.get(key, 0)
            if held_by & flag:
                if held_by == flag:
                    del holders[key]
                else:
                    holders[key] = held_by ^ flag
                changed.append(key)
        return _change(changed)

    def drop(self, holder: int) -> None:
        others = ~(1 << holder)
        self._holders = {
            key: held_by & others for key, held_by in self._holders.items() if held_by & others
        }

    def runs(self, keys: KeyArray) -> Runs:
        runs: Runs = ([], [])
        get, alive = self._holders.get, -1
        before = -1
        for index, key in enumerate(keys.tolist()):
            held_by = get(key, 0)
            if held_by is before:
                continue
            before = held_by
            left = alive & held_by
            if left != alive:
                if index:
                    _tell(runs, alive ^ left, index)
                alive = left
                if not alive:
                    break
        if len(keys):
            _tell(runs, alive, len(keys))
        return runs

    def keys_of(self, holder: int) -> KeyArray:
        flag = 1 << holder
        keys = [key for key, held_by in self._holders.items() if held_by & flag]
        return np.array(keys, np.uint64)

    def validate(self) -> None:
        assert 0 not in self._holders
        assert all(held_by > 0 for held_by in self._holders.values()), "a key has no holder"


def _change(keys: list[int]) -> KeyChange:
    return KeyChange(len(keys), keys_digest(np.array(keys, np.uint64)))


def _tell(runs: Runs, held_by: int, length: int) -> None:
    while held_by:
        lowest = held_by & -held_by
        runs[0].append(lowest.bit_length() - 1)
        runs[1].append(length)
        held_by ^= lowest
