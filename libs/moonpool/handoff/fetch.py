"""Fetch: what the reader's side knows of one attempt's prefix at one peer."""

from __future__ import annotations

import copy
import enum
from dataclasses import dataclass

from moonpool.core.protocol import FetchReserved
from moonpool.handoff.arrival import Arrival
from moonpool.handoff.effects import FetchOutcome
from moonpool.handoff.fetch_choice import FetchPlan, FetchTicket, Tier
from moonpool.handoff.messages import PeerPrefix, PrefixOpened, PrefixRefusal, PrefixStaging
from moonpool.ids import AttemptId
from moonpool.inference.request import InferenceRequest


class FetchState(enum.StrEnum):
    #: The core may reserve blocks for it, or start without.
    ASKED = "asked"
    #: Blocks are reserved, the stream is asked for.
    OPENING = "opening"
    #: The holder's blocks are locked; they are read.
    READING = "reading"
    #: Nothing of it is wanted any more; reads are outstanding.
    ENDING = "ending"


@dataclass(slots=True, kw_only=True)
class Fetch:
    """One attempt's prefix at one peer."""

    attempt_id: AttemptId
    peer: PeerPrefix
    state: FetchState = FetchState.ASKED
    #: ASKED: what is to be computed, and when its peer is told what will be wanted; None: it is not, or was.
    request: InferenceRequest | None = None
    ahead_at: float | None = None
    #: From FetchReserved; None while it is ASKED.
    reserved: FetchReserved | None = None
    arrival: Arrival | None = None
    plan: FetchPlan | None = None
    ticket: FetchTicket | None = None
    begun_at: float = 0.0
    is_stream_open: bool = False
    #: Blocks from the first that is wanted that the lease asks for.
    num_open_blocks: int = 0
    #: What the holder said when part of it lay on its disk.
    staging: PrefixStaging | None = None
    #: READING: the holder's blocks from the first that is wanted, all their leaves, and how many of
    #: them have been asked for.
    opened: PrefixOpened | None = None
    opened_at: float = 0.0
    num_asked_blocks: int = 0
    #: Bytes of pieces that came whole.
    num_bytes: int = 0
    #: Prefix of tokens that the core was told of.
    num_told_tokens: int = 0
    #: Why no more is asked for, once that is so.
    outcome: FetchOutcome | None = None
    #: REFUSED: why, and in words.
    refusal: PrefixRefusal | None = None
    message: str = ""
    #: OPENING and READING, until the reads are stopped.
    stop_at: float | None = None

    def fork(self) -> Fetch:
        fetch = copy.copy(self)
        fetch.arrival = self.arrival.fork() if self.arrival is not None else None
        return fetch

    def key(self) -> tuple[object, ...]:
        return (
            self.attempt_id,
            self.peer,
            self.state,
            self.ahead_at is None,
            self.is_stream_open,
            self.num_open_blocks,
            self.staging,
            self.ticket.tier if self.ticket is not None else None,
            self.arrival.key() if self.arrival is not None else None,
            self.opened,
            self.num_asked_blocks,
            self.num_told_tokens,
            self.outcome,
            self.stop_at is None,
        )

    @property
    def is_waiting_for_disk(self) -> bool:
        """Or has waited for it until the holder answered."""
        return self.ticket is not None and self.ticket.tier is Tier.DISK

    @property
    def has_left_disk(self) -> bool:
        """Only what the holder had in memory is read, though it has more on its disk."""
        return (
            self.staging is not None and self.ticket is not None and self.ticket.tier is Tier.MEMORY
        )

    @property
    def num_ready_blocks(self) -> int:
        """Of what was wanted of a holder that went to its disk."""
        return self.staging.num_ready_blocks if self.staging is not None else 0

    def num_wanted_blocks(self, block_size: int) -> int:
        """Blocks that were reserved for it. Not while it is ASKED."""
        assert self.reserved is not None, self
        return (self.reserved.num_tokens - self.reserved.num_cached_tokens) // block_size
