"""RecentChains: the chains that a store node was given, lent or found on its disk last, for the day on which it leaves. Without IO.

Rules
- A chain is forgotten when another one comes that extends it: a chat that grows is one chain, however
  often its turns were put.
- Bounded by blocks, not by chains; the one that was noted longest ago goes first. A chain that is longer
  than all there is room for is not kept.
"""

from __future__ import annotations

from collections import OrderedDict

from moonpool.ids import BlockHash


class RecentChains:
    """See the file's head."""

    def __init__(self, max_blocks: int) -> None:
        self._max_blocks = max_blocks
        #: By the last block, in the order in which they were noted.
        self._chains: OrderedDict[BlockHash, tuple[BlockHash, ...]] = OrderedDict()
        #: Of all chains together; what two of them share counts twice.
        self.num_blocks = 0

    def __len__(self) -> int:
        return len(self._chains)

    def note(self, chain: tuple[BlockHash, ...]) -> None:
        """This chain is the latest. Requires at least one block."""
        if len(chain) > self._max_blocks:
            return
        # A hash vouches for all before it: whatever ends at one of these is a beginning of this chain.
        for block_hash in [block_hash for block_hash in chain if block_hash in self._chains]:
            self.num_blocks -= len(self._chains.pop(block_hash))
        self._chains[chain[-1]] = chain
        self.num_blocks += len(chain)
        while self.num_blocks > self._max_blocks:
            _, forgotten = self._chains.popitem(last=False)
            self.num_blocks -= len(forgotten)

    def latest(self) -> tuple[BlockHash, ...] | None:
        """The one that was noted last; None if there is none."""
        return next(reversed(self._chains.values()), None)

    def forget_latest(self) -> None:
        """Requires that there is one."""
        _, forgotten = self._chains.popitem()
        self.num_blocks -= len(forgotten)

    def validate(self) -> None:
        """Check every invariant; raises AssertionError."""
        assert self.num_blocks == sum(map(len, self._chains.values())) <= self._max_blocks
        earlier: set[BlockHash] = set()
        for last_hash, chain in self._chains.items():
            assert last_hash == chain[-1], chain
            assert earlier.isdisjoint(chain), chain
            earlier.add(last_hash)
