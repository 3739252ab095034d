"""KeyTable in both forms against a dict of sets."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from moonpool import native
from moonpool.kv.block_key import KeyArray, keys_digest
from moonpool.kv.key_table import DictKeyTable, KeyChange, KeyTable
from moonpool.native.binding import NativeLibrary, load_library
from moonpool.native.compiled_table import CompiledKeyTable
from moonpool.native.loading import LIBRARY_NAME

HOLDERS = [0, 1, 63, 64, 130]
#: Few low and high bits, so that buckets overflow, also from the last one into the first.
some_keys = st.lists(
    st.builds(
        lambda high, middle, low: (high << 60) | (middle << 30) | low,
        st.sampled_from([0, 15]),
        st.integers(0, 25),
        st.sampled_from([0, 1, 7, 15]),
    ),
    max_size=40,
)
holders = st.sampled_from(HOLDERS)


def array(keys: list[int]) -> KeyArray:
    return np.array(keys, np.uint64)


def change(keys: set[int]) -> KeyChange:
    return KeyChange(len(keys), keys_digest(array(sorted(keys))))


class DictKeyTableMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.table = self._make_table()
        self.holders: defaultdict[int, set[int]] = defaultdict(set)

    def _make_table(self) -> KeyTable:
        return DictKeyTable()

    @rule(keys=some_keys, holder=holders)
    def add(self, keys: list[int], holder: int) -> None:
        new = {key for key in keys if key and holder not in self.holders[key]}
        assert self.table.add(array(keys), holder) == change(new)
        for key in new:
            self.holders[key].add(holder)

    @rule(keys=some_keys, holder=holders)
    def remove(self, keys: list[int], holder: int) -> None:
        gone = {key for key in keys if holder in self.holders[key]}
        assert self.table.remove(array(keys), holder) == change(gone)
        for key in gone:
            self.holders[key].remove(holder)

    @rule(holder=holders)
    def drop(self, holder: int) -> None:
        self.table.drop(holder)
        for held_by in self.holders.values():
            held_by.discard(holder)

    @rule(keys=some_keys)
    def runs(self, keys: list[int]) -> None:
        expected: dict[int, int] = {}
        alive = set(HOLDERS)
        for length, key in enumerate(keys, start=1):
            alive &= self.holders[key]
            expected |= dict.fromkeys(alive, length)
        found, lengths = self.table.runs(array(keys))
        assert dict(zip(found, lengths, strict=True)) == expected
        assert len(found) == len(expected)

    @invariant()
    def agrees_with_the_model(self) -> None:
        self.table.validate()
        assert self.table.num_held == sum(1 for held_by in self.holders.values() if held_by)
        for holder in HOLDERS:
            has = {key for key, held_by in self.holders.items() if holder in held_by}
            assert set(self.table.keys_of(holder).tolist()) == has


class CompiledKeyTableMachine(DictKeyTableMachine):
    """The C library's, where it is built."""

    def _make_table(self) -> KeyTable:
        return native.kernels().key_table()


_SETTINGS = settings(max_examples=25, stateful_step_count=20)

TestDictKeyTable = DictKeyTableMachine.TestCase
TestDictKeyTable.settings = _SETTINGS
TestCompiledKeyTable = CompiledKeyTableMachine.TestCase
TestCompiledKeyTable.settings = _SETTINGS


class OutOfMemory:
    """The library, short of memory after it added what it was asked to, while `is_failing`."""

    def __init__(self, library: Any) -> None:  # Any: a ctypes library
        self._library = library
        self.is_failing = False

    def __getattr__(self, name: str) -> Any:  # Any: a ctypes function
        return getattr(self._library, name)

    def mp_key_table_add(self, *arguments: Any) -> int:  # Any: as ctypes takes them
        status: int = self._library.mp_key_table_add(*arguments)
        return -1 if self.is_failing else status


@pytest.mark.skipif(not native.status().is_compiled, reason=native.status().message)
def test_each_holders_run_has_room_after_an_add_that_failed_half_done() -> None:
    library = load_library(Path(native.__file__).with_name(LIBRARY_NAME))
    memory: Any = OutOfMemory(library.brief)
    table = CompiledKeyTable(NativeLibrary(library.working, memory))
    memory.is_failing = True
    with pytest.raises(MemoryError):
        table.add(array([1]), 130)
    memory.is_failing = False
    for holder in range(64):
        table.add(array([1]), holder)
    found, lengths = table.runs(array([1]))
    assert sorted(found) == [*range(64), 130]
    assert set(lengths) == {1}
