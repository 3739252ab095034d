"""Loads: which blocks are being read from the disk into the arena, and which gets wait for them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from moonpool.ids import BlockHash, BlockId


@dataclass(slots=True, kw_only=True)
class Load:
    """One LoadBlocks that has not been answered; it has a reference on each of its blocks."""

    load_id: int
    #: The chain of the get that asked for it, and where in it these blocks stand, ascending.
    chain: Sequence[BlockHash]
    positions: tuple[int, ...]
    block_ids: tuple[BlockId, ...]
    begun_at: float
    #: Gets that wait for it, in the order in which they came.
    waiting: dict[int, None] = field(default_factory=dict)

    @property
    def hashes(self) -> tuple[BlockHash, ...]:
        return tuple(self.chain[position] for position in self.positions)

    def blocks(self) -> tuple[tuple[BlockHash, BlockId], ...]:
        return tuple(zip(self.hashes, self.block_ids, strict=True))


class Loads:
    """All loads of one store. A block is in at most one at a time: whoever wants it waits for that one."""

    def __init__(self) -> None:
        self._loads: dict[int, Load] = {}
        self._by_hash: dict[BlockHash, tuple[Load, BlockId]] = {}
        self._next_id = 1

    def __contains__(self, block_hash: BlockHash) -> bool:
        return block_hash in self._by_hash

    @property
    def num_blocks(self) -> int:
        return len(self._by_hash)

    def find(self, block_hash: BlockHash) -> tuple[Load, BlockId] | None:
        """The load that brings a block, and where to."""
        return self._by_hash.get(block_hash)

    def get(self, load_id: int) -> Load:
        return self._loads[load_id]

    def begin(
        self,
        chain: Sequence[BlockHash],
        positions: Sequence[int],
        block_ids: Sequence[BlockId],
        now: float,
    ) -> Load:
        """Note a load; the references on its blocks are the caller's."""
        load = Load(
            load_id=self._next_id,
            chain=chain,
            positions=tuple(positions),
            block_ids=tuple(block_ids),
            begun_at=now,
        )
        self._next_id += 1
        self._loads[load.load_id] = load
        for block_hash, block_id in load.blocks():
            assert block_hash not in self._by_hash, block_hash
            self._by_hash[block_hash] = (load, block_id)
        return load

    def end(self, load_id: int) -> Load | None:
        """Take a load out; None: there is no such load."""
        load = self._loads.pop(load_id, None)
        if load is not None:
            for block_hash in load.hashes:
                del self._by_hash[block_hash]
        return load

    def held(self) -> Iterator[BlockId]:
        """Every block that is loaded into."""
        for load in self._loads.values():
            yield from load.block_ids

    def __iter__(self) -> Iterator[Load]:
        return iter(self._loads.values())

    def validate(self) -> None:
        """Raise AssertionError if the books contradict each other."""
        by_hash = {h: (load, b) for load in self for h, b in load.blocks()}
        assert by_hash == self._by_hash
        assert sum(len(load.positions) for load in self) == len(by_hash), "a block is in two loads"
