"""Cores under random requests, roles, aborts, revocations and tiny pools: tokens equal each request
alone, every request ends, and the ledgers are quiet afterwards."""

from __future__ import annotations

from typing import Any

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, initialize, multiple, rule

from moonpool.core.config import CoreConfig
from moonpool.core.protocol import ClearCache
from moonpool.ids import RequestId
from moonpool.kv.eviction import EvictionName
from support.core_cluster import CoreCluster, Tracked
from support.fake_runner import answer_alone
from support.requests import make_request

NUM_WORKERS = 2
#: Requests begin with a piece of one of these, so prefixes are shared.
PREFIXES = ([5] * 20, [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16])


class CoreMachine(RuleBasedStateMachine):
    tracked = Bundle("tracked")

    @initialize(
        num_blocks=st.integers(5, 14),
        max_num_seqs=st.integers(1, 4),
        max_num_batched_tokens=st.sampled_from([4, 7, 16, 64]),
        local_prefill_tokens=st.sampled_from([0, 3, 8, 64]),
        headroom_tokens=st.sampled_from([0, 4, 8]),
        eviction=st.sampled_from(EvictionName),
    )
    def start(self, **limits: Any) -> None:
        self.config = CoreConfig(
            block_size=4,
            max_model_len=40,
            max_queued_steps=2,
            eos_token_ids=(0,),
            is_checked=True,
            **limits,
        )
        self.cluster = CoreCluster(self.config, NUM_WORKERS)
        self.num_requests = 0

    @rule(
        target=tracked,
        prefix=st.sampled_from(PREFIXES),
        num_prefix_tokens=st.integers(0, 16),
        suffix=st.lists(st.integers(0, 3), min_size=1, max_size=6),
        max_tokens=st.integers(1, 12),
        arrival=st.integers(0, 5),
        stop=st.sampled_from([(), (7, 8, 9)]),
        ignore_eos=st.booleans(),
    )
    def submit(
        self,
        prefix: list[int],
        num_prefix_tokens: int,
        suffix: list[int],
        max_tokens: int,
        arrival: int,
        stop: tuple[int, ...],
        ignore_eos: bool,
    ) -> object:
        prompt = prefix[:num_prefix_tokens] + suffix
        num_kv_tokens = min(len(prompt) + max_tokens, self.config.max_model_len) - 1
        if num_kv_tokens > self.config.num_blocks * self.config.block_size:
            return multiple()
        self.num_requests += 1
        request = make_request(
            f"r{self.num_requests}",
            prompt=prompt,
            max_tokens=max_tokens,
            arrival=arrival,
            stop_token_ids=stop,
            ignore_eos=ignore_eos,
        )
        self.cluster.submit(request)
        return request.request_id

    def _get(self, request_id: RequestId) -> Tracked:
        return self.cluster.requests[request_id]

    @rule(
        request_id=tracked,
        worker=st.integers(0, NUM_WORKERS - 1),
        source=st.sampled_from([None, *range(NUM_WORKERS)]),
        num_peer_tokens=st.sampled_from([0, 8, 40]),
    )
    def place(
        self, request_id: RequestId, worker: int, source: int | None, num_peer_tokens: int
    ) -> None:
        tracked = self._get(request_id)
        if not tracked.is_placed and not tracked.is_over:
            self.cluster.place(
                tracked,
                worker,
                None if source == worker else source,
                num_peer_tokens=num_peer_tokens,
            )

    @rule(index=st.integers(0, NUM_WORKERS - 1))
    def step(self, index: int) -> None:
        self.cluster.step(index)

    @rule(index=st.integers(0, NUM_WORKERS - 1))
    def deliver(self, index: int) -> None:
        self.cluster.deliver(index)

    @rule()
    def turn(self) -> None:
        """Everybody moves once: gets runs further than single moves do."""
        for index in range(NUM_WORKERS):
            self.cluster.step(index)
            self.cluster.deliver(index)
        for tracked in list(self.cluster.requests.values()):
            self.cluster.read(tracked)
        for read_id in list(self.cluster.fetches):
            self.cluster.fetch(read_id)

    @rule(index=st.integers(0, 9), num_tokens=st.none() | st.integers(0, 40))
    def fetch(self, index: int, num_tokens: int | None) -> None:
        read_ids = list(self.cluster.fetches)
        if index < len(read_ids):
            self.cluster.fetch(read_ids[index], num_tokens)

    @rule(index=st.integers(0, 9))
    def give_up_fetching(self, index: int) -> None:
        """The soft deadline has passed, or the peer died."""
        read_ids = list(self.cluster.fetches)
        if index < len(read_ids):
            self.cluster.end_fetch(read_ids[index])

    @rule(request_id=tracked, index=st.integers(0, NUM_WORKERS - 1))
    def lock(self, request_id: RequestId, index: int) -> None:
        self.cluster.lock(index, self._get(request_id).request)

    @rule(place=st.integers(0, 9))
    def unlock(self, place: int) -> None:
        if place < len(self.cluster.locks):
            self.cluster.unlock(place)

    @rule(request_id=tracked, num_tokens=st.none() | st.integers(0, 40))
    def read(self, request_id: RequestId, num_tokens: int | None) -> None:
        self.cluster.read(self._get(request_id), num_tokens)

    @rule(request_id=tracked)
    def lose_source(self, request_id: RequestId) -> None:
        """The stream broke, or a bad tail: go on with what has been read."""
        tracked = self._get(request_id)
        if tracked.handoff is not None and tracked.handoff.is_reserved:
            self.cluster.finish_reading(tracked)

    @rule(request_id=tracked)
    def abort(self, request_id: RequestId) -> None:
        tracked = self._get(request_id)
        if not tracked.is_over:
            self.cluster.abort(tracked)

    @rule()
    def scribble(self) -> None:
        self.cluster.scribble()

    @rule(index=st.integers(0, 9))
    def end_stray_read(self, index: int) -> None:
        if index < len(self.cluster.stray_reads):
            self.cluster.end_stray_read(index)

    @rule(index=st.integers(0, NUM_WORKERS - 1))
    def clear_cache(self, index: int) -> None:
        self.cluster.workers[index].core.handle(ClearCache(), 0.0)

    @rule(index=st.integers(0, NUM_WORKERS - 1))
    def go_on_with_a_fork(self, index: int) -> None:
        """A fork is whole and independent: it takes the place of the original."""
        worker = self.cluster.workers[index]
        worker.core = worker.core.fork()
        worker.core.validate()

    def teardown(self) -> None:
        if not hasattr(self, "cluster"):
            return
        self.cluster.settle(_route)
        self.cluster.check_quiet()
        for tracked in self.cluster.requests.values():
            expected, finish_reason = answer_alone(
                tracked.request,
                max_model_len=self.config.max_model_len,
                eos_token_ids=self.config.eos_token_ids,
            )
            assert tracked.answer == expected[: len(tracked.answer)]
            assert tracked.is_aborted or tracked.answer == expected
            assert tracked.is_aborted or tracked.finish_reason == finish_reason


def _route(tracked: Tracked) -> tuple[int, int | None]:
    """Cross the workers; every third attempt decodes where it is prefilled."""
    target = int(tracked.request.request_id[1:]) % NUM_WORKERS
    return target, None if tracked.attempt % 3 == 2 else 1 - target


CoreMachine.TestCase.settings = settings(
    max_examples=30,
    stateful_step_count=50,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)
TestCoreMachine = CoreMachine.TestCase
