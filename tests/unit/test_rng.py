"""The counter-based generator: published vectors, and that a number depends on its counter only."""

from __future__ import annotations

import numpy as np
import pytest

from moonpool.inference.rng import philox4x32, uniforms


@pytest.mark.parametrize(
    ("counter", "key", "expected"),
    [  # Random123's kat_vectors, philox4x32 with 10 rounds
        ([0] * 4, [0] * 2, [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]),
        (
            [0xFFFFFFFF] * 4,
            [0xFFFFFFFF] * 2,
            [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD],
        ),
        (
            [0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344],
            [0xA4093822, 0x299F31D0],
            [0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1],
        ),
    ],
)
def test_philox_gives_the_published_words(counter, key, expected) -> None:
    words = philox4x32(np.array([counter], np.uint64), np.array([key], np.uint64))
    assert words.tolist() == [expected]


def test_a_number_does_not_depend_on_its_neighbours() -> None:
    seeds, positions = [7, 2**64 - 1, 7], [0, 3, 1]
    together = uniforms(seeds, [0, 0, 0], positions)
    alone = [uniforms([s], [0], [p])[0] for s, p in zip(seeds, positions, strict=True)]
    assert together.tolist() == alone


def test_seed_choice_and_position_all_count() -> None:
    numbers = [
        uniforms([seed], [choice], [position])[0]
        for seed in (0, 1, 2**32, 2**63)
        for choice in (0, 1)
        for position in (0, 1, 2**32)
    ]
    assert len(set(numbers)) == len(numbers)


def test_numbers_are_uniform_in_the_half_open_unit_interval() -> None:
    numbers = uniforms(np.full(20_000, 5), np.zeros(20_000), np.arange(20_000))
    assert numbers.min() >= 0.0
    assert numbers.max() < 1.0
    counts, _ = np.histogram(numbers, bins=10, range=(0, 1))
    assert abs(counts - 2000).max() < 200
