"""Arrival: which KV of one attempt lies verified at its reader, block by block and layer by layer.

Blocks are counted from 0 within the request. [0, num_held_blocks) were here before; the others are
read, a group of layers at a time, and a block counts when all its layers are verified:

    block     0    1    2  |  3      4      5      6
              held         |  full   full   part   -        verified prefix: 5 blocks
                              ^ num_held_blocks             limit: none, or the first bad block

A bad or missing leaf makes everything from its block on missing: what follows is recomputed anyway,
so it is not read. Digests belong to a copy, so a block's layers all come from one source.
"""

from __future__ import annotations

from dataclasses import dataclass

from moonpool.ids import BlockId


@dataclass(frozen=True, slots=True, kw_only=True)
class WantedRead:
    """Blocks of one announcement that are lacking, and their layers [first_layer, end_layer)."""

    number: int
    source_block_ids: tuple[BlockId, ...]
    target_block_ids: tuple[BlockId, ...]
    first_layer: int
    end_layer: int
    digests: tuple[bytes, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class _OpenRead:
    """A read that has not ended: positions of its blocks in the request, and a mask of its layers."""

    positions: tuple[int, ...]
    layers: int


class Arrival:
    """The blocks of one reservation, from Reserved to Arrived (or to the end of the last read).

    Args:
        num_tokens: prompt + emitted.
        num_held_tokens: Of these, what the core had cached; a multiple of `block_size`.
        target_block_ids: The reserved blocks, in order, ceil(num_tokens / block_size) of them or more.
    """

    def __init__(
        self,
        *,
        num_tokens: int,
        num_held_tokens: int,
        target_block_ids: tuple[BlockId, ...],
        block_size: int,
        num_layers: int,
    ) -> None:
        num_blocks = -(-num_tokens // block_size)
        assert num_held_tokens % block_size == 0, num_held_tokens
        assert num_held_tokens < num_tokens, (num_held_tokens, num_tokens)
        assert num_blocks <= len(target_block_ids), (num_tokens, target_block_ids)
        self._num_tokens = num_tokens
        self._target_block_ids = target_block_ids
        self._block_size = block_size
        self._num_layers = num_layers
        self._all_layers = (1 << num_layers) - 1
        self._num_held_blocks = num_held_tokens // block_size
        #: Blocks [0, _num_verified_blocks) are held or verified in all layers.
        self._num_verified_blocks = self._num_held_blocks
        #: First block that can no longer arrive; num_blocks while none is bad.
        self._limit = num_blocks
        #: Per lacking block (index: position - _num_held_blocks), bit masks of layers.
        self._asked = [0] * (num_blocks - self._num_held_blocks)
        self._verified = [0] * (num_blocks - self._num_held_blocks)
        self._open_reads: dict[int, _OpenRead] = {}
        self._next_number = 0

    @property
    def num_open_reads(self) -> int:
        return len(self._open_reads)

    def num_blocks_of(self, number: int) -> int:
        """Blocks of a read that has not ended."""
        return len(self._open_reads[number].positions)

    @property
    def num_verified_tokens(self) -> int:
        """KV of tokens [0, this) lies verified in the reserved blocks."""
        return min(self._num_verified_blocks * self._block_size, self._num_tokens)

    def announce(
        self,
        *,
        start: int,
        block_ids: tuple[BlockId, ...],
        first_layer: int,
        end_layer: int,
        digests: bytes,
    ) -> WantedRead | None:
        """Take an announcement of the source; returns the read that it makes possible, if any.

        Raises:
            ValueError: It cannot be meant for this request. The source is not to be trusted.
        """
        first = start // self._block_size
        num_blocks = len(self._asked) + self._num_held_blocks
        if start % self._block_size or first + len(block_ids) > num_blocks:
            raise ValueError(f"blocks from token {start}, {len(block_ids)} of them")
        if not 0 <= first_layer < end_layer <= self._num_layers:
            raise ValueError(f"layers {first_layer} to {end_layer}")
        if block_ids and len(digests) % len(block_ids):
            raise ValueError(f"{len(digests)} bytes of digests for {len(block_ids)} blocks")
        share = len(digests) // len(block_ids) if block_ids else 0
        layers = (1 << end_layer) - (1 << first_layer)
        chosen = [
            offset
            for offset in range(
                max(self._num_held_blocks - first, 0), min(len(block_ids), self._limit - first)
            )
            if not self._asked[first + offset - self._num_held_blocks] & layers
        ]
        if not chosen:
            return None
        positions = tuple(first + offset for offset in chosen)
        for position in positions:
            self._asked[position - self._num_held_blocks] |= layers
        number = self._next_number
        self._next_number += 1
        self._open_reads[number] = _OpenRead(positions=positions, layers=layers)
        return WantedRead(
            number=number,
            source_block_ids=tuple(block_ids[offset] for offset in chosen),
            target_block_ids=tuple(self._target_block_ids[position] for position in positions),
            first_layer=first_layer,
            end_layer=end_layer,
            digests=tuple(digests[offset * share : (offset + 1) * share] for offset in chosen),
        )

    def end_read(self, number: int, *, is_ok: bool, bad_indices: tuple[int, ...]) -> None:
        """A read has ended; blocks at `bad_indices` of its lists (all if not `is_ok`) are bad."""
        read = self._open_reads.pop(number)
        bad = set(bad_indices)
        for index, position in enumerate(read.positions):
            if not is_ok or index in bad:
                self._limit = min(self._limit, position)
            else:
                self._verified[position - self._num_held_blocks] |= read.layers
        while (
            self._num_verified_blocks < self._limit
            and self._verified[self._num_verified_blocks - self._num_held_blocks]
            == self._all_layers
        ):
            self._num_verified_blocks += 1

    def fork(self) -> Arrival:
        fork = object.__new__(Arrival)
        for name in self.__dict__:
            setattr(fork, name, getattr(self, name))
        fork._asked = list(self._asked)
        fork._verified = list(self._verified)
        fork._open_reads = dict(self._open_reads)
        return fork

    def key(self) -> tuple[object, ...]:
        return (
            self._num_held_blocks,
            self._limit,
            tuple(self._asked),
            tuple(self._verified),
            tuple((n, r.positions, r.layers) for n, r in sorted(self._open_reads.items())),
            self._next_number,
        )

    def validate(self) -> None:
        num_blocks = len(self._asked) + self._num_held_blocks
        assert self._num_held_blocks <= self._num_verified_blocks <= num_blocks
        assert self._num_verified_blocks <= max(self._limit, self._num_held_blocks)
        reading = [0] * len(self._asked)
        for read in self._open_reads.values():
            for position in read.positions:
                index = position - self._num_held_blocks
                assert not reading[index] & read.layers, read
                reading[index] |= read.layers
        for asked, verified, open_layers in zip(self._asked, self._verified, reading, strict=True):
            assert not verified & open_layers
            assert (verified | open_layers) & ~asked == 0
