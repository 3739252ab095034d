"""What the handoff machines want done. A shell performs effects in the order given."""

from __future__ import annotations

import enum
from dataclasses import dataclass

from moonpool.core.protocol import Command
from moonpool.handoff.events import ReadId
from moonpool.handoff.messages import (
    HolderMessage,
    LeaseId,
    Open,
    PrefixOpen,
    RouterKey,
    SourceMessage,
    SourceRef,
    StreamId,
    WorkerMessage,
)
from moonpool.ids import AttemptId, BlockHash, BlockId, WorkerKey


@dataclass(frozen=True, slots=True, kw_only=True)
class SendCommand:
    """All machines. To this worker's core, in order."""

    command: Command


@dataclass(frozen=True, slots=True, kw_only=True)
class SendToRouter:
    """Both roles. On the router's stream; dropped if that stream is gone."""

    router: RouterKey
    message: WorkerMessage


@dataclass(frozen=True, slots=True, kw_only=True)
class SendOnStream:
    """Prefill. To the reader; the shell fills in the digests of Opened and LayersReady."""

    stream_id: StreamId
    message: SourceMessage


@dataclass(frozen=True, slots=True, kw_only=True)
class EndStream:
    """Prefill. End the stream after what was sent; no StreamClosed is expected any more."""

    stream_id: StreamId


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenStream:
    """Decode, fetch. Connect to `source` and send `open`; failure to connect is StreamBroken."""

    attempt_id: AttemptId
    source: SourceRef
    open: Open | PrefixOpen


@dataclass(frozen=True, slots=True, kw_only=True)
class CloseStream:
    """Decode, fetch. End the stream of this attempt; each of its reads still tells ReadDone."""

    attempt_id: AttemptId


@dataclass(frozen=True, slots=True, kw_only=True)
class StartRead:
    """Decode, fetch. Copy layers [first_layer, end_layer) of each block to its target, then verify.

    The two lists have the same length. `digests[i]` holds the expected leaves of block i: its layers
    ascending, within a layer the shards of KV heads.
    """

    read_id: ReadId
    source: SourceRef
    source_block_ids: tuple[BlockId, ...]
    target_block_ids: tuple[BlockId, ...]
    first_layer: int
    end_layer: int
    digests: tuple[bytes, ...]
    #: Of a fetch; else of a handoff.
    is_prefix: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class StopReads:
    """Fetch. Cut the attempt's reads short. Each still tells ReadDone, when nothing writes any more."""

    attempt_id: AttemptId


@dataclass(frozen=True, slots=True, kw_only=True)
class TellAhead:
    """Fetch. Tell a peer what will be wanted of it; what it answers is of no interest."""

    source: SourceRef
    open: PrefixOpen


class FetchOutcome(enum.StrEnum):
    """How a fetch ended. Label of a metric."""

    #: Nothing is read from the peer, since computing is believed to be faster.
    RECOMPUTE = "recompute"
    #: All that was wanted has come.
    WHOLE = "whole"
    #: All that the peer still held has come, less than was hoped for.
    SHORT = "short"
    #: What the peer had in memory has come; its disk was not waited for.
    MEMORY_ONLY = "memory_only"
    #: The peer held nothing that was wanted.
    ABSENT = "absent"
    #: It took too long: what had come by then stays.
    SLOW = "slow"
    #: A block did not match its digest: what came before it stays.
    DAMAGED = "damaged"
    #: The peer would not lock it.
    REFUSED = "refused"
    #: The peer, or the way to it, was lost.
    LOST = "lost"
    #: The attempt ended, or its blocks went to an older request.
    CANCELLED = "cancelled"


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordFetch:
    """Fetch. For the books: what became of it, once for each FetchReserved."""

    attempt_id: AttemptId
    holder: WorkerKey
    outcome: FetchOutcome
    num_wanted_blocks: int
    #: Verified, in order.
    num_blocks: int
    #: Leading tokens of the request that the holder turned out to hold, if they are fewer than were wanted.
    num_held_tokens: int | None = None
    #: From the decision to the end.
    elapsed_s: float
    #: What was believed when it was decided; 0 if nothing was known.
    predicted_s: float
    recompute_s: float
    #: What the peer said when it would not.
    message: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class SendOnPrefixLease:
    """Hold. To the reader; the shell fills in the digests of PrefixOpened."""

    lease_id: LeaseId
    message: HolderMessage


@dataclass(frozen=True, slots=True, kw_only=True)
class EndPrefixLease:
    """Hold. End the lease after what was sent; no PrefixLeaseClosed is expected any more."""

    lease_id: LeaseId


@dataclass(frozen=True, slots=True, kw_only=True)
class StagePrefix:
    """Hold. A reader will want this chain soon: what of it lies on this node's disk only may be read into memory."""

    hashes: tuple[BlockHash, ...]


PrefillEffect = SendCommand | SendToRouter | SendOnStream | EndStream
DecodeEffect = SendCommand | SendToRouter | OpenStream | CloseStream | StartRead
FetchEffect = (
    SendCommand | TellAhead | OpenStream | CloseStream | StartRead | StopReads | RecordFetch
)
HoldEffect = SendCommand | SendOnPrefixLease | EndPrefixLease | StagePrefix
HandoffEffect = PrefillEffect | DecodeEffect | FetchEffect | HoldEffect
