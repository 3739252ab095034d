"""The prefill side of a core: queue, chunks, what is told when, blocks held until Release."""

from __future__ import annotations

from moonpool.core.protocol import (
    Abort,
    Accepted,
    BlockLedger,
    ChunkPlanned,
    ClearCache,
    CoreFrame,
    Drain,
    HandBackReason,
    PrefillDone,
    PrefillFailed,
    PrefillStarted,
    Refused,
    RefuseReason,
    Release,
)
from moonpool.ids import BlockId
from moonpool.inference.output import FinishReason
from moonpool.kv.block_hash import hash_blocks
from moonpool.kv.events import BlockStored
from support.core_cases import Row, ident, make_worker, prefill, rows
from support.core_cluster import tenant_seed
from support.fake_runner import answer_alone, kv_values
from support.requests import make_request


def test_a_prompt_in_one_chunk_frame_by_frame() -> None:
    worker = make_worker(num_blocks=8)
    request = make_request(prompt=6)
    (first_token, *_), _ = answer_alone(request, max_model_len=64)
    blocks = (BlockId(0), BlockId(1))
    full_blocks = tuple(hash_blocks(tenant_seed(request), request.prompt_token_ids, 4))

    assert worker.step(prefill(request)) == CoreFrame(
        step=1,
        replies=(
            Accepted(attempt_id=ident()),
            PrefillStarted(attempt_id=ident(), num_cached_tokens=0, block_ids=blocks),
            ChunkPlanned(attempt_id=ident(), start=0, end=6),
        ),
        ledger=BlockLedger(num_total=8, num_free=6, num_cached=0, num_referenced=2, num_prefills=1),
    )
    held = BlockLedger(num_total=8, num_free=6, num_cached=0, num_referenced=2, num_prefills=1)
    assert worker.step() == CoreFrame(
        step=0,
        replies=(PrefillDone(attempt_id=ident(), num_cached_tokens=0, first_token=first_token),),
        ledger=held,
        cache_events=(BlockStored(hashes=full_blocks, parent_hash=None),),
        forward_s=0.001,
        num_step_tokens=6,
    )
    assert worker.core.is_idle
    released = worker.step(Release(attempt_id=ident()))
    assert released == CoreFrame(
        step=0,
        replies=(),
        # The full block stays cached, the partly filled one is free.
        ledger=BlockLedger(num_total=8, num_free=7, num_cached=1, num_referenced=0),
    )
    assert released.ledger.is_quiet


def test_the_plan_of_a_partly_filled_last_block() -> None:
    worker = make_worker()
    request = make_request(prompt=6)
    worker.step(prefill(request))
    (plan,) = worker.runner.plans
    assert rows(plan) == [Row(0, 0, 6, list(request.prompt_token_ids), [0, 1], 0)]
    assert plan.leaf_block_ids.tolist() == [0, 1]
    assert plan.zero_tails.tolist() == [[1, 2]]
    expected = [*kv_values([], request.prompt_token_ids), 0, 0]
    assert worker.runner.read([0, 1], 8) == expected
    assert sorted(worker.runner.leaves) == [0, 1]


def test_chunks_end_on_block_edges_and_leaves_come_with_their_chunk() -> None:
    worker = make_worker(max_num_batched_tokens=10)
    worker.run_until_idle(prefill(make_request(prompt=21)))
    assert [
        (row.start, row.end, row.position) for plan in worker.runner.plans for row in rows(plan)
    ] == [
        (0, 8, None),
        (8, 16, None),
        (16, 21, 0),
    ]
    assert [plan.leaf_block_ids.tolist() for plan in worker.runner.plans] == [
        [0, 1],
        [2, 3],
        [4, 5],
    ]
    assert [plan.zero_tails.tolist() for plan in worker.runner.plans] == [[], [], [[5, 1]]]


def test_full_blocks_are_cached_as_each_chunk_completes() -> None:
    worker = make_worker(max_num_batched_tokens=8)
    request = make_request(prompt=16)
    worker.step(prefill(request))
    worker.step(Abort(attempt_id=ident()))
    assert worker.core.ledger() == BlockLedger(
        num_total=16, num_free=14, num_cached=2, num_referenced=0
    )
    frame = worker.step(prefill(request, attempt=2))
    assert frame.replies[1:] == (
        PrefillStarted(
            attempt_id=ident(attempt=2),
            num_cached_tokens=8,
            block_ids=(BlockId(0), BlockId(1), BlockId(2), BlockId(3)),
        ),
        ChunkPlanned(attempt_id=ident(attempt=2), start=8, end=16),
    )


def test_a_cached_prompt_still_computes_its_last_token() -> None:
    worker = make_worker()
    request = make_request(prompt=8)
    worker.run_until_idle(prefill(request))
    worker.step(Release(attempt_id=ident()))
    again = make_request("r2", prompt=request.prompt_token_ids)
    replies = worker.run_until_idle(prefill(again))
    # The second block was cached too, but the token that follows needs the logits of the last one.
    done = replies[-1]
    assert isinstance(done, PrefillDone)
    assert done.num_cached_tokens == 4
    assert [done.first_token] == answer_alone(again, max_model_len=64)[0][:1]


def test_a_replay_continues_at_its_position() -> None:
    worker = make_worker()
    request = make_request(prompt=5, max_tokens=9, temperature=1.0, seed=3)
    answer, _ = answer_alone(request, max_model_len=64)
    replay = make_request(prompt=5, max_tokens=9, temperature=1.0, seed=3, emitted=answer[:4])
    replies = worker.run_until_idle(prefill(replay, attempt=2))
    assert replies[-1] == PrefillDone(
        attempt_id=ident(attempt=2), num_cached_tokens=0, first_token=answer[4]
    )
    assert rows(worker.runner.plans[0])[0].position == 4


def test_the_first_token_may_end_the_answer() -> None:
    request = make_request(prompt=5, max_tokens=1)
    (token,), _ = answer_alone(request, max_model_len=64)
    for ending, finish_reason in (
        (make_request(prompt=5, max_tokens=1), FinishReason.LENGTH),
        (make_request(prompt=5, stop_token_ids=[token]), FinishReason.STOP),
    ):
        done = make_worker().run_until_idle(prefill(ending))[-1]
        assert done == PrefillDone(
            attempt_id=ident(), num_cached_tokens=0, first_token=token, finish_reason=finish_reason
        )


def test_not_finite_fails_and_leaves_nothing_cached_of_its_chain() -> None:
    """Only the row that draws shows it, so the chunks before it are suspect as well."""
    worker = make_worker(max_num_batched_tokens=8)
    worker.run_until_idle(prefill(make_request("other", prompt=[9] * 8)))
    worker.step(Release(attempt_id=ident("other")))
    worker.runner._is_invalid = lambda row: True
    replies = worker.run_until_idle(prefill(make_request(prompt=16)))
    assert replies[-1] == PrefillFailed(attempt_id=ident(), reason=FinishReason.INVALID_OUTPUT)
    assert worker.core.ledger() == BlockLedger(
        num_total=16, num_free=14, num_cached=2, num_referenced=0
    )


def test_what_shares_a_chain_with_output_that_is_not_finite_runs_on() -> None:
    worker = make_worker(max_num_batched_tokens=8)
    worker.run_until_idle(prefill(make_request("held", prompt=list(range(16)))))
    worker.runner._is_invalid = lambda row: True
    worker.run_until_idle(prefill(make_request("bad", prompt=list(range(18)), arrival=1.0)))
    worker.runner._is_invalid = lambda row: False
    # The reader of the first still has its blocks; they are free, not cached, when it goes.
    assert worker.core.ledger().num_referenced == 4
    ledger = worker.step(Release(attempt_id=ident("held"))).ledger
    assert (ledger.num_free, ledger.num_cached) == (16, 0)
    replies = worker.run_until_idle(
        prefill(make_request("next", prompt=list(range(18)), arrival=2.0))
    )
    assert replies[1] == PrefillStarted(
        attempt_id=ident("next"), num_cached_tokens=0, block_ids=(0, 1, 2, 3, 4)
    )


def test_two_prompts_share_a_step() -> None:
    worker = make_worker(max_num_batched_tokens=16)
    frame = worker.step(
        prefill(make_request("young", prompt=20, arrival=2.0)),
        prefill(make_request("old", prompt=7, arrival=1.0)),
    )
    assert [reply for reply in frame.replies if isinstance(reply, ChunkPlanned)] == [
        ChunkPlanned(attempt_id=ident("old"), start=0, end=7),
        ChunkPlanned(attempt_id=ident("young"), start=0, end=8),
    ]


def test_an_idle_worker_takes_any_length_and_a_full_queue_refuses() -> None:
    worker = make_worker(num_blocks=64, max_num_batched_tokens=8, max_queued_steps=2)
    frame = worker.step(
        prefill(make_request("long", prompt=60)),
        prefill(make_request("short", prompt=5, arrival=1.0)),
    )
    assert frame.replies[:2] == (
        Accepted(attempt_id=ident("long")),
        Refused(attempt_id=ident("short"), reason=RefuseReason.QUEUE_FULL),
    )
    # Its plan is out: 8 of 60 tokens are counted as computed.
    assert frame.num_queued_tokens == 52
    while worker.core.take_frame().num_queued_tokens > 10:
        worker.step()
    frame = worker.step(prefill(make_request("next", prompt=5, arrival=1.0)))
    assert Accepted(attempt_id=ident("next")) in frame.replies


def test_the_young_that_wait_keep_no_older_one_out() -> None:
    worker = make_worker(num_blocks=64, max_num_batched_tokens=8, max_queued_steps=2)
    frame = worker.step(
        prefill(make_request("young", prompt=60, arrival=2.0)),
        prefill(make_request("old", prompt=60, arrival=1.0)),
    )
    assert frame.replies[:2] == (
        Accepted(attempt_id=ident("young")),
        Accepted(attempt_id=ident("old")),
    )
    assert frame.replies[-1] == ChunkPlanned(attempt_id=ident("old"), start=0, end=8)


def test_blocks_promised_to_the_queue_are_counted() -> None:
    worker = make_worker(num_blocks=8, max_num_batched_tokens=16, max_queued_steps=9)
    frame = worker.step(
        prefill(make_request("a", prompt=16, arrival=1.0)),
        prefill(make_request("b", prompt=12, arrival=2.0)),
        prefill(make_request("c", prompt=8, arrival=3.0)),
        prefill(make_request("d", prompt=4, arrival=4.0)),
    )
    assert frame.replies[:4] == (
        Accepted(attempt_id=ident("a")),
        Accepted(attempt_id=ident("b")),
        Refused(attempt_id=ident("c"), reason=RefuseReason.NO_BLOCKS),
        Accepted(attempt_id=ident("d")),
    )
    # Whoever waits holds nothing.
    assert worker.core.ledger().num_referenced == 4


def test_what_can_never_be_computed_here_is_refused() -> None:
    worker = make_worker(num_blocks=4, max_model_len=64)
    never = {
        "too many blocks": make_request("r1", prompt=17),
        "nothing to draw": make_request("r2", prompt=4, emitted=[1, 2], max_tokens=2),
        "model too short": make_request("r3", prompt=64),
        "empty": make_request("r4", prompt=[]),
    }
    frame = worker.step(*(prefill(request) for request in never.values()))
    assert [reply.reason for reply in frame.replies] == [RefuseReason.NEVER_FITS] * 4
    assert worker.step(prefill(make_request("r5", prompt=16))).step == 1


def test_drain_refuses_what_is_new_and_gives_back_what_has_not_finished() -> None:
    worker = make_worker()
    worker.step(prefill(make_request("held", prompt=4)))
    worker.step(Drain(), prefill(make_request("running", prompt=20), attempt=1))
    frame = worker.step(prefill(make_request("late", prompt=4)))
    assert frame.replies == (Refused(attempt_id=ident("late"), reason=RefuseReason.DRAINING),)

    worker = make_worker()
    worker.step(prefill(make_request("held", prompt=4)))
    worker.step(prefill(make_request("running", prompt=20)))
    frame = worker.step(Drain(hand_back=True))
    assert frame.replies == (
        PrefillFailed(attempt_id=ident("running"), reason=HandBackReason.DRAINING),
    )
    assert worker.core.ledger().num_prefills == 1
    assert worker.step(Release(attempt_id=ident("held"))).ledger.is_quiet


def test_clear_cache_spares_what_is_referenced() -> None:
    worker = make_worker()
    worker.run_until_idle(prefill(make_request("gone", prompt=8)))
    worker.run_until_idle(prefill(make_request("held", prompt=8)))
    ledger = worker.step(Release(attempt_id=ident("gone")), ClearCache()).ledger
    assert (ledger.num_cached, ledger.num_referenced) == (0, 2)
