"""Selector: places one request on a fleet. Filters, then the policy for decode, the disagg decision over
what that worker lacks, and the policy again for prefill.

The policy chooses; what is predicted, recorded and decided about local or remote is the same for all of
them, so that policies can be compared on one trace. Pure: a table and a query in, a record out.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from moonpool.ids import WorkerKey
from moonpool.routing.config import PolicyName, RoutingConfig
from moonpool.routing.disagg_decider import DisaggDecision, Prediction, decide
from moonpool.routing.dynamo_linear import DynamoLinear
from moonpool.routing.filters import FilterArray, filter_decode, filter_prefill, filter_sources
from moonpool.routing.fleet_table import FleetTable, FloatArray
from moonpool.routing.forecast import Forecast, PlanKind
from moonpool.routing.load_policies import LeastLoaded, Random, RoundRobin
from moonpool.routing.min_ttft import MinTtft
from moonpool.routing.policy import Choice, PlacementPolicy
from moonpool.routing.prefix_affinity import PrefixAffinity
from moonpool.routing.query import PlacementQuery
from moonpool.routing.selection import Selection, Term, make_selection, num_possible


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerMatch:
    """A peer that is believed to hold more of the prefix than the worker that prefills."""

    key: WorkerKey
    #: A multiple of the block size.
    num_tokens: int
    #: It is a store node, which computes nothing.
    is_store: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillPlan:
    """What the worker that prefills is expected to do, and to take."""

    key: WorkerKey
    kind: PlanKind
    num_cached_tokens: int
    #: Expected to be read from `peer`; 0 unless the plan is to fetch.
    num_read_tokens: int
    num_computed_tokens: int
    #: Named to the worker whatever the plan: it knows better what reading takes.
    peer: PeerMatch | None
    queue_s: float
    load_s: float
    compute_s: float
    #: Between the first token's draw and the decode worker's next step; 0 if that is the same worker.
    exposed_s: float

    @property
    def ttft_s(self) -> float:
        """The prediction, from placement on."""
        return max(self.queue_s, self.load_s) + self.compute_s + self.exposed_s


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacementDecision:
    """The record of one decision: where to, and every term of every candidate."""

    policy: PolicyName
    #: Costs are measured, and predictions are seconds; else uncached tokens are the unit.
    is_measured: bool
    num_tokens: int
    #: The most that any one worker is believed to hold; blocks that may be reused, in tokens.
    num_held_tokens: int = 0
    decode: Selection
    #: None if nobody can decode.
    disagg: DisaggDecision | None = None
    #: None if it is prefilled where it is decoded.
    prefill: Selection | None = None
    #: None if it cannot be placed.
    plan: PrefillPlan | None = None

    @property
    def lacks_prefill_room(self) -> bool:
        """It should be prefilled elsewhere, and nobody has room for that."""
        return self.prefill is not None and self.prefill.key is None


class Selector:
    """See the file's head. Without state."""

    def __init__(self, config: RoutingConfig) -> None:
        self._config = config
        self._policy = make_policy(config)

    @property
    def config(self) -> RoutingConfig:
        return self._config

    def place(self, table: FleetTable, query: PlacementQuery) -> PlacementDecision:
        """Decide; nothing is changed. Who has no room now may have some later."""
        forecast = Forecast(
            table,
            query,
            reads_from_peers=self._config.reads_from_peers,
            typical_output_tokens=self._config.expected_output_tokens,
        )
        decode_filters = filter_decode(table, query)
        prefill_filters = filter_prefill(table, query)
        remote_s = forecast.remote_s(filter_sources(table, prefill_filters, None) == 0)
        is_open = decode_filters == 0
        choice = None
        if is_open.any():
            choice = self._policy.choose_decode(forecast, is_open, remote_s=remote_s)
        decode = _decode_selection(forecast, decode_filters, choice, remote_s)
        if choice is None or decode.key is None:
            return self._decision(forecast, decode=decode)
        return self._place_prefill(forecast, prefill_filters, decode, choice.row)

    # -- parts --

    def _place_prefill(
        self,
        forecast: Forecast,
        prefill_filters: FilterArray,
        decode: Selection,
        decode_row: int,
    ) -> PlacementDecision:
        table, query = forecast.table, forecast.query
        filters = filter_sources(table, prefill_filters, decode_row)
        exposed_s = forecast.exposed_s(decode_row)
        is_open = filters == 0
        choice = None
        if is_open.any():
            choice = self._policy.choose_prefill(forecast, is_open, exposed_s=exposed_s)
        disagg = decide(
            self._config.disagg,
            num_tokens=query.num_tokens,
            num_cached_tokens=int(forecast.num_cached_tokens[decode_row]),
            num_prefill_workers=num_possible(filters),
            least_queued_tokens=(
                int(table.num_queued_tokens[choice.row]) if choice is not None else None
            ),
            prediction=(
                self._predict(forecast, decode_row, choice.row, exposed_s)
                if table.is_measured and choice is not None
                else None
            ),
        )
        if not disagg.is_remote:
            plan = _plan(forecast, decode_row, exposed_s=0.0)
            return self._decision(forecast, decode=decode, disagg=disagg, plan=plan)
        prefill = _prefill_selection(forecast, filters, choice, exposed_s)
        if choice is None:
            return self._decision(forecast, decode=decode, disagg=disagg, prefill=prefill)
        plan = _plan(forecast, choice.row, exposed_s=float(exposed_s[choice.row]))
        return self._decision(forecast, decode=decode, disagg=disagg, prefill=prefill, plan=plan)

    def _predict(
        self, forecast: Forecast, decode_row: int, prefill_row: int, exposed_s: FloatArray
    ) -> Prediction:
        cost_s = forecast.ready_s + forecast.interference_s
        slo_s = self._config.min_ttft.slo_tpot_s
        return Prediction(
            local_s=float(cost_s[decode_row]),
            remote_s=float(cost_s[prefill_row] + exposed_s[prefill_row]),
            breaks_tpot=slo_s is not None
            and bool(forecast.tpot_s[decode_row] <= slo_s < forecast.chunked_tpot_s[decode_row]),
        )

    def _decision(
        self,
        forecast: Forecast,
        *,
        decode: Selection,
        disagg: DisaggDecision | None = None,
        prefill: Selection | None = None,
        plan: PrefillPlan | None = None,
    ) -> PlacementDecision:
        return PlacementDecision(
            policy=self._config.policy,
            is_measured=forecast.table.is_measured,
            num_tokens=forecast.query.num_tokens,
            num_held_tokens=int(forecast.num_cached_tokens.max(initial=0)),
            decode=decode,
            disagg=disagg,
            prefill=prefill,
            plan=plan,
        )


def make_policy(config: RoutingConfig) -> PlacementPolicy:
    """The policy that the configuration names."""
    match config.policy:
        case PolicyName.MIN_TTFT:
            return MinTtft(config.min_ttft, config.disagg)
        case PolicyName.RANDOM:
            return Random(config.seed)
        case PolicyName.ROUND_ROBIN:
            return RoundRobin()
        case PolicyName.LEAST_LOADED:
            return LeastLoaded()
        case PolicyName.PREFIX_AFFINITY:
            return PrefixAffinity(config.prefix_affinity)
        case PolicyName.DYNAMO_LINEAR:
            return DynamoLinear(config.dynamo_linear, config.seed)


def _plan(forecast: Forecast, row: int, *, exposed_s: float) -> PrefillPlan:
    keys, peer_row = forecast.table.keys, int(forecast.peer_row[row])
    num_cached_tokens = int(forecast.num_cached_tokens[row])
    num_read_tokens = int(forecast.num_read_tokens[row])
    return PrefillPlan(
        key=keys[row],
        kind=forecast.plan_kind(row),
        num_cached_tokens=num_cached_tokens,
        num_read_tokens=num_read_tokens,
        num_computed_tokens=forecast.query.num_tokens - num_cached_tokens - num_read_tokens,
        peer=(
            PeerMatch(
                key=keys[peer_row],
                num_tokens=int(forecast.num_peer_tokens[row]),
                is_store=bool(forecast.table.is_store[peer_row]),
            )
            if peer_row >= 0
            else None
        ),
        queue_s=float(forecast.queue_s[row]),
        load_s=float(forecast.load_s[row]),
        compute_s=float(forecast.compute_s[row]),
        exposed_s=exposed_s,
    )


def _decode_selection(
    forecast: Forecast, filters: FilterArray, choice: Choice | None, remote_s: FloatArray
) -> Selection:
    return _selection(
        forecast,
        filters,
        choice,
        (
            ("ttft_here_s", forecast.ready_s),
            ("ttft_elsewhere_s", remote_s),
            ("tpot_s", forecast.tpot_s),
            ("tpot_with_chunks_s", forecast.chunked_tpot_s),
        ),
    )


def _prefill_selection(
    forecast: Forecast, filters: FilterArray, choice: Choice | None, exposed_s: FloatArray
) -> Selection:
    return _selection(
        forecast,
        filters,
        choice,
        (("exposed_s", exposed_s), ("ttft_s", forecast.ready_s + exposed_s)),
    )


def _selection(
    forecast: Forecast,
    filters: FilterArray,
    choice: Choice | None,
    terms: tuple[Term, ...],
) -> Selection:
    """What the record has whatever the policy, the leg's own terms, and what the policy adds."""
    table = forecast.table
    return make_selection(
        keys=table.keys,
        filters=filters,
        row=choice.row if choice is not None else None,
        scores=choice.scores if choice is not None else np.zeros(len(table)),
        terms=(
            ("num_cached_tokens", forecast.num_cached_tokens),
            ("num_read_tokens", forecast.num_read_tokens),
            ("num_queued_tokens", table.num_queued_tokens),
            ("num_requests", table.num_requests),
            ("used_fraction", forecast.used_fraction),
            ("queue_s", forecast.queue_s),
            ("load_s", forecast.load_s),
            ("compute_s", forecast.compute_s),
            ("interference_s", forecast.interference_s),
            *terms,
            *(choice.terms if choice is not None else ()),
        ),
        inputs=choice.inputs if choice is not None else (),
    )
