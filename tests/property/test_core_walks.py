"""Long seeded walks of two workers of role 'both' under memory pressure: what the hypothesis machine
reaches only seldom (preemption, revocation in all directions, hand-back) happens here all the time."""

from __future__ import annotations

import dataclasses
import random

import pytest

from moonpool.core.config import CoreConfig
from moonpool.core.protocol import (
    Abort,
    Arrived,
    BlocksArrived,
    BlocksFetched,
    ClearCache,
    Decode,
    FetchEnded,
    ReadEnded,
    Release,
    Reply,
    TokensReady,
    UnlockPrefix,
)
from moonpool.ids import AttemptId, RequestId
from moonpool.kv.eviction import EvictionName
from support.core_cluster import CoreCluster, Tracked, Worker
from support.fake_runner import answer_alone
from support.requests import make_request

NUM_WORKERS = 2
BLOCK_SIZE = 4
#: Of requests whose output is not finite.
BAD_SEED = 1


def make_config(rng: random.Random) -> CoreConfig:
    return CoreConfig(
        num_blocks=rng.randint(6, 16),
        block_size=BLOCK_SIZE,
        max_num_batched_tokens=rng.choice([4, 7, 16, 64]),
        max_num_seqs=rng.choice([1, 3, 8, 8]),
        max_model_len=40,
        local_prefill_tokens=rng.choice([0, 4, 8, 64]),
        max_queued_steps=rng.choice([1, 4, 50]),
        headroom_tokens=rng.choice([0, 0, 0, 4, 8]),
        eviction=rng.choice(list(EvictionName)),
        eos_token_ids=(0,),
        is_checked=True,
    )


class Walk:
    """One walk: random moves of everybody, then a fair end."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.config = make_config(self.rng)
        self.cluster = CoreCluster(self.config, NUM_WORKERS)
        self.prefix = [self.rng.randrange(50) for _ in range(20)]

    def run(self, num_moves: int) -> None:
        moves = [
            (8, self.submit),
            (16, self.place),
            (30, self.step),
            (25, self.deliver),
            (20, self.read),
            (8, self.fetch),
            (2, self.give_up_fetching),
            (2, self.lock),
            (3, self.unlock),
            (2, self.lose_source),
            (2, self.abort),
            (4, self.end_stray_read),
            (4, self.cluster.scribble),
            (3, self.clear_cache),
            (3, self.repeat_something),
        ]
        weights = [weight for weight, _ in moves]
        for _ in range(num_moves):
            self.rng.choices(moves, weights)[0][1]()
        self.cluster.settle(self.route)
        self.check()

    def check(self) -> None:
        self.cluster.check_quiet()
        for tracked in self.cluster.requests.values():
            expected, finish_reason = answer_alone(
                tracked.request,
                max_model_len=self.config.max_model_len,
                eos_token_ids=self.config.eos_token_ids,
            )
            assert tracked.answer == expected[: len(tracked.answer)]
            if not tracked.is_aborted:
                assert (tracked.answer, tracked.finish_reason) == (expected, finish_reason)

    # -- moves --

    def submit(self) -> None:
        rng = self.rng
        num_live = sum(not t.is_over for t in self.cluster.requests.values())
        prompt = self.prefix[: rng.randint(0, 20)] + [
            rng.randrange(3) for _ in range(rng.randint(1, 4))
        ]
        max_tokens = rng.randint(1, 16)
        num_kv_tokens = min(len(prompt) + max_tokens, self.config.max_model_len) - 1
        if num_live < 6 and num_kv_tokens <= self.config.num_blocks * BLOCK_SIZE:
            request = make_request(
                f"r{len(self.cluster.requests)}",
                prompt=prompt,
                max_tokens=max_tokens,
                arrival=rng.randrange(20),
                temperature=1.0,
                seed=rng.randrange(9),
                ignore_eos=rng.random() < 0.8,
            )
            self.cluster.submit(request)

    def some(self) -> Tracked | None:
        live = [t for t in self.cluster.requests.values() if not t.is_over]
        return self.rng.choice(live) if live else None

    def place(self) -> None:
        waiting = [t for t in self.cluster.requests.values() if not t.is_over and not t.is_placed]
        if waiting:
            target = self.rng.randrange(NUM_WORKERS)
            source = 1 - target if self.rng.random() < 0.6 else None
            num_peer_tokens = self.rng.choice([0, 8, 40, 40])
            tracked = self.rng.choice(waiting)
            self.cluster.place(tracked, target, source, num_peer_tokens=num_peer_tokens)

    def route(self, tracked: Tracked) -> tuple[int, int | None]:
        target = int(tracked.request.request_id[1:]) % NUM_WORKERS
        return target, 1 - target if tracked.attempt % 3 else None

    def step(self) -> None:
        self.cluster.step(self.rng.randrange(NUM_WORKERS), is_late=self.rng.random() < 0.2)

    def deliver(self) -> None:
        self.cluster.deliver(self.rng.randrange(NUM_WORKERS))

    def read(self) -> None:
        tracked = self.some()
        if tracked is not None:
            self.cluster.read(tracked, self.rng.choice([None, None, self.rng.randrange(40)]))

    def fetch(self) -> None:
        if self.cluster.fetches:
            read_id = self.rng.choice(list(self.cluster.fetches))
            self.cluster.fetch(read_id, self.rng.choice([None, None, self.rng.randrange(40)]))

    def give_up_fetching(self) -> None:
        if self.cluster.fetches:
            self.cluster.end_fetch(self.rng.choice(list(self.cluster.fetches)))

    def lock(self) -> None:
        tracked = self.some()
        if tracked is not None:
            self.cluster.lock(self.rng.randrange(NUM_WORKERS), tracked.request)

    def unlock(self) -> None:
        if self.cluster.locks:
            self.cluster.unlock(self.rng.randrange(len(self.cluster.locks)))

    def lose_source(self) -> None:
        tracked = self.some()
        if tracked is not None and tracked.handoff is not None and tracked.handoff.is_reserved:
            self.cluster.finish_reading(tracked)

    def abort(self) -> None:
        tracked = self.some()
        if tracked is not None:
            self.cluster.abort(tracked)

    def end_stray_read(self) -> None:
        if self.cluster.stray_reads:
            self.cluster.end_stray_read(self.rng.randrange(len(self.cluster.stray_reads)))

    def clear_cache(self) -> None:
        self.cluster.workers[self.rng.randrange(NUM_WORKERS)].core.handle(ClearCache(), 0.0)

    def repeat_something(self) -> None:
        """Commands about attempts that have ended, and of requests that never were."""
        rng = self.rng
        ended = [t for t in self.cluster.requests.values() if t.attempt > 1]
        attempt_id = AttemptId(make_request("unknown").request_id, 1)
        if ended:
            tracked = rng.choice(ended)
            stray = {attempt for _, attempt, _ in self.cluster.stray_reads}
            attempt_id = AttemptId(tracked.request.request_id, rng.randrange(1, tracked.attempt))
            if attempt_id in stray:
                return
        self.cluster.repeat(
            rng.randrange(NUM_WORKERS),
            rng.choice(
                [
                    Abort(attempt_id=attempt_id),
                    Release(attempt_id=attempt_id),
                    ReadEnded(attempt_id=attempt_id),
                    BlocksArrived(attempt_id=attempt_id, num_tokens=rng.randrange(40)),
                    Arrived(attempt_id=attempt_id, num_tokens=rng.randrange(40), first_token=1),
                    BlocksFetched(attempt_id=attempt_id, num_tokens=rng.randrange(40)),
                    FetchEnded(attempt_id=attempt_id, num_tokens=rng.randrange(40)),
                    UnlockPrefix(read_id=10_000),
                ]
            ),
        )


@pytest.mark.parametrize("seed", range(30))
def test_every_request_ends_with_the_tokens_it_has_alone(seed: int) -> None:
    Walk(seed).run(num_moves=250)


@pytest.mark.parametrize("seed", range(10))
def test_output_that_is_not_finite_harms_nobody_else(seed: int) -> None:
    """Some requests fail at their first token, in the midst of others that share their prefix."""
    rng = random.Random(seed)
    worker = Worker(dataclasses.replace(make_config(rng), max_num_seqs=8, max_queued_steps=50))
    worker.runner._is_invalid = lambda row: (
        row.sample is not None and row.sample.sampling.seed == BAD_SEED
    )
    requests = [
        make_request(
            f"r{number}",
            prompt=[5] * rng.randint(1, 14) + [rng.randrange(3)],
            max_tokens=rng.randint(1, 8),
            arrival=rng.randrange(9),
            seed=rng.choice([0, BAD_SEED]),
        )
        for number in range(40)
    ]
    replies: list[Reply] = []
    for request in requests:
        replies += worker.step(Decode(request=request, attempt=1, has_source=False)).replies
        for _ in range(rng.randrange(3)):
            replies += worker.step().replies
    replies += worker.run_until_idle()
    assert worker.core.ledger().is_quiet
    answers: dict[RequestId, list[int]] = {}
    for reply in replies:
        if isinstance(reply, TokensReady):
            answers.setdefault(reply.attempt_id.request_id, []).extend(reply.run.token_ids)
    assert len(answers) > 10
    for request in requests:
        if request.request_id in answers:
            alone, _ = answer_alone(request, max_model_len=40, eos_token_ids=(0,))
            is_bad = request.sampling.seed == BAD_SEED
            assert answers[request.request_id] == ([] if is_bad else alone)
