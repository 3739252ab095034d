"""Block keys: 64 bits of a block hash, enough to say who may hold a block, never enough to serve it.

A key is the first 8 bytes of the hash, little-endian. The hash is keyed with the cluster's secret, so
keys are uniform and nobody outside can make two of them collide. Two blocks that share a key by chance
(one pair in 2^64) cost a recompute: the owner compares all 32 bytes.

Zero is no key, so that a table may mark what is empty with it. A hash that begins with eight zero bytes
has the key 1.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from moonpool.ids import BlockHash

#: uint64[n], none of them zero.
KeyArray = npt.NDArray[np.uint64]

#: Where a copy lies is part of the digest; a worker's own pool is the only tier that is published.
_DEVICE_TIER = 0

_GOLDEN = 0x9E3779B97F4A7C15
_MIX_1 = np.uint64(0xBF58476D1CE4E5B9)
_MIX_2 = np.uint64(0x94D049BB133111EB)


def block_key(block_hash: BlockHash) -> int:
    """The key of one hash, in [1, 2^64)."""
    return int.from_bytes(block_hash[:8], "little") or 1


def block_keys(hashes: Sequence[BlockHash]) -> KeyArray:
    """uint64[len(hashes)]: the keys of a chain or of any other hashes, in their order."""
    words = np.frombuffer(b"".join(hashes), "<u8").reshape(-1, 4)
    keys: KeyArray = np.maximum(words[:, 0], np.uint64(1))
    return keys


def are_distinct(keys: KeyArray) -> bool:
    """Whether no key is there twice. O(n log n); several times as fast as np.unique."""
    ordered = np.sort(keys)
    return not bool((ordered[1:] == ordered[:-1]).any())


def keys_digest(keys: KeyArray, tier: int = _DEVICE_TIER) -> int:
    """Sum mod 2^64 of a mix of each (key, tier): the same for any order, and a sum over parts.

    The mix is that of splitmix64 (Steele, Lea, Flood: Fast splittable pseudorandom number generators,
    OOPSLA 2014), with the tier as the number of steps from the key.
    """
    mixed = keys + np.uint64((tier + 1) * _GOLDEN % 2**64)
    mixed = (mixed ^ (mixed >> np.uint64(30))) * _MIX_1
    mixed = (mixed ^ (mixed >> np.uint64(27))) * _MIX_2
    mixed ^= mixed >> np.uint64(31)
    return int(mixed.sum(dtype=np.uint64))
