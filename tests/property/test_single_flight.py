"""Prefills with common prefixes on one worker with room for all, against a naive model: the set of
block hashes that have been made. No block that has been made, or is being made, is made again."""

from __future__ import annotations

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, initialize, multiple, rule

from moonpool.core.protocol import (
    Abort,
    BlocksFetched,
    ChunkPlanned,
    CoreFrame,
    FetchEnded,
    FetchReserved,
    PrefillDone,
    ReadEnded,
    Release,
)
from moonpool.ids import AttemptId, BlockHash
from moonpool.inference.request import InferenceRequest
from support.core_cases import chain, fetch, make_worker, prefill
from support.fake_runner import answer_alone
from support.requests import make_request

BLOCK_SIZE = 4


class SingleFlightMachine(RuleBasedStateMachine):
    """Steps, fetches and aborts in any order. Nothing is evicted, so what was made stays made."""

    requests = Bundle("requests")

    @initialize(
        max_num_batched_tokens=st.sampled_from([4, 8, 12, 64]), max_num_seqs=st.integers(1, 4)
    )
    def start(self, **limits: int) -> None:
        self.worker = make_worker(num_blocks=512, max_queued_steps=999, **limits)
        self.requests_by_id: dict[AttemptId, InferenceRequest] = {}
        #: What a prefill, or a fetch, has made and announced.
        self.made: set[BlockHash] = set()
        self.fetches: dict[AttemptId, FetchReserved] = {}
        self.aborted: set[AttemptId] = set()
        self.done: dict[AttemptId, PrefillDone] = {}

    @rule(
        target=requests,
        kind=st.integers(0, 2),
        num_prefix_tokens=st.integers(0, 24),
        suffix=st.lists(st.integers(0, 2), min_size=1, max_size=8),
        arrival=st.integers(0, 9),
        num_peer_tokens=st.sampled_from([0, 0, 8, 16, 99]),
    )
    def submit(
        self,
        kind: int,
        num_prefix_tokens: int,
        suffix: list[int],
        arrival: int,
        num_peer_tokens: int,
    ) -> object:
        if len(self.requests_by_id) >= 20:
            return multiple()
        request = make_request(
            f"r{len(self.requests_by_id)}",
            prompt=[kind] * num_prefix_tokens + suffix,
            arrival=arrival,
        )
        command = prefill(request, peer=num_peer_tokens)
        self.requests_by_id[command.attempt_id] = request
        self.worker.core.handle(command, 0.0)
        return command.attempt_id

    @rule()
    def step(self) -> None:
        self._step()

    def _step(self) -> CoreFrame:
        frame = self.worker.step()
        making: set[BlockHash] = set()
        for reply in frame.replies:
            match reply:
                case FetchReserved():
                    self.fetches[reply.attempt_id] = reply
                    self._begin_making(
                        making, reply.hashes[reply.num_cached_tokens // BLOCK_SIZE :]
                    )
                case ChunkPlanned():
                    request = self.requests_by_id[reply.attempt_id]
                    hashes = self._hashes(request)
                    ended = hashes[reply.start // BLOCK_SIZE : reply.end // BLOCK_SIZE]
                    # The block of the last token is made in any case: its logits are wanted.
                    num_findable = (request.num_tokens - 1) // BLOCK_SIZE
                    findable = ended[: max(0, num_findable - reply.start // BLOCK_SIZE)]
                    self._begin_making(making, findable)
                    self.made.update(ended)
                case PrefillDone():
                    self.done[reply.attempt_id] = reply
        return frame

    def _begin_making(self, making: set[BlockHash], hashes: tuple[BlockHash, ...]) -> None:
        assert not self.made.intersection(hashes), "a block is made again"
        assert not making.intersection(hashes), "two make one block"
        making.update(hashes)

    def _hashes(self, request: InferenceRequest) -> tuple[BlockHash, ...]:
        return chain(request, request.num_tokens // BLOCK_SIZE)

    def _some_fetch(self, index: int) -> FetchReserved | None:
        fetches = list(self.fetches.values())
        return fetches[index] if index < len(fetches) else None

    @rule(index=st.integers(0, 3), num_blocks=st.integers(0, 6))
    def blocks_fetched(self, index: int, num_blocks: int) -> None:
        reply = self._some_fetch(index)
        if reply is not None:
            self._fetch(reply, num_blocks)

    def _fetch(self, reply: FetchReserved, num_blocks: int) -> int:
        num_tokens = min(reply.num_cached_tokens + num_blocks * BLOCK_SIZE, reply.num_tokens)
        fetch(self.worker, reply, self.requests_by_id[reply.attempt_id], num_tokens)
        command = BlocksFetched(attempt_id=reply.attempt_id, num_tokens=num_tokens)
        self.worker.core.handle(command, 0.0)
        self.made.update(reply.hashes[: num_tokens // BLOCK_SIZE])
        return num_tokens

    @rule(index=st.integers(0, 3), num_blocks=st.integers(0, 6))
    def fetch_ended(self, index: int, num_blocks: int) -> None:
        reply = self._some_fetch(index)
        if reply is not None:
            del self.fetches[reply.attempt_id]
            num_tokens = self._fetch(reply, num_blocks)
            command = FetchEnded(attempt_id=reply.attempt_id, num_tokens=num_tokens)
            self.worker.core.handle(command, 0.0)

    @rule(attempt_id=requests)
    def abort(self, attempt_id: AttemptId) -> None:
        self.aborted.add(attempt_id)
        self.worker.core.handle(Abort(attempt_id=attempt_id), 0.0)
        if self.fetches.pop(attempt_id, None) is not None:
            self.worker.core.handle(ReadEnded(attempt_id=attempt_id), 0.0)

    def teardown(self) -> None:
        if not hasattr(self, "worker"):
            return
        while self._step().step or self.fetches:
            for _ in list(self.fetches):
                self.fetch_ended(0, 99)
        for attempt_id, request in self.requests_by_id.items():
            if attempt_id in self.done:
                first_token = answer_alone(request, max_model_len=64)[0][0]
                assert self.done[attempt_id].first_token == first_token
            else:
                assert attempt_id in self.aborted
            self.worker.core.handle(Release(attempt_id=attempt_id), 0.0)
        assert self.worker.core.ledger().is_quiet


SingleFlightMachine.TestCase.settings = settings(
    max_examples=30,
    stateful_step_count=40,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)
TestSingleFlight = SingleFlightMachine.TestCase
