"""Forecast: what each worker of a fleet would need for one request, in seconds. All workers at once.

For each worker the plan is the best of what it could do about the prefix:

    local      compute what lies behind its own blocks
    fetch      read what a peer holds beyond them, meanwhile waiting in its queue, then compute the rest
    recompute  it holds nothing, and no peer's blocks come sooner than they are computed

and from it

    ready_s         max(queue_s, load_s) + compute_s: until the first token is drawn there
    interference_s  what its running decodes lose to the chunks (one of them: the unit is a request)
    exposed_s       for a pair of workers: what a handoff adds after the token: its latency, and the part of
                    the transfer that no computing hides (the last layer at least)
    tpot_s          of a decode step with the request in it
    chunked_tpot_s  the same, the request's chunks spread over the answers that run there

Without any measured fit the costs are nominal: uncached tokens are the unit, seconds only a name, reads only
break ties, and nothing is known of interference.
"""

from __future__ import annotations

import enum
from functools import cached_property

import numpy as np

from moonpool.routing.filters import num_blocks
from moonpool.routing.fleet_table import BoolArray, FleetTable, FloatArray, IntArray
from moonpool.routing.query import PlacementQuery

#: Peers whose blocks are weighed, the longest matches first.
_MAX_PEERS = 4
#: Prefill workers whose handoff to each decode worker is weighed, the soonest ready first.
_MAX_SOURCES = 8
#: Of what reads take, while uncached tokens are the unit: a nominal token is many times as fast as some real
#: ones, and reads may be measured before the first prefills are.
_NOMINAL_READ_SHARE = 0.01


class PlanKind(enum.StrEnum):
    """What a worker is expected to do about the prefix."""

    LOCAL = "local"
    FETCH = "fetch"
    RECOMPUTE = "recompute"


class Forecast:
    """See the file's head. All columns are [worker].

    Args:
        reads_from_peers: Whether the plan may be to fetch.
        typical_output_tokens: How long the answers that run are expected to become.
    """

    def __init__(
        self,
        table: FleetTable,
        query: PlacementQuery,
        *,
        reads_from_peers: bool = True,
        typical_output_tokens: int = 256,
    ) -> None:
        self.table = table
        self.query = query
        #: The last token is always computed, and a block is reused whole or not at all.
        limit = (query.num_tokens - 1) // table.block_size * table.block_size
        self.num_cached_tokens: IntArray = np.minimum(table.spread(query.num_cached_tokens), limit)
        #: Blocks that requests hold: no new one can have them.
        self.num_used_blocks: IntArray = table.num_total_blocks - table.num_available_blocks
        #: Of each pool, 0 to 1; 0 while a worker has not told its pool.
        self.used_fraction: FloatArray = self.num_used_blocks / np.maximum(
            table.num_total_blocks, 1
        )
        added_step_s = (
            table.decode_per_request_s * table.num_requests
            + table.decode_per_context_token_s * (self.num_used_blocks * table.block_size)
        )
        #: A step of a prefill, beside the decodes that run there.
        self._step_s: FloatArray = table.prefill_base_s + added_step_s
        self.queue_s = self._queue_s()
        #: Tokens that a peer is expected to spare; 0 unless the plan is to fetch.
        self.num_read_tokens: IntArray = np.zeros(len(table), np.int64)
        self.load_s: FloatArray = np.zeros(len(table))
        #: Row of the peer that is named to the worker, and how much it holds; -1 and 0 for none.
        self.peer_row: IntArray = np.full(len(table), -1)
        self.num_peer_tokens: IntArray = np.zeros(len(table), np.int64)
        self.compute_s = self._prefill_s(
            query.num_tokens - self.num_cached_tokens, self.num_cached_tokens
        )
        self.ready_s: FloatArray = self.queue_s + self.compute_s
        if reads_from_peers and self.num_cached_tokens.any():
            self._weigh_peers(limit)
        is_disturbed = (table.num_requests > 0) & table.is_measured
        self.interference_s: FloatArray = np.where(is_disturbed, self.compute_s, 0.0)
        self.tpot_s: FloatArray = (
            table.decode_base_s
            + added_step_s
            + table.decode_per_request_s
            + table.decode_per_context_token_s * query.num_tokens
        )
        self.chunked_tpot_s: FloatArray = self.tpot_s + self.interference_s / typical_output_tokens
        self.has_growth_room: BoolArray = (table.num_total_blocks == 0) | (
            num_blocks(table, query.num_tokens + query.num_expected_tokens)
            <= table.num_available_blocks
        )

    @property
    def num_computed_tokens(self) -> IntArray:
        """Tokens that each worker is expected to compute."""
        return self.query.num_tokens - self.num_cached_tokens - self.num_read_tokens

    @cached_property
    def evicted_s(self) -> FloatArray:
        """What it takes to compute as many tokens again as the request pushes out of each cache."""
        table = self.table
        num_new_tokens = self.query.num_tokens - self.num_cached_tokens
        num_new_blocks = -(-num_new_tokens // table.block_size)
        num_free_blocks = table.num_total_blocks - table.num_filled_blocks
        num_evicted_blocks = np.maximum(num_new_blocks - num_free_blocks, 0)
        seconds: FloatArray = num_evicted_blocks * table.block_size * table.prefill_per_token_s
        return seconds

    def plan_kind(self, row: int) -> PlanKind:
        """What this worker is expected to do."""
        if self.num_read_tokens[row]:
            return PlanKind.FETCH
        return PlanKind.LOCAL if self.num_cached_tokens[row] else PlanKind.RECOMPUTE

    def exposed_s(self, decode_row: int) -> FloatArray:
        """float64[source]: what a handoff to this worker adds after the first token."""
        table = self.table
        num_bytes = (
            self.query.num_tokens - self.num_cached_tokens[decode_row]
        ) * table.bytes_per_token[decode_row]
        move_s = num_bytes / table.transfer_bytes_per_s[decode_row]
        exposed: FloatArray = table.transfer_latency_s[decode_row] + np.maximum(
            move_s / table.num_layers[decode_row], move_s - self.compute_s
        )
        return exposed

    def remote_s(self, is_source: BoolArray) -> FloatArray:
        """float64[decode]: soonest first token, and what it costs others, by a prefill elsewhere.

        Args:
            is_source: Who may prefill; never for itself. Infinite where nobody may.
        """
        table = self.table
        sources = np.flatnonzero(is_source)
        if not len(sources):
            return np.full(len(table), np.inf)
        cost_s = self.ready_s[sources] + self.interference_s[sources]
        if len(sources) > _MAX_SOURCES:
            best = np.sort(np.argpartition(cost_s, _MAX_SOURCES - 1)[:_MAX_SOURCES])
            sources, cost_s = sources[best], cost_s[best]
        num_bytes = (self.query.num_tokens - self.num_cached_tokens) * table.bytes_per_token
        move_s = num_bytes[:, None] / table.transfer_bytes_per_s[:, sources]
        exposed_s = table.transfer_latency_s[:, sources] + np.maximum(
            move_s / table.num_layers[:, None], move_s - self.compute_s[sources]
        )
        total_s = exposed_s + cost_s
        total_s[sources, np.arange(len(sources))] = np.inf
        soonest: FloatArray = total_s.min(axis=1)
        return soonest

    # -- parts --

    def _prefill_s(self, num_tokens: IntArray, num_cached_tokens: IntArray) -> FloatArray:
        """Seconds for `num_tokens` behind `num_cached_tokens`, [worker] or [worker, peer]."""
        table = self.table
        step_s, max_step_tokens = self._step_s, table.max_step_tokens
        per_token_s, per_work_s = table.prefill_per_token_s, table.prefill_per_work_s
        if num_tokens.ndim > 1:
            step_s, max_step_tokens = step_s[:, None], max_step_tokens[:, None]
            per_token_s, per_work_s = per_token_s[:, None], per_work_s[:, None]
        seconds: FloatArray = step_s * np.ceil(num_tokens / max_step_tokens) + num_tokens * (
            per_token_s + per_work_s * (num_tokens + 2 * num_cached_tokens)
        )
        return seconds

    def _queue_s(self) -> FloatArray:
        """Seconds until what is queued is computed, taken as prompts of one step each."""
        table = self.table
        step, num_queued_tokens = table.max_step_tokens, table.num_queued_tokens
        num_steps = num_queued_tokens / step
        num_full_steps = np.floor(num_steps)
        num_rest_tokens = num_queued_tokens - num_full_steps * step
        work = num_full_steps * step * step + num_rest_tokens * num_rest_tokens
        seconds: FloatArray = (
            self._step_s * np.ceil(num_steps)
            + table.prefill_per_token_s * num_queued_tokens
            + table.prefill_per_work_s * work
        )
        return seconds

    def _weigh_peers(self, limit: IntArray) -> None:
        table, num_tokens = self.table, self.query.num_tokens
        held = self.num_cached_tokens
        # The longest match first; among equals whoever has less to do.
        peers = np.lexsort((table.num_queued_tokens + table.num_requests, -held))
        # Who drains locks nothing for readers any more.
        is_willing = ~(table.is_inhibited | table.is_draining)
        peers = peers[(held[peers] > 0) & is_willing[peers]][:_MAX_PEERS]
        if not len(peers):
            return
        reachable = np.minimum(held[peers], limit[:, None])
        num_read = np.maximum(reachable - held[:, None], 0)
        can_read = num_read > 0
        load_s = (
            table.transfer_latency_s[:, peers]
            + num_read * table.bytes_per_token[:, None] / table.transfer_bytes_per_s[:, peers]
        )
        if not table.is_measured:
            load_s *= _NOMINAL_READ_SHARE
        num_before = held[:, None] + num_read
        compute_s = self._prefill_s(num_tokens - num_before, num_before)
        ready_s = np.maximum(self.queue_s[:, None], load_s) + compute_s
        ready_s[~can_read] = np.inf
        best = ready_s.argmin(axis=1)
        rows = np.arange(len(table))
        has_peer = can_read[rows, best]
        self.peer_row = np.where(has_peer, peers[best], -1)
        self.num_peer_tokens = np.where(has_peer, reachable[rows, best], 0)
        is_fetch = ready_s[rows, best] < self.ready_s
        self.num_read_tokens = np.where(is_fetch, num_read[rows, best], 0)
        self.load_s = np.where(is_fetch, load_s[rows, best], 0.0)
        self.compute_s = np.where(is_fetch, compute_s[rows, best], self.compute_s)
        self.ready_s = np.where(is_fetch, ready_s[rows, best], self.ready_s)
