"""What a router knows about one worker: who it is, what it may do, and how loaded it is."""

from __future__ import annotations

import enum
from dataclasses import dataclass

from moonpool.ids import WorkerKey
from moonpool.latency.costs import DecodeCost, PrefillCost, TransferCost


class WorkerRole(enum.StrEnum):
    """What a worker is asked to do. A role change is not a new incarnation."""

    PREFILL = "prefill"
    DECODE = "decode"
    BOTH = "both"
    #: Keeps KV for all others, who read it there; computes nothing.
    STORE = "store"

    @property
    def can_prefill(self) -> bool:
        return self in (WorkerRole.PREFILL, WorkerRole.BOTH)

    @property
    def can_decode(self) -> bool:
        return self in (WorkerRole.DECODE, WorkerRole.BOTH)

    @property
    def computes(self) -> bool:
        return self is not WorkerRole.STORE


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerFits:
    """What a worker has learnt of its own step times and of reading from peers; None: nothing yet."""

    prefill: PrefillCost | None = None
    decode: DecodeCost | None = None
    #: By peer, in order of its key.
    transfers: tuple[tuple[WorkerKey, TransferCost], ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerLoad:
    """Load as a worker reports it, in every frame on the router's stream and in each heartbeat."""

    num_total_blocks: int = 0
    #: Free blocks plus cached ones that nobody references: what a new request can have.
    num_available_blocks: int = 0
    #: Of those, the ones that hold nothing: the rest is cache.
    num_free_blocks: int = 0
    #: Requests that hold or wait for decode blocks: running, waiting and reserved ones.
    num_requests: int = 0
    #: Prefills for others that hold blocks.
    num_prefills: int = 0
    #: Uncached tokens that wait to be computed, the rest of running prefills included.
    num_queued_tokens: int = 0
    is_draining: bool = False
    #: None in most reports: those of the last report that had some still hold.
    fits: WorkerFits | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerInfo:
    """A worker as it introduced itself: fixed for an incarnation, but for its role."""

    key: WorkerKey
    role: WorkerRole
    #: gRPC address (host:port) that routers and peers connect to.
    address: str
    block_size: int = 16
    #: KV of one token, all layers.
    bytes_per_token: int = 0
    num_layers: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerView:
    """A worker as the selector sees it at one moment.

    The `own_*` numbers are what this router knows better than the last report. A report may or may
    not count our requests already, so of the two counts the larger is taken: nothing is counted
    twice, and placement is not blind between two reports.
    """

    info: WorkerInfo
    load: WorkerLoad = WorkerLoad()
    #: The last that it told.
    fits: WorkerFits = WorkerFits()
    #: Requests of this router that decode there.
    own_num_requests: int = 0
    #: Blocks of those that were placed there since the last report.
    own_num_new_blocks: int = 0
    #: Prefills of this router there, for decode workers elsewhere, that have not drawn their token.
    own_num_prefills: int = 0
    #: Uncached tokens of this router's prefills there that have not drawn their token.
    own_num_queued_tokens: int = 0
    #: A request-path failure lies less than the inhibition time back: only if there is no other.
    is_inhibited: bool = False
    #: It refused a moment ago, and no report has shown more room since.
    is_full: bool = False
    #: How fast requests fill its cache, in a unit that is the same for all workers of a router.
    churn: float = 0.0

    @property
    def key(self) -> WorkerKey:
        return self.info.key

    @property
    def num_queued_tokens(self) -> int:
        return max(self.load.num_queued_tokens, self.own_num_queued_tokens)

    @property
    def num_requests(self) -> int:
        return max(self.load.num_requests, self.own_num_requests)

    @property
    def num_prefills(self) -> int:
        return max(self.load.num_prefills, self.own_num_prefills)

    @property
    def num_available_blocks(self) -> int:
        return max(self.load.num_available_blocks - self.own_num_new_blocks, 0)

    @property
    def used_fraction(self) -> float:
        """Of the pool, 0 to 1; 0 while the worker has not reported its pool."""
        if self.load.num_total_blocks == 0:
            return 0.0
        return 1.0 - min(self.num_available_blocks / self.load.num_total_blocks, 1.0)
