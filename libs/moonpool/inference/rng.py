"""The random number of one drawn token: a counter, not a state.

Philox4x32-10 (Salmon, Moraes, Dror, Shaw: Parallel random numbers: as easy as 1, 2, 3; SC 2011) with
the seed as key and (position, choice) as counter. Whoever draws the token at a position, on whatever
worker and after whatever retry, gets the same number.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

_ROUNDS = 10
_MULTIPLIER_0 = np.uint64(0xD2511F53)
_MULTIPLIER_1 = np.uint64(0xCD9E8D57)
_WEYL_0 = np.uint64(0x9E3779B9)
_WEYL_1 = np.uint64(0xBB67AE85)
_LOW = np.uint64(0xFFFFFFFF)
_SHIFT = np.uint64(32)

UInt64Array = npt.NDArray[np.uint64]
Float64Array = npt.NDArray[np.float64]


def philox4x32(counter: UInt64Array, key: UInt64Array) -> UInt64Array:
    """Ten rounds for each row: `counter` [n, 4] and `key` [n, 2], 32-bit words in uint64."""
    c0, c1, c2, c3 = (counter[:, i].copy() for i in range(4))
    k0, k1 = key[:, 0].copy(), key[:, 1].copy()
    for _ in range(_ROUNDS):
        product_0, product_1 = c0 * _MULTIPLIER_0, c2 * _MULTIPLIER_1
        c0, c1, c2, c3 = (
            (product_1 >> _SHIFT) ^ c1 ^ k0,
            product_1 & _LOW,
            (product_0 >> _SHIFT) ^ c3 ^ k1,
            product_0 & _LOW,
        )
        k0 = (k0 + _WEYL_0) & _LOW
        k1 = (k1 + _WEYL_1) & _LOW
    return np.stack((c0, c1, c2, c3), axis=1)


def uniforms(
    seeds: npt.ArrayLike, choices: npt.ArrayLike, positions: npt.ArrayLike
) -> Float64Array:
    """float64[n] in [0, 1), 53 random bits each, for unsigned 64-bit seeds and positions."""
    seed = np.asarray(seeds, dtype=np.uint64)
    position = np.asarray(positions, dtype=np.uint64)
    choice = np.asarray(choices, dtype=np.uint64)
    counter = np.stack(
        (position & _LOW, position >> _SHIFT, choice, np.zeros_like(position)), axis=1
    )
    words = philox4x32(counter, np.stack((seed & _LOW, seed >> _SHIFT), axis=1))
    bits = ((words[:, 0] << _SHIFT) | words[:, 1]) >> np.uint64(11)
    return bits.astype(np.float64) * 2.0**-53
