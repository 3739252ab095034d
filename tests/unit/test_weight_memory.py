"""WeightMemory: arrays of many sizes out of shared mappings."""

from __future__ import annotations

import numpy as np
import pytest

from moonpool.native import weight_memory
from moonpool.native.weight_memory import WeightMemory, of_its_own

SIZES = [1, 64, 65, 4_000, 60_000, 100_000, 1, 250_000, 7, 99_999]


@pytest.fixture
def memory(monkeypatch: pytest.MonkeyPatch) -> WeightMemory:
    monkeypatch.setattr(weight_memory, "_MAPPING_BYTES", 100_000)
    return WeightMemory()


def test_arrays_begin_at_cache_lines_and_keep_what_is_written(memory: WeightMemory) -> None:
    arrays = [memory.allocate(size) for size in SIZES]
    for number, array in enumerate(arrays):
        array[:] = number
    for number, (size, array) in enumerate(zip(SIZES, arrays, strict=True)):
        assert len(array) == size
        assert array.ctypes.data % 64 == 0
        assert (array == number).all()


def test_small_arrays_follow_one_another(memory: WeightMemory) -> None:
    first, second = memory.allocate(65), memory.allocate(10)
    assert second.ctypes.data - first.ctypes.data == 128


def test_an_array_outlives_the_memory_it_was_cut_from() -> None:
    array = WeightMemory().allocate(1 << 20)
    array[:] = 7
    assert int(array.sum()) == 7 << 20


def test_an_array_of_its_own_begins_at_a_cache_line() -> None:
    array = of_its_own(100)
    assert array.dtype == np.uint8
    assert (len(array), array.ctypes.data % 64) == (100, 0)
