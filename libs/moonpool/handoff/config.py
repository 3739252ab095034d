"""HandoffConfig and FetchConfig: sizes and patience of handoffs and of reads from peers."""

from __future__ import annotations

import enum
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class HandoffConfig:
    """Validated in config/; here only asserted."""

    num_layers: int
    block_size: int = 16
    #: So many layers of a chunk are announced together (the last group may be smaller).
    layers_per_group: int = 4
    #: How long an Open waits for its Prefill.
    park_s: float = 2.0
    #: How long an ended attempt is remembered, so that what comes late is not taken for new.
    remember_s: float = 2.0
    #: How long a finished prefill waits for its reader.
    unclaimed_s: float = 10.0
    #: How long a Decode waits for the core's answer, holding nothing.
    core_answer_s: float = 2.0
    #: The source is lost if its stream says nothing for so long.
    progress_s: float = 5.0
    #: A reader that hears nothing else is told this often that the engine moves, if it does.
    waiting_s: float = 1.0
    #: A worker ends an attempt so long after the router should have.
    deadline_grace_s: float = 5.0

    def __post_init__(self) -> None:
        assert self.num_layers > 0, self.num_layers
        assert self.block_size > 0, self.block_size
        assert self.layers_per_group > 0, self.layers_per_group
        assert self.waiting_s < self.progress_s, (self.waiting_s, self.progress_s)

    def num_blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)


class FetchMode(enum.StrEnum):
    """Whether a worker reads prefixes from its peers."""

    #: When it is believed to be faster than computing them.
    AUTO = "auto"
    #: Whenever a peer is named: for measuring.
    ALWAYS = "always"
    NEVER = "never"


@dataclass(frozen=True, slots=True, kw_only=True)
class FetchConfig:
    """Both ends of a prefix read."""

    mode: FetchMode = FetchMode.AUTO
    #: KV of one block, all layers, as this worker stores it.
    block_bytes: int = 1 << 16

    #: A fetch is read in pieces of about this size: what has come is known, and kept, piece by piece.
    span_bytes: int = 8 << 20
    #: Pieces of one fetch under way at once: the next is asked for before the last is here.
    max_reads: int = 3
    #: Who waits so long for its turn has its peer told what it will want: that may have to come from a disk.
    ahead_s: float = 0.02
    #: Fetches from one peer under way at once; more are computed.
    max_fetches_per_peer: int = 8

    #: How long the first piece may take: this share of what computing would take, if the peer has
    #: never let us down, and the second if it has. So a bad peer costs a hit little, and seldom. The
    #: second also holds for each later piece, of what computing the rest would take.
    first_share: float = 0.25
    probe_share: float = 0.04
    #: Or so many times what is believed, if nothing speaks against the peer.
    slack: float = 3.0
    #: A peer that has let us down is tried again after so many computed hits, whatever that costs.
    hits_per_probe: int = 50
    #: A pace is not judged by pieces that come faster than this.
    min_pace_s: float = 0.01
    #: How long each piece of a fetch may take while nobody knows what computing would take.
    blind_s: float = 0.5
    #: How long a fetch may take in mode ALWAYS.
    always_s: float = 30.0
    #: How long a peer that was lost, or would not, is left alone: this, doubled each time; one that
    #: is busy: just this.
    min_leave_s: float = 1.0
    max_leave_s: float = 60.0

    #: Prefixes that may be locked here for readers, in all and for one of them.
    max_locks: int = 64
    max_locks_per_reader: int = 16
    #: How long the core may take to lock a prefix (a long step).
    core_answer_s: float = 2.0
    #: A reader's time, from the lock.
    hold_s: float = 30.0

    def __post_init__(self) -> None:
        assert min(self.block_bytes, self.span_bytes, self.max_reads) > 0, self
        assert 0.0 < self.probe_share <= self.first_share <= 1.0, self
        assert self.max_locks_per_reader <= self.max_locks, self

    @property
    def span_blocks(self) -> int:
        """Blocks of one piece."""
        return max(self.span_bytes // self.block_bytes, 1)
