"""When blocks or slots run short: headroom, revocation, preemption, hand-back, and who gives way."""

from __future__ import annotations

from moonpool.core.protocol import (
    Abort,
    Accepted,
    Arrived,
    HandBackReason,
    HandedBack,
    PrefillStarted,
    ReadEnded,
    Refused,
    RefuseReason,
    Release,
    Reserved,
    Revoked,
    TokensReady,
)
from moonpool.inference.request import InferenceRequest
from support.core_cases import (
    answers,
    decode_here,
    ident,
    make_config,
    make_worker,
    prefill,
    reserve,
    rows,
)
from support.core_cluster import CoreCluster, Tracked
from support.fake_runner import answer_alone
from support.requests import make_request


def old(**kwargs: int) -> InferenceRequest:
    return make_request("old", arrival=1.0, **kwargs)


def young(**kwargs: int) -> InferenceRequest:
    return make_request("young", arrival=2.0, **kwargs)


# -- acceptance --


def test_growth_of_what_runs_is_kept_free() -> None:
    # 8 blocks; the running one holds 2 and has 9 tokens: 8 more would take 3 blocks.
    for num_tokens, expected in ((12, Reserved), (13, Refused)):
        worker = make_worker(num_blocks=8, headroom_tokens=8)
        worker.step(decode_here(old(prompt=8, max_tokens=20)))
        frame = worker.step(reserve(young(prompt=num_tokens, max_tokens=4)))
        assert type(frame.replies[-1]) is expected


def test_headroom_is_capped_by_what_may_still_be_drawn() -> None:
    worker = make_worker(num_blocks=8, headroom_tokens=8)
    # 8 tokens of prompt and 2 of answer, the last of which is never computed: one more block.
    worker.step(decode_here(old(prompt=8, max_tokens=2)))
    frame = worker.step(reserve(young(prompt=20)))
    assert isinstance(frame.replies[-1], Reserved)


def test_a_reservation_counts_what_older_queued_requests_were_promised() -> None:
    for queued, asking, expected in ((old, young, Refused), (young, old, Reserved)):
        worker = make_worker(num_blocks=8, max_queued_steps=9)
        worker.step(prefill(make_request("first", prompt=16, arrival=0.0)))
        # 4 blocks are left, 3 of them promised.
        frame = worker.step(prefill(queued(prompt=12)), reserve(asking(prompt=8)))
        replies = {reply.attempt_id: type(reply) for reply in frame.replies[1:3]}
        assert replies[ident(queued().request_id)] is Accepted
        assert replies[ident(asking().request_id)] is expected


# -- revocation --


def test_an_older_prefill_revokes_and_starts_when_the_reads_have_ended() -> None:
    worker = make_worker(num_blocks=6)
    worker.step(reserve(young(prompt=16)))
    frame = worker.step(prefill(old(prompt=16)))
    assert frame.replies == (
        Accepted(attempt_id=ident("old")),
        Revoked(attempt_id=ident("young")),
    )
    assert frame.step == 0
    assert (frame.ledger.num_waiting, frame.ledger.num_quarantined) == (1, 1)
    frame = worker.step(ReadEnded(attempt_id=ident("young")))
    assert isinstance(frame.replies[0], PrefillStarted)
    assert frame.step == 1


def test_an_older_reservation_revokes_for_its_next_attempt() -> None:
    worker = make_worker(num_blocks=6)
    worker.step(reserve(young(prompt=16)))
    frame = worker.step(reserve(old(prompt=16)))
    assert frame.replies == (
        Revoked(attempt_id=ident("young")),
        Refused(attempt_id=ident("old"), reason=RefuseReason.NO_BLOCKS),
    )
    # What is on its way out is not asked for twice.
    frame = worker.step(reserve(old(prompt=16), attempt=2))
    assert frame.replies == (Refused(attempt_id=ident("old", 2), reason=RefuseReason.NO_BLOCKS),)
    frame = worker.step(ReadEnded(attempt_id=ident("young")), reserve(old(prompt=16), attempt=3))
    assert [type(reply) for reply in frame.replies] == [Reserved]


def test_nobody_revokes_an_older_reservation_or_one_that_does_not_help() -> None:
    worker = make_worker(num_blocks=6)
    worker.step(reserve(old(prompt=16)))
    frame = worker.step(reserve(young(prompt=16)), prefill(young(prompt=16)))
    assert frame.replies == (
        Refused(attempt_id=ident("young"), reason=RefuseReason.NO_BLOCKS),
        Refused(attempt_id=ident("young"), reason=RefuseReason.NO_BLOCKS),
    )

    worker = make_worker(num_blocks=6)
    worker.step(prefill(make_request("held", prompt=12)))
    worker.step(reserve(young(prompt=8)))
    frame = worker.step(reserve(old(prompt=20)))
    assert Refused(attempt_id=ident("old"), reason=RefuseReason.NO_BLOCKS) in frame.replies
    assert frame.ledger.num_reserved == 1


def test_arrival_that_crosses_a_revocation_ends_the_read() -> None:
    worker = make_worker(num_blocks=6)
    worker.step(reserve(young(prompt=16)))
    worker.step(prefill(old(prompt=16)))
    frame = worker.step(Arrived(attempt_id=ident("young"), num_tokens=16, first_token=1))
    assert isinstance(frame.replies[0], PrefillStarted)
    assert frame.ledger.num_quarantined == 0


def test_an_older_decode_takes_a_younger_reservations_slot() -> None:
    worker = make_worker(max_num_seqs=1)
    worker.step(reserve(young(prompt=4)))
    frame = worker.step(reserve(old(prompt=4)))
    assert [type(reply) for reply in frame.replies] == [Reserved, Revoked]
    frame = worker.step(reserve(young(prompt=4), attempt=2))
    assert frame.replies == (Refused(attempt_id=ident("young", 2), reason=RefuseReason.NO_SLOTS),)


# -- growth --


def test_growth_revokes_and_waits_for_the_reads() -> None:
    worker = make_worker(num_blocks=4, headroom_tokens=0)
    request = old(prompt=4, max_tokens=6)
    worker.step(decode_here(request))
    frame = worker.step(reserve(young(prompt=8)))
    assert isinstance(frame.replies[-1], Reserved)
    # Three blocks are taken, the fourth goes at position 4; position 8 needs a fifth.
    for _ in range(3):
        assert worker.step().step
    frame = worker.step()
    assert frame.replies[-1] == Revoked(attempt_id=ident("young"))
    assert (frame.step, frame.ledger.num_running) == (0, 1)
    assert worker.step().step == 0
    replies = [r for f in worker.frames for r in f.replies]
    replies += worker.run_until_idle(ReadEnded(attempt_id=ident("young")))
    assert answers(replies) == {"old": answer_alone(request, max_model_len=64)[0]}


def test_growth_preempts_the_youngest_which_comes_back() -> None:
    worker = make_worker(num_blocks=6, headroom_tokens=0)
    requests = [
        make_request("a", prompt=7, max_tokens=10, arrival=1.0),
        make_request("b", prompt=7, max_tokens=10, arrival=2.0),
        make_request("c", prompt=7, max_tokens=10, arrival=3.0),
    ]
    replies = worker.run_until_idle(*map(decode_here, requests))
    assert sum(frame.num_preemptions for frame in worker.frames) >= 2
    assert answers(replies) == {
        request.request_id: answer_alone(request, max_model_len=64)[0] for request in requests
    }
    assert worker.core.ledger().is_quiet
    # The oldest was never held up: it drew one token in each of the first steps.
    assert [row.position for plan in worker.runner.plans for row in rows(plan)[:1]][:10] == list(
        range(10)
    )


def test_a_preempted_request_with_a_source_is_handed_back_if_too_much_is_lost() -> None:
    for local_prefill_tokens, is_handed_back in ((3, True), (16, False)):
        worker = make_worker(
            num_blocks=4, headroom_tokens=0, local_prefill_tokens=local_prefill_tokens
        )
        first = old(prompt=7, max_tokens=8)
        worker.step(decode_here(first))
        # All that it read is in a block that is not full: nothing of it stays cached.
        worker.step(reserve(young(prompt=7, max_tokens=6)))
        arrived = Arrived(attempt_id=ident("young"), num_tokens=7, first_token=5)
        replies = worker.run_until_idle(arrived)
        handed_back = HandedBack(attempt_id=ident("young"), reason=HandBackReason.PREEMPTED)
        assert (handed_back in replies) is is_handed_back
        told = [
            reply.num_cached_tokens
            for reply in replies
            if isinstance(reply, TokensReady)
            and reply.attempt_id == ident("young")
            and reply.num_cached_tokens is not None
        ]
        # What it computed again after all was not cached.
        assert told == ([7] if is_handed_back else [7, 0])
        assert sum(frame.num_preemptions for frame in worker.frames) > 0
        assert worker.core.ledger().is_quiet


def test_the_youngest_gives_way_itself() -> None:
    worker = make_worker(num_blocks=4, headroom_tokens=0)
    # The older needs no more blocks, and a held prefill takes one.
    worker.step(prefill(make_request("held", prompt=4, arrival=0.0)))
    request = young(prompt=4, max_tokens=10)
    worker.step(reserve(old(prompt=4)), decode_here(request))
    while worker.core.ledger().num_running:
        worker.step()
    ledger = worker.core.ledger()
    assert (ledger.num_waiting, ledger.num_reserved, ledger.num_prefills) == (1, 1, 1)
    replies = [r for f in worker.frames for r in f.replies]
    replies += worker.run_until_idle(
        Abort(attempt_id=ident("old")),
        ReadEnded(attempt_id=ident("old")),
        Release(attempt_id=ident("held")),
    )
    assert answers(replies) == {"young": answer_alone(request, max_model_len=64)[0]}


# -- two workers of role 'both' --


def test_two_requests_that_cross_on_pools_of_one_request_both_end() -> None:
    cluster = CoreCluster(make_config(num_blocks=3, local_prefill_tokens=0, headroom_tokens=0), 2)
    requests = [old(prompt=8, max_tokens=4), young(prompt=8, max_tokens=4)]
    for request in requests:
        cluster.submit(request)

    def route(tracked: Tracked) -> tuple[int, int]:
        target = 0 if tracked.request.request_id == "old" else 1
        return target, 1 - target

    # Each has reserved on one worker when the other's prefill comes there.
    first, second = cluster.requests.values()
    cluster.place(second, *route(second))
    cluster.step(1)
    cluster.place(first, *route(first))
    cluster.step(0)
    assert [worker.core.ledger().num_reserved for worker in cluster.workers] == [1, 1]
    cluster.settle(route)
    # The older has got its way at once.
    assert first.attempt == 1
    assert second.attempt > 1
    for request in requests:
        assert (
            cluster.requests[request.request_id].answer
            == answer_alone(request, max_model_len=64)[0]
        )
    cluster.check_quiet()
