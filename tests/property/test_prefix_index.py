"""A router's PrefixIndex against the caches of workers behind a link that does what it likes.

The link loses, doubles, delays, reorders and damages batches, heartbeats and snapshots; workers restart and
are lost; requests end before a worker tells what they left. Once it is calm (a few heartbeats of each worker, and the snapshots that are asked for then), the
index is the workers' truth, and nothing that was delayed changes it any more.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import takewhile

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from moonpool.ids import Incarnation, WorkerId, WorkerKey
from moonpool.kv.block_cache import BlockCache
from moonpool.kv.block_key import KeyArray, block_keys
from moonpool.kv.prefix_index import PrefixIndex
from moonpool.kv.published_set import EventBatch, PublishedSet, SetHead, SetSnapshot
from support.kv import hold, make_chain
from support.snapshots import load_snapshot

NUM_BLOCKS = 8
TEXTS = ["a", "aa", "aaaa", "aaaaaa", "aab", "aabb", "aaba", "abba", "ab", "bbbb", "cd", "cdcd"]
CHAINS = {text: make_chain(text) for text in TEXTS}
KEYS = {text: block_keys(chain) for text, chain in CHAINS.items()}
WORKER_IDS = [WorkerId("p0"), WorkerId("d0"), WorkerId("d1")]
texts = st.sampled_from(TEXTS)
worker_ids = st.sampled_from(WORKER_IDS)

Message = EventBatch | SetHead | SetSnapshot


class Worker:
    """One life of a worker: its cache, and what it has announced of it."""

    def __init__(self, worker_id: WorkerId, life: int) -> None:
        self.key = WorkerKey(worker_id, Incarnation(f"{life:016x}"))
        self.cache = BlockCache(NUM_BLOCKS)
        self.published = PublishedSet()

    def publish(self) -> EventBatch | None:
        return self.published.apply(self.cache.take_events())

    @property
    def truth(self) -> KeyArray:
        return np.sort(block_keys([block_hash for block_hash, _ in self.cache.contents()]))


@dataclass(frozen=True, slots=True)
class Sent:
    worker: WorkerKey
    message: Message


def damaged(message: Message) -> Message:
    """The same with one bit turned, wherever it has one to turn."""
    flip = np.array([1 << 33], np.uint64)
    match message:
        case SetHead(digest=digest):
            return replace(message, digest=digest ^ 1)
        case SetSnapshot(keys=keys):
            return replace(message, keys=np.concatenate((keys[:1] ^ flip, keys[1:])))
        case EventBatch(stored_keys=stored, removed_keys=removed):
            return replace(
                message,
                stored_keys=np.concatenate((stored[:-1], stored[-1:] ^ flip)),
                removed_keys=np.concatenate((removed[:-1], removed[-1:] ^ flip)),
            )


class PrefixIndexMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.index = PrefixIndex(max_held_batches=3, max_held_keys=14)
        self.num_lives = 0
        self.workers: dict[WorkerId, Worker] = {}
        #: Per worker, the lives that the router was told of, in their order.
        self.joined: dict[WorkerId, list[WorkerKey]] = {worker_id: [] for worker_id in WORKER_IDS}
        self.link: list[Sent] = []
        #: Per life, what a request left there, and how many words ago the router saw it end.
        self.left: dict[WorkerKey, list[tuple[set[int], int]]] = {}

    # -- workers --

    def _worker(self, worker_id: WorkerId) -> Worker:
        if worker_id not in self.workers:
            self.num_lives += 1
            self.workers[worker_id] = Worker(worker_id, self.num_lives)
        return self.workers[worker_id]

    @rule(worker_id=worker_ids, text=texts)
    def compute(self, worker_id: WorkerId, text: str) -> None:
        """A request comes and goes; what it computed stays until there is no room."""
        cache = self._worker(worker_id).cache
        cache.release(hold(cache, text))

    @rule(worker_id=worker_ids, text=texts)
    def forget(self, worker_id: WorkerId, text: str) -> None:
        self._worker(worker_id).cache.forget_chain(CHAINS[text][0])

    @rule(worker_id=worker_ids)
    def clear(self, worker_id: WorkerId) -> None:
        self._worker(worker_id).cache.clear()

    @rule(worker_id=worker_ids, is_known_at_once=st.booleans())
    def restart(self, worker_id: WorkerId, is_known_at_once: bool) -> None:
        self.workers.pop(worker_id, None)
        if is_known_at_once:
            self.join(worker_id)

    # -- what they send --

    def _send(self, worker: Worker, message: Message | None) -> None:
        if message is not None:
            self.link.append(Sent(worker.key, message))

    @rule(worker_id=worker_ids)
    def publish(self, worker_id: WorkerId) -> None:
        worker = self._worker(worker_id)
        self._send(worker, worker.publish())

    @rule(worker_id=worker_ids, texts=st.lists(texts, min_size=2, max_size=5))
    def publish_often(self, worker_id: WorkerId, texts: list[str]) -> None:
        for text in texts:
            self.compute(worker_id, text)
            self.publish(worker_id)

    @rule(worker_id=worker_ids)
    def beat(self, worker_id: WorkerId) -> None:
        worker = self._worker(worker_id)
        self._send(worker, worker.published.head)

    @rule(worker_id=worker_ids)
    def answer(self, worker_id: WorkerId) -> None:
        """A snapshot goes out, asked for now or long ago."""
        worker = self._worker(worker_id)
        self._send(worker, worker.published.snapshot())

    # -- what the router hears of it --

    def _hear(self, worker: WorkerKey, message: Message) -> None:
        if worker in self.index.workers:
            self._age(worker, message)
        match message:
            case EventBatch():
                needs = self.index.apply(worker, message)
            case SetHead():
                needs = self.index.note_head(worker, message)
            case SetSnapshot():
                needs = load_snapshot(self.index, worker, message)
        assert needs == self.index.needs_snapshot(worker)

    def _age(self, worker: WorkerKey, message: Message) -> None:
        """What was left is believed for two more words, unless the worker says otherwise."""
        left = [(keys, age + 1) for keys, age in self.left.get(worker, []) if age < 2]
        if isinstance(message, EventBatch):
            gone = set(message.removed_keys.tolist())
            left = [] if message.is_cleared else [(keys - gone, age) for keys, age in left]
        self.left[worker] = left

    @rule(worker_id=worker_ids, text=texts)
    def leave(self, worker_id: WorkerId, text: str) -> None:
        """The router sees a request end, before the worker's events tell what it left."""
        self.compute(worker_id, text)
        key = self._worker(worker_id).key
        if key in self.index.workers:
            held = set(self.index.keys_of(key).tolist())
            keys = KEYS[text].tolist()
            num_held = len(list(takewhile(held.__contains__, keys)))
            self.index.expect(key, KEYS[text])
            self.left.setdefault(key, []).append((set(keys[num_held:]), 0))

    def _take(self, data: st.DataObject, *, keep: bool = False) -> Sent:
        place = data.draw(st.integers(0, len(self.link) - 1))
        return self.link[place] if keep else self.link.pop(place)

    @precondition(lambda self: self.link)
    @rule(num=st.integers(1, 8))
    def deliver_in_order(self, num: int) -> None:
        for sent in self.link[:num]:
            self._hear(sent.worker, sent.message)
        del self.link[:num]

    @precondition(lambda self: self.link)
    @rule(data=st.data(), keep=st.booleans())
    def deliver(self, data: st.DataObject, keep: bool) -> None:
        sent = self._take(data, keep=keep)
        self._hear(sent.worker, sent.message)

    @precondition(lambda self: self.link)
    @rule(data=st.data())
    def lose_message(self, data: st.DataObject) -> None:
        self._take(data)

    @precondition(lambda self: self.link)
    @rule(data=st.data())
    def damage(self, data: st.DataObject) -> None:
        sent = self._take(data)
        self._hear(sent.worker, damaged(sent.message))

    @rule(worker_id=worker_ids)
    def join(self, worker_id: WorkerId) -> None:
        key = self._worker(worker_id).key
        self.index.join(key)
        if key not in self.joined[worker_id]:
            self.joined[worker_id].append(key)

    @rule(worker_id=worker_ids)
    def join_a_former_life(self, worker_id: WorkerId) -> None:
        """A hello that comes late: in vain once a later life was joined."""
        before = self.index.workers
        for key in self.joined[worker_id][:-1]:
            self.index.join(key)
        assert self.index.workers == before

    @rule(worker_id=worker_ids)
    def lose(self, worker_id: WorkerId) -> None:
        key = self._worker(worker_id).key
        self.index.lose(key)
        self.left.pop(key, None)

    # -- calm --

    @rule(is_lost=st.booleans())
    def calm(self, is_lost: bool) -> None:
        """Only the last heartbeats get through, or all batches too; then the old rest, late."""
        late, self.link = self.link, []
        for worker in self.workers.values():
            self.join(worker.key.worker_id)
            batch = worker.publish()
            if batch is not None and not is_lost:
                self._hear(worker.key, batch)
            for _ in range(3):
                self._hear(worker.key, worker.published.head)
            if self.index.needs_snapshot(worker.key):
                self._hear(worker.key, worker.published.snapshot())
        self._check_truth()
        for sent in late:
            self._hear(sent.worker, sent.message)
        self._check_truth()

    def _check_truth(self) -> None:
        for worker in self.workers.values():
            worker.published.validate()
            assert not self.index.needs_snapshot(worker.key)
            assert self.index.head(worker.key) == worker.published.head
            assert np.array_equal(self.index.keys_of(worker.key), worker.truth)
        for text, chain in CHAINS.items():
            found = self.index.match(KEYS[text])
            for worker in self.workers.values():
                assert found.get(worker.key, 0) == worker.cache.match_prefix(chain).num_blocks

    @invariant()
    def is_sound(self) -> None:
        self.index.validate()
        held = {key: set(self.index.keys_of(key).tolist()) for key in self.index.workers}
        for keys in KEYS.values():
            expected = {}
            for worker, has in held.items():
                left = set[int]().union(*(left for left, _ in self.left.get(worker, [])))
                run = list(takewhile(has.__contains__, keys.tolist()))
                run += takewhile(left.__contains__, keys[len(run) :].tolist())
                if run:
                    expected[worker] = len(run)
            assert self.index.match(keys) == expected

    def teardown(self) -> None:
        self.calm(is_lost=True)
        self.index.validate()


TestPrefixIndex = PrefixIndexMachine.TestCase
TestPrefixIndex.settings = settings(max_examples=40, stateful_step_count=40)
