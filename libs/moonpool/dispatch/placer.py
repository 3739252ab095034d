"""Placer: where the attempts of a router's requests go, in terms of its fleet.

It asks what is believed of prefixes, has the selector decide, keeps the fleet's books of what was put on
whom until the next report says so, and makes the messages. Whether and when to place stands in
dispatcher.py. A worker has the last word: what is decided here reserves nothing there.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from moonpool.dispatch.effects import SendDecode, SendPrefill
from moonpool.dispatch.fleet import Fleet
from moonpool.handoff.messages import DecodeRequest, PeerPrefix, PrefillRequest, SourceRef
from moonpool.ids import AttemptId, RequestId, WorkerKey
from moonpool.inference.request import InferenceRequest
from moonpool.routing.config import PolicyName, RoutingConfig
from moonpool.routing.query import PlacementQuery
from moonpool.routing.selector import PlacementDecision, PrefillPlan, Selector
from moonpool.routing.worker_view import WorkerRole

#: How many leading tokens of prompt + emitted each worker is believed to have cached; workers that hold
#: nothing are left out.
MatchPrefix = Callable[[InferenceRequest], Mapping[WorkerKey, int]]


def nothing_cached(request: InferenceRequest) -> Mapping[WorkerKey, int]:
    """The belief of a router without a prefix index."""
    return {}


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """Where an attempt goes: what a decision that found room comes to."""

    decode: WorkerKey
    #: None: the decode worker prefills it itself.
    prefill: WorkerKey | None
    plan: PrefillPlan


class Placer:
    """See the file's head.

    Args:
        fleet: Shared with the dispatcher; its books of attempts are begun here and ended there.
    """

    def __init__(self, config: RoutingConfig, fleet: Fleet, match: MatchPrefix) -> None:
        self._selector = Selector(config)
        self._fleet = fleet
        self._match = match
        self._num_placed = 0

    def decide(
        self,
        request: InferenceRequest,
        *,
        attempt: int,
        unfit: frozenset[WorkerKey],
        lost: frozenset[WorkerKey],
    ) -> PlacementDecision:
        """Weigh the fleet for one request; changes nothing.

        Args:
            request: With what was emitted so far.
            unfit: Workers that said that they can never hold it.
            lost: Workers that vanished in the middle of a handoff of it.
        """
        query = PlacementQuery(
            request_id=request.request_id,
            attempt=attempt,
            num_tokens=request.num_tokens,
            num_expected_tokens=min(
                self._selector.config.expected_output_tokens, request.num_remaining_tokens
            ),
            num_cached_tokens=self._match(request),
            unfit=unfit,
            lost=lost,
            sequence=self._num_placed,
        )
        return self._selector.place(self._fleet.table(), query)

    def begin(self, request_id: RequestId, decision: PlacementDecision) -> Target:
        """Note in the fleet's books what this decision puts on whom. Requires that it found room."""
        plan, decode = decision.plan, decision.decode.key
        assert plan is not None, decision
        assert decode is not None, decision
        self._num_placed += 1
        num_blocks = -(-decision.num_tokens // self._fleet.info(decode).block_size)
        self._fleet.begin_decode(decode, request_id, num_blocks)
        self._fleet.begin_prefill(plan.key, request_id, plan.num_computed_tokens)
        self._fill(plan.key, plan.num_read_tokens + plan.num_computed_tokens)
        if plan.key != decode and decision.disagg is not None:
            self._fill(decode, decision.disagg.num_uncached_tokens)
        return Target(
            decode=decode, prefill=plan.key if decision.prefill is not None else None, plan=plan
        )

    def messages(
        self, request: InferenceRequest, target: Target, attempt_id: AttemptId, deadline_s: float
    ) -> list[SendPrefill | SendDecode]:
        """What the workers are told, in order."""
        attempt = attempt_id.attempt
        peer = self._peer(target.plan)
        if target.prefill is None:
            decode = DecodeRequest(
                request=request, attempt=attempt, source=None, peer=peer, deadline_s=deadline_s
            )
            return [SendDecode(key=target.decode, message=decode)]
        info = self._fleet.info(target.prefill)
        source = SourceRef(key=info.key, address=info.address)
        prefill = PrefillRequest(request=request, attempt=attempt, peer=peer, deadline_s=deadline_s)
        decode = DecodeRequest(
            request=request, attempt=attempt, source=source, deadline_s=deadline_s
        )
        return [
            SendPrefill(key=target.prefill, message=prefill),
            SendDecode(key=target.decode, message=decode),
        ]

    def fork(self, fleet: Fleet) -> Placer:
        """An independent copy over a copy of the fleet, for exploration."""
        fork = Placer(self._selector.config, fleet, self._match)
        fork._num_placed = self._num_placed
        return fork

    def key(self) -> object:
        """Equal for placers over equal fleets that will choose alike."""
        is_counting = self._selector.config.policy is PolicyName.ROUND_ROBIN
        return self._num_placed if is_counting else None

    # -- parts --

    def _fill(self, key: WorkerKey, num_tokens: int) -> None:
        self._fleet.fill(key, num_tokens // self._fleet.info(key).block_size)

    def _peer(self, plan: PrefillPlan) -> PeerPrefix | None:
        if plan.peer is None:
            return None
        info = self._fleet.info(plan.peer.key)
        return PeerPrefix(
            key=plan.peer.key,
            address=info.address,
            num_tokens=plan.peer.num_tokens,
            is_store=info.role is WorkerRole.STORE,
        )
