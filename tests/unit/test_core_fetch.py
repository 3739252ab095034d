"""Reading a prefix from a peer: reserved in turn, cached as it comes, given up for older requests."""

from __future__ import annotations

import pytest

from moonpool.core.failed_chains import FailedChains
from moonpool.core.protocol import (
    Abort,
    Accepted,
    BlocksFetched,
    ChunkPlanned,
    Drain,
    FetchEnded,
    FetchReserved,
    HandBackReason,
    HandedBack,
    PrefillDone,
    PrefillFailed,
    PrefillStarted,
    ReadEnded,
    Release,
    Reserved,
    Revoked,
)
from moonpool.ids import BlockHash
from moonpool.inference.output import FinishReason
from moonpool.inference.request import InferenceRequest
from support.core_cases import (
    answers,
    chain,
    decode_here,
    fetch,
    ident,
    make_worker,
    prefill,
    reserve,
    rows,
    tokens,
)
from support.fake_runner import answer_alone
from support.requests import make_request


def old(**kwargs: int) -> InferenceRequest:
    return make_request("old", arrival=1.0, **kwargs)


def young(**kwargs: int) -> InferenceRequest:
    return make_request("young", arrival=2.0, **kwargs)


def answer(request: InferenceRequest) -> list[int]:
    return answer_alone(request, max_model_len=64)[0]


# -- the way of a fetch --


def test_a_prefill_fetches_and_computes_the_rest() -> None:
    worker = make_worker()
    request = make_request(prompt=14)
    frame = worker.step(prefill(request, peer=8))
    reserved = FetchReserved(
        attempt_id=ident(),
        num_cached_tokens=0,
        num_tokens=8,
        block_ids=(0, 1),
        hashes=chain(request, 2),
    )
    assert frame.replies == (Accepted(attempt_id=ident()), reserved)
    # All its blocks are held; six tokens are to be computed when the eight are there.
    assert (frame.step, frame.num_queued_tokens) == (0, 6)
    assert (frame.ledger.num_reserved, frame.ledger.num_waiting) == (1, 0)
    assert (frame.ledger.num_prefills, frame.ledger.num_referenced) == (0, 4)
    fetch(worker, reserved, request, 8)
    frame = worker.step(FetchEnded(attempt_id=ident(), num_tokens=8))
    assert frame.replies == (
        PrefillStarted(
            attempt_id=ident(), num_cached_tokens=8, block_ids=(0, 1, 2, 3), num_peer_tokens=8
        ),
        ChunkPlanned(attempt_id=ident(), start=8, end=14),
    )
    assert worker.step().replies == (
        PrefillDone(
            attempt_id=ident(),
            num_cached_tokens=8,
            first_token=answer(request)[0],
            num_peer_tokens=8,
        ),
    )
    # What was read is new to the runner, and nothing else is.
    assert [plan.arrived_block_ids.tolist() for plan in worker.runner.plans] == [[0, 1]]
    assert worker.step(Release(attempt_id=ident())).ledger.num_cached == 3


def test_a_decode_fetches_and_decodes_on() -> None:
    worker = make_worker()
    request = make_request(prompt=10, max_tokens=3)
    frame = worker.step(decode_here(request, peer=8))
    assert isinstance(frame.replies[1], FetchReserved)
    # It will take a row, but does not run yet.
    assert (frame.ledger.num_running, frame.ledger.num_reserved) == (0, 1)
    fetch(worker, frame.replies[1], request, 8)
    replies = worker.run_until_idle(FetchEnded(attempt_id=ident(), num_tokens=8))
    first, second, third = answer(request)
    assert replies == [
        tokens("r1", 0, first, cached=8, peer=8),
        tokens("r1", 1, second),
        tokens("r1", 2, third, finish=FinishReason.LENGTH),
    ]


@pytest.mark.parametrize(
    ("num_peer_tokens", "end"), [(100, 8), (9, 8), (8, 8), (7, 4), (3, 0), (0, 0), (-5, 0)]
)
def test_what_is_fetched_are_full_blocks_before_the_last_token(
    num_peer_tokens: int, end: int
) -> None:
    worker = make_worker()
    frame = worker.step(prefill(make_request(prompt=12), peer=num_peer_tokens))
    fetches = [reply for reply in frame.replies if isinstance(reply, FetchReserved)]
    assert [reply.num_tokens for reply in fetches] == ([end] if end else [])
    assert bool(frame.step) is not bool(end)


def test_what_is_here_is_not_fetched() -> None:
    worker = make_worker()
    worker.run_until_idle(prefill(make_request("first", prompt=list(range(9)))))
    worker.step(Release(attempt_id=ident("first")))
    for name, peer, fetched in (("r2", 16, (8, 16)), ("r3", 8, None), ("r4", 4, None)):
        frame = worker.step(prefill(make_request(name, prompt=[*range(9), *[7] * 11]), peer=peer))
        fetches = [reply for reply in frame.replies if isinstance(reply, FetchReserved)]
        assert [(reply.num_cached_tokens, reply.num_tokens) for reply in fetches] == (
            [fetched] if fetched else []
        )
        assert not fetches or fetches[0].block_ids[:2] == (0, 1)
        worker.step(Abort(attempt_id=ident(name)), ReadEnded(attempt_id=ident(name)))
    assert worker.core.ledger().is_quiet


def test_blocks_that_have_come_are_cached_while_the_rest_is_read() -> None:
    worker = make_worker()
    request = make_request(prompt=14)
    (_, reply) = worker.step(prefill(request, peer=12)).replies
    fetch(worker, reply, request, 7)
    frame = worker.step(BlocksFetched(attempt_id=ident(), num_tokens=7))
    assert [event.hashes for event in frame.cache_events] == [chain(request, 1)]
    # Told again, told less, told of more than was asked for: nothing but what lies between counts.
    fetch(worker, reply, request, 12)
    frame = worker.step(
        BlocksFetched(attempt_id=ident(), num_tokens=7),
        BlocksFetched(attempt_id=ident(), num_tokens=0),
        BlocksFetched(attempt_id=ident(), num_tokens=1000),
    )
    assert [event.hashes for event in frame.cache_events] == [chain(request, 3)[1:]]
    assert frame.ledger.num_reserved == 1


@pytest.mark.parametrize(
    ("verified", "ended", "cached"), [(0, 0, 0), (0, 7, 4), (8, 3, 8), (4, 99, 12)]
)
def test_what_did_not_come_is_computed(verified: int, ended: int, cached: int) -> None:
    worker = make_worker()
    request = make_request(prompt=14, max_tokens=2)
    (_, reply) = worker.step(decode_here(request, peer=12)).replies
    fetch(worker, reply, request, min(max(verified, ended), 12))
    frame = worker.step(
        BlocksFetched(attempt_id=ident(), num_tokens=verified),
        FetchEnded(attempt_id=ident(), num_tokens=ended),
    )
    assert frame.step
    first, second = answer(request)
    assert worker.run_until_idle() == [
        tokens("r1", 0, first, cached=cached, peer=cached),
        tokens("r1", 1, second, finish=FinishReason.LENGTH),
    ]
    assert [row.start for plan in worker.runner.plans for row in rows(plan)] == [cached, 14]


def test_only_what_came_from_the_peer_is_counted_as_such() -> None:
    worker = make_worker()
    worker.run_until_idle(prefill(make_request("first", prompt=list(range(5)))))
    request = make_request(prompt=list(range(14)), max_tokens=1)
    reply = worker.step(decode_here(request, peer=12)).replies[-1]
    fetch(worker, reply, request, 8)
    replies = worker.run_until_idle(FetchEnded(attempt_id=ident(), num_tokens=8))
    assert replies == [
        tokens("r1", 0, *answer(request), cached=8, peer=4, finish=FinishReason.LENGTH)
    ]


def test_a_decode_with_a_source_does_not_ask_a_peer() -> None:
    worker = make_worker()
    command = reserve(make_request(prompt=14))
    frame = worker.step(
        type(command)(request=command.request, attempt=1, has_source=True, num_peer_tokens=8)
    )
    assert [type(reply) for reply in frame.replies] == [Reserved]


# -- its turn --


def test_what_was_read_and_is_not_finite_is_not_read_again_but_computed() -> None:
    worker = make_worker()
    bad = make_request("bad", prompt=range(14))
    reserved = worker.step(prefill(bad, peer=8)).replies[-1]
    fetch(worker, reserved, bad, 8)
    worker.runner._is_invalid = lambda row: row.sample is not None
    # One that waits for what is read looks again when that has ended.
    waiting = make_request("waiting", prompt=range(14), arrival=2.0)
    replies = worker.run_until_idle(
        prefill(waiting, peer=8), FetchEnded(attempt_id=ident("bad"), num_tokens=8)
    )
    assert not [reply for reply in replies if isinstance(reply, FetchReserved)]
    failed = [reply.attempt_id for reply in replies if isinstance(reply, PrefillFailed)]
    assert ident("bad") in failed
    worker.runner._is_invalid = lambda row: False
    again = make_request("again", prompt=range(14), arrival=3.0)
    assert worker.run_until_idle(prefill(again, peer=8)) == [
        Accepted(attempt_id=ident("again")),
        PrefillStarted(attempt_id=ident("again"), num_cached_tokens=0, block_ids=(0, 1, 2, 3)),
        ChunkPlanned(attempt_id=ident("again"), start=0, end=14),
        PrefillDone(attempt_id=ident("again"), num_cached_tokens=0, first_token=answer(again)[0]),
    ]


def test_a_chain_that_failed_is_read_again_a_minute_later() -> None:
    chains = FailedChains()
    first, *others = (BlockHash(number.to_bytes(32, "big")) for number in range(1_025))
    assert not chains.has(first, 0.0)
    chains.note(first, 0.0)
    assert chains.has(first, 59.0)
    assert not chains.has(first, 60.0)
    for other in others:
        chains.note(other, 1.0)
    # It is the oldest of too many.
    assert not chains.has(first, 1.0)
    assert all(chains.has(other, 1.0) for other in others)


def test_a_fetch_waits_for_no_tokens_of_the_budget() -> None:
    worker = make_worker(num_blocks=32, max_num_batched_tokens=8, max_queued_steps=9)
    worker.step(prefill(make_request("long", prompt=[3] * 40, arrival=0.0)))
    frame = worker.step(prefill(young(prompt=14), peer=8))
    assert [type(reply) for reply in frame.replies] == [Accepted, FetchReserved, ChunkPlanned]


def test_a_fetch_waits_for_blocks_and_for_older_ones_that_do() -> None:
    worker = make_worker(num_blocks=8, max_queued_steps=9, headroom_tokens=0)
    last = make_request("last", prompt=[3] * 8, arrival=3.0)
    frame = worker.step(
        prefill(young(prompt=[2] * 14), peer=12), prefill(last, peer=4), reserve(old(prompt=20))
    )
    # Three blocks are left: enough for the last one, but they are promised.
    assert [type(reply) for reply in frame.replies] == [Accepted, Accepted, Reserved]
    assert (frame.ledger.num_waiting, frame.ledger.num_referenced) == (2, 5)
    frame = worker.step(Abort(attempt_id=ident("old")), ReadEnded(attempt_id=ident("old")))
    assert [reply.attempt_id for reply in frame.replies] == [ident("young"), ident("last")]
    assert frame.ledger.num_reserved == 2


def test_a_fetch_does_not_go_before_an_older_request_that_lacks_the_same() -> None:
    worker = make_worker()
    frame = worker.step(prefill(young(prompt=[5] * 14), peer=12), prefill(old(prompt=[5] * 15)))
    assert [type(reply) for reply in frame.replies[2:]] == [PrefillStarted, ChunkPlanned]
    assert frame.replies[2].attempt_id == ident("old")
    assert frame.ledger.num_waiting == 1


# -- its end --


def test_an_aborted_fetch_keeps_its_blocks_until_its_reads_have_ended() -> None:
    worker = make_worker()
    request = make_request(prompt=14)
    (_, reply) = worker.step(prefill(request, peer=12)).replies
    fetch(worker, reply, request, 4)
    frame = worker.step(BlocksFetched(attempt_id=ident(), num_tokens=4), Abort(attempt_id=ident()))
    assert frame.replies == ()
    assert (frame.ledger.num_quarantined, frame.ledger.num_reserved) == (1, 0)
    assert frame.ledger.num_referenced == 4
    # Too late for the cache, and twice.
    frame = worker.step(
        BlocksFetched(attempt_id=ident(), num_tokens=12),
        ReadEnded(attempt_id=ident()),
        ReadEnded(attempt_id=ident()),
    )
    assert (frame.ledger.num_cached, frame.ledger.num_free) == (1, 15)
    assert frame.ledger.is_quiet


def test_a_higher_attempt_ends_a_fetch() -> None:
    worker = make_worker()
    worker.step(prefill(make_request(prompt=14), peer=12))
    frame = worker.step(prefill(make_request(prompt=14), attempt=2, peer=8))
    assert [type(reply) for reply in frame.replies] == [Accepted, FetchReserved]
    assert (frame.ledger.num_quarantined, frame.ledger.num_reserved) == (1, 1)
    # It is over for the first attempt only.
    frame = worker.step(FetchEnded(attempt_id=ident(), num_tokens=12))
    assert (frame.ledger.num_quarantined, frame.ledger.num_reserved) == (0, 1)


@pytest.mark.parametrize(
    "end",
    [ReadEnded(attempt_id=ident("young")), FetchEnded(attempt_id=ident("young"), num_tokens=12)],
)
def test_a_fetch_is_revoked_for_an_older_request_and_then_computed(
    end: ReadEnded | FetchEnded,
) -> None:
    worker = make_worker(num_blocks=6, max_queued_steps=9)
    request = young(prompt=[5] * 14)
    (_, reply) = worker.step(prefill(request, peer=12)).replies
    fetch(worker, reply, request, 4)
    frame = worker.step(
        BlocksFetched(attempt_id=ident("young"), num_tokens=4), prefill(old(prompt=16))
    )
    assert frame.replies == (
        Accepted(attempt_id=ident("old")),
        Revoked(attempt_id=ident("young")),
    )
    assert (frame.step, frame.ledger.num_waiting, frame.ledger.num_quarantined) == (0, 2, 1)
    # Its block that has come may go now, and three more are free when no read may write them.
    frame = worker.step(end)
    assert frame.replies[0] == PrefillStarted(
        attempt_id=ident("old"), num_cached_tokens=0, block_ids=frame.replies[0].block_ids
    )
    assert (frame.ledger.num_waiting, frame.ledger.num_quarantined) == (1, 0)
    replies = worker.run_until_idle()
    assert [type(reply) for reply in replies] == [PrefillDone]
    replies = worker.run_until_idle(Release(attempt_id=ident("old")))
    # It asks no peer again.
    assert [type(reply) for reply in replies] == [PrefillStarted, ChunkPlanned, PrefillDone]
    assert replies[-1].first_token == answer(request)[0]


def test_a_revoked_fetch_finds_what_had_come() -> None:
    worker = make_worker(num_blocks=6, max_queued_steps=9)
    request = young(prompt=[5] * 14)
    (_, reply) = worker.step(prefill(request, peer=12)).replies
    fetch(worker, reply, request, 8)
    worker.step(BlocksFetched(attempt_id=ident("young"), num_tokens=8), prefill(old(prompt=13)))
    replies = worker.run_until_idle(
        Abort(attempt_id=ident("old")), ReadEnded(attempt_id=ident("young"))
    )
    done = replies[-1]
    assert isinstance(done, PrefillDone)
    assert (done.num_cached_tokens, done.num_peer_tokens) == (8, 8)
    assert done.first_token == answer(request)[0]


def test_of_a_fetch_that_is_revoked_in_the_step_that_begins_it_nobody_hears() -> None:
    worker = make_worker(num_blocks=7, max_num_batched_tokens=4, headroom_tokens=8)
    # Its blocks fit beside the older one's, what it is expected to grow by does not.
    frame = worker.step(
        decode_here(young(prompt=20, max_tokens=6), peer=8), prefill(old(prompt=[7]))
    )
    assert [type(reply) for reply in frame.replies] == [
        Accepted,
        Accepted,
        PrefillStarted,
        ChunkPlanned,
    ]
    ledger = worker.core.ledger()
    assert (ledger.num_waiting, ledger.num_reserved, ledger.num_quarantined) == (1, 0, 0)
    # Its turn comes, with the same offer.
    frame = worker.step(Release(attempt_id=ident("old")))
    (reserved,) = [reply for reply in frame.replies if isinstance(reply, FetchReserved)]
    assert (reserved.num_tokens, len(reserved.block_ids)) == (8, 2)


def test_a_fetch_gives_way_to_no_younger_one() -> None:
    worker = make_worker(num_blocks=6, max_queued_steps=9)
    worker.step(prefill(old(prompt=[5] * 16), peer=12))
    frame = worker.step(reserve(young(prompt=16)), prefill(young(prompt=16)))
    assert [type(reply).__name__ for reply in frame.replies] == ["Refused", "Refused"]
    assert frame.ledger.num_reserved == 1


def test_a_fetch_is_revoked_for_an_older_reservation_and_for_growth() -> None:
    worker = make_worker(num_blocks=6, max_queued_steps=9)
    worker.step(decode_here(young(prompt=[5] * 14, max_tokens=3), peer=12))
    frame = worker.step(reserve(old(prompt=16)))
    assert [type(reply).__name__ for reply in frame.replies] == ["Revoked", "Refused"]

    worker = make_worker(num_blocks=4, headroom_tokens=0)
    request = old(prompt=4, max_tokens=6)
    worker.step(decode_here(request))
    frame = worker.step(prefill(young(prompt=[5] * 8), peer=4))
    assert isinstance(frame.replies[-1], FetchReserved)
    while worker.step().step:
        pass
    assert Revoked(attempt_id=ident("young")) in worker.frames[-1].replies
    replies = [r for f in worker.frames for r in f.replies]
    replies += worker.run_until_idle(ReadEnded(attempt_id=ident("young")))
    assert answers(replies) == {"old": answer(request)}


def test_a_decode_whose_fetch_is_revoked_keeps_its_place_in_the_batch() -> None:
    worker = make_worker(num_blocks=6, max_num_seqs=1, max_queued_steps=9)
    worker.step(decode_here(young(prompt=[5] * 14, max_tokens=3), peer=12))
    # An older one finds no place: a fetch that is taken back waits for its turn with its place.
    frame = worker.step(reserve(old(prompt=4)))
    assert [type(reply).__name__ for reply in frame.replies] == ["Refused"]
    assert frame.ledger.num_reserved == 1


def test_drain_gives_back_what_fetches() -> None:
    worker = make_worker()
    worker.step(prefill(make_request("p", prompt=14), peer=12))
    worker.step(decode_here(make_request("d", prompt=[9] * 14), peer=12))
    frame = worker.step(Drain(hand_back=True))
    assert frame.replies == (
        Revoked(attempt_id=ident("p")),
        PrefillFailed(attempt_id=ident("p"), reason=HandBackReason.DRAINING),
        Revoked(attempt_id=ident("d")),
        HandedBack(attempt_id=ident("d"), reason=HandBackReason.DRAINING),
    )
    assert frame.ledger.num_quarantined == 2
    frame = worker.step(ReadEnded(attempt_id=ident("p")), ReadEnded(attempt_id=ident("d")))
    assert frame.ledger.is_quiet


def test_commands_about_no_fetch_are_ignored() -> None:
    worker = make_worker()
    worker.step(prefill(make_request(prompt=14)), reserve(make_request("d", prompt=9)))
    key = worker.core.key()
    for attempt_id in (ident(), ident("d"), ident("nobody")):
        worker.core.handle(BlocksFetched(attempt_id=attempt_id, num_tokens=8), 0.0)
        worker.core.handle(FetchEnded(attempt_id=attempt_id, num_tokens=8), 0.0)
    assert worker.core.key() == key


def test_a_fork_of_a_fetch_is_equal_and_independent() -> None:
    worker = make_worker()
    request = make_request(prompt=14)
    worker.step(prefill(request, peer=12))
    worker.step(
        prefill(make_request("gone", prompt=[9] * 14), peer=12),
        Abort(attempt_id=ident("gone")),
    )
    fork = worker.core.fork()
    key = fork.key()
    assert key == worker.core.key()
    worker.step(FetchEnded(attempt_id=ident(), num_tokens=0), ReadEnded(attempt_id=ident("gone")))
    assert fork.key() == key != worker.core.key()
    fork.validate()


def test_fetches_are_told_apart_from_each_other() -> None:
    worker = make_worker(num_blocks=32)
    first, second = make_request("a", prompt=14), make_request("b", prompt=[9] * 14)
    replies = worker.step(prefill(first, peer=12), prefill(second, peer=8)).replies
    reserved = {reply.attempt_id: reply for reply in replies if isinstance(reply, FetchReserved)}
    blocks = {block for reply in reserved.values() for block in reply.block_ids}
    assert len(blocks) == 5
    fetch(worker, reserved[ident("b")], second, 8)
    replies = worker.run_until_idle(FetchEnded(attempt_id=ident("b"), num_tokens=8))
    assert replies[-1].first_token == answer(second)[0]
    assert worker.core.ledger().num_reserved == 1
