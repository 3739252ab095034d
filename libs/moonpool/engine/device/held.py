"""HeldBlocks: which blocks of the device's pool came from a peer's, and what they hold.

A block that was read from device to device lies in host memory as well, like all that arrives, and the core
names it as arrived. It need not come in from there. What decides is neither a message nor an order of
messages but what the block holds:

    digests     of the layers that were copied to the device and checked, until anything else writes the block
    arrived     a block is here if these are the digests of what lies in host memory now

So whatever became of a read (given up, failed, its block handed to somebody else), at worst a block is
copied once more. Two threads: the one that reads peers notes, the one that runs steps asks and forgets;
never about the same block at once, since a block is either being read or in a step.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from moonpool.core.step import Int32Array


class HeldBlocks:
    """See the module.

    Args:
        leaf_digests: uint64[num_blocks, num_layers] of what lies in host memory.
    """

    def __init__(self, leaf_digests: npt.NDArray[np.uint64]) -> None:
        self._leaf_digests = leaf_digests
        self._digests = np.zeros(leaf_digests.shape, np.uint64)
        #: Blocks with any layer noted; of others `_digests` says nothing.
        self._is_noted = np.zeros(len(leaf_digests), np.bool_)

    def forget(self, block_ids: npt.NDArray[np.integer]) -> None:
        """Something else writes these blocks on the device."""
        self._is_noted[block_ids] = False

    def note(
        self,
        block_ids: npt.NDArray[np.integer],
        first_layer: int,
        digests: npt.NDArray[np.uint64],
        is_good: npt.NDArray[np.bool_],
    ) -> None:
        """Layers [first_layer, first_layer + m) of n blocks are being copied from a peer, or were.

        Args:
            digests: [n, m]
            is_good: [n, m]: they hold what has this digest; else they may hold anything.
        """
        self._digests[block_ids[~self._is_noted[block_ids]]] = 0
        end_layer = first_layer + digests.shape[1]
        self._digests[block_ids, first_layer:end_layer] = np.where(is_good, digests, 0)
        self._is_noted[block_ids] = True

    def lacking(self, block_ids: Int32Array) -> Int32Array:
        """Those of these blocks, which arrived in host memory, that are not on the device."""
        noted = self._is_noted[block_ids]
        if not noted.any():
            return block_ids
        is_same = (self._digests[block_ids] == self._leaf_digests[block_ids]).all(axis=1)
        lacking: Int32Array = block_ids[~(noted & is_same)]
        return lacking
