"""Concurrent requests for one cold prefix: one makes it, the others wait for it and hold nothing."""

from __future__ import annotations

import pytest

from moonpool.core.protocol import (
    Abort,
    Accepted,
    BlocksFetched,
    ChunkPlanned,
    Command,
    Drain,
    FetchEnded,
    FetchReserved,
    PrefillDone,
    PrefillFailed,
    PrefillStarted,
    ReadEnded,
    Release,
    Revoked,
)
from moonpool.inference.request import InferenceRequest
from support.core_cases import (
    answers,
    decode_here,
    fetch,
    ident,
    make_worker,
    prefill,
    reserve,
)
from support.core_cluster import Worker
from support.fake_runner import answer_alone
from support.requests import make_request

PREFIX = list(range(100, 124))


def sharing(
    name: str, arrival: float, *, own: int = 3, num_shared: int = 24, max_tokens: int = 3
) -> InferenceRequest:
    """A request that begins with the common prefix and goes on with `own` tokens of its own."""
    suffix = [sum(name.encode()) + i for i in range(own)]
    return make_request(
        name, prompt=PREFIX[:num_shared] + suffix, arrival=arrival, max_tokens=max_tokens
    )


def make_slow_worker(num_blocks: int = 64, **limits: int) -> Worker:
    """Computes two blocks a step."""
    return make_worker(
        num_blocks=num_blocks, max_num_batched_tokens=8, max_queued_steps=99, **limits
    )


def num_computed_tokens(worker: Worker) -> int:
    return sum(plan.num_tokens for plan in worker.runner.plans)


def answer(request: InferenceRequest) -> list[int]:
    return answer_alone(request, max_model_len=64)[0]


def test_one_computes_and_the_others_wait_without_a_block() -> None:
    worker = make_slow_worker()
    first, second, third = requests = [sharing(f"r{i}", float(i)) for i in range(3)]
    frame = worker.step(*map(prefill, requests))
    assert frame.replies == (
        *(Accepted(attempt_id=ident(request.request_id)) for request in requests),
        PrefillStarted(attempt_id=ident("r0"), num_cached_tokens=0, block_ids=tuple(range(7))),
        ChunkPlanned(attempt_id=ident("r0"), start=0, end=8),
    )
    assert (frame.ledger.num_waiting, frame.ledger.num_referenced) == (2, 7)
    # 19 tokens of the first are left; of each other three are its own.
    assert frame.num_queued_tokens == 19 + 3 + 3
    replies = worker.run_until_idle()
    done = {r.attempt_id: r for r in replies if isinstance(r, PrefillDone)}
    for request in (second, third):
        assert done[ident(request.request_id)].num_cached_tokens == 24
        assert done[ident(request.request_id)].first_token == answer(request)[0]
    assert num_computed_tokens(worker) == len(first.prompt_token_ids) + 3 + 3


def test_a_follower_goes_as_soon_as_what_it_lacks_is_made() -> None:
    worker = make_slow_worker()
    worker.step(prefill(sharing("long", 1.0, own=20)))
    worker.step(prefill(sharing("short", 0.5, num_shared=8)))
    # Two blocks are made by now, and it is the older one.
    frame = worker.step()
    assert PrefillStarted(attempt_id=ident("short"), num_cached_tokens=8, block_ids=(0, 1, 11)) in (
        worker.frames[-2].replies + frame.replies
    )


def test_followers_of_a_follower_wait_for_it_in_turn() -> None:
    worker = make_slow_worker()
    long = make_request("long", prompt=[*PREFIX, *range(8)], arrival=2.0)
    longer = make_request("longer", prompt=[*PREFIX, *range(8), 9], arrival=3.0)
    first = sharing("first", 1.0)
    replies = worker.run_until_idle(*map(prefill, (longer, first, long)))
    done = {r.attempt_id: r for r in replies if isinstance(r, PrefillDone)}
    assert done[ident("long")].num_cached_tokens == 24
    assert done[ident("longer")].num_cached_tokens == 32
    assert num_computed_tokens(worker) == 27 + 8 + 1


def test_others_go_past_a_follower() -> None:
    worker = make_slow_worker()
    worker.step(prefill(sharing("first", 1.0)), prefill(sharing("follower", 2.0)))
    other = make_request("other", prompt=5, arrival=3.0)
    worker.step(prefill(other), prefill(make_request("last", prompt=5, arrival=4.0)))
    frame = worker.step()
    frame = worker.step()
    # The first has ended its prompt by now; the follower comes before the younger ones.
    planned = [r.attempt_id for r in frame.replies if isinstance(r, ChunkPlanned)]
    assert planned[0] == ident("first")
    replies = worker.run_until_idle()
    assert {r.attempt_id for r in replies if isinstance(r, PrefillDone)} == {
        ident(name) for name in ("first", "follower", "other", "last")
    }


def test_a_younger_one_runs_while_an_older_one_follows() -> None:
    worker = make_worker(num_blocks=64, max_queued_steps=99)
    follower, other = sharing("follower", 2.0), make_request("other", prompt=5, arrival=3.0)
    (_, reply) = worker.step(prefill(sharing("leader", 1.0), peer=24)).replies
    frame = worker.step(prefill(follower), prefill(other))
    assert [r.attempt_id for r in frame.replies if isinstance(r, PrefillStarted)] == [
        ident("other")
    ]
    assert isinstance(reply, FetchReserved)


def test_tokens_and_blocks_that_another_makes_are_not_asked_for_twice() -> None:
    """Ten requests of seven blocks in a pool of twenty: with one prefix they have room."""
    for num_shared, num_accepted in ((24, 10), (0, 4)):
        worker = make_slow_worker(num_blocks=20)
        own = 27 - num_shared
        frame = worker.step(
            *(
                prefill(sharing(f"r{i}", float(i), own=own, num_shared=num_shared, max_tokens=1))
                for i in range(10)
            )
        )
        accepted = [reply for reply in frame.replies if isinstance(reply, Accepted)]
        assert len(accepted) >= num_accepted if num_shared else len(accepted) <= num_accepted


# -- the leader ends --


@pytest.mark.parametrize(
    "end",
    [
        (Abort(attempt_id=ident("leader")),),
        (prefill(make_request("leader", prompt=[9] * 5, arrival=1.0), attempt=2),),
    ],
    ids=["aborted", "replaced"],
)
def test_when_the_leader_ends_the_oldest_follower_leads(end: tuple[Command, ...]) -> None:
    worker = make_slow_worker()
    young, middle = sharing("young", 3.0), sharing("middle", 2.0)
    worker.step(prefill(sharing("leader", 1.0)), prefill(young), prefill(middle))
    # Its first two blocks are made, and are not made again.
    frame = worker.step(*end)
    started = [reply for reply in frame.replies if isinstance(reply, PrefillStarted)]
    assert [(r.attempt_id, r.num_cached_tokens) for r in started][-1] == (ident("middle"), 8)
    assert frame.ledger.num_waiting == 1
    replies = worker.run_until_idle()
    done = {r.attempt_id: r for r in replies if isinstance(r, PrefillDone)}
    assert done[ident("middle")].first_token == answer(middle)[0]
    assert done[ident("young")].first_token == answer(young)[0]
    assert done[ident("young")].num_cached_tokens == 24


def test_when_the_leader_fails_the_follower_computes_all_of_it() -> None:
    worker = make_worker(num_blocks=64, max_num_batched_tokens=64)
    follower = sharing("follower", 2.0)
    worker.runner._is_invalid = lambda row: True
    worker.step(prefill(sharing("leader", 1.0)), prefill(follower))
    worker.runner._is_invalid = lambda row: False
    frame = worker.step()
    assert isinstance(frame.replies[0], PrefillFailed)
    assert isinstance(frame.replies[1], PrefillStarted)
    assert frame.replies[1].num_cached_tokens == 0
    replies = worker.run_until_idle()
    assert replies[-1].first_token == answer(follower)[0]


def test_when_the_leader_is_handed_back_the_followers_are_too() -> None:
    worker = make_slow_worker()
    worker.step(prefill(sharing("leader", 1.0)), prefill(sharing("follower", 2.0)))
    frame = worker.step(Drain(hand_back=True))
    assert [type(reply) for reply in frame.replies] == [PrefillFailed, PrefillFailed]
    worker.step()
    assert worker.core.ledger().is_quiet


def test_a_preempted_leader_follows_the_older_one_that_waited_for_it() -> None:
    worker = make_worker(
        num_blocks=13, max_num_batched_tokens=5, max_queued_steps=99, headroom_tokens=0
    )
    growing = make_request("growing", prompt=15, arrival=0.0, max_tokens=14)
    leader, follower = sharing("leader", 2.0), sharing("follower", 1.0)
    worker.step(decode_here(growing))
    for _ in range(3):
        worker.step()
    worker.step(decode_here(leader))
    worker.step(decode_here(follower))
    replies = [r for f in worker.frames for r in f.replies] + worker.run_until_idle()
    requests = {r.request_id: r for r in (growing, leader, follower)}
    assert answers(replies) == {name: answer(request) for name, request in requests.items()}
    assert sum(frame.num_preemptions for frame in worker.frames) > 0
    assert worker.core.ledger().is_quiet


# -- a leader that fetches --


def test_followers_of_a_fetch_wait_for_what_it_brings() -> None:
    worker = make_slow_worker()
    leader, follower = sharing("leader", 1.0), sharing("follower", 2.0)
    frame = worker.step(prefill(leader, peer=24), prefill(follower, peer=24))
    assert [type(reply) for reply in frame.replies] == [Accepted, Accepted, FetchReserved]
    assert (frame.ledger.num_waiting, frame.ledger.num_referenced) == (1, 7)
    fetch(worker, frame.replies[-1], leader, 24)
    frame = worker.step(BlocksFetched(attempt_id=ident("leader"), num_tokens=24))
    # It need not wait for the end of the fetch, nor fetch itself.
    assert frame.replies[0] == PrefillStarted(
        attempt_id=ident("follower"), num_cached_tokens=24, block_ids=(0, 1, 2, 3, 4, 5, 7)
    )
    replies = worker.run_until_idle(FetchEnded(attempt_id=ident("leader"), num_tokens=24))
    done = {r.attempt_id: r for r in replies if isinstance(r, PrefillDone)}
    assert done[ident("leader")].num_peer_tokens == 24
    assert done[ident("follower")].num_peer_tokens == 0
    assert done[ident("follower")].first_token == answer(follower)[0]
    assert num_computed_tokens(worker) == 6


@pytest.mark.parametrize("has_ended", [False, True], ids=["aborted", "in vain"])
def test_when_a_fetch_ends_in_vain_it_is_computed_once(has_ended: bool) -> None:
    worker = make_slow_worker()
    follower = sharing("follower", 2.0)
    worker.step(prefill(sharing("leader", 1.0), peer=24), prefill(follower))
    if has_ended:
        worker.step(FetchEnded(attempt_id=ident("leader"), num_tokens=0))
    else:
        worker.step(Abort(attempt_id=ident("leader")))
    replies = worker.run_until_idle(ReadEnded(attempt_id=ident("leader")))
    assert replies[-1].first_token == answer(follower)[0]
    assert num_computed_tokens(worker) == 27 + (3 if has_ended else 0)


def test_a_follower_may_fetch_when_the_leader_has_gone() -> None:
    worker = make_slow_worker()
    worker.step(prefill(sharing("leader", 1.0)), prefill(sharing("follower", 2.0), peer=24))
    frame = worker.step(Abort(attempt_id=ident("leader")))
    reply = frame.replies[0]
    assert isinstance(reply, FetchReserved)
    assert (reply.num_cached_tokens, reply.num_tokens) == (8, 24)


# -- age --


def test_a_leader_counts_as_old_as_its_oldest_follower() -> None:
    """The oldest waits for the youngest: who stands between the two may not take its blocks."""
    worker = make_worker(num_blocks=10, max_queued_steps=99, headroom_tokens=0)
    leader, oldest = sharing("leader", 3.0), sharing("oldest", 1.0)
    (_, reply) = worker.step(prefill(leader, peer=24)).replies
    between = make_request("between", prompt=20, arrival=2.0)
    frame = worker.step(prefill(oldest), reserve(between))
    assert not any(isinstance(reply, Revoked) for reply in frame.replies)
    fetch(worker, reply, leader, 24)
    replies = worker.run_until_idle(FetchEnded(attempt_id=ident("leader"), num_tokens=24))
    done = {r.attempt_id: r for r in replies if isinstance(r, PrefillDone)}
    assert done[ident("oldest")].num_cached_tokens == 24

    # Without the follower it gives way.
    worker = make_worker(num_blocks=10, max_queued_steps=99, headroom_tokens=0)
    worker.step(prefill(leader, peer=24))
    frame = worker.step(reserve(between))
    assert frame.replies[0] == Revoked(attempt_id=ident("leader"))


def test_a_leader_gets_the_row_that_its_older_follower_would_get() -> None:
    """Decodes fill every row: one row and one block of tokens go to the oldest prefill."""
    worker = make_worker(
        num_blocks=64, max_num_seqs=2, max_num_batched_tokens=8, max_queued_steps=99
    )
    decodes = [make_request(f"d{i}", prompt=4, arrival=2.0, max_tokens=30) for i in range(2)]
    worker.step(prefill(sharing("leader", 3.0)))
    worker.step(*map(decode_here, decodes))
    for _ in range(3):
        worker.step()
        assert [row.num_tokens for row in worker.runner.plans[-1].rows] == [1, 1]
    frame = worker.step(prefill(sharing("oldest", 1.0)))
    assert [r.attempt_id for r in frame.replies if isinstance(r, ChunkPlanned)] == [ident("leader")]


def test_a_reservation_with_a_source_leads_nobody() -> None:
    worker = make_slow_worker()
    worker.step(reserve(sharing("reader", 1.0)))
    frame = worker.step(prefill(sharing("other", 2.0)))
    assert any(isinstance(reply, ChunkPlanned) for reply in frame.replies)


def test_answers_are_not_followed_only_prefixes_are() -> None:
    """Two equal requests: the second finds all but the block of its last token."""
    worker = make_slow_worker()
    requests = [make_request(name, prompt=PREFIX, arrival=i) for i, name in enumerate("ab")]
    replies = worker.run_until_idle(*map(decode_here, requests))
    assert answers(replies) == {request.request_id: answer(request) for request in requests}
    assert num_computed_tokens(worker) == 24 + 4 + 2 * 3


def test_release_frees_what_followers_share() -> None:
    worker = make_slow_worker()
    worker.run_until_idle(prefill(sharing("a", 1.0)), prefill(sharing("b", 2.0)))
    assert worker.core.ledger().num_referenced == 8
    frame = worker.step(Release(attempt_id=ident("a")))
    assert frame.ledger.num_referenced == 7
    assert worker.step(Release(attempt_id=ident("b"))).ledger.is_quiet
