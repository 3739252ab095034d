"""What router, prefill and decode worker say to each other. Values only; wire/ encodes them.

Four conversations, each a FIFO channel of its own, unordered among each other:

1. router -> worker, one multiplexed stream per worker: PrefillRequest, DecodeRequest, AbortRequest.
2. worker -> router, the same stream back, one frame per engine step: TokensReady, Refused and
   HandedBack (the core's own words, see core/protocol.py, passed on by the handoff machines), and
   the worker's load. What the outbox cannot send yet is merged per request, not queued.
3. decode worker -> prefill worker, one stream per attempt, the handoff stream, which is the lease on
   the source's blocks: the reader sends one Open and then only listens; the source answers

       Waiting* Opened LayersReady* (Commit | CommitFailed)      or Reset at any time

   The reader ends the stream when it needs nothing more; a cut means the same. No other message
   says "close": the end of the stream is the message, since a dead reader could not send one.
4. reader -> holder, one stream for all prefixes that it reads there, and on it one lease for each, whose life is
   the lock on the holder's blocks: the reader sends one PrefixOpen and then only listens; the holder answers

       PrefixOpened | PrefixFailed, before PrefixOpened perhaps PrefixStaging, after it perhaps PrefixFailed

   and the lease ends by a message of either, or with the stream.

Digests. The machines never look into a digest. Opened, LayersReady and PrefixOpened leave their machine
with `digests` empty; the shell fills it from the leaf array at the moment of sending (`with_digests`),
and the reader's machine cuts it per block and hands the pieces to StartRead. Order: blocks as in the
message, within a block its layers ascending, within a layer its shards of KV heads; every leaf has
the same size, so a block's share is len(digests) / number of blocks.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, replace
from typing import NewType, TypeVar

from moonpool.core.protocol import HandBackReason, HandedBack, Refused, TokensReady
from moonpool.ids import AttemptId, BlockHash, BlockId, WorkerKey
from moonpool.inference.output import FinishReason
from moonpool.inference.request import InferenceRequest

#: One life of one router's stream to a worker; minted by the worker's shell when the stream opens.
#: All state that a router made on a worker dies with it.
RouterKey = NewType("RouterKey", str)

#: One incoming handoff stream of a reader; minted by the worker's shell.
StreamId = NewType("StreamId", int)

#: One lease of a reader on a prefix, among those of all readers; minted by the worker's shell.
LeaseId = NewType("LeaseId", int)


# -- router -> worker --


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceRef:
    """A worker that another one reads KV from."""

    key: WorkerKey
    #: gRPC address, host:port.
    address: str


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerPrefix:
    """A worker that is believed to hold the KV of a request's beginning. A hint, never a promise."""

    key: WorkerKey
    #: gRPC address, host:port.
    address: str
    #: Leading tokens of prompt + emitted that it is believed to hold; a multiple of the block size.
    num_tokens: int
    #: It may have some of them on a disk only.
    is_store: bool = False

    @property
    def ref(self) -> SourceRef:
        """Where it is reached."""
        return SourceRef(key=self.key, address=self.address)


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillRequest:
    """Compute the KV of prompt + emitted, draw one token, keep the blocks for a reader."""

    request: InferenceRequest
    attempt: int
    #: Who may be read from instead of computing.
    peer: PeerPrefix | None = None
    #: Remaining time. The router ends the request then; the worker only 5 s later.
    deadline_s: float

    @property
    def attempt_id(self) -> AttemptId:
        return AttemptId(self.request.request_id, self.attempt)


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeRequest:
    """Decode here: with a source, read its KV; without one, prefill here too, whatever the length."""

    request: InferenceRequest
    attempt: int
    source: SourceRef | None
    #: Who may be read from instead of computing; only without a source.
    peer: PeerPrefix | None = None
    #: Remaining time. The router ends the request then; the worker only 5 s later.
    deadline_s: float

    @property
    def attempt_id(self) -> AttemptId:
        return AttemptId(self.request.request_id, self.attempt)


@dataclass(frozen=True, slots=True, kw_only=True)
class AbortRequest:
    """Stop working on this attempt and on all lower ones, in either role.

    May come twice, or before what it aborts. Not answered.
    """

    attempt_id: AttemptId
    #: One choice of a fork, or None for all.
    choice: int | None = None


RouterMessage = PrefillRequest | DecodeRequest | AbortRequest

# -- worker -> router --

#: TokensReady: tokens of the current attempt; from a prefill worker exactly one token at position
#: len(emitted), which only shortens TTFT, since the decode worker's frames begin with it too; a
#: finish reason counts whoever sends it. Refused and HandedBack: the attempt has ended on the sender.
WorkerMessage = TokensReady | Refused | HandedBack


# -- the handoff stream: decode -> prefill --


@dataclass(frozen=True, slots=True, kw_only=True)
class Open:
    """The first and only message of the reader."""

    attempt_id: AttemptId
    reader: WorkerKey
    #: Whom the reader believes it talks to: another incarnation answers Reset.
    source: WorkerKey
    #: Fingerprint of everything that changes the values of KV, as both workers computed it.
    namespace: str


# -- the handoff stream: prefill -> decode --


class ResetReason(enum.StrEnum):
    """Why the source ends a handoff without a commit."""

    #: The Open waited 2 s and no Prefill came.
    NO_PREFILL = "no_prefill"
    #: The source refused the Prefill: the router knows and places the request again.
    REFUSED = "refused"
    #: The router aborted this attempt, or its stream to the source was cut, or its time is up.
    ABORTED = "aborted"
    #: The source has seen a higher attempt.
    SUPERSEDED = "superseded"
    #: Finished, and nobody came for 10 s: the blocks are only cache now.
    EXPIRED = "expired"
    #: Somebody else reads this attempt already.
    ALREADY_OPEN = "already_open"
    WRONG_INCARNATION = "wrong_incarnation"
    WRONG_NAMESPACE = "wrong_namespace"


@dataclass(frozen=True, slots=True, kw_only=True)
class Waiting:
    """The prefill is queued and the source makes progress: the reader's patience starts again."""

    attempt_id: AttemptId


@dataclass(frozen=True, slots=True, kw_only=True)
class Opened:
    """The prefill has its blocks; all layers of tokens [0, num_cached_tokens) can be read now."""

    attempt_id: AttemptId
    num_cached_tokens: int
    #: The source's blocks of [0, num_cached_tokens), in order.
    block_ids: tuple[BlockId, ...]
    #: Of the cached tokens, how many the source read from a peer.
    num_peer_tokens: int = 0
    #: Leading tokens that its peer held in the end; None: as was believed, for all that is known.
    num_peer_held_tokens: int | None = None
    #: All leaves of these blocks, layers [0, num_layers); filled by the shell.
    digests: bytes = b""


@dataclass(frozen=True, slots=True, kw_only=True)
class LayersReady:
    """Layers [first_layer, end_layer) of tokens [start, end) can be read now.

    `start` is a multiple of the block size; `end` too, but at the end of prompt + emitted. Of one
    block every layer is announced exactly once.
    """

    attempt_id: AttemptId
    start: int
    end: int
    first_layer: int
    end_layer: int
    #: The source's blocks of [start, end), in order; the last may be partly filled (its rest is zero).
    block_ids: tuple[BlockId, ...]
    #: The leaves of these blocks and layers; filled by the shell.
    digests: bytes = b""


@dataclass(frozen=True, slots=True, kw_only=True)
class Commit:
    """All KV of prompt + emitted has been announced, and the next token is drawn."""

    attempt_id: AttemptId
    first_token: int
    #: Position of `first_token` in the answer: len(emitted).
    position: int
    #: Set if the first token already ends the answer.
    finish_reason: FinishReason | None
    #: How many tokens of prompt + emitted the source did not have to compute.
    num_cached_tokens: int
    #: Of those, how many it read from a peer for this attempt.
    num_peer_tokens: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class CommitFailed:
    """The source gave the prefill up.

    What was announced and read is still good, unless the reason is INVALID_OUTPUT.
    """

    attempt_id: AttemptId
    reason: HandBackReason | FinishReason


@dataclass(frozen=True, slots=True, kw_only=True)
class Reset:
    """The source ends the handoff; what was read and verified is still good."""

    attempt_id: AttemptId
    reason: ResetReason


SourceMessage = Waiting | Opened | LayersReady | Commit | CommitFailed | Reset


# -- a lease on a prefix: reader -> holder --


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefixOpen:
    """The first and only message of the reader: lock what you hold of this chain."""

    #: Of the reader; of no meaning to the holder but for its log.
    attempt_id: AttemptId
    reader: WorkerKey
    #: Whom the reader believes it talks to.
    holder: WorkerKey
    #: Fingerprint of everything that changes the values of KV, and of the cluster's secret.
    namespace: str
    secret_fingerprint: str
    #: The chain from its start, up to the last block that is wanted.
    hashes: tuple[BlockHash, ...]
    #: Index of the first block that is wanted. Their number: nothing is wanted yet, but will be soon; a holder that
    #: has some of it on a disk only reads that into its memory meanwhile.
    first: int


# -- a lease on a prefix: holder -> reader --


class PrefixRefusal(enum.StrEnum):
    """Why a holder locks nothing, or no longer."""

    WRONG_INCARNATION = "wrong_incarnation"
    WRONG_SECRET = "wrong_secret"
    WRONG_NAMESPACE = "wrong_namespace"
    #: As many prefixes are locked as may be, in all or for this reader.
    TOO_MANY_LOCKS = "too_many_locks"
    #: The core did not answer in time (a long step).
    BUSY = "busy"
    #: The reader has had the time that a reader gets.
    EXPIRED = "expired"

    @property
    def is_passing(self) -> bool:
        """It is about this moment, not about these two workers."""
        return self in (self.TOO_MANY_LOCKS, self.BUSY, self.EXPIRED)


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefixStaging:
    """The holder reads part of what is wanted from its disk; PrefixOpened follows when that has come.

    Whoever would not wait for it opens another lease, for what is ready.
    """

    attempt_id: AttemptId
    #: Of the blocks from `first` on: how many leading ones are ready, and how many will be if all comes.
    num_ready_blocks: int
    num_blocks: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefixOpened:
    """Blocks [first, first + len(block_ids)) of the chain are locked; none if the chain ends before."""

    attempt_id: AttemptId
    block_ids: tuple[BlockId, ...]
    #: All leaves of these blocks; filled by the shell.
    digests: bytes = b""


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefixFailed:
    """The holder ends the stream."""

    attempt_id: AttemptId
    reason: PrefixRefusal
    #: The same in words, with what differs.
    message: str


HolderMessage = PrefixStaging | PrefixOpened | PrefixFailed

MessageT = TypeVar("MessageT", bound=Opened | LayersReady | PrefixOpened)


def with_digests(message: MessageT, digests: bytes) -> MessageT:
    """The message with its leaves, as it goes on the wire (order: see the file's head)."""
    return replace(message, digests=digests)
