"""What later requests find: prompts and answers, on both roles, and never another tenant's."""

from __future__ import annotations

import numpy as np

from moonpool.core.protocol import (
    FetchEnded,
    FetchReserved,
    LockPrefix,
    PrefixLocked,
    Release,
    TokensReady,
    UnlockPrefix,
)
from moonpool.inference.request import InferenceRequest
from support.core_cases import (
    answers,
    chain,
    decode_here,
    fetch,
    ident,
    make_config,
    make_worker,
    prefill,
)
from support.core_cluster import CoreCluster, Worker
from support.fake_runner import answer_alone
from support.requests import make_request

NUM_TURNS = 8
SECRET = -777


def answer(request: InferenceRequest) -> list[int]:
    return answer_alone(request, max_model_len=1024)[0]


def num_computed_tokens(worker: Worker) -> int:
    return sum(plan.num_tokens for plan in worker.runner.plans)


# -- the next turn --


def test_a_chat_through_a_prefill_and_a_decode_worker_computes_only_what_is_new() -> None:
    """The prefill worker fetches the answer before from the decode worker that made it."""
    config = make_config(
        num_blocks=256, max_model_len=1024, max_num_batched_tokens=64, max_queued_steps=99
    )
    cluster = CoreCluster(config, 2)
    prefill_worker, decode_worker = cluster.workers
    history = [*range(10)]
    for turn in range(NUM_TURNS):
        question = [100 + turn] * 5
        request = make_request(
            f"turn{turn}", prompt=history + question, max_tokens=9, arrival=turn, ignore_eos=True
        )
        cluster.submit(request)
        before = num_computed_tokens(prefill_worker), num_computed_tokens(decode_worker)
        tracked = cluster.requests[request.request_id]
        cluster.place(tracked, 1, 0, num_peer_tokens=request.num_tokens)
        cluster.settle(lambda tracked: (1, 0))
        assert tracked.answer == answer(request)
        prefilled = num_computed_tokens(prefill_worker) - before[0]
        decoded = num_computed_tokens(decode_worker) - before[1]
        # The last token drawn was never computed, and a block that is not full is nobody's.
        num_new_tokens = len(question) + (1 if turn else len(history))
        assert prefilled <= num_new_tokens + config.block_size
        assert decoded == request.sampling.max_tokens - 1
        history = [*request.prompt_token_ids, *tracked.answer]
    cluster.check_quiet()


def test_a_decode_worker_serves_prompt_and_answer_after_a_handoff() -> None:
    config = make_config(num_blocks=64)
    cluster = CoreCluster(config, 2)
    request = make_request("r1", prompt=10, max_tokens=8)
    cluster.submit(request)
    cluster.settle(lambda tracked: (1, 0))
    both = [*request.prompt_token_ids, *cluster.requests[request.request_id].answer]
    following = make_request("r2", prompt=[*both, 1, 2, 3], max_tokens=1)
    # On the worker itself ...
    worker = cluster.workers[1]
    (reply,) = [
        r for r in worker.run_until_idle(decode_here(following)) if isinstance(r, TokensReady)
    ]
    assert (reply.num_cached_tokens, list(reply.run.token_ids)) == (16, answer(following))
    # ... and to its peers, which find the question by now as well.
    frame = worker.step(LockPrefix(read_id=1, hashes=chain(following, 5)))
    (locked,) = [r for r in frame.replies if isinstance(r, PrefixLocked)]
    assert len(locked.block_ids) == 5
    worker.step(UnlockPrefix(read_id=1))


def test_a_prefill_worker_serves_an_answer_that_it_fetched() -> None:
    worker = make_worker()
    request = make_request(prompt=14)
    (_, reply) = worker.step(prefill(request, peer=12)).replies
    assert isinstance(reply, FetchReserved)
    fetch(worker, reply, request, 12)
    worker.run_until_idle(FetchEnded(attempt_id=ident(), num_tokens=12))
    worker.step(Release(attempt_id=ident()))
    frame = worker.step(LockPrefix(read_id=1, hashes=chain(request, 3)))
    assert len(frame.replies[0].block_ids) == 3


# -- tenants --


def test_poisoned_blocks_of_one_tenant_change_no_token_of_another() -> None:
    """Whatever one tenant's blocks hold: the other neither finds them nor reads what is left in them."""
    worker = make_worker(num_blocks=12, max_model_len=40)
    prompt = list(range(10))
    victims = [
        make_request(f"v{i}", prompt=[*prompt, *[i] * i], max_tokens=6, tenant="a") for i in (1, 2)
    ]
    worker.run_until_idle(*map(decode_here, victims))
    ledger = worker.core.ledger()
    assert ledger.is_quiet
    assert ledger.num_cached > 3
    worker.runner.pool[:] = SECRET
    worker.runner.leaves.clear()
    request = make_request("other", prompt=prompt, max_tokens=6, tenant="b")
    replies = worker.run_until_idle(prefill(request))
    assert replies[-1].first_token == answer(request)[0]
    replies = worker.run_until_idle(decode_here(request, attempt=2))
    assert answers(replies) == {"other": answer(request)}
    # What may leave this worker has its leaves: no value of the other tenant is among it.
    assert worker.runner.leaves
    for values in worker.runner.leaves.values():
        assert SECRET not in np.frombuffer(values, dtype=np.int64)


def test_a_prefills_unused_slots_are_zero_before_anybody_reads_them() -> None:
    """Also where the block held another tenant's tokens a moment before."""
    for num_tokens in range(1, 13):
        worker = make_worker(num_blocks=3)
        worker.runner.pool[:] = SECRET
        request = make_request(prompt=num_tokens, max_tokens=1)
        worker.run_until_idle(prefill(request))
        num_blocks = -(-num_tokens // 4)
        values = worker.runner.pool[:num_blocks].reshape(-1)
        assert SECRET not in values[:num_tokens]
        assert not values[num_tokens:].any()
        assert len(worker.runner.leaves) == num_blocks


def test_a_decodes_blocks_hold_nothing_of_others_at_any_time() -> None:
    for num_tokens in range(1, 10):
        worker = make_worker(num_blocks=5)
        worker.runner.pool[:] = SECRET
        worker.step(decode_here(make_request(prompt=num_tokens, max_tokens=8)))
        while worker.core.ledger().num_running:
            (row,) = worker.runner.plans[-1].rows
            assert SECRET not in worker.runner.pool[row.block_tables[0]]
            worker.step()


def test_a_tenants_lock_holds_only_its_own() -> None:
    worker = make_worker()
    request = make_request(prompt=14, tenant="a")
    worker.run_until_idle(prefill(request))
    other = make_request(prompt=request.prompt_token_ids, tenant="b")
    frame = worker.step(
        LockPrefix(read_id=1, hashes=chain(request, 3)),
        LockPrefix(read_id=2, hashes=chain(other, 3)),
    )
    assert [len(reply.block_ids) for reply in frame.replies] == [3, 0]
