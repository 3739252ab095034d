"""The router's request machine: events in, the whole list of effects out (placement records apart)."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

import pytest

from moonpool.core.protocol import (
    HandBackReason,
    HandedBack,
    Refused,
    RefuseReason,
    TokensReady,
)
from moonpool.dispatch.config import DispatchConfig
from moonpool.dispatch.dispatcher import Dispatcher
from moonpool.dispatch.effects import (
    DispatchEffect,
    EmitTokens,
    EndRequest,
    Placed,
    PrefixLeft,
    RetryReason,
    SendAbort,
    SendDecode,
    SendPrefill,
)
from moonpool.dispatch.events import (
    DispatchEvent,
    DrainRequested,
    LoadReported,
    RequestArrived,
    RequestCancelled,
    RequestStopped,
    WorkerJoined,
    WorkerLost,
    WorkerMessageReceived,
)
from moonpool.handoff.messages import (
    AbortRequest,
    DecodeRequest,
    PeerPrefix,
    PrefillRequest,
    SourceRef,
    WorkerMessage,
)
from moonpool.ids import AttemptId, Incarnation, RequestId, WorkerId, WorkerKey
from moonpool.inference.generation import Usage
from moonpool.inference.output import FinishReason, TokenRun
from moonpool.inference.request import InferenceRequest
from moonpool.latency.costs import PrefillCost
from moonpool.routing.config import PolicyName, RoutingConfig
from moonpool.routing.disagg_decider import DisaggConfig, DisaggReason
from moonpool.routing.worker_view import WorkerFits, WorkerInfo, WorkerLoad, WorkerRole
from support.requests import make_request

CONFIG = DispatchConfig(
    routing=RoutingConfig(disagg=DisaggConfig(threshold_tokens=4, busy_threshold_tokens=4))
)
IDLE = WorkerLoad(num_total_blocks=100, num_available_blocks=100)


def key(name: str, incarnation: int = 1) -> WorkerKey:
    return WorkerKey(WorkerId(name), Incarnation(str(incarnation)))


P, P2, D, D2 = key("p"), key("p2"), key("d"), key("d2")
STORE = key("store")
ROLES = {
    P: WorkerRole.PREFILL,
    P2: WorkerRole.PREFILL,
    D: WorkerRole.DECODE,
    D2: WorkerRole.DECODE,
    STORE: WorkerRole.STORE,
}
A = make_request("a", prompt=10, max_tokens=4, arrival=1.0)


def attempt(number: int = 1, request_id: str = "a") -> AttemptId:
    return AttemptId(RequestId(request_id), number)


class Router:
    """The machine, checked after every event."""

    def __init__(self, *workers: WorkerKey, config: DispatchConfig = CONFIG) -> None:
        self.machine = Dispatcher(config)
        self.now = 0.0
        self.placements: list[Placed] = []
        #: Of the last request that ended.
        self.left: tuple[PrefixLeft, ...] = ()
        for worker in workers:
            self.join(worker)

    def __call__(self, event: DispatchEvent) -> list[DispatchEffect]:
        return self._seen(self.machine.handle(event, self.now))

    def at(self, now: float) -> list[DispatchEffect]:
        self.now = now
        return self._seen(self.machine.tick(now))

    def _seen(self, effects: list[DispatchEffect]) -> list[DispatchEffect]:
        self.machine.validate()
        self.placements += [effect for effect in effects if isinstance(effect, Placed)]
        for effect in effects:
            if isinstance(effect, EndRequest):
                self.left = effect.left
        return [
            replace(effect, left=()) if isinstance(effect, EndRequest) else effect
            for effect in effects
            if not isinstance(effect, Placed)
        ]

    def join(self, worker: WorkerKey, load: WorkerLoad = IDLE) -> list[DispatchEffect]:
        role = ROLES.get(worker, WorkerRole.DECODE)
        info = WorkerInfo(key=worker, role=role, address=f"{worker.worker_id}:1", block_size=4)
        return self(WorkerJoined(info=info)) + self.load(worker, load)

    def load(self, worker: WorkerKey, load: WorkerLoad = IDLE) -> list[DispatchEffect]:
        return self(LoadReported(key=worker, load=load))

    def arrive(
        self,
        request: InferenceRequest = A,
        deadline_s: float = 60.0,
        queue_timeout_s: float = math.inf,
    ) -> list[DispatchEffect]:
        return self(
            RequestArrived(request=request, deadline_s=deadline_s, queue_timeout_s=queue_timeout_s)
        )

    def hear(self, worker: WorkerKey, message: WorkerMessage) -> list[DispatchEffect]:
        return self(WorkerMessageReceived(key=worker, message=message))

    def tokens(
        self,
        worker: WorkerKey,
        first_position: int,
        *token_ids: int,
        number: int = 1,
        finish_reason: FinishReason | None = None,
        num_cached_tokens: int | None = None,
        num_peer_tokens: int = 0,
        num_peer_held_tokens: int | None = None,
    ) -> list[DispatchEffect]:
        run = TokenRun(
            first_position=first_position, token_ids=token_ids, finish_reason=finish_reason
        )
        message = TokensReady(
            attempt_id=attempt(number),
            run=run,
            num_cached_tokens=num_cached_tokens,
            num_peer_tokens=num_peer_tokens,
            num_peer_held_tokens=num_peer_held_tokens,
        )
        return self.hear(worker, message)

    def refuse(
        self, worker: WorkerKey, reason: RefuseReason = RefuseReason.NO_BLOCKS, number: int = 1
    ) -> list[DispatchEffect]:
        return self.hear(worker, Refused(attempt_id=attempt(number), reason=reason))

    def hand_back(
        self, worker: WorkerKey, reason: HandBackReason, number: int = 1
    ) -> list[DispatchEffect]:
        return self.hear(worker, HandedBack(attempt_id=attempt(number), reason=reason))


def sent(
    number: int = 1,
    *,
    prefill: WorkerKey | None = P,
    decode: WorkerKey = D,
    request: InferenceRequest = A,
    deadline_s: float = 60.0,
) -> list[DispatchEffect]:
    """The messages of one placement."""
    source = None
    effects: list[DispatchEffect] = []
    if prefill is not None:
        source = SourceRef(key=prefill, address=f"{prefill.worker_id}:1")
        message = PrefillRequest(request=request, attempt=number, deadline_s=deadline_s)
        effects.append(SendPrefill(key=prefill, message=message))
    decode_message = DecodeRequest(
        request=request, attempt=number, source=source, deadline_s=deadline_s
    )
    return [*effects, SendDecode(key=decode, message=decode_message)]


def abort(worker: WorkerKey, number: int = 1) -> SendAbort:
    return SendAbort(key=worker, message=AbortRequest(attempt_id=attempt(number)))


def emit(
    first_position: int, *token_ids: int, finish_reason: FinishReason | None = None
) -> EmitTokens:
    run = TokenRun(first_position=first_position, token_ids=token_ids, finish_reason=finish_reason)
    return EmitTokens(request_id=RequestId("a"), run=run)


def ended(
    num_output_tokens: int,
    finish_reason: FinishReason | None = FinishReason.LENGTH,
    *,
    error_code: str | None = None,
    num_cached_tokens: int = 0,
    num_peer_tokens: int = 0,
    cached_attempt: int = 0,
    num_attempts: int = 1,
    num_failures: int = 0,
) -> EndRequest:
    usage = Usage(
        num_prompt_tokens=10,
        num_completion_tokens=num_output_tokens,
        num_cached_tokens=num_cached_tokens,
        num_peer_tokens=num_peer_tokens,
    )
    return EndRequest(
        request_id=RequestId("a"),
        finish_reason=finish_reason,
        usage=usage,
        cached_attempt=cached_attempt,
        num_attempts=num_attempts,
        num_failures=num_failures,
        error_code=error_code,
    )


@pytest.fixture
def r() -> Iterator[Router]:
    router = Router(P, D)
    yield router
    router.machine.validate()


def test_the_life_of_a_request(r: Router) -> None:
    assert r.arrive() == sent()
    assert r.tokens(P, 0, 50, num_cached_tokens=8) == [emit(0, 50)]
    assert r.tokens(D, 0, 50, num_cached_tokens=8) == []
    assert r.tokens(D, 1, 51, 52) == [emit(1, 51, 52)]
    assert r.tokens(D, 3, 53, finish_reason=FinishReason.LENGTH) == [
        emit(3, 53, finish_reason=FinishReason.LENGTH),
        ended(4, num_cached_tokens=8, cached_attempt=1),
        abort(P),
    ]
    assert r.machine.num_requests == 0


def left(worker: WorkerKey, num_tokens: int, *emitted: int) -> PrefixLeft:
    return PrefixLeft(
        key=worker, request=replace(A, emitted_token_ids=emitted), num_tokens=num_tokens
    )


def test_an_answer_leaves_all_but_its_last_token_and_a_prefill_the_prompt(r: Router) -> None:
    r.arrive()
    r.tokens(D, 0, 50, 51, 52, 53, finish_reason=FinishReason.LENGTH)
    assert r.left == (left(D, 13, 50, 51, 52, 53), left(P, 10, 50, 51, 52, 53))


def test_an_answer_of_one_token_leaves_the_prompt_where_it_was_prefilled(r: Router) -> None:
    r.arrive()
    r.tokens(P, 0, 50, finish_reason=FinishReason.STOP)
    assert r.left == (left(P, 10, 50),)


def test_a_stop_string_leaves_what_the_client_has(r: Router) -> None:
    r.arrive()
    r.tokens(D, 0, 50, 51, 52)
    r(RequestStopped(request_id=A.request_id, num_output_tokens=2))
    assert r.left == (left(D, 11, 50, 51), left(P, 10, 50, 51))


def test_a_request_that_fails_leaves_nothing_to_count_on(r: Router) -> None:
    r.arrive()
    r.tokens(D, 0, 50, 51)
    r(RequestCancelled(request_id=A.request_id))
    assert r.left == ()


def test_nothing_is_left_on_a_worker_that_was_lost(r: Router) -> None:
    r.arrive()
    r.tokens(D, 0, 50)
    r(WorkerLost(key=P))
    r.tokens(D, 1, 51, 52, 53, finish_reason=FinishReason.LENGTH)
    assert r.left == (left(D, 13, 50, 51, 52, 53),)


def test_a_request_that_stops_between_two_attempts_leaves_nothing(r: Router) -> None:
    r.arrive()
    r.tokens(D, 0, 50, 51)
    r(WorkerLost(key=D))
    r(RequestStopped(request_id=A.request_id, num_output_tokens=1))
    assert r.left == ()


def test_the_decode_workers_frames_alone_are_complete(r: Router) -> None:
    r.arrive()
    assert r.tokens(D, 0, 50) == [emit(0, 50)]
    assert r.tokens(P, 0, 50) == []


def test_a_finish_in_the_prefill_workers_frame_counts(r: Router) -> None:
    r.arrive()
    assert r.tokens(P, 0, 50, finish_reason=FinishReason.STOP) == [
        emit(0, 50, finish_reason=FinishReason.STOP),
        ended(1, FinishReason.STOP),
        abort(P),
        abort(D),
    ]


def test_no_more_tokens_than_asked_for(r: Router) -> None:
    r.arrive()
    assert r.tokens(D, 0, 50, 51, 52, 53, 54, 55) == [
        emit(0, 50, 51, 52, 53, finish_reason=FinishReason.LENGTH),
        ended(4),
        abort(P),
        abort(D),
    ]


def test_a_short_prompt_is_prefilled_where_it_is_decoded(r: Router) -> None:
    short = replace(A, prompt_token_ids=(1, 2, 3, 4))
    assert r.arrive(short) == sent(prefill=None, request=short)


def test_a_request_waits_for_workers_in_order_of_arrival() -> None:
    r = Router()
    younger = make_request("b", prompt=3, arrival=2.0)
    assert r.arrive(younger) == []
    assert r.arrive() == []
    assert r.machine.num_queued == 2
    first, second = r.join(D)
    assert isinstance(first, SendDecode)
    assert isinstance(second, SendDecode)
    assert [first.message.request.request_id, second.message.request.request_id] == ["a", "b"]


def test_a_refusal_costs_an_attempt_number_and_no_failure() -> None:
    r = Router(P, D, D2)
    r.arrive()
    assert r.refuse(D) == [abort(P), *sent(2, decode=D2)]
    assert r.refuse(D) == []
    assert r.tokens(D2, 0, 50, number=2) == [emit(0, 50)]


def test_a_refused_request_waits_for_a_frame_that_shows_room(r: Router) -> None:
    full = WorkerLoad(num_total_blocks=100, num_available_blocks=5, num_requests=3)
    r.arrive()
    assert r.refuse(D) == [abort(P)]
    assert r.load(D, full) == []
    assert r.load(D, full) == []
    assert r.load(D, replace(full, num_available_blocks=6)) == sent(2)


def test_a_refused_request_is_tried_again_after_a_while(r: Router) -> None:
    r.arrive()
    r.refuse(D)
    assert r.machine.next_wakeup(0.0) == 1.0
    assert r.at(1.0) == sent(2, deadline_s=59.0)


def test_any_event_notices_that_a_refusals_time_is_over(r: Router) -> None:
    """The timer may be late: what it would have done is done by whatever comes first."""
    r.arrive()
    r.refuse(D, RefuseReason.NO_BLOCKS)
    r.now = 1.0
    assert r(RequestCancelled(request_id=RequestId("unknown"))) == sent(2, deadline_s=59.0)


def test_a_full_prefill_worker_is_not_the_end(r: Router) -> None:
    r.arrive()
    assert r.refuse(P, RefuseReason.QUEUE_FULL) == [abort(D)]
    assert r.join(P2) == sent(2, prefill=P2)


def test_who_waits_for_a_prefill_worker_is_passed_by_who_needs_none(r: Router) -> None:
    r.arrive()
    r.refuse(P, RefuseReason.QUEUE_FULL)
    long = make_request("b", prompt=10, arrival=2.0)
    short = make_request("c", prompt=4, arrival=3.0)
    assert r.arrive(long) == []
    (local,) = r.arrive(short)
    assert isinstance(local, SendDecode)
    assert local.message.source is None
    assert r.machine.num_queued == 2
    assert r.join(P2)[:2] == sent(2, prefill=P2)


def test_the_queue_is_looked_at_only_when_there_may_be_room(r: Router) -> None:
    """A saturated router hears a report from each worker at each step."""
    looks: list[RequestId] = []

    def look(request: InferenceRequest) -> dict[WorkerKey, int]:
        looks.append(request.request_id)
        return {}

    r.machine = Dispatcher(CONFIG, match=look)
    r.join(D)
    r.join(P)
    r.arrive()
    r.refuse(P, RefuseReason.QUEUE_FULL)
    busy = replace(IDLE, num_requests=1, num_queued_tokens=50)
    r.load(P, busy)
    r.load(D)
    looks.clear()
    assert r.load(P, busy) == r.load(D) == r.load(D, replace(IDLE, num_available_blocks=90)) == []
    assert r.at(0.9) == []
    assert looks == []
    # It has a decode worker; what comes free there brings it no prefill worker.
    assert r.load(D, replace(IDLE, num_available_blocks=91)) == []
    assert looks == []
    # Nor is it looked at for another one's sake.
    assert r.arrive(make_request("b", prompt=10, arrival=2.0)) == []
    assert looks == [RequestId("b")]
    # Nobody is left to prefill it elsewhere.
    looks.clear()
    assert r(WorkerLost(key=P))[0] == sent(2, prefill=None, deadline_s=59.1)[0]
    assert looks[0] == A.request_id


def test_blocks_that_come_free_are_news_to_who_lacks_them(r: Router) -> None:
    full = replace(IDLE, num_available_blocks=2)
    assert r.load(D, full) == []
    assert r.arrive() == []
    assert r.load(D, full) == []
    assert r.load(D, replace(IDLE, num_available_blocks=3)) == sent(1)


def test_nobody_passes_who_waits_for_a_decode_worker(r: Router) -> None:
    r.arrive()
    r.refuse(D)
    assert r.arrive(make_request("b", prompt=4, arrival=2.0)) == []


def test_what_fits_nowhere_is_refused_for_good(r: Router) -> None:
    r.arrive()
    code = "prompt_too_large_for_deployment"
    assert r.refuse(D, RefuseReason.NEVER_FITS) == [abort(P), ended(0, None, error_code=code)]


def test_a_lost_decode_worker_is_replaced_with_what_was_emitted() -> None:
    r = Router(P, D, D2)
    r.arrive()
    r.tokens(D, 0, 50, 51)
    replay = replace(A, emitted_token_ids=(50, 51))
    assert r(WorkerLost(key=D)) == [abort(P), *sent(2, decode=D2, request=replay)]
    assert r.tokens(D, 2, 52) == []
    assert r.tokens(D2, 2, 52, number=2) == [emit(2, 52)]
    r.hear(D2, HandedBack(attempt_id=attempt(2), reason=HandBackReason.PREEMPTED))
    assert r(RequestCancelled(request_id=RequestId("a")))[-1] == ended(
        3, None, error_code="cancelled", num_attempts=2, num_failures=1
    )


def test_the_decode_worker_decides_about_a_lost_prefill_worker() -> None:
    r = Router(P, P2, D)
    r.arrive()
    assert r(WorkerLost(key=P)) == []
    assert r.hand_back(D, HandBackReason.SOURCE_LOST) == sent(2, prefill=P2)


def test_three_failures_end_a_request(r: Router) -> None:
    r.arrive()
    assert r.hand_back(D, HandBackReason.TOO_LONG_TO_REPAIR) == [abort(P), *sent(2)]
    assert r.hand_back(D, HandBackReason.TOO_LONG_TO_REPAIR, 2) == [abort(P, 2), *sent(3)]
    assert r.hand_back(D, HandBackReason.SOURCE_LOST, 3) == [
        ended(0, None, error_code="worker_lost", num_attempts=3, num_failures=3),
        abort(P, 3),
    ]


def test_a_request_that_two_workers_died_of_is_poison() -> None:
    r = Router(P, D, D2)
    r.arrive()
    r(WorkerLost(key=D))
    assert r(WorkerLost(key=D2)) == [
        ended(0, None, error_code="poison_request", num_attempts=2, num_failures=1),
        abort(P, 2),
    ]


def test_both_workers_of_an_attempt_lost_at_once_are_one_death() -> None:
    r = Router(P, P2, D, D2)
    r.arrive()
    assert r(WorkerLost(key=P)) == []
    assert r(WorkerLost(key=D)) == sent(2, prefill=P2, decode=D2)


def test_a_failed_source_is_avoided_for_five_seconds() -> None:
    r = Router(P, P2, D)
    r.arrive()
    assert r.hand_back(D, HandBackReason.TOO_LONG_TO_REPAIR) == [abort(P), *sent(2, prefill=P2)]
    assert r.hand_back(D, HandBackReason.REVOKED, 2) == [abort(P2, 2)]
    r.now = 5.0
    assert r.load(D)[-1:] == sent(3, prefill=P, deadline_s=55.0)[-1:]


def test_a_request_does_not_go_back_to_a_source_that_it_lost() -> None:
    """A frozen prefill worker is there until its silence is noticed; three tries would be lost."""
    r = Router(P, D)
    r.arrive()
    assert r.hand_back(D, HandBackReason.SOURCE_LOST) == [abort(P), *sent(2, prefill=None)]
    placement = r.placements[-1].placement
    assert placement.decision.reason is DisaggReason.NO_PREFILL_WORKER
    # Others still use it.
    b = make_request("b", prompt=10, max_tokens=4, arrival=2.0)
    assert r.arrive(b) == sent(prefill=P, request=b)


def test_a_contradiction_of_what_the_client_has_starts_anew(r: Router) -> None:
    r.arrive()
    r.tokens(P, 0, 50)
    replay = replace(A, emitted_token_ids=(50,))
    assert r.tokens(D, 0, 60) == [abort(P), abort(D), *sent(2, request=replay)]


def test_a_gap_starts_anew(r: Router) -> None:
    r.arrive()
    assert r.tokens(D, 1, 51) == [abort(P), abort(D), *sent(2)]


def test_a_cancelled_request_is_aborted_everywhere(r: Router) -> None:
    r.arrive()
    assert r(RequestCancelled(request_id=RequestId("a"))) == [
        ended(0, None, error_code="cancelled"),
        abort(P),
        abort(D),
    ]
    assert r(RequestCancelled(request_id=RequestId("a"))) == []
    assert r.tokens(D, 0, 50) == []


def test_a_stop_string_ends_the_answer_where_it_was_found(r: Router) -> None:
    r.arrive()
    r.tokens(D, 0, 50, 51, 52)
    assert r(RequestStopped(request_id=RequestId("a"), num_output_tokens=2)) == [
        ended(2, FinishReason.STOP),
        abort(P),
        abort(D),
    ]


@pytest.mark.parametrize("is_queued", [True, False])
def test_a_deadline_ends_a_request(is_queued: bool) -> None:
    r = Router() if is_queued else Router(P, D)
    r.arrive(deadline_s=7.0)
    assert r.machine.next_wakeup(0.0) == 7.0
    assert r.at(6.9) == []
    end = ended(0, None, error_code="deadline_exceeded", num_attempts=0 if is_queued else 1)
    assert r.at(7.0) == [end, *([] if is_queued else [abort(P), abort(D)])]
    assert r.machine.next_wakeup(7.0) is None


def timed_out(num_attempts: int) -> EndRequest:
    return ended(0, None, error_code="deadline_exceeded", num_attempts=num_attempts)


def test_nobody_waits_for_workers_past_the_queue_deadline() -> None:
    r = Router()
    r.arrive(queue_timeout_s=3.0)
    assert r.machine.next_wakeup(0.0) == 3.0
    assert r.at(2.9) == []
    assert r.at(3.0) == [timed_out(num_attempts=0)]
    assert r.machine.next_wakeup(3.0) is None


def test_a_request_without_time_is_not_placed(r: Router) -> None:
    assert r.arrive(deadline_s=0.0) == [timed_out(num_attempts=0)]


def test_a_refused_request_waits_no_longer_than_one_that_was_never_placed() -> None:
    r = Router(P, D)
    r.arrive(queue_timeout_s=0.5)
    assert r.refuse(D) == [abort(P)]
    assert r.at(0.5) == [timed_out(num_attempts=1)]


def test_a_request_refused_after_its_queue_deadline_does_not_wait_again() -> None:
    r = Router(P, D, D2)
    r.arrive(queue_timeout_s=3.0)
    # It is on its workers then.
    assert r.at(3.0) == []
    # Another one has room: that is no wait.
    assert r.refuse(D) == [abort(P), *sent(2, decode=D2, deadline_s=57.0)]
    assert r.refuse(D2, number=2) == [abort(P, 2)]
    assert r.machine.next_wakeup(3.0) == 3.0
    assert r.at(3.0) == [timed_out(num_attempts=2)]


def test_a_request_with_a_token_waits_up_to_its_own_deadline() -> None:
    r = Router(P, D)
    r.arrive(queue_timeout_s=3.0)
    r.tokens(P, 0, 50)
    r.refuse(D)
    replay = replace(A, emitted_token_ids=(50,))
    assert r.at(3.0) == sent(2, request=replay, deadline_s=57.0)
    r.refuse(D, number=2)
    assert r.machine.next_wakeup(3.0) == 4.0


def test_output_that_is_not_finite_is_our_fault(r: Router) -> None:
    r.arrive()
    assert r.tokens(P, 0, finish_reason=FinishReason.INVALID_OUTPUT) == [
        ended(0, None, error_code="model_output_invalid"),
        abort(P),
        abort(D),
    ]


def test_a_draining_router_takes_nothing_new(r: Router) -> None:
    r.arrive()
    assert r(DrainRequested()) == []
    other = make_request("b", prompt=10)
    (end,) = r.arrive(other)
    assert isinstance(end, EndRequest)
    assert end.error_code == "draining"
    assert r.tokens(D, 0, 50) == [emit(0, 50)]


def test_a_full_queue_refuses() -> None:
    r = Router(config=replace(CONFIG, max_queued_requests=1))
    r.arrive()
    (end,) = r.arrive(make_request("b", prompt=10))
    assert isinstance(end, EndRequest)
    assert end.error_code == "server_overloaded"


def test_a_tenant_takes_no_more_than_its_share_of_the_queue() -> None:
    def asking(request_id: str, tenant: str) -> InferenceRequest:
        return replace(make_request(request_id, prompt=10), tenant=tenant)

    r = Router(config=replace(CONFIG, max_queued_requests=3, max_queued_per_tenant=2))
    assert [r.arrive(asking(name, "flood")) for name in "ab"] == [[], []]
    (end,) = r.arrive(asking("c", "flood"))
    assert isinstance(end, EndRequest)
    assert end.error_code == "rate_limit_exceeded"
    assert r.arrive(asking("d", "other")) == []
    r(RequestCancelled(request_id=RequestId("a")))
    assert r.arrive(asking("e", "flood")) == []
    (end,) = r.arrive(asking("f", "other"))
    assert isinstance(end, EndRequest)
    assert end.error_code == "server_overloaded"


def test_a_placement_says_what_ended_the_attempt_before(r: Router) -> None:
    def last_end() -> RetryReason | None:
        return r.placements[-1].placement.previous_end

    r.arrive()
    assert last_end() is None
    r.refuse(D)
    r.load(D)
    assert last_end() is RetryReason.REFUSED
    r(WorkerLost(key=D))
    r.join(key("lost"))
    assert last_end() is RetryReason.LOST
    r.refuse(key("lost"), number=3)
    r.load(key("lost"))
    # Not by its words, in which the worker's name stands.
    assert r.placements[-1].placement.previous_outcome.startswith("lost refused")
    assert last_end() is RetryReason.REFUSED


def test_a_cluster_that_always_refuses_is_not_asked_for_ever() -> None:
    r = Router(P, D, config=replace(CONFIG, max_attempts=2))
    r.arrive()
    r.refuse(D)
    assert r.load(D) == sent(2)
    assert r.refuse(D, number=2) == [
        abort(P, 2),
        ended(0, None, error_code="server_overloaded", num_attempts=2),
    ]


def test_load_spreads_over_workers_between_two_reports() -> None:
    r = Router(P, P2, D, D2)
    r.arrive()
    assert [effect.key for effect in r.arrive(make_request("b", prompt=10, arrival=2.0))] == [
        P2,
        D2,
    ]
    record = r.placements[-1].placement
    assert record.decode.key == D2
    assert [record.decode.term(worker, "num_requests") for worker in (D, D2)] == [1, 0]
    assert record.decision.num_uncached_tokens == 10
    assert record.prefill is not None
    assert [record.prefill.term(worker, "num_queued_tokens") for worker in (P, P2)] == [10, 0]


def test_a_fork_lives_on_its_own(r: Router) -> None:
    r.arrive()
    fork = r.machine.fork()
    assert fork.key() == r.machine.key()
    fork.handle(RequestCancelled(request_id=RequestId("a")), 0.0)
    fork.validate()
    assert fork.key() != r.machine.key()
    assert r.tokens(D, 0, 50) == [emit(0, 50)]
    fork = r.machine.fork()
    assert r.tokens(D, 1, 51) == [emit(1, 51)]
    assert fork.key() != r.machine.key()


def test_workers_are_told_of_the_peer_that_holds_more() -> None:
    r = Router()
    r.machine = Dispatcher(CONFIG, match=lambda request: {D: 4, P2: 8})
    for worker in (P, D):
        r.join(worker)
    r.join(P2, replace(IDLE, num_queued_tokens=10_000))
    to_prefill, to_decode = r.arrive()
    peer = PeerPrefix(key=P2, address="p2:1", num_tokens=8)
    assert isinstance(to_prefill, SendPrefill)
    assert isinstance(to_decode, SendDecode)
    assert (to_prefill.key, to_prefill.message.peer) == (P, peer)
    assert to_decode.message.source == SourceRef(key=P, address="p:1")
    assert to_decode.message.peer is None
    r.join(P2, replace(IDLE, num_queued_tokens=10_000))
    # 6 tokens: the decode worker has 4, and may have no more of a prompt of 6 than these.
    (local,) = r.arrive(make_request("b", prompt=6, arrival=2.0))
    assert isinstance(local, SendDecode)
    assert (local.message.source, local.message.peer) == (None, None)
    r.machine = Dispatcher(CONFIG, match=lambda request: {P2: 8})
    r.join(D)
    r.join(P2, replace(IDLE, is_draining=True))
    (local,) = r.arrive()
    assert isinstance(local, SendDecode)
    # Whoever drains is neither asked to prefill nor read from.
    assert (local.message.source, local.message.peer) == (None, None)


def usage(effects: list[DispatchEffect]) -> tuple[int, int]:
    """Cached tokens, and those of them that came from a peer, of the request that ended."""
    (end,) = (effect for effect in effects if isinstance(effect, EndRequest))
    return end.usage.num_cached_tokens, end.usage.num_peer_tokens


def test_cached_tokens_are_those_of_the_worker_that_prefilled(r: Router) -> None:
    r.arrive()
    r.tokens(P, 0, 50, num_cached_tokens=8, num_peer_tokens=4)
    # The decode worker lost a part of what it read, and computed it again.
    r.tokens(D, 0, 50, num_cached_tokens=6, num_peer_tokens=2)
    assert usage(r.tokens(D, 1, 51, 52, 53)) == (6, 2)


def stored(effects: list[DispatchEffect]) -> tuple[int, int, int]:
    """Cached tokens by where they lay, of the request that ended: device, peer, store."""
    (end,) = (effect for effect in effects if isinstance(effect, EndRequest))
    by_source = end.usage.num_cached_tokens_by_source
    assert sum(by_source.values()) == end.usage.num_cached_tokens
    return by_source["device"], by_source["peer"], by_source["store"]


def test_a_store_is_read_from_and_never_asked_to_compute() -> None:
    r = Router()
    r.machine = Dispatcher(CONFIG, match=lambda request: {STORE: 8})
    for worker in (P, D, STORE):
        r.join(worker)
    to_prefill, to_decode = r.arrive()
    assert isinstance(to_prefill, SendPrefill)
    assert isinstance(to_decode, SendDecode)
    assert (to_prefill.key, to_decode.key) == (P, D)
    peer = PeerPrefix(key=STORE, address="store:1", num_tokens=8, is_store=True)
    assert to_prefill.message.peer == peer
    r.tokens(P, 0, 50, num_cached_tokens=8, num_peer_tokens=8)
    # A part of it was lost on the way to the decode worker, and computed again.
    assert stored(r.tokens(D, 0, 50, 51, 52, 53, num_cached_tokens=6, num_peer_tokens=6)) == (
        0,
        0,
        6,
    )


def test_a_store_that_is_lost_ends_no_attempt() -> None:
    r = Router()
    r.machine = Dispatcher(CONFIG, match=lambda request: {STORE: 8})
    for worker in (P, D, STORE):
        r.join(worker)
    r.arrive()
    assert r(WorkerLost(key=STORE)) == []
    # It had been read before: where from is known from the placement.
    assert stored(r.tokens(D, 0, 50, 51, 52, 53, num_cached_tokens=8, num_peer_tokens=8)) == (
        0,
        0,
        8,
    )
    to_prefill, _ = r.arrive(make_request("b", prompt=10, arrival=2.0))
    assert isinstance(to_prefill, SendPrefill)
    assert to_prefill.message.peer is None


def test_only_stores_are_nobody() -> None:
    r = Router(STORE)
    assert r.arrive() == []
    assert r.machine.num_queued == 1
    assert r.join(D) == sent(prefill=None)


def test_what_one_attempt_found_and_the_next_computed_was_computed() -> None:
    r = Router(P, D, D2)
    r.arrive()
    assert r.tokens(D, 0, 50, num_cached_tokens=8) == [emit(0, 50)]
    r(WorkerLost(key=D))
    r.tokens(D2, 1, 51, number=2, num_cached_tokens=4, num_peer_tokens=4)
    assert usage(r.tokens(D2, 2, 52, 53, number=2)) == (4, 4)


def test_what_an_attempt_computed_is_not_cached_for_the_next() -> None:
    r = Router(P, D, D2)
    r.arrive()
    assert r.tokens(D, 0, 50, num_cached_tokens=0) == [emit(0, 50)]
    r(WorkerLost(key=D))
    # Its replay finds what it has left behind, answer and all: never more than the prompt.
    r.tokens(D2, 1, 51, number=2, num_cached_tokens=11)
    assert usage(r.tokens(D2, 2, 52, 53, number=2)) == (0, 0)


@pytest.mark.parametrize(
    ("first", "second", "counted"),
    [
        # The first one computed more, for want of a peer that held it: that is what is told.
        ((0, 4), (8, None), (1, 4)),
        # The second one did, though its peer held it.
        ((8, None), (4, None), (2, None)),
        ((8, 8), (4, 6), (2, 6)),
        # Both found as much: the first one's word stands.
        ((4, None), (4, 4), (1, None)),
    ],
)
def test_the_attempt_that_computed_the_most_tells_what_its_peer_held(
    first: tuple[int, int | None], second: tuple[int, int | None], counted: tuple[int, int | None]
) -> None:
    r = Router(P, D, D2)
    r.arrive()
    (cached, held), (cached_again, held_again) = first, second
    r.tokens(D, 0, 50, num_cached_tokens=cached, num_peer_held_tokens=held)
    r(WorkerLost(key=D))
    r.tokens(D2, 1, 51, number=2, num_cached_tokens=cached_again, num_peer_held_tokens=held_again)
    (end,) = (
        effect for effect in r.tokens(D2, 2, 52, 53, number=2) if isinstance(effect, EndRequest)
    )
    assert (end.cached_attempt, end.num_peer_held_tokens) == counted


def test_an_attempt_that_ends_in_silence_may_have_computed() -> None:
    r = Router()
    r.machine = Dispatcher(CONFIG, match=lambda request: {P: 4})
    for worker in (P, D, D2):
        r.join(worker)
    r.arrive()
    # The prefill worker may be at work by then, and what it has done is found by the next attempt.
    r.refuse(D)
    assert usage(r.tokens(D2, 0, 50, 51, 52, 53, number=2, num_cached_tokens=8)) == (4, 0)


def test_a_refusal_of_the_prefill_worker_computes_nothing() -> None:
    r = Router(P, P2, D)
    r.arrive()
    r.refuse(P, RefuseReason.QUEUE_FULL)
    assert usage(r.tokens(D, 0, 50, 51, 52, 53, number=2, num_cached_tokens=8)) == (8, 0)


def test_what_a_worker_has_learnt_holds_until_it_tells_more() -> None:
    r = Router(P, D)
    fits = WorkerFits(
        prefill=PrefillCost(base_s=0.0, per_token_s=1.0, per_work_s=0.0, max_step_tokens=8)
    )
    r.load(P, replace(IDLE, fits=fits))
    r.load(P)
    r.arrive()
    (placed,) = r.placements
    assert placed.placement.record.is_measured
    assert placed.placement.plan.compute_s == 10.0


def test_a_local_prefill_counts_as_queued_until_its_first_token() -> None:
    r = Router(D, D2)
    config = DispatchConfig(routing=RoutingConfig(policy=PolicyName.LEAST_LOADED))
    r.machine = Dispatcher(config)
    for worker in (D, D2):
        r.join(worker)
    r.arrive()
    r.arrive(make_request("b", prompt=10, arrival=2.0))
    r.arrive(make_request("c", prompt=10, arrival=3.0))
    queued = [
        r.placements[-1].placement.decode.term(worker, "num_queued_tokens") for worker in (D, D2)
    ]
    assert queued == [10, 10]
    r.tokens(D, 0, 50)
    r.arrive(make_request("d", prompt=10, arrival=4.0))
    queued = [
        r.placements[-1].placement.decode.term(worker, "num_queued_tokens") for worker in (D, D2)
    ]
    assert queued == [10, 10]
    assert [p.placement.decode.key for p in r.placements] == [D, D2, D, D2]


def test_the_newest_decisions_are_kept() -> None:
    r = Router(P, D)
    r.arrive()
    r.refuse(P, RefuseReason.QUEUE_FULL)
    r.join(P2)
    first, second = r.machine.decisions(A.request_id)
    assert (first.attempt, second.attempt) == (1, 2)
    assert second.previous_outcome == "p refused: queue_full"
    assert r.machine.decisions(RequestId("unknown")) == ()


def test_round_robin_takes_turns_over_requests() -> None:
    r = Router()
    r.machine = Dispatcher(DispatchConfig(routing=RoutingConfig(policy=PolicyName.ROUND_ROBIN)))
    for worker in (D, D2):
        r.join(worker)
    for number in range(4):
        r.arrive(make_request(f"r{number}", prompt=10, arrival=float(number)))
    assert [p.placement.decode.key for p in r.placements] == [D, D2, D, D2]
    assert r.machine.fork().key() == r.machine.key()
