"""When the router asks a worker for a snapshot, and when it does not."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from moonpool.dispatch.index_follower import (
    AskReason,
    AskSnapshot,
    IndexFollower,
    IndexFollowerConfig,
)
from moonpool.ids import BlockHash, Incarnation, WorkerId, WorkerKey
from moonpool.kv.block_key import block_keys
from moonpool.kv.events import BlockRemoved, BlockStored
from moonpool.kv.prefix_index import PrefixIndex
from moonpool.kv.published_set import EventBatch, PublishedSet, SetHead
from moonpool.routing.worker_view import WorkerInfo, WorkerRole
from support.kv import make_chain
from support.snapshots import answer

CONFIG = IndexFollowerConfig(patience_s=0.25, min_retry_s=0.1, max_retry_s=0.4, poll_s=10.0)
KEY = WorkerKey(WorkerId("d0"), Incarnation("a" * 16))
INFO = WorkerInfo(key=KEY, role=WorkerRole.DECODE, address="127.0.0.1:1")
CHAIN = make_chain("abcd")


class Published:
    """A worker's side: a set, and its batches."""

    def __init__(self) -> None:
        self.set = PublishedSet()

    def store(self, *hashes: BlockHash, parent: BlockHash | None = None) -> EventBatch:
        batch = self.set.apply((BlockStored(hashes=hashes, parent_hash=parent),))
        assert batch is not None
        return batch

    def remove(self, *hashes: BlockHash) -> EventBatch:
        batch = self.set.apply((BlockRemoved(hashes=hashes),))
        assert batch is not None
        return batch


def ask(reason: AskReason, *, is_repeated: bool = False) -> AskSnapshot:
    return AskSnapshot(key=KEY, address="127.0.0.1:1", reason=reason, is_repeated=is_repeated)


@pytest.fixture
def follower() -> Iterator[IndexFollower]:
    """The bus is there; the worker has joined at 0 and told its empty set."""
    follower = IndexFollower(PrefixIndex(), CONFIG)
    follower.on_bus_changed(True)
    follower.on_joined(INFO, 0.0)
    assert follower.tick(0.0) == [ask(AskReason.JOINED)]
    answer(follower, KEY, PublishedSet().snapshot(), 0.0)
    yield follower
    follower.validate()


@pytest.fixture
def worker() -> Published:
    return Published()


def num_found(follower: IndexFollower) -> int:
    return follower.index.match(block_keys(CHAIN)).get(KEY, 0)


def test_batches_in_order_need_no_question(follower: IndexFollower, worker: Published) -> None:
    follower.on_batch(KEY, worker.store(*CHAIN[:2]), 1.0)
    follower.on_batch(KEY, worker.store(*CHAIN[2:], parent=CHAIN[1]), 1.1)
    follower.on_head(KEY, worker.set.head, 1.2)
    assert num_found(follower) == 4
    assert follower.next_due() is None
    assert follower.tick(100.0) == []


def test_a_worker_that_joins_is_asked_what_it_holds(worker: Published) -> None:
    follower = IndexFollower(PrefixIndex(), CONFIG)
    worker.store(*CHAIN)
    follower.on_joined(INFO, 5.0)
    assert follower.next_due() == 5.0
    assert follower.tick(5.0) == [ask(AskReason.JOINED)]
    assert follower.tick(5.1) == []
    answer(follower, KEY, worker.set.snapshot(), 5.2)
    assert num_found(follower) == 4
    follower.validate()


def test_what_is_missing_may_come_within_patience(
    follower: IndexFollower, worker: Published
) -> None:
    first, second = worker.store(*CHAIN[:1]), worker.store(*CHAIN[1:], parent=CHAIN[0])
    follower.on_head(KEY, second.head, 1.0)
    assert follower.next_due() == 1.25
    follower.on_batch(KEY, second, 1.1)
    follower.on_batch(KEY, first, 1.2)
    assert num_found(follower) == 4
    assert follower.next_due() is None


def test_a_lost_batch_is_made_up_for_by_a_snapshot(
    follower: IndexFollower, worker: Published
) -> None:
    worker.store(*CHAIN[:2])
    follower.on_head(KEY, worker.set.head, 1.0)
    assert follower.tick(1.2) == []
    assert follower.tick(1.25) == [ask(AskReason.GAP)]
    snapshot = worker.set.snapshot()
    # While the answer is on its way the set goes on.
    follower.on_batch(KEY, worker.store(*CHAIN[2:], parent=CHAIN[1]), 1.3)
    assert follower.tick(9.0) == []
    answer(follower, KEY, snapshot, 9.0)
    assert num_found(follower) == 4
    assert follower.next_due() is None


def test_another_digest_is_asked_about_at_once(follower: IndexFollower, worker: Published) -> None:
    follower.on_batch(KEY, worker.store(*CHAIN), 1.0)
    head = worker.set.head
    wrong = SetHead(sequence=head.sequence, count=head.count, digest=head.digest ^ 1)
    follower.on_head(KEY, wrong, 2.0)
    assert follower.tick(2.0) == [ask(AskReason.MISMATCH)]
    answer(follower, KEY, worker.set.snapshot(), 2.1)
    assert num_found(follower) == 4
    assert follower.next_due() is None


def test_questions_in_vain_are_repeated_after_longer_pauses(
    follower: IndexFollower, worker: Published
) -> None:
    worker.store(*CHAIN)
    follower.on_head(KEY, worker.set.head, 1.0)
    assert follower.tick(1.25) == [ask(AskReason.GAP)]
    now = 1.25
    for pause_s in (0.1, 0.2, 0.4, 0.4):
        follower.on_not_answered(KEY, now)
        # What is heard meanwhile does not shorten the pause.
        follower.on_head(KEY, worker.set.head, now)
        assert follower.next_due() == pytest.approx(now + pause_s)
        now += pause_s
        assert follower.tick(now) == [ask(AskReason.GAP, is_repeated=True)]
    answer(follower, KEY, worker.set.snapshot(), now)
    assert num_found(follower) == 4
    # The next fault starts anew.
    worker.remove(CHAIN[3])
    follower.on_head(KEY, worker.set.head, now)
    assert follower.tick(now + 0.25) == [ask(AskReason.GAP)]
    answer(follower, KEY, worker.set.snapshot(), now)


def test_a_snapshot_that_was_overtaken_is_no_failure(
    follower: IndexFollower, worker: Published
) -> None:
    worker.store(*CHAIN[:2])
    follower.on_head(KEY, worker.set.head, 1.0)
    follower.tick(1.25)
    snapshot = worker.set.snapshot()
    third, fourth = worker.store(CHAIN[2], parent=CHAIN[1]), worker.store(CHAIN[3], parent=CHAIN[2])
    follower.on_batch(KEY, fourth, 1.5)
    answer(follower, KEY, snapshot, 2.0)
    assert num_found(follower) == 2
    # What it lacks has the usual time to come.
    assert follower.next_due() == 2.25
    follower.on_batch(KEY, third, 2.1)
    assert num_found(follower) == 4
    assert follower.next_due() is None


def test_a_snapshot_that_is_too_old_does_not_help(
    follower: IndexFollower, worker: Published
) -> None:
    old = worker.set.snapshot()
    worker.store(*CHAIN)
    follower.on_head(KEY, worker.set.head, 1.0)
    follower.tick(1.25)
    answer(follower, KEY, old, 1.3)
    assert follower.tick(1.45) == [ask(AskReason.GAP, is_repeated=True)]
    answer(follower, KEY, worker.set.snapshot(), 1.5)
    assert num_found(follower) == 4


def test_while_the_bus_is_away_workers_are_asked_now_and_then(
    follower: IndexFollower, worker: Published
) -> None:
    worker.store(*CHAIN)
    follower.on_bus_changed(False)
    assert follower.next_due() == 10.0
    assert follower.tick(10.0) == [ask(AskReason.BUS_AWAY)]
    answer(follower, KEY, worker.set.snapshot(), 10.0)
    assert num_found(follower) == 4
    assert follower.next_due() == 20.0
    follower.on_bus_changed(True)
    assert follower.next_due() is None


def test_a_lost_worker_holds_nothing(follower: IndexFollower, worker: Published) -> None:
    follower.on_batch(KEY, worker.store(*CHAIN), 1.0)
    follower.on_lost(KEY)
    follower.on_lost(KEY)
    assert num_found(follower) == 0
    # What was on its way is of nobody.
    follower.on_batch(KEY, worker.remove(CHAIN[3]), 1.0)
    follower.on_head(KEY, worker.set.head, 1.0)
    answer(follower, KEY, worker.set.snapshot(), 1.0)
    follower.on_not_answered(KEY, 1.0)
    assert num_found(follower) == 0
    assert follower.next_due() is None


def test_a_stream_that_comes_back_is_a_new_start(
    follower: IndexFollower, worker: Published
) -> None:
    follower.on_batch(KEY, worker.store(*CHAIN), 1.0)
    follower.on_lost(KEY)
    follower.on_joined(INFO, 2.0)
    assert follower.tick(2.0) == [ask(AskReason.JOINED)]
    answer(follower, KEY, worker.set.snapshot(), 2.1)
    assert num_found(follower) == 4


def test_who_is_lost_while_its_snapshot_is_loaded_is_asked_anew(
    follower: IndexFollower, worker: Published
) -> None:
    worker.store(*make_chain(range(20_000)))
    follower.on_head(KEY, worker.set.head, 1.0)
    follower.tick(1.25)
    pieces = follower.loading(KEY, worker.set.snapshot(), 1.3)
    next(pieces)
    # Nobody is asked twice at a time.
    assert follower.tick(1.4) == []
    follower.on_lost(KEY)
    follower.on_joined(INFO, 1.5)
    assert list(pieces) == []
    assert follower.tick(1.5) == [ask(AskReason.JOINED)]
    answer(follower, KEY, worker.set.snapshot(), 1.6)
    assert follower.index.head(KEY) == worker.set.head
