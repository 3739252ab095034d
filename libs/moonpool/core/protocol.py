"""What the service process and the core say to each other. Values only; wire/engine_frames.py encodes them.

Commands go to the core and are drained at the top of each step, so each is answered within one step.
One CoreFrame leaves per step, before the model runs: results of step N and plan of step N + 1.

Life of a decode-side request in the core, as commands and replies:

    Decode(has_source=True) -> Reserved | Refused
        BlocksArrived* -> Arrived -> tokens ... -> a TokenRun with a finish reason
        or Revoked (by the core)  -> ReadEnded (by the service, when no read is outstanding)
        or Abort (by the service) -> ReadEnded
    Decode(has_source=False) -> Accepted | Refused, then TokensReady ...
    any running request may end in HandedBack instead of a finish reason

A peer is believed to hold a prefix (num_peer_tokens > 0; a Prefill, or a Decode without a source):

    Accepted ... FetchReserved
        BlocksFetched* -> FetchEnded                      it computes the rest, as if it had been cached
        or Revoked (by the core)  -> ReadEnded            it waits again and computes all of it
        or Abort (by the service) -> ReadEnded
    FetchReserved comes when it is the request's turn and blocks for it are free, or never: then, or if
    the prefix has come meanwhile in another way, the request simply starts.

Life of a reader's lock on a prefix that this worker holds:

    LockPrefix -> PrefixLocked -> UnlockPrefix

Life of a prefill-side request:

    Prefill -> Accepted | Refused
        PrefillStarted(blocks, what was cached) -> ChunkPlanned* -> PrefillDone -> Release
        or Abort at any time; PrefillFailed if the core gives it up

A command about an unknown or ended attempt is ignored: commands and frames cross.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, replace

from moonpool.ids import AttemptId, BlockHash, BlockId, WorkerKey
from moonpool.inference.cached_tokens import CachedTokens
from moonpool.inference.output import FinishReason, TokenRun
from moonpool.inference.request import InferenceRequest
from moonpool.kv.events import CacheEvent


class RefuseReason(enum.StrEnum):
    """Why a worker does not take an attempt. Takes a new attempt number, none of the failures."""

    NO_BLOCKS = "no_blocks"
    QUEUE_FULL = "queue_full"
    #: More running requests than `max_num_seqs`.
    NO_SLOTS = "no_slots"
    DRAINING = "draining"
    #: Larger than the whole pool, or both roles of one attempt: will never fit on this worker.
    NEVER_FITS = "never_fits"
    #: The core did not answer in time (a long step); said by the service, not by the core.
    BUSY = "busy"


class HandBackReason(enum.StrEnum):
    """Why a worker gives an accepted attempt back to the router. Not an error."""

    #: Its blocks went to an older request's prefill, reservation or growth.
    REVOKED = "revoked"
    #: It needs more local prefill than `local_prefill_tokens`.
    TOO_LONG_TO_REPAIR = "too_long_to_repair"
    #: The prefill side failed or vanished and the rest is too long to compute here.
    SOURCE_LOST = "source_lost"
    #: The prefill side refused, aborted or outran this attempt: the router has been or will be told.
    SOURCE_REFUSED = "source_refused"
    PREEMPTED = "preempted"
    DRAINING = "draining"


# -- commands: service -> core --


@dataclass(frozen=True, slots=True, kw_only=True)
class Prefill:
    """Compute the KV of prompt + emitted, draw one token, keep the blocks locked until Release."""

    request: InferenceRequest
    attempt: int
    #: Leading tokens of prompt + emitted that a peer is believed to hold; 0: no peer is to be asked.
    num_peer_tokens: int = 0

    @property
    def attempt_id(self) -> AttemptId:
        return AttemptId(self.request.request_id, self.attempt)


@dataclass(frozen=True, slots=True, kw_only=True)
class Decode:
    """Decode here. With a source: reserve and wait for KV; without: prefill it here as well."""

    request: InferenceRequest
    attempt: int
    has_source: bool
    #: As in Prefill; of no account with a source.
    num_peer_tokens: int = 0

    @property
    def attempt_id(self) -> AttemptId:
        return AttemptId(self.request.request_id, self.attempt)


@dataclass(frozen=True, slots=True, kw_only=True)
class BlocksArrived:
    """KV of tokens [0, num_tokens) lies verified in the reserved blocks; full ones may be cached."""

    attempt_id: AttemptId
    num_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Arrived:
    """Reading has ended: no read is or will be outstanding. Admit the request.

    `num_tokens` < prompt + emitted: the tail is missing or bad and is computed here if it is at most
    `local_prefill_tokens`, else the attempt is handed back. `first_token` is None if the source
    never committed: then it is drawn here.
    """

    attempt_id: AttemptId
    num_tokens: int
    first_token: int | None
    #: Set if the source's first token already ended the answer, or INVALID_OUTPUT if its output was
    #: not finite: then nothing that came from it stays.
    finish_reason: FinishReason | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class BlocksFetched:
    """KV of tokens [0, num_tokens) lies verified in a fetch's blocks; full ones may be cached."""

    attempt_id: AttemptId
    num_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class FetchEnded:
    """Fetching has ended: no read is or will be outstanding. Go on from `num_tokens`, verified."""

    attempt_id: AttemptId
    num_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadEnded:
    """After Abort or Revoked: no read is or will be outstanding, the blocks may be freed."""

    attempt_id: AttemptId


@dataclass(frozen=True, slots=True, kw_only=True)
class Release:
    """The reader's stream closed, or nobody came: the prefill's blocks are cache now."""

    attempt_id: AttemptId


@dataclass(frozen=True, slots=True, kw_only=True)
class Abort:
    """Stop working on this attempt and on all lower ones, in either role.

    May come twice, or first. Not answered.
    """

    attempt_id: AttemptId


@dataclass(frozen=True, slots=True, kw_only=True)
class LockPrefix:
    """Hold what is cached of this chain until UnlockPrefix: somebody reads it."""

    #: Chosen by the service; never used twice.
    read_id: int
    #: The chain from its start.
    hashes: tuple[BlockHash, ...]
    #: Who reads. A lock is the same for everybody; a store tells its neighbours from its workers by it.
    reader: WorkerKey | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class UnlockPrefix:
    """The reader is gone. May come twice, or for a lock that never was."""

    read_id: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Drain:
    """Refuse what is new. With `hand_back` also give back what has not finished."""

    hand_back: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ClearCache:
    """Forget every cached block that nobody references."""


Command = (
    Prefill
    | Decode
    | BlocksArrived
    | Arrived
    | BlocksFetched
    | FetchEnded
    | ReadEnded
    | Release
    | Abort
    | LockPrefix
    | UnlockPrefix
    | Drain
    | ClearCache
)

# -- the frame: core -> service --


@dataclass(frozen=True, slots=True, kw_only=True)
class Accepted:
    """A Prefill or a Decode without a source is queued."""

    attempt_id: AttemptId


@dataclass(frozen=True, slots=True, kw_only=True)
class Refused:
    attempt_id: AttemptId
    reason: RefuseReason


@dataclass(frozen=True, slots=True, kw_only=True)
class Reserved:
    """Blocks for the prompt + emitted are held; tokens [0, num_cached_tokens) are already there.

    `num_cached_tokens` is a multiple of the block size, never past prompt + emitted - 1.
    """

    attempt_id: AttemptId
    num_cached_tokens: int
    block_ids: tuple[BlockId, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class FetchReserved:
    """Read tokens [num_cached_tokens, num_tokens) of the prefix from the peer into these blocks.

    Both bounds are multiples of the block size; `num_tokens` is never past prompt + emitted - 1.
    """

    attempt_id: AttemptId
    num_cached_tokens: int
    num_tokens: int
    #: The request's blocks and their hashes from the start up to `num_tokens`.
    block_ids: tuple[BlockId, ...]
    hashes: tuple[BlockHash, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefixLocked:
    """The blocks of the longest prefix of a LockPrefix that is held here; perhaps none."""

    read_id: int
    block_ids: tuple[BlockId, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Revoked:
    """The reservation is taken back; the blocks stay until ReadEnded.

    Of a decode with a source this is the end; a request that fetched from a peer goes on without.
    """

    attempt_id: AttemptId


@dataclass(frozen=True, slots=True, kw_only=True)
class HandedBack:
    """An admitted attempt ends here; the router places the request again."""

    attempt_id: AttemptId
    reason: HandBackReason


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillStarted:
    """The prefill's blocks, in order, for prompt + emitted; [0, num_cached_tokens) is ready now."""

    attempt_id: AttemptId
    num_cached_tokens: int
    block_ids: tuple[BlockId, ...]
    #: Of the cached tokens, how many were read from a peer for this attempt.
    num_peer_tokens: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkPlanned:
    """The frame's step computes tokens [start, end) of a prefill; the control page tells the layers."""

    attempt_id: AttemptId
    start: int
    end: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillDone:
    """The first token is drawn; the blocks stay locked until Release."""

    attempt_id: AttemptId
    num_cached_tokens: int
    first_token: int
    finish_reason: FinishReason | None = None
    #: Of the cached tokens, how many were read from a peer for this attempt.
    num_peer_tokens: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillFailed:
    """The core gives the prefill up (not finite, or revoked while it waited for blocks)."""

    attempt_id: AttemptId
    reason: HandBackReason | FinishReason


@dataclass(frozen=True, slots=True, kw_only=True)
class TokensReady:
    """Tokens that a decode-side request drew in the last step."""

    attempt_id: AttemptId
    run: TokenRun
    #: In the first run of an attempt, and in the first one after it has become less: how many tokens
    #: of prompt + emitted were not computed here.
    num_cached_tokens: int | None = None
    #: Of those, how many were read from a peer for this attempt.
    num_peer_tokens: int = 0
    #: With them: leading tokens of prompt + emitted that the peer held in the end; None: as was believed, for
    #: all that is known. The core does not know: the handoff machines fill it in.
    num_peer_held_tokens: int | None = None

    @property
    def cached(self) -> CachedTokens | None:
        """What is said of cached tokens, as the prefix that they are."""
        if self.num_cached_tokens is None:
            return None
        return CachedTokens(
            num_tokens=self.num_cached_tokens,
            num_peer_tokens=self.num_peer_tokens,
            num_peer_held_tokens=self.num_peer_held_tokens,
        )

    def joined(self, later: TokensReady) -> TokensReady:
        """This and the next one of the same attempt and choice, as one."""
        newest = self if later.num_cached_tokens is None else later
        return replace(newest, run=self.run.joined(later.run))


Reply = (
    Accepted
    | Refused
    | Reserved
    | FetchReserved
    | PrefixLocked
    | Revoked
    | HandedBack
    | PrefillStarted
    | ChunkPlanned
    | PrefillDone
    | PrefillFailed
    | TokensReady
)


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockLedger:
    """Every block is in exactly one of free, cached, referenced: they sum to total."""

    num_total: int
    num_free: int
    #: In the radix tree, no reference: may be evicted at any time.
    num_cached: int
    #: Held by a request, a reservation, a prefill that waits for its reader, or a read that must end.
    num_referenced: int
    num_running: int = 0
    num_waiting: int = 0
    num_reserved: int = 0
    num_prefills: int = 0
    #: Attempts that ended, and fetches that were taken back, but whose reads have not ended.
    num_quarantined: int = 0
    #: Readers' locks on cached prefixes, empty ones included.
    num_prefix_locks: int = 0

    @property
    def is_quiet(self) -> bool:
        """Nothing is held and nothing runs: free + cached without reference = total."""
        return self.num_free + self.num_cached == self.num_total and not (
            self.num_referenced
            or self.num_running
            or self.num_waiting
            or self.num_reserved
            or self.num_prefills
            or self.num_quarantined
            or self.num_prefix_locks
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class CoreFrame:
    """One message per step."""

    #: The plan that runs after this frame; 0 if nothing is to run.
    step: int
    replies: tuple[Reply, ...]
    ledger: BlockLedger
    #: Uncached tokens that wait to be computed, running prefills' rest included.
    num_queued_tokens: int = 0
    num_preemptions: int = 0
    #: What can be found in the cache, or no longer can, since the last frame: the net change.
    cache_events: tuple[CacheEvent, ...] = ()
    #: Timing of the step before, in seconds; 0 if there was none.
    forward_s: float = 0.0
    logits_s: float = 0.0
    sample_s: float = 0.0
    other_s: float = 0.0
    num_step_tokens: int = 0
