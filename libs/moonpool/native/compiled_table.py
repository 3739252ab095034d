"""The key table in C: src/key_table.c behind kv/key_table.py's interface."""

from __future__ import annotations

import ctypes
import weakref

import numpy as np

from moonpool.kv.block_key import KeyArray
from moonpool.kv.key_table import KeyChange, Runs
from moonpool.native.binding import KeyChangeStruct, NativeLibrary

_WORD_BITS = 64


class CompiledKeyTable:
    """KeyTable in C, for one thread. Calls keep the interpreter lock: most take a microsecond."""

    def __init__(self, library: NativeLibrary) -> None:
        self._library = library.brief
        self._table: int | None = self._library.mp_key_table_create()
        if self._table is None:
            raise MemoryError
        weakref.finalize(self, self._library.mp_key_table_destroy, self._table)
        self._change = KeyChangeStruct()
        self._change_address = ctypes.addressof(self._change)
        self._make_room(self._library.mp_key_table_num_words(self._table))

    def _make_room(self, num_words: int) -> None:
        """For one run per holder: who it is, and how long it is."""
        num_holders = num_words * _WORD_BITS
        holders, lengths = (ctypes.c_int32 * num_holders)(), (ctypes.c_int32 * num_holders)()
        self._holders, self._lengths = holders, lengths
        self._runs_addresses = ctypes.addressof(holders), ctypes.addressof(lengths)

    @property
    def num_held(self) -> int:
        num_held: int = self._library.mp_key_table_num_held(self._table)
        return num_held

    @property
    def num_bytes(self) -> int:
        num_bytes: int = self._library.mp_key_table_num_bytes(self._table)
        return num_bytes

    def add(self, keys: KeyArray, holder: int) -> KeyChange:
        if holder >= len(self._holders):
            # Before the table has room for it, which it may have found even when the call fails.
            self._make_room(holder // _WORD_BITS + 1)
        raw = _raw(keys)
        status = self._library.mp_key_table_add(
            self._table, raw, len(raw) // 8, holder, self._change_address
        )
        if status:
            raise MemoryError
        return KeyChange(self._change.num_keys, self._change.digest)

    def remove(self, keys: KeyArray, holder: int) -> KeyChange:
        raw = _raw(keys)
        self._library.mp_key_table_remove(
            self._table, raw, len(raw) // 8, holder, self._change_address
        )
        return KeyChange(self._change.num_keys, self._change.digest)

    def drop(self, holder: int) -> None:
        self._library.mp_key_table_drop(self._table, holder)

    def runs(self, keys: KeyArray) -> Runs:
        raw = _raw(keys)
        num_runs = self._library.mp_key_table_runs(
            self._table, raw, len(raw) // 8, *self._runs_addresses
        )
        return self._holders[:num_runs], self._lengths[:num_runs]

    def keys_of(self, holder: int) -> KeyArray:
        keys = np.zeros(self._library.mp_key_table_keys_of(self._table, holder, None), np.uint64)
        self._library.mp_key_table_keys_of(self._table, holder, keys.ctypes.data)
        return keys

    def validate(self) -> None:
        assert self._library.mp_key_table_is_valid(self._table), "the table contradicts itself"


def _raw(keys: KeyArray) -> bytes:
    """A copy is cheaper than asking for an array's address, and lives as long as the call."""
    assert keys.dtype == np.uint64, keys.dtype
    return keys.tobytes()
