"""The decode side of a core: local prefill, reservations, what arrives, repair, the end of an answer."""

from __future__ import annotations

import pytest

from moonpool.core.protocol import (
    Abort,
    Accepted,
    Arrived,
    BlockLedger,
    BlocksArrived,
    ChunkPlanned,
    Drain,
    HandBackReason,
    HandedBack,
    PrefillStarted,
    ReadEnded,
    Refused,
    RefuseReason,
    Reserved,
    Revoked,
    TokensReady,
)
from moonpool.ids import BlockId
from moonpool.inference.output import FinishReason
from moonpool.inference.request import InferenceRequest
from support.core_cases import (
    Row,
    answers,
    decode_here,
    ident,
    make_config,
    make_worker,
    prefill,
    reserve,
    rows,
    tokens,
)
from support.core_cluster import CoreCluster, Worker
from support.fake_runner import answer_alone, kv_values
from support.requests import make_request


def read_in(
    worker: Worker, request: InferenceRequest, block_ids: tuple[BlockId, ...], end: int
) -> None:
    """The transport writes KV of [0, end) into these blocks."""
    values = kv_values([], request.token_ids)[:end]
    for position, value in enumerate(values):
        worker.runner.pool[block_ids[position // 4], position % 4] = value


def reserve_and_read(worker: Worker, request: InferenceRequest, end: int) -> None:
    reserved = worker.step(reserve(request)).replies[0]
    assert isinstance(reserved, Reserved), reserved
    read_in(worker, request, reserved.block_ids, end)


# -- without a source --


def test_prefill_and_decode_here() -> None:
    worker = make_worker()
    request = make_request(prompt=6, max_tokens=3)
    (a, b, c), _ = answer_alone(request, max_model_len=64)
    assert worker.run_until_idle(decode_here(request)) == [
        Accepted(attempt_id=ident()),
        tokens("r1", 0, a, cached=0),
        tokens("r1", 1, b),
        tokens("r1", 2, c, finish=FinishReason.LENGTH),
    ]
    assert [rows(plan) for plan in worker.runner.plans] == [
        [Row(0, 0, 6, list(request.prompt_token_ids), [0, 1], 0)],
        # The input is the last token of slot 0.
        [Row(0, 6, 7, [], [0, 1], 1)],
        [Row(0, 7, 8, [], [0, 1], 2)],
    ]
    # A decode's blocks get leaves when they are full; what a block begins with is never another's.
    assert [plan.leaf_block_ids.tolist() for plan in worker.runner.plans] == [[0], [], [1]]
    assert [plan.zero_tails.tolist() for plan in worker.runner.plans] == [[[1, 2]], [], []]
    assert worker.core.ledger() == BlockLedger(
        num_total=16, num_free=14, num_cached=2, num_referenced=0
    )


def test_the_next_turn_finds_the_answer() -> None:
    worker = make_worker()
    request = make_request("r1", prompt=6, max_tokens=7)
    answer, _ = answer_alone(request, max_model_len=64)
    worker.run_until_idle(decode_here(request))
    turn = make_request("r2", prompt=[*request.prompt_token_ids, *answer, 1, 2], max_tokens=2)
    replies = worker.run_until_idle(decode_here(turn))
    # 13 tokens, the last one drawn but never computed: 12 are cached.
    assert replies[1] == tokens("r2", 0, answer_alone(turn, max_model_len=64)[0][0], cached=12)


def test_a_long_prompt_and_decodes_share_steps_decodes_first() -> None:
    worker = make_worker(max_num_batched_tokens=8)
    short = make_request("short", prompt=4, max_tokens=9, arrival=2.0)
    long = make_request("long", prompt=22, max_tokens=1, arrival=1.0)
    worker.step(decode_here(short))
    worker.run_until_idle(decode_here(long))
    assert [[row[:3] for row in rows(plan)] for plan in worker.runner.plans[:6]] == [
        [(0, 0, 4)],
        [(0, 4, 5), (1, 0, 4)],
        [(0, 5, 6), (1, 4, 8)],
        [(0, 6, 7), (1, 8, 12)],
        [(0, 7, 8), (1, 12, 16)],
        [(0, 8, 9), (1, 16, 22)],
    ]


@pytest.mark.parametrize("max_num_seqs", [1, 2, 3])
def test_more_decodes_than_slots_are_refused(max_num_seqs: int) -> None:
    worker = make_worker(max_num_seqs=max_num_seqs, max_queued_steps=99)
    requests = [make_request(f"r{i}", prompt=3, arrival=float(i)) for i in range(4)]
    frame = worker.step(*(decode_here(request) for request in requests))
    assert [type(reply) for reply in frame.replies] == (
        [Accepted] * max_num_seqs + [Refused] * (4 - max_num_seqs)
    )
    assert frame.replies[-1] == Refused(attempt_id=ident("r3"), reason=RefuseReason.NO_SLOTS)


def test_a_prefill_gets_a_row_though_decodes_fill_all() -> None:
    worker = make_worker(max_num_seqs=2, max_queued_steps=99)
    decodes = [
        make_request("d1", prompt=2, max_tokens=20, arrival=1.0),
        make_request("d2", prompt=2, max_tokens=20, arrival=3.0),
    ]
    worker.step(*map(decode_here, decodes))
    worker.step()
    frame = worker.step(prefill(make_request("p", prompt=6, arrival=2.0)))
    assert ChunkPlanned(attempt_id=ident("p"), start=0, end=6) in frame.replies
    # The youngest sat out and lost its slot: its token is carried.
    replies = [r for f in worker.frames for r in f.replies] + worker.run_until_idle()
    expected = {r.request_id: answer_alone(r, max_model_len=64)[0] for r in decodes}
    assert answers(replies) == expected
    d2_inputs = [row.token_ids.tolist() for plan in worker.runner.plans for row in plan.rows]
    assert [expected["d2"][1]] in d2_inputs


# -- how an answer ends --


@pytest.mark.parametrize(
    ("limits", "expected_length", "finish_reason"),
    [
        ({"stop": 2}, 3, FinishReason.STOP),
        ({"eos": 1}, 2, FinishReason.STOP),
        ({"eos": 1, "ignore_eos": True}, 8, FinishReason.LENGTH),
        ({"max_model_len": 10}, 5, FinishReason.LENGTH),
    ],
)
def test_an_answer_ends(
    limits: dict[str, int], expected_length: int, finish_reason: FinishReason
) -> None:
    alone, _ = answer_alone(make_request(prompt=5, max_tokens=8), max_model_len=64)
    assert len(set(alone[:3])) == 3
    worker = Worker(
        make_config(
            eos_token_ids=(alone[limits["eos"]],) if "eos" in limits else (),
            max_model_len=limits.get("max_model_len", 64),
        )
    )
    request = make_request(
        prompt=5,
        max_tokens=8,
        stop_token_ids=[alone[limits["stop"]]] if "stop" in limits else [],
        ignore_eos="ignore_eos" in limits,
    )
    replies = worker.run_until_idle(decode_here(request))
    assert answers(replies) == {"r1": alone[:expected_length]}
    last = replies[-1]
    assert isinstance(last, TokensReady)
    # A stop token is the last of the run.
    assert last.run.token_ids == (alone[expected_length - 1],)
    assert last.run.finish_reason is finish_reason
    assert worker.core.ledger().is_quiet


def test_not_finite_ends_a_decode() -> None:
    worker = make_worker()
    worker.runner._is_invalid = lambda row: row.sample is not None and row.sample.position == 2
    request = make_request(prompt=5, max_tokens=8)
    alone, _ = answer_alone(request, max_model_len=64)
    replies = worker.run_until_idle(decode_here(request))
    assert replies[-1] == tokens("r1", 2, finish=FinishReason.INVALID_OUTPUT)
    assert answers(replies) == {"r1": alone[:2]}
    assert worker.core.ledger() == BlockLedger(
        num_total=16, num_free=16, num_cached=0, num_referenced=0
    )


def test_a_token_of_an_aborted_request_is_discarded() -> None:
    worker = make_worker()
    worker.step(decode_here(make_request(prompt=5)))
    frame = worker.step(late=[Abort(attempt_id=ident())])
    # The plan under way still writes: the blocks are given back with its result.
    assert frame.ledger.num_referenced == 2
    frame = worker.step()
    assert frame.replies == ()
    assert frame.ledger.is_quiet


# -- with a source --


def test_a_handoff_frame_by_frame() -> None:
    worker = make_worker(num_blocks=8)
    request = make_request(prompt=6, max_tokens=3)
    (a, b, c), _ = answer_alone(request, max_model_len=64)
    blocks = (BlockId(0), BlockId(1))
    frame = worker.step(reserve(request))
    assert frame.step == 0
    assert frame.replies == (Reserved(attempt_id=ident(), num_cached_tokens=0, block_ids=blocks),)
    assert frame.ledger == BlockLedger(
        num_total=8, num_free=6, num_cached=0, num_referenced=2, num_reserved=1
    )
    assert worker.core.is_idle

    read_in(worker, request, blocks, 6)
    worker.step(BlocksArrived(attempt_id=ident(), num_tokens=4))
    frame = worker.step(Arrived(attempt_id=ident(), num_tokens=6, first_token=a))
    # The stream of this worker alone is complete: it begins with the token that arrived.
    assert frame.replies == (tokens("r1", 0, a, cached=6),)
    assert frame.step == 1
    assert worker.run_until_idle() == [
        tokens("r1", 1, b),
        tokens("r1", 2, c, finish=FinishReason.LENGTH),
    ]
    assert [rows(plan) for plan in worker.runner.plans] == [
        # The runner has not drawn the first token, so the plan carries it.
        [Row(0, 6, 7, [a], [0, 1], 1)],
        [Row(0, 7, 8, [], [0, 1], 2)],
    ]
    # What came is new to the runner once, the partly filled block included.
    assert [plan.arrived_block_ids.tolist() for plan in worker.runner.plans] == [[0, 1], []]
    assert worker.core.ledger().is_quiet


def test_a_reservation_locks_its_own_prefix() -> None:
    worker = make_worker()
    request = make_request(prompt=8)
    worker.run_until_idle(decode_here(make_request("r0", prompt=request.prompt_token_ids)))
    frame = worker.step(reserve(request))
    # Both blocks are cached, but never the one of the last token.
    assert frame.replies == (
        Reserved(attempt_id=ident(), num_cached_tokens=4, block_ids=(BlockId(0), BlockId(2))),
    )
    worker.step(Abort(attempt_id=ident()), ReadEnded(attempt_id=ident()))
    assert worker.core.ledger().is_quiet


def test_what_has_arrived_is_found_by_a_new_attempt() -> None:
    worker = make_worker()
    request = make_request(prompt=14)
    reserve_and_read(worker, request, 9)
    frame = worker.step(
        BlocksArrived(attempt_id=ident(), num_tokens=9), reserve(request, attempt=2)
    )
    reserved = frame.replies[0]
    assert isinstance(reserved, Reserved)
    assert reserved.num_cached_tokens == 8
    # The lower attempt's reads may be outstanding.
    assert frame.ledger.num_quarantined == 1
    worker.step(ReadEnded(attempt_id=ident()), Abort(attempt_id=ident(attempt=2)))
    assert worker.step(ReadEnded(attempt_id=ident(attempt=2))).ledger.is_quiet


def test_what_arrived_for_another_request_does_not_come_into_a_block_that_begins_anew() -> None:
    worker = make_worker(num_blocks=2)
    reserve_and_read(worker, make_request(prompt=6, max_tokens=2), 4)
    worker.step(
        BlocksArrived(attempt_id=ident(), num_tokens=4),
        Abort(attempt_id=ident()),
        ReadEnded(attempt_id=ident()),
        reserve(make_request("r2", prompt=3, max_tokens=1)),
        # The other block is taken: this one evicts what arrived.
        decode_here(make_request("r3", prompt=2, max_tokens=2)),
    )
    (plan,) = worker.runner.plans
    assert plan.zero_tails.tolist() == [[0, 2]]
    assert plan.arrived_block_ids.tolist() == []


@pytest.mark.parametrize("num_arrived", [0, 3, 4, 8, 9, 12])
def test_a_missing_tail_is_repaired_here(num_arrived: int) -> None:
    worker = make_worker(local_prefill_tokens=16)
    request = make_request(prompt=12, max_tokens=4)
    alone, _ = answer_alone(request, max_model_len=64)
    reserve_and_read(worker, request, num_arrived)
    replies = worker.run_until_idle(
        Arrived(attempt_id=ident(), num_tokens=num_arrived, first_token=alone[0])
    )
    assert answers(replies) == {"r1": alone}
    # No block mixes what was read with what is computed here.
    num_cached = num_arrived - num_arrived % 4
    assert replies[0] == tokens("r1", 0, alone[0], cached=num_cached)
    first_row = rows(worker.runner.plans[0])[0]
    assert (first_row.start, first_row.end, first_row.position) == (num_cached, 13, 1)


@pytest.mark.parametrize("num_arrived", [4, 12])
def test_a_lost_source_is_repaired_here(num_arrived: int) -> None:
    worker = make_worker(local_prefill_tokens=8)
    request = make_request(prompt=12, max_tokens=4)
    alone, _ = answer_alone(request, max_model_len=64)
    reserve_and_read(worker, request, num_arrived)
    replies = worker.run_until_idle(
        BlocksArrived(attempt_id=ident(), num_tokens=num_arrived),
        Arrived(attempt_id=ident(), num_tokens=num_arrived, first_token=None),
    )
    assert answers(replies) == {"r1": alone}
    # Without a first token the last block is computed whole, even if all of it is there.
    assert replies[0] == tokens("r1", 0, alone[0], cached=min(num_arrived, 8))


@pytest.mark.parametrize(
    ("first_token", "reason"),
    [(1, HandBackReason.TOO_LONG_TO_REPAIR), (None, HandBackReason.SOURCE_LOST)],
)
def test_a_long_rest_is_handed_back(first_token: int | None, reason: HandBackReason) -> None:
    worker = make_worker(local_prefill_tokens=7)
    request = make_request(prompt=12)
    reserve_and_read(worker, request, 7)
    frame = worker.step(
        BlocksArrived(attempt_id=ident(), num_tokens=7),
        Arrived(attempt_id=ident(), num_tokens=7, first_token=first_token),
    )
    assert frame.replies == (HandedBack(attempt_id=ident(), reason=reason),)
    # What did arrive stays for the next attempt.
    assert frame.ledger == BlockLedger(num_total=16, num_free=15, num_cached=1, num_referenced=0)


def test_what_came_from_a_source_that_is_not_finite_is_forgotten() -> None:
    worker = make_worker()
    request = make_request(prompt=12)
    reserve_and_read(worker, request, 8)
    frame = worker.step(
        BlocksArrived(attempt_id=ident(), num_tokens=8),
        Arrived(
            attempt_id=ident(),
            num_tokens=8,
            first_token=None,
            finish_reason=FinishReason.INVALID_OUTPUT,
        ),
    )
    assert frame.replies == (tokens("r1", 0, cached=0, finish=FinishReason.INVALID_OUTPUT),)
    assert frame.ledger == BlockLedger(num_total=16, num_free=16, num_cached=0, num_referenced=0)


def test_an_answer_that_ended_with_the_first_token_needs_no_kv() -> None:
    worker = make_worker(local_prefill_tokens=0)
    request = make_request(prompt=12, max_tokens=1)
    worker.step(reserve(request))
    frame = worker.step(
        Arrived(attempt_id=ident(), num_tokens=4, first_token=9, finish_reason=FinishReason.LENGTH)
    )
    assert frame.replies == (tokens("r1", 0, 9, cached=4, finish=FinishReason.LENGTH),)
    assert frame.ledger.is_quiet


def test_prefill_on_one_core_decode_on_another() -> None:
    cluster = CoreCluster(make_config(max_num_batched_tokens=8), 2)
    request = make_request("r1", prompt=21, max_tokens=9)
    cluster.submit(request)
    cluster.settle(lambda tracked: (1, 0))
    assert cluster.requests[request.request_id].answer == answer_alone(request, max_model_len=64)[0]
    assert [len(worker.runner.plans) for worker in cluster.workers] == [3, 8]
    cluster.check_quiet()


# -- both sides on one worker, attempts --


def test_both_sides_of_one_attempt_live_side_by_side() -> None:
    worker = make_worker()
    request = make_request(prompt=6)
    frame = worker.step(prefill(request), reserve(request))
    assert [type(reply) for reply in frame.replies] == [
        Accepted,
        Reserved,
        PrefillStarted,
        ChunkPlanned,
    ]
    ledger = worker.step(Abort(attempt_id=ident())).ledger
    assert (ledger.num_prefills, ledger.num_reserved, ledger.num_quarantined) == (0, 0, 1)
    assert worker.step(ReadEnded(attempt_id=ident())).ledger.is_quiet


def test_a_higher_attempt_ends_the_lower_in_its_role_only() -> None:
    worker = make_worker()
    request = make_request(prompt=6)
    worker.step(prefill(request), reserve(request))
    ledger = worker.step(prefill(request, attempt=2)).ledger
    assert (ledger.num_prefills, ledger.num_reserved, ledger.num_quarantined) == (1, 1, 0)
    ledger = worker.step(reserve(request, attempt=2)).ledger
    assert (ledger.num_prefills, ledger.num_reserved, ledger.num_quarantined) == (1, 1, 1)


@pytest.mark.parametrize("attempt", [1, 2])
def test_abort_may_come_first(attempt: int) -> None:
    worker = make_worker()
    request = make_request(prompt=6)
    frame = worker.step(
        Abort(attempt_id=ident(attempt=2)),
        prefill(request, attempt=attempt),
        reserve(request, attempt=attempt),
        decode_here(request, attempt=attempt),
    )
    assert frame.replies == ()
    assert frame.ledger.is_quiet
    assert worker.step(decode_here(request, attempt=3)).replies == (
        Accepted(attempt_id=ident(attempt=3)),
    )


def test_an_abort_is_forgotten_after_a_while() -> None:
    worker = make_worker()
    request = make_request(prompt=6)
    worker.step(Abort(attempt_id=ident()), now=100.0)
    assert worker.step(decode_here(request), now=109.0).replies == ()
    # Ten seconds after whatever came last about it.
    worker.step(now=119.5)
    assert worker.step(decode_here(request), now=119.5).replies == (Accepted(attempt_id=ident()),)


def test_a_late_abort_of_a_lower_attempt_changes_nothing() -> None:
    worker = make_worker()
    request = make_request(prompt=6, max_tokens=2)
    worker.step(decode_here(request, attempt=2))
    replies = worker.run_until_idle(Abort(attempt_id=ident(attempt=1)))
    assert answers(replies) == {"r1": answer_alone(request, max_model_len=64)[0]}


def test_commands_about_what_does_not_exist_are_ignored() -> None:
    worker = make_worker()
    frame = worker.step(
        Arrived(attempt_id=ident("x"), num_tokens=4, first_token=1),
        BlocksArrived(attempt_id=ident("x"), num_tokens=4),
        ReadEnded(attempt_id=ident("x")),
        Abort(attempt_id=ident("x")),
    )
    assert frame.replies == ()
    assert frame.ledger.is_quiet


def test_drain_hands_back_and_revokes() -> None:
    worker = make_worker()
    worker.step(
        decode_here(make_request("running", prompt=4)), reserve(make_request("reserved", prompt=4))
    )
    frame = worker.step(Drain(hand_back=True), decode_here(make_request("late", prompt=4)))
    assert set(frame.replies[1:]) == {
        HandedBack(attempt_id=ident("running"), reason=HandBackReason.DRAINING),
        Revoked(attempt_id=ident("reserved")),
        Refused(attempt_id=ident("late"), reason=RefuseReason.DRAINING),
    }
    assert worker.step(ReadEnded(attempt_id=ident("reserved"))).ledger.is_quiet


def test_a_request_of_another_tenant_finds_nothing() -> None:
    worker = make_worker()
    request = make_request("r1", prompt=9, max_tokens=1)
    worker.run_until_idle(decode_here(request))
    other = make_request("r2", prompt=request.prompt_token_ids, tenant="other")
    frame = worker.step(reserve(other))
    assert isinstance(frame.replies[0], Reserved)
    assert frame.replies[0].num_cached_tokens == 0
