"""SampleKernel in C: src/sample.c says how a row is drawn from."""

from __future__ import annotations

import numpy as np

from moonpool.native.binding import NativeLibrary, address_of
from moonpool.native.geometry import DRAW_DTYPE, DrawArray, Int64Array

#: MP_SAMPLE_GROUP of src/moonpool_native.h.
_GROUP = 64


class CompiledSampleKernel:
    """With memory of its own to work in: for one thread."""

    def __init__(self, library: NativeLibrary, *, isa: str | None = None) -> None:
        """`isa` names a variant of src/dispatch.c; by default the one that suits this machine."""
        self._sample = library.kernel("mp_sample", isa)
        self._work = np.empty(0, np.uint64)
        self._work_address = 0

    def sample(self, logits: int, size: int, draws: DrawArray, largest: int = 0) -> Int64Array:
        # A token and its logit are one word.
        if not 0 < size <= 1 << 32:
            raise ValueError(f"no vocabulary has {size} tokens")
        num_words = size + 2 * -(-size // _GROUP)
        if len(self._work) < num_words:
            self._work = np.empty(num_words, np.uint64)
            self._work_address = address_of(self._work, np.uint64)
        tokens = np.empty(len(draws), np.int64)
        self._sample(
            logits,
            largest or None,
            len(draws),
            size,
            address_of(draws, DRAW_DTYPE),
            self._work_address,
            address_of(tokens, np.int64),
        )
        return tokens
