"""WaitingRoom: the requests of a router that wait for workers, and their way onto them.

Whom to ask is decided in placer.py; here is who is looked at, and when. What becomes of a request before and
after stands in dispatcher.py.

Rules
- A look at a request is a placement over the whole fleet. Nobody is looked at unless something may have made
  room, or left nobody to wait for.
- The oldest first. Nobody passes a request that waits for a decode worker. One that waits for a prefill worker
  is passed by those that need none: they do not take what it waits for.
- A look that finds no room changes nothing.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace

from moonpool.dispatch.config import DispatchConfig
from moonpool.dispatch.decision_log import DecisionLog
from moonpool.dispatch.effects import DispatchEffect, Placed, Placement
from moonpool.dispatch.fleet import Fleet
from moonpool.dispatch.placer import MatchPrefix, Placer
from moonpool.dispatch.request_queue import RequestQueue
from moonpool.dispatch.request_record import DispatchState, OnWorkers, RequestRecord
from moonpool.ids import RequestId
from moonpool.inference.request import InferenceRequest
from moonpool.routing.selector import PlacementDecision


@dataclass(frozen=True, slots=True, kw_only=True)
class NeverFits:
    """A request that waits, for nothing: no worker can ever hold it."""

    request: RequestRecord
    num_tokens: int


class WaitingRoom:
    """See the file's head.

    Args:
        fleet: Shared with the dispatcher.
        match: What the prefix index believes; asked once per look at a request.
    """

    def __init__(self, config: DispatchConfig, fleet: Fleet, match: MatchPrefix) -> None:
        self._config = config
        self._fleet = fleet
        self._match = match
        #: Those that wait.
        self._requests: dict[RequestId, RequestRecord] = {}
        #: How many of them are whose; a tenant without any is not there.
        self._num_by_tenant: Counter[str] = Counter()
        self._queue = RequestQueue()
        self._placer = Placer(config.routing, fleet, match)
        self._decisions = DecisionLog(config.num_kept_decisions)
        #: Set by what may make room, or leave nobody to wait for.
        self._may_place = False

    def __len__(self) -> int:
        return len(self._requests)

    def num_of(self, tenant: str) -> int:
        """How many of those that wait are this tenant's."""
        return self._num_by_tenant[tenant]

    def add(self, request: RequestRecord) -> None:
        """It waits from here on, in order of age. Requires that it did not."""
        assert request.request_id not in self._requests, request
        request.state = DispatchState.QUEUED
        self._requests[request.request_id] = request
        self._num_by_tenant[request.request.tenant] += 1
        self._queue.add(request.request.age)
        self._may_place = True

    def remove(self, request: RequestRecord) -> None:
        """It waits no more. Requires that it does."""
        del self._requests[request.request_id]
        tenant = request.request.tenant
        self._num_by_tenant[tenant] -= 1
        if not self._num_by_tenant[tenant]:
            del self._num_by_tenant[tenant]
        self._queue.remove(request.request.age)

    def note_room(self) -> None:
        """There may be room where there was none."""
        self._may_place = True

    def look_again(self) -> None:
        """Who may be asked has changed."""
        self._may_place = True
        self._queue.look_again()

    def expire(self, now: float) -> None:
        """Look again if workers that would not, or were not to be asked, may be asked now."""
        if self._requests and self._fleet.expire(now):
            self.look_again()

    def next_wakeup(self, now: float) -> float | None:
        """When `expire` may have something to do; None if nobody waits for that."""
        return self._fleet.next_wakeup(now) if self._requests else None

    def place_next(self, now: float) -> list[DispatchEffect] | NeverFits | None:
        """Place the next request that there is room for. Call until there is None.

        Returns:
            What is to be done for it; or one that is to be ended; None: nobody can be placed now.
        """
        while self._may_place and (request_id := self._queue.next()) is not None:
            request = self._requests[request_id]
            value = request.request
            if request.emitted:
                value = replace(value, emitted_token_ids=tuple(request.emitted))
            decision = self._placer.decide(
                value,
                attempt=request.attempt + 1,
                unfit=request.unfit,
                lost=request.lost_sources,
            )
            if decision.decode.can_never_fit:
                return NeverFits(request=request, num_tokens=value.num_tokens)
            if decision.decode.key is None:
                break
            if not decision.lacks_prefill_room:
                self.remove(request)
                return self._place(request, value, decision, now)
            self._queue.pass_over(request_id)
        self._may_place = False
        return None

    def decisions(self, request_id: RequestId) -> tuple[Placement, ...]:
        """Why one of the newest requests went where; empty if it is not known, or no longer."""
        return self._decisions.get(request_id)

    def fork(self, requests: Mapping[RequestId, RequestRecord], fleet: Fleet) -> WaitingRoom:
        """An independent copy over copies of the requests and of the fleet, for exploration."""
        fork = WaitingRoom(self._config, fleet, self._match)
        fork._requests = {request_id: requests[request_id] for request_id in self._requests}
        fork._num_by_tenant = self._num_by_tenant.copy()
        fork._queue = self._queue.fork()
        fork._placer = self._placer.fork(fleet)
        fork._decisions = self._decisions.fork()
        fork._may_place = self._may_place
        return fork

    def key(self) -> tuple[object, ...]:
        """Equal for rooms with the same requests that behave alike."""
        return (self._placer.key(), self._queue.key())

    def validate(self, requests: Mapping[RequestId, RequestRecord]) -> None:
        """Check that these are the ones that wait."""
        assert self._requests == requests, (self._requests.keys(), requests.keys())
        tenants = Counter(request.request.tenant for request in requests.values())
        assert dict(self._num_by_tenant) == dict(tenants), (self._num_by_tenant, tenants)
        self._queue.validate([request.request.age for request in requests.values()])

    # -- parts --

    def _place(
        self,
        request: RequestRecord,
        value: InferenceRequest,
        decision: PlacementDecision,
        now: float,
    ) -> list[DispatchEffect]:
        """The next attempt begins.

        Args:
            value: The request with what was emitted so far.
        """
        target = self._placer.begin(request.request_id, decision)
        request.attempt += 1
        request.num_held_tokens = decision.num_held_tokens
        request.state = DispatchState.PLACED
        peer = target.plan.peer
        request.placed = OnWorkers(
            decode=target.decode,
            prefill=target.prefill,
            has_store_peer=peer is not None and peer.is_store,
        )
        placement = Placement(
            request_id=request.request_id,
            attempt=request.attempt,
            record=decision,
            placed_at=now,
            previous_outcome=request.outcome,
            previous_end=request.retry_reason,
        )
        self._decisions.add(placement)
        deadline_s = max(request.deadline_at - now, 0.0)
        messages = self._placer.messages(value, target, request.attempt_id, deadline_s)
        return [Placed(placement=placement), *messages]
