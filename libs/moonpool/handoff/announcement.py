"""Announcement: what of one prefill its reader may read, and what it has been told.

    chunks     [start, end) of tokens, each computed by one step, in order
    told       per chunk, layers [0, num_told); every layer of each block is told exactly once
    page       the control page: layers [0, page.num_layers) of page.step are written, earlier
               steps wholly

Layers go in whole groups. What became ready while nobody listened is told in one message for all
neighbouring chunks that stand at the same layers.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass, field
from typing import NamedTuple

from moonpool.handoff.config import HandoffConfig
from moonpool.handoff.messages import LayersReady, Opened
from moonpool.ids import AttemptId, BlockId


class Page(NamedTuple):
    """The control page as last told."""

    step: int = 0
    num_layers: int = 0


@dataclass(slots=True, kw_only=True)
class _Chunk:
    start: int
    end: int
    step: int
    num_told: int = 0


@dataclass(slots=True, kw_only=True)
class Announcement:
    """The blocks of a prefill that has started."""

    attempt_id: AttemptId
    #: All blocks of prompt + emitted, in order.
    block_ids: tuple[BlockId, ...]
    #: Tokens [0, num_cached_tokens) were ready at the start; a multiple of the block size.
    num_cached_tokens: int
    #: Of those, how many were read from a peer.
    num_peer_tokens: int = 0
    #: Leading tokens that the peer held in the end, if that is known.
    num_peer_held_tokens: int | None = None
    #: Opened has been told.
    is_opened: bool = False
    #: Chunks with a layer that is not told yet, in order.
    _chunks: list[_Chunk] = field(default_factory=list)

    def plan(self, *, start: int, end: int, step: int) -> None:
        """A step computes tokens [start, end)."""
        self._chunks.append(_Chunk(start=start, end=end, step=step))

    def take(
        self, page: Page, *, is_done: bool, config: HandoffConfig
    ) -> list[Opened | LayersReady]:
        """All that can be read and was not told; it is told now. `is_done`: all is written."""
        messages: list[Opened | LayersReady] = []
        if not self.is_opened:
            self.is_opened = True
            messages.append(
                Opened(
                    attempt_id=self.attempt_id,
                    num_cached_tokens=self.num_cached_tokens,
                    block_ids=self._blocks(0, self.num_cached_tokens, config),
                    num_peer_tokens=self.num_peer_tokens,
                    num_peer_held_tokens=self.num_peer_held_tokens,
                )
            )
        ready: list[tuple[int, int, int, int]] = []
        for chunk in self._chunks:
            num_written = config.num_layers if is_done else _num_written(chunk, page, config)
            if num_written <= chunk.num_told:
                continue
            first, chunk.num_told = chunk.num_told, num_written
            if ready and ready[-1][1:] == (chunk.start, first, num_written):
                ready[-1] = (ready[-1][0], chunk.end, first, num_written)
            else:
                ready.append((chunk.start, chunk.end, first, num_written))
        self._chunks = [chunk for chunk in self._chunks if chunk.num_told < config.num_layers]
        messages += [
            LayersReady(
                attempt_id=self.attempt_id,
                start=start,
                end=end,
                first_layer=first_layer,
                end_layer=end_layer,
                block_ids=self._blocks(start, end, config),
            )
            for start, end, first_layer, end_layer in ready
        ]
        return messages

    def _blocks(self, start: int, end: int, config: HandoffConfig) -> tuple[BlockId, ...]:
        return self.block_ids[start // config.block_size : config.num_blocks_for(end)]

    @property
    def is_all_told(self) -> bool:
        """Every chunk that was planned has been told, all layers."""
        return not self._chunks

    def fork(self) -> Announcement:
        fork = copy.copy(self)
        fork._chunks = [copy.copy(chunk) for chunk in self._chunks]
        return fork

    def key(self) -> tuple[object, ...]:
        return (
            self.is_opened,
            self.block_ids,
            self.num_cached_tokens,
            self.num_peer_tokens,
            self.num_peer_held_tokens,
            tuple((chunk.start, chunk.end, chunk.step, chunk.num_told) for chunk in self._chunks),
        )

    def validate(self, config: HandoffConfig) -> None:
        assert self.num_cached_tokens % config.block_size == 0, self
        end = None
        for chunk in self._chunks:
            assert chunk.start % config.block_size == 0, chunk
            assert end is None or chunk.start == end, self._chunks
            assert chunk.num_told < config.num_layers, chunk
            assert chunk.num_told == 0 or self.is_opened, chunk
            end = chunk.end


def _num_written(chunk: _Chunk, page: Page, config: HandoffConfig) -> int:
    """Layers of the chunk that are written, rounded down to whole groups."""
    if chunk.step < page.step or (chunk.step == page.step and page.num_layers >= config.num_layers):
        return config.num_layers
    if chunk.step > page.step:
        return 0
    return page.num_layers - page.num_layers % config.layers_per_group
