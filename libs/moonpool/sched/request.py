"""RequestState: one attempt at a request on this worker, in one role.

    Prefill                 WAITING -> RUNNING -> HELD -> FINISHED
    Decode, no source       WAITING -> RUNNING -> FINISHED
    either, with a peer     WAITING -> WAITING_FOR_REMOTE_KV -> RUNNING -> as above
                                   <-/ (revoked: it waits again, and computes what it would have read)
    Decode with a source    WAITING_FOR_REMOTE_KV -> RUNNING -> FINISHED
                                   \\-> FINISHED (revoked)
    a running decode        RUNNING -> PREEMPTED -> RUNNING

Any of them may be aborted. Blocks that a read may still write into outlive their attempt: see
sched/reservations.py.

Whatever is known of the sequence stands in `token_ids`: prompt, emitted by earlier attempts, drawn
here. Work is always "compute KV for [num_computed_tokens, num_tokens)"; whether that is a prompt, a
tail that did not arrive, a sequence that was preempted or the last token drawn makes no difference.

    |-- prompt --|-- emitted --|-- drawn --|
    |-- num_computed_tokens --------|      |
                                           num_tokens <= max_num_tokens

Buffers have their full length from the start, so plans may hold views of them: a place that has been
written is never written again.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Self

import numpy as np
import numpy.typing as npt

from moonpool.ids import AttemptId, BlockHash, BlockId
from moonpool.inference.output import FinishReason
from moonpool.inference.request import Age, InferenceRequest
from moonpool.kv.block_hash import NamespaceSeed, hash_blocks

Int32Array = npt.NDArray[np.int32]


class Role(enum.StrEnum):
    """Which side of a request an attempt is; the core can hold both of one request."""

    PREFILL = "prefill"
    DECODE = "decode"


class RequestStatus(enum.StrEnum):
    """Where an attempt stands."""

    #: In the queue, holds no block.
    WAITING = "waiting"
    #: Holds blocks that are being read into: a reservation, or a fetch.
    WAITING_FOR_REMOTE_KV = "waiting_for_remote_kv"
    #: Holds blocks for everything known; takes part in steps.
    RUNNING = "running"
    #: Lost its blocks, keeps its tokens; waits like WAITING.
    PREEMPTED = "preempted"
    #: A prefill that drew its token: its blocks are locked for its reader.
    HELD = "held"
    FINISHED = "finished"


class Order(tuple[Age, Role]):
    """Who goes first: the older request; of one request's two roles always the same one."""

    __slots__ = ()

    def __new__(cls, age: Age, role: Role) -> Self:
        return super().__new__(cls, (age, role))

    def is_younger_than(self, other: Order) -> bool:
        """Strictly: the two roles of one request never count as younger than each other."""
        return self[0] > other[0]


@dataclass(slots=True, kw_only=True, eq=False)
class RequestState:
    """The mutable state of one attempt. Written by the scheduler and the core only."""

    attempt_id: AttemptId
    request: InferenceRequest
    role: Role
    #: A decode whose KV is read from a prefill worker: limits what it may compute here.
    has_source: bool
    order: Order
    block_size: int
    #: No token is drawn beyond this length.
    max_num_tokens: int
    #: Tokens that end the answer.
    stop_token_ids: frozenset[int]
    seed: NamespaceSeed
    #: Tokens of the request: prompt and emitted. What is known beyond was drawn here.
    num_given_tokens: int
    status: RequestStatus = RequestStatus.WAITING

    #: int32[max_num_tokens], of which [0, num_tokens) are known.
    token_ids: Int32Array
    num_tokens: int
    #: KV of [0, n) is written, or will be by the plan in flight: advances when planned.
    num_computed_tokens: int = 0
    #: Tokens of prompt + emitted that were not computed here; meaningful once it runs. Less after a
    #: preemption, if blocks that were found at first had to be computed then.
    num_cached_tokens: int = 0
    #: `num_cached_tokens` has gone out with tokens.
    is_cached_reported: bool = False

    #: Leading tokens that a peer is believed to hold, in full blocks, short of the last known token;
    #: 0: no fetch is to be begun. An attempt fetches once at most.
    num_offered_tokens: int = 0
    #: The one fetch reads tokens [fetch_start, fetch_end).
    fetch_start: int = 0
    fetch_end: int = 0
    #: KV of [0, n) was found here or has been fetched and verified; never less than `fetch_start`.
    num_fetched_tokens: int = 0

    #: Blocks of positions [0, len * block_size), one reference each.
    block_ids: list[BlockId] = field(default_factory=list)
    #: int32[blocks for max_num_tokens]; the first len(block_ids) equal `block_ids`.
    block_table: Int32Array
    #: Hashes of the first full blocks of known tokens.
    block_hashes: list[BlockHash]
    #: The first n blocks are full, final and in the cache (under this id or another).
    num_final_blocks: int = 0

    #: While it waits or fetches: tokens that it will have to compute here, and blocks that it will
    #: have to itself, as they looked when it was queued.
    num_queued_tokens: int = 0
    num_promised_blocks: int = 0

    #: Where the runner keeps its last token; -1: nowhere.
    slot: int = -1
    #: The runner's slot holds token num_tokens - 1.
    is_token_in_slot: bool = False
    #: Plans under way that write its blocks.
    num_in_flight: int = 0

    @classmethod
    def create(
        cls,
        request: InferenceRequest,
        attempt: int,
        *,
        role: Role,
        has_source: bool,
        num_peer_tokens: int,
        block_size: int,
        max_model_len: int,
        eos_token_ids: Sequence[int],
        seed: NamespaceSeed,
    ) -> Self:
        """State of a new attempt, with the prompt hashed.

        `num_peer_tokens` is what a peer is believed to hold, whatever that may be. Requires prompt +
        emitted to be shorter than prompt + max_tokens and than `max_model_len`.
        """
        sampling = request.sampling
        known = request.token_ids
        num_prompt_tokens = len(request.prompt_token_ids)
        max_num_tokens = min(num_prompt_tokens + sampling.max_tokens, max_model_len)
        assert 0 < len(known) < max_num_tokens, (len(known), max_num_tokens)
        token_ids = np.empty(max_num_tokens, dtype=np.int32)
        token_ids[: len(known)] = known
        num_offered_tokens = 0 if has_source else max(0, min(num_peer_tokens, len(known) - 1))
        stops = set(sampling.stop_token_ids)
        if not sampling.ignore_eos:
            stops.update(eos_token_ids)
        return cls(
            attempt_id=AttemptId(request.request_id, attempt),
            request=request,
            role=role,
            has_source=has_source,
            order=Order(request.age, role),
            block_size=block_size,
            max_num_tokens=max_num_tokens,
            stop_token_ids=frozenset(stops),
            seed=seed,
            num_given_tokens=len(known),
            token_ids=token_ids,
            num_tokens=len(known),
            num_offered_tokens=num_offered_tokens - num_offered_tokens % block_size,
            block_table=np.empty(-(-max_num_tokens // block_size), dtype=np.int32),
            block_hashes=hash_blocks(seed, known, block_size),
        )

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.request.prompt_token_ids)

    @property
    def num_drawn_tokens(self) -> int:
        """Tokens of this attempt, one that arrived from the prefill worker included."""
        return self.num_tokens - self.num_given_tokens

    @property
    def num_uncomputed_tokens(self) -> int:
        return self.num_tokens - self.num_computed_tokens

    @property
    def is_decoding(self) -> bool:
        """Only the last token drawn is still to be computed."""
        return self.num_tokens - self.num_computed_tokens == 1 and (
            self.num_tokens > self.num_given_tokens
        )

    @property
    def is_prefilling(self) -> bool:
        """More than that is: a prompt, a tail that did not arrive, a sequence to recompute."""
        return self.num_tokens - self.num_computed_tokens > (
            self.num_tokens > self.num_given_tokens
        )

    @property
    def is_fetching(self) -> bool:
        """It holds blocks into which a prefix is read from a peer."""
        return self.status is RequestStatus.WAITING_FOR_REMOTE_KV and not self.has_source

    @property
    def num_peer_tokens(self) -> int:
        """Of `num_cached_tokens`, how many were read from a peer for this attempt."""
        return max(0, min(self.num_cached_tokens, self.num_fetched_tokens) - self.fetch_start)

    @property
    def num_needed_blocks(self) -> int:
        """Blocks for everything known."""
        return -(-self.num_tokens // self.block_size)

    @property
    def num_missing_blocks(self) -> int:
        return -(-self.num_tokens // self.block_size) - len(self.block_ids)

    @property
    def num_blocks_at_most(self) -> int:
        """Blocks that it may ever need: the last token drawn is never computed."""
        if self.role is Role.PREFILL:
            return self.num_needed_blocks
        return -(-max(self.num_tokens, self.max_num_tokens - 1) // self.block_size)

    def num_growth_blocks(self, headroom_tokens: int) -> int:
        """Blocks beyond those held that the next `headroom_tokens` tokens are expected to take."""
        num_tokens = self.num_tokens + headroom_tokens
        num_blocks = min(-(-num_tokens // self.block_size), self.num_blocks_at_most)
        return max(0, num_blocks - len(self.block_ids))

    @property
    def num_matchable_blocks(self) -> int:
        """Leading blocks that may be found instead of computed: short of the last known token."""
        return (self.num_tokens - 1) // self.block_size

    @property
    def prefix_hashes(self) -> list[BlockHash]:
        """What may be matched: all but the last known token, whose logits are wanted."""
        return self.block_hashes[: self.num_matchable_blocks]

    def note_cached(self, num_computed_tokens: int) -> None:
        """It begins, or begins again, with KV of so many tokens found."""
        if self.status is RequestStatus.WAITING:
            self.num_cached_tokens = num_computed_tokens
        elif num_computed_tokens < self.num_cached_tokens:
            self.num_cached_tokens = num_computed_tokens
            self.is_cached_reported = False

    def begin_fetch(self) -> None:
        """What it was offered and has not found is read from a peer."""
        self.fetch_start = self.num_fetched_tokens = self.num_computed_tokens
        self.fetch_end = self.num_offered_tokens
        self.num_offered_tokens = 0

    def undo_fetch(self) -> None:
        """Nobody was told of the fetch: it is offered as before."""
        self.num_offered_tokens = self.fetch_end
        self.fetch_start = self.fetch_end = self.num_fetched_tokens = 0

    def attach(self, block_ids: Sequence[BlockId]) -> None:
        """Append blocks on which the caller took a reference for this request."""
        start = len(self.block_ids)
        self.block_table[start : start + len(block_ids)] = block_ids
        self.block_ids += block_ids

    def detach(self) -> list[BlockId]:
        """Give up all blocks, slot and computed counts; the caller drops the references."""
        block_ids = self.block_ids
        self.block_ids = []
        # A new array: a plan may still hold a view of the old one.
        self.block_table = np.empty_like(self.block_table)
        self.num_computed_tokens = 0
        self.num_final_blocks = 0
        return block_ids

    def hash_up_to(self, num_blocks: int) -> None:
        """Extend the chain to the first `num_blocks` blocks, whose tokens are all final."""
        num_hashed = len(self.block_hashes)
        if num_hashed < num_blocks:
            tokens = self.token_ids[num_hashed * self.block_size : num_blocks * self.block_size]
            parent = self.block_hashes[-1] if num_hashed else None
            self.block_hashes += hash_blocks(self.seed, tokens.tolist(), self.block_size, parent)

    def append_token(self, token_id: int) -> FinishReason | None:
        """Note a drawn token; says whether it ends the answer."""
        self.token_ids[self.num_tokens] = token_id
        self.num_tokens += 1
        self.is_token_in_slot = False
        if token_id in self.stop_token_ids:
            return FinishReason.STOP
        if self.num_tokens >= self.max_num_tokens:
            return FinishReason.LENGTH
        return None

    def fork(self) -> RequestState:
        """An independent copy. What is never written again is shared."""
        copy = RequestState(**{name: getattr(self, name) for name in self.__slots__})
        copy.token_ids = self.token_ids.copy()
        copy.block_table = self.block_table.copy()
        copy.block_ids = list(self.block_ids)
        copy.block_hashes = list(self.block_hashes)
        return copy

    def key(self, block_names: tuple[int, ...]) -> tuple[object, ...]:
        """What decides how it goes on, its blocks under the names that the caller gives them."""
        return (
            self.role,
            self.attempt_id,
            self.status,
            self.token_ids[: self.num_tokens].tobytes(),
            self.num_computed_tokens,
            self.num_cached_tokens,
            self.is_cached_reported,
            self.num_offered_tokens,
            self.fetch_start,
            self.fetch_end,
            self.num_fetched_tokens,
            block_names,
            self.num_final_blocks,
            self.num_queued_tokens,
            self.num_promised_blocks,
            self.slot >= 0,
            self.is_token_in_slot,
            self.num_in_flight,
        )

    def validate(self) -> None:
        """Raise AssertionError if the counts contradict each other."""
        size = self.block_size
        assert 0 <= self.num_computed_tokens <= self.num_tokens <= self.max_num_tokens, self
        assert self.num_computed_tokens <= len(self.block_ids) * size or not self.block_ids, self
        assert self.num_final_blocks <= len(self.block_ids), self
        assert self.num_final_blocks <= len(self.block_hashes) <= self.num_tokens // size, self
        assert self.block_table[: len(self.block_ids)].tolist() == self.block_ids, self
        assert not self.is_token_in_slot or self.slot >= 0, self
        assert self.fetch_start <= self.num_fetched_tokens <= self.fetch_end, self
        assert not self.num_offered_tokens or not self.fetch_end, self
        for num_tokens in (self.num_offered_tokens, self.fetch_start, self.fetch_end):
            assert num_tokens % size == 0, self
            assert num_tokens < self.num_tokens, self
        assert not self.is_fetching or self.fetch_start < self.fetch_end, self
