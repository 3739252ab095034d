"""What was ever asked for, in bounded memory: exact while it is small, and how wrong it may be after."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from moonpool import native
from moonpool.kv.asked_keys import AskedKeys, KnownPrefix
from moonpool.kv.block_key import KeyArray
from moonpool.kv.key_table import DictKeyTable, KeyTable

TABLES = [DictKeyTable, lambda: native.kernels().key_table()]


def keys(seed: int, num_keys: int) -> KeyArray:
    return np.random.default_rng(seed).integers(1, 2**64, num_keys, dtype=np.uint64)


@pytest.mark.parametrize("make_table", TABLES)
def test_what_was_added_is_known_up_to_where_it_ends(make_table: Callable[[], KeyTable]) -> None:
    asked = AskedKeys(make_table())
    chain = keys(1, 100)
    assert asked.prefix(chain) == KnownPrefix(num_blocks=0)
    asked.add(chain[:60])
    assert asked.prefix(chain) == KnownPrefix(num_blocks=60)
    assert asked.prefix(chain[:10]) == KnownPrefix(num_blocks=10)
    assert asked.prefix(keys(2, 10)) == KnownPrefix(num_blocks=0)
    assert asked.prefix(chain[:0]) == KnownPrefix(num_blocks=0)
    asked.add(chain)
    assert asked.prefix(chain) == KnownPrefix(num_blocks=100)
    assert (asked.num_keys, asked.kept_fraction) == (100, 1.0)
    asked.validate()


@pytest.mark.parametrize("make_table", TABLES)
def test_memory_is_bounded_and_the_error_is_told(make_table: Callable[[], KeyTable]) -> None:
    asked = AskedKeys(make_table(), max_keys=1_000)
    chains = [keys(seed, 200) for seed in range(100)]
    for number, chain in enumerate(chains):
        asked.add(chain[: 2 * number])
        asked.validate()
        assert asked.num_keys <= 1_000
    # 9,900 keys came: one of 16 is kept.
    assert asked.kept_fraction == 1 / 16
    errors = []
    for number, chain in enumerate(chains):
        prefix = asked.prefix(chain)
        assert abs(prefix.num_blocks - 2 * number) <= prefix.max_error_blocks
        errors.append(prefix.num_blocks - 2 * number)
    # Half of the distance between two kept keys, and no side is favoured.
    assert np.abs(errors).mean() < 16
    assert abs(np.mean(errors)) < 4


def test_a_long_history_is_given_up_in_parts() -> None:
    asked = AskedKeys(max_keys=40_000)
    asked.add(keys(1, 50_000))
    assert asked.num_keys <= 40_000
    for seed in range(2, 6):
        asked.add(keys(seed, 10))
        asked.validate()
    assert asked.kept_fraction == 0.5
