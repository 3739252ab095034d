"""FoundChains: what a store node finds on its disk when it starts, as the chains that it stands in. Without IO.

A record names the block before its own by a link: 64 bits of that block's hash, which tell it from all others
that lie on one disk.

Rules
- A chain is told from its start to a block that nothing found follows: a chain that is here has its beginnings
  here as well.
- What lies behind a hole, or behind a record that names nothing (it was written before records had links), is in
  no chain: nobody could be lent it.
- A link that is right by chance joins what does not belong together. Such a chain is of no use to anybody, and
  does no harm: its blocks are found by their own hashes.
"""

from __future__ import annotations

from moonpool.ids import BlockHash

#: Of a record of which it is not known what is before it, and of the first block of a chain.
NO_LINK = 0
START_LINK = 2**64 - 1


def parent_link(parent_hash: BlockHash | None) -> int:
    """64 bits that stand on disk for the block before one in its chain; None: it is the first."""
    return START_LINK if parent_hash is None else _link_to(parent_hash)


class FoundChains:
    """See the file's head. O(1) a block."""

    def __init__(self) -> None:
        #: By hash, in order of writing.
        self._links: dict[BlockHash, int] = {}
        self._by_link: dict[int, BlockHash] = {}

    def add(self, block_hash: BlockHash, link: int) -> None:
        """This was found, written after all that was added before."""
        self._links.pop(block_hash, None)
        self._links[block_hash] = link
        self._by_link[_link_to(block_hash)] = block_hash

    def chains(self, max_blocks: int) -> list[tuple[BlockHash, ...]]:
        """The chains whose ends were written last, the last one last; together at most so many blocks.

        What two of them share counts twice.
        """
        followed = set(self._links.values())
        chains: list[tuple[BlockHash, ...]] = []
        num_blocks = 0
        #: Blocks from which no way leads to a start.
        lost: set[BlockHash] = set()
        for tip in reversed(self._links):
            if _link_to(tip) in followed:
                continue
            chain = self._chain(tip, lost)
            num_blocks += len(chain)
            if num_blocks > max_blocks:
                break
            if chain:
                chains.append(chain)
        chains.reverse()
        return chains

    def _chain(self, tip: BlockHash, lost: set[BlockHash]) -> tuple[BlockHash, ...]:
        """From its start; empty if that is not here."""
        back: dict[BlockHash, None] = {}
        block_hash: BlockHash | None = tip
        while block_hash is not None and block_hash not in lost and block_hash not in back:
            back[block_hash] = None
            link = self._links[block_hash]
            if link == START_LINK:
                return tuple(reversed(back))
            block_hash = self._by_link.get(link)
        lost.update(back)
        return ()


def _link_to(block_hash: BlockHash) -> int:
    return int.from_bytes(block_hash[:8], "little")
