"""KeyTable: 64-bit keys, each with the set of its holders; and its form in numpy.

ArrayKeyTable keeps flat arrays that it probes for all keys of a call at once. Buckets of 8 slots are
filled from the left; a key belongs into the bucket that its low bits name, or, where that is full, into
the next one with room. Per 64 holders there is one array with a word per slot, bit h of it set if holder
64 * array + h has the slot's key.

    keys      [ k k k . . . . . | k k k k k k k k | k . . . . . . . | ... ]     0: free
    holders   [ m m m           | m m m m m m m m | m               | ... ]     0: nobody holds it

Rules
- Keys are uniform already (kv/block_key.py): no hashing. Zero is no key.
- A slot is never freed: a key without holders keeps its place until the table is rebuilt, so a probe may
  stop at the first bucket that has a free slot. It is rebuilt when more than half of the slots are used.
- Memory: 16 bytes a slot (8 more per further 64 holders); 32 to 86 bytes a key that is held.

The native library has the same in C (native/src/key_table.c), faster on the few keys of most calls.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from moonpool.kv.block_key import KeyArray, keys_digest

_BUCKET = 8
_WORD_BITS = 64
_MIN_SLOTS = 64
_FREE = np.uint64(0)
_FIRST_PROBE = 32

_Indices = npt.NDArray[np.intp]
_Flags = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class KeyChange:
    """The keys whose holders a call changed. Positional, since one is made per call."""

    num_keys: int
    #: `keys_digest` of them.
    digest: int


class KeyTable(Protocol):
    """Holders are numbered from 0; low numbers are cheap. Keys are uint64[n]; zeros among them are
    ignored, and so is a key that comes twice.
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

    def runs(self, keys: KeyArray) -> dict[int, int]:
        """Per holder of keys[0]: how many keys from the first on it has without a gap.

        Probes no further than the longest run.
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
    def num_bytes(self) -> int: ...

    def validate(self) -> None:
        """Check the table's form; raises AssertionError. O(size)."""
        ...


class ArrayKeyTable:
    """KeyTable in numpy: see the file's head. Runs are probed in steps that double."""

    def __init__(self) -> None:
        self._keys: KeyArray = np.zeros(_MIN_SLOTS, np.uint64)
        #: Per 64 holders.
        self._holders: list[KeyArray] = [np.zeros(_MIN_SLOTS, np.uint64)]
        self._num_used = 0
        self._num_held = 0

    @property
    def num_held(self) -> int:
        return self._num_held

    @property
    def num_bytes(self) -> int:
        return self._keys.nbytes * (1 + len(self._holders))

    def add(self, keys: KeyArray, holder: int) -> KeyChange:
        word, bit = divmod(holder, _WORD_BITS)
        while word >= len(self._holders):
            self._holders.append(np.zeros(len(self._keys), np.uint64))
        keys = _distinct(keys)
        slots = self._find(keys)
        if 2 * (self._num_used + np.count_nonzero(slots < 0)) > len(self._keys):
            self._rebuild(len(keys))
            slots = self._find(keys)
        is_missing = slots < 0
        slots[is_missing] = self._place(keys[is_missing])
        self._num_held += int(np.count_nonzero(self._is_unheld(slots)))
        column, flag = self._holders[word], np.uint64(1 << bit)
        before = column[slots]
        column[slots] = before | flag
        return _change(keys[(before & flag) == 0])

    def remove(self, keys: KeyArray, holder: int) -> KeyChange:
        word, bit = divmod(holder, _WORD_BITS)
        if word >= len(self._holders):
            return _change(keys[:0])
        keys = _distinct(keys)
        slots = self._find(keys)
        column, flag = self._holders[word], np.uint64(1 << bit)
        had = (slots >= 0) & ((column[slots] & flag) != 0)
        slots = slots[had]
        column[slots] &= ~flag
        self._num_held -= int(np.count_nonzero(self._is_unheld(slots)))
        return _change(keys[had])

    def drop(self, holder: int) -> None:
        word, bit = divmod(holder, _WORD_BITS)
        if word < len(self._holders):
            self._holders[word] &= ~np.uint64(1 << bit)
            self._num_held = int(np.count_nonzero(self._is_held()))

    def keys_of(self, holder: int) -> KeyArray:
        word, bit = divmod(holder, _WORD_BITS)
        if word >= len(self._holders):
            return np.zeros(0, np.uint64)
        return self._keys[(self._holders[word] & np.uint64(1 << bit)) != 0]

    def runs(self, keys: KeyArray) -> dict[int, int]:
        runs: dict[int, int] = {}
        start, stop = 0, _FIRST_PROBE
        alive = [np.uint64(2**_WORD_BITS - 1)] * len(self._holders)
        while start < len(keys):
            slots = self._find(keys[start:stop])
            is_found = slots >= 0
            for word, column in enumerate(self._holders):
                masks = np.where(is_found, column[slots], _FREE)
                masks[0] &= alive[word]
                np.bitwise_and.accumulate(masks, out=masks)
                _tell_ended(runs, masks, alive[word], word, start)
                alive[word] = masks[-1]
            if not any(alive):
                return runs
            start, stop = stop, 2 * stop
        if len(keys):
            for word, mask in enumerate(alive):
                _tell(runs, int(mask), word, len(keys))
        return runs

    def validate(self) -> None:
        used = self._keys != 0
        assert np.count_nonzero(used) == self._num_used <= len(self._keys) // 2
        assert np.count_nonzero(self._is_held()) == self._num_held
        assert not np.any(self._is_held() & ~used), "a free slot has holders"
        keys = self._keys[used]
        assert len(np.unique(keys)) == len(keys), "a key has two slots"
        rows = used.reshape(-1, _BUCKET)
        assert not np.any(rows[:, 1:] & ~rows[:, :-1]), "a bucket has a hole"
        assert np.array_equal(self._find(keys), np.flatnonzero(used)), "a key cannot be found"

    # -- slots --

    def _home(self, keys: KeyArray) -> _Indices:
        num_buckets = len(self._keys) // _BUCKET
        return (keys & np.uint64(num_buckets - 1)).astype(np.intp)

    def _find(self, keys: KeyArray) -> _Indices:
        """Slot of each key, -1 where it has none."""
        rows = self._keys.reshape(-1, _BUCKET)
        slots = np.full(len(keys), -1, np.intp)
        asked = np.arange(len(keys))
        buckets = self._home(keys)
        while len(asked):
            found = rows[buckets]
            where, column = np.nonzero(found == keys[asked, None])
            slots[asked[where]] = buckets[where] * _BUCKET + column
            goes_on = found[:, -1] != _FREE
            goes_on[where] = False
            asked = asked[goes_on]
            buckets = (buckets[goes_on] + 1) % len(rows)
        return slots

    def _place(self, keys: KeyArray) -> _Indices:
        """Give slots to distinct keys that have none; there is room."""
        rows = self._keys.reshape(-1, _BUCKET)
        slots = np.empty(len(keys), np.intp)
        left = np.arange(len(keys))
        buckets = self._home(keys)
        while len(left):
            order = np.argsort(buckets, kind="stable")
            left, buckets = left[order], buckets[order]
            # How many before it want the same bucket.
            starts = np.flatnonzero(np.diff(buckets, prepend=-1))
            rank = np.arange(len(buckets)) - np.repeat(starts, np.diff(starts, append=len(buckets)))
            column = np.count_nonzero(rows[buckets], axis=1) + rank
            fits = column < _BUCKET
            placed = buckets[fits] * _BUCKET + column[fits]
            self._keys[placed] = keys[left[fits]]
            slots[left[fits]] = placed
            left, buckets = left[~fits], (buckets[~fits] + 1) % len(rows)
        self._num_used += len(keys)
        return slots

    def _rebuild(self, num_more: int) -> None:
        """Drop the keys that nobody holds, and make room for `num_more`."""
        is_held = self._is_held()
        keys, holders = self._keys[is_held], [column[is_held] for column in self._holders]
        num_slots = _MIN_SLOTS
        while 3 * num_slots < 8 * (len(keys) + num_more):
            num_slots *= 2
        self._keys = np.zeros(num_slots, np.uint64)
        self._num_used = 0
        slots = self._place(keys)
        for word, column in enumerate(holders):
            self._holders[word] = np.zeros(num_slots, np.uint64)
            self._holders[word][slots] = column

    def _is_held(self) -> _Flags:
        is_held = self._holders[0] != 0
        for column in self._holders[1:]:
            is_held |= column != 0
        return is_held

    def _is_unheld(self, slots: _Indices) -> _Flags:
        is_unheld = self._holders[0][slots] == 0
        for column in self._holders[1:]:
            is_unheld &= column[slots] == 0
        return is_unheld


def _distinct(keys: KeyArray) -> KeyArray:
    """Ascending, each once, without zero."""
    keys = np.sort(keys)
    is_first = keys != 0
    is_first[1:] &= keys[1:] != keys[:-1]
    return keys if is_first.all() else keys[is_first]


def _change(keys: KeyArray) -> KeyChange:
    return KeyChange(len(keys), keys_digest(keys))


def _tell_ended(
    runs: dict[int, int], masks: KeyArray, before: np.uint64, word: int, start: int
) -> None:
    """Tell the runs that end within `masks`, which only lose bits, from `before` on."""
    if masks[-1] == before:
        return
    previous = np.concatenate((np.array([before]), masks[:-1]))
    for index in np.flatnonzero(masks != previous).tolist():
        # A run of no length is none.
        if start + index:
            _tell(runs, int(previous[index] & ~masks[index]), word, start + index)


def _tell(runs: dict[int, int], mask: int, word: int, length: int) -> None:
    while mask:
        lowest = mask & -mask
        runs[word * _WORD_BITS + lowest.bit_length() - 1] = length
        mask ^= lowest
