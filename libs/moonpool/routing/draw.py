"""draw: randomness as a function of what it is for, so that a machine with it can be copied and replayed."""

from __future__ import annotations

import hashlib


def draw(seed: int, *parts: object) -> float:
    """A uniform number in [0, 1), the same for the same seed and parts."""
    text = repr((seed, *parts)).encode()
    return (
        int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little") >> 11
    ) * 2.0**-53
