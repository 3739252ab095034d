"""Readers' locks on cached prefixes."""

from __future__ import annotations

import pytest

from moonpool.core.protocol import (
    Abort,
    ClearCache,
    Drain,
    LockPrefix,
    PrefixLocked,
    ReadEnded,
    RefuseReason,
    Release,
    UnlockPrefix,
)
from support.core_cases import chain, ident, make_worker, prefill, reserve
from support.core_cluster import Worker
from support.requests import make_request

REQUEST = make_request("first", prompt=list(range(14)))


@pytest.fixture
def worker() -> Worker:
    """Holds three cached blocks of REQUEST, referenced by nobody, in a pool of six."""
    worker = make_worker(num_blocks=6)
    worker.run_until_idle(prefill(REQUEST))
    assert worker.step(Release(attempt_id=ident("first"))).ledger.num_cached == 3
    return worker


def test_the_longest_held_prefix_is_locked_until_it_is_unlocked(worker: Worker) -> None:
    other = make_request(prompt=[*range(8), *[9] * 6])
    frame = worker.step(LockPrefix(read_id=1, hashes=chain(other, 3)))
    assert frame.replies == (PrefixLocked(read_id=1, block_ids=(0, 1)),)
    assert (frame.ledger.num_prefix_locks, frame.ledger.num_referenced) == (1, 2)
    assert not frame.ledger.is_quiet
    frame = worker.step(UnlockPrefix(read_id=1))
    assert (frame.ledger.num_prefix_locks, frame.ledger.num_cached) == (0, 3)
    assert frame.ledger.is_quiet


def test_a_lock_of_nothing_is_a_lock(worker: Worker) -> None:
    cold = make_request(prompt=[9] * 14)
    frame = worker.step(
        LockPrefix(read_id=1, hashes=chain(cold, 3)), LockPrefix(read_id=2, hashes=())
    )
    assert frame.replies == (
        PrefixLocked(read_id=1, block_ids=()),
        PrefixLocked(read_id=2, block_ids=()),
    )
    assert (frame.ledger.num_prefix_locks, frame.ledger.is_quiet) == (2, False)
    frame = worker.step(UnlockPrefix(read_id=1), UnlockPrefix(read_id=2))
    assert frame.ledger.is_quiet


def test_what_is_locked_is_not_evicted(worker: Worker) -> None:
    worker.step(LockPrefix(read_id=1, hashes=chain(REQUEST, 2)))
    frame = worker.step(reserve(make_request("big", prompt=17, max_tokens=2)))
    assert [reply.reason for reply in frame.replies] == [RefuseReason.NO_BLOCKS]
    # The third block was not asked for: it goes.
    frame = worker.step(reserve(make_request("fits", prompt=14, max_tokens=2)))
    assert frame.ledger.num_free + frame.ledger.num_cached == 0
    frame = worker.step(UnlockPrefix(read_id=1))
    assert frame.ledger.num_cached == 2
    worker.step(Abort(attempt_id=ident("fits")), ReadEnded(attempt_id=ident("fits")))
    assert worker.core.ledger().is_quiet


def test_two_readers_of_one_prefix_count_twice(worker: Worker) -> None:
    for read_id in (1, 2):
        worker.step(LockPrefix(read_id=read_id, hashes=chain(REQUEST, 3)))
    assert worker.step(UnlockPrefix(read_id=1)).ledger.num_referenced == 3
    assert worker.step(UnlockPrefix(read_id=2)).ledger.num_referenced == 0


def test_unlocking_what_is_not_locked_and_locking_twice_is_ignored(worker: Worker) -> None:
    worker.step(LockPrefix(read_id=1, hashes=chain(REQUEST, 1)))
    key = worker.core.key()
    frame = worker.step(LockPrefix(read_id=1, hashes=chain(REQUEST, 3)), UnlockPrefix(read_id=2))
    assert frame.replies == ()
    assert worker.core.key() == key
    assert worker.step(UnlockPrefix(read_id=1), UnlockPrefix(read_id=1)).ledger.is_quiet


def test_locks_outlive_a_cleared_cache_and_a_forgotten_chain(worker: Worker) -> None:
    worker.step(LockPrefix(read_id=1, hashes=chain(REQUEST, 2)))
    frame = worker.step(ClearCache())
    assert (frame.ledger.num_referenced, frame.ledger.num_cached) == (2, 0)
    worker.runner._is_invalid = lambda row: True
    worker.run_until_idle(prefill(make_request("bad", prompt=list(range(10)))))
    # Nobody finds them any more: they are free, not cached, when the reader goes.
    ledger = worker.core.ledger()
    assert (ledger.num_referenced, ledger.num_free) == (2, 4)
    assert worker.step(UnlockPrefix(read_id=1)).ledger.num_free == 6


def test_a_worker_that_drains_answers_with_nothing_new(worker: Worker) -> None:
    worker.step(LockPrefix(read_id=1, hashes=chain(REQUEST, 3)))
    frame = worker.step(Drain(), LockPrefix(read_id=2, hashes=chain(REQUEST, 3)))
    assert frame.replies == (PrefixLocked(read_id=2, block_ids=()),)
    assert (frame.ledger.num_prefix_locks, frame.ledger.num_referenced) == (2, 3)


def test_a_running_request_may_be_locked_too() -> None:
    """What it has cached so far; its own end changes nothing for the reader."""
    worker = make_worker(max_num_batched_tokens=8)
    request = make_request(prompt=14)
    worker.step(prefill(request))
    frame = worker.step(LockPrefix(read_id=1, hashes=chain(request, 3)))
    assert frame.replies[0] == PrefixLocked(read_id=1, block_ids=(0, 1))
    frame = worker.step(Abort(attempt_id=ident()))
    assert (frame.ledger.num_referenced, frame.ledger.num_cached) == (2, 1)


def test_a_fork_of_locks_is_equal_and_independent(worker: Worker) -> None:
    worker.step(LockPrefix(read_id=1, hashes=chain(REQUEST, 2)))
    fork = worker.core.fork()
    assert fork.key() == worker.core.key()
    worker.step(UnlockPrefix(read_id=1))
    assert fork.key() != worker.core.key()
    assert fork.ledger().num_prefix_locks == 1
    fork.validate()


def test_a_reader_elsewhere_does_not_make_blocks_last_longer(worker: Worker) -> None:
    younger = make_request("second", prompt=[7] * 6)
    worker.run_until_idle(prefill(younger))
    worker.step(Release(attempt_id=ident("second")))
    worker.step(LockPrefix(read_id=1, hashes=chain(REQUEST, 3)))
    worker.step(UnlockPrefix(read_id=1))
    # Three blocks have to go: those that were used first, although they were read last.
    worker.run_until_idle(prefill(make_request("third", prompt=[8] * 18)))
    worker.step(Release(attempt_id=ident("third")))
    frame = worker.step(
        LockPrefix(read_id=2, hashes=chain(younger, 1)),
        LockPrefix(read_id=3, hashes=chain(REQUEST, 3)),
    )
    (kept, gone) = frame.replies
    assert isinstance(kept, PrefixLocked)
    assert isinstance(gone, PrefixLocked)
    assert (len(kept.block_ids), len(gone.block_ids)) == (1, 0)
