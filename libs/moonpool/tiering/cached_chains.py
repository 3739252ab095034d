"""CachedChains: what a worker's cache holds, as chains from their starts to their tips. Without IO.

A block is here as long as the cache holds it, parents first; a leaf is one that nothing follows. The cache
evicts leaves, so a chain that is here has no holes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, KeysView, Sequence

from moonpool.ids import BlockHash


class CachedChains:
    """See the file's head. O(1) a block."""

    def __init__(self) -> None:
        #: By hash, the hash before it.
        self._parents: dict[BlockHash, BlockHash | None] = {}
        #: Of these, the ones that nothing follows, in order of becoming it.
        self._leaves: dict[BlockHash, None] = {}
        #: How many blocks follow one beyond the first; 0 is left out.
        self._num_branches: dict[BlockHash, int] = {}

    def __contains__(self, block_hash: BlockHash) -> bool:
        return block_hash in self._parents

    def add(self, hashes: Sequence[BlockHash], parent_hash: BlockHash | None) -> BlockHash | None:
        """These follow on one another and on `parent_hash`; some may be here.

        Returns:
            The tip: the last of them. None: there are none, or what they follow on is not here.
        """
        if parent_hash is not None and parent_hash not in self._parents:
            return None
        tip = parent_hash
        for block_hash in hashes:
            if block_hash not in self._parents:
                self._add(block_hash, tip)
            tip = block_hash
        return tip

    def remove(self, block_hash: BlockHash) -> BlockHash | None:
        """It has left the cache. Requires that it is here. Its parent, if that is here."""
        parent = self._parents.pop(block_hash)
        self._leaves.pop(block_hash, None)
        self._num_branches.pop(block_hash, None)
        if parent is None or parent not in self._parents:
            return None
        num_branches = self._num_branches.pop(parent, 0)
        if num_branches > 1:
            self._num_branches[parent] = num_branches - 1
        elif not num_branches:
            self._leaves[parent] = None
        return parent

    def clear(self) -> None:
        """The cache is empty."""
        self._parents.clear()
        self._leaves.clear()
        self._num_branches.clear()

    def chain(self, tip: BlockHash) -> tuple[BlockHash, ...]:
        """From its start. Requires that the tip is here. O(length)."""
        hashes = [tip]
        while (parent := self._parents[hashes[-1]]) is not None:
            hashes.append(parent)
        return tuple(reversed(hashes))

    def latest_leaves(self) -> Iterator[BlockHash]:
        """The one first that became it last."""
        return reversed(self._leaves)

    def blocks(self) -> KeysView[BlockHash]:
        """All that is here."""
        return self._parents.keys()

    def parent(self, block_hash: BlockHash) -> BlockHash | None:
        """The one before it. Requires that it is here."""
        return self._parents[block_hash]

    def validate(self) -> None:
        """Check every invariant; raises AssertionError. O(blocks)."""
        for block_hash, parent in self._parents.items():
            assert parent is None or parent in self._parents, block_hash
        followed = Counter(parent for parent in self._parents.values() if parent is not None)
        assert self._leaves.keys() == self._parents.keys() - followed.keys()
        branches = {block_hash: count - 1 for block_hash, count in followed.items() if count > 1}
        assert self._num_branches == branches

    # -- parts --

    def _add(self, block_hash: BlockHash, parent: BlockHash | None) -> None:
        self._parents[block_hash] = parent
        self._leaves[block_hash] = None
        if parent is None:
            return
        if parent in self._leaves:
            del self._leaves[parent]
        else:
            self._num_branches[parent] = self._num_branches.get(parent, 0) + 1
