from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest

from moonpool import native
from moonpool.ids import BlockHash, Incarnation, WorkerId, WorkerKey
from moonpool.kv.block_key import KeyArray, block_keys
from moonpool.kv.events import AllBlocksCleared, BlockRemoved, BlockStored
from moonpool.kv.expected_blocks import ExpectedBlocks
from moonpool.kv.key_table import DictKeyTable, KeyTable
from moonpool.kv.prefix_index import PrefixIndex
from moonpool.kv.published_set import EventBatch, PublishedSet
from support.kv import make_chain
from support.snapshots import load_snapshot


def key_of(worker_id: str, incarnation: int = 1) -> WorkerKey:
    return WorkerKey(WorkerId(worker_id), Incarnation(f"{incarnation:016x}"))


A, B = key_of("a"), key_of("b")


class Worker:
    """A worker's side: what it has announced, one batch per call."""

    def __init__(self, key: WorkerKey) -> None:
        self.key = key
        self.published = PublishedSet()

    def store(self, tokens: str) -> EventBatch:
        chain = tuple(make_chain(tokens))
        return self._publish(BlockStored(hashes=chain, parent_hash=None))

    def remove(self, tokens: str, keep: int = 0) -> EventBatch:
        return self._publish(BlockRemoved(hashes=tuple(make_chain(tokens)[keep:])))

    def clear(self) -> EventBatch:
        return self._publish(AllBlocksCleared())

    def _publish(self, event: BlockStored | BlockRemoved | AllBlocksCleared) -> EventBatch:
        batch = self.published.apply([event])
        assert batch is not None
        return batch


@pytest.fixture(params=["python", "native"])
def table(request: pytest.FixtureRequest) -> KeyTable:
    return DictKeyTable() if request.param == "python" else native.kernels().key_table()


@pytest.fixture
def index(table: KeyTable) -> Iterator[PrefixIndex]:
    index = PrefixIndex(table, max_held_batches=3, max_held_keys=20)
    yield index
    index.validate()


@pytest.fixture
def a(index: PrefixIndex) -> Worker:
    index.join(A)
    return Worker(A)


@pytest.fixture
def b(index: PrefixIndex) -> Worker:
    index.join(B)
    return Worker(B)


def match(index: PrefixIndex, tokens: str) -> dict[WorkerKey, int]:
    return index.match(block_keys(make_chain(tokens)))


def stands(index: PrefixIndex, worker: Worker) -> bool:
    """Whether the index has exactly what the worker has announced."""
    truth = np.sort(worker.published.snapshot().keys)
    return (
        not index.needs_snapshot(worker.key)
        and np.array_equal(index.keys_of(worker.key), truth)
        and index.head(worker.key) == worker.published.head
    )


def test_a_chain_matches_each_worker_as_far_as_it_goes(
    index: PrefixIndex, a: Worker, b: Worker
) -> None:
    assert not index.apply(A, a.store("abcdef"))
    assert not index.apply(B, b.store("abx"))
    assert match(index, "abcdxx") == {A: 4, B: 2}
    assert match(index, "abxy") == {A: 2, B: 3}
    assert match(index, "abcdef") == {A: 6, B: 2}
    assert match(index, "x") == {}
    assert match(index, "") == {}
    assert index.num_blocks == 7


def test_a_run_ends_at_the_first_block_that_is_not_held(index: PrefixIndex, a: Worker) -> None:
    index.apply(A, a.store("abcdef"))
    batch = a.published.apply([BlockRemoved(hashes=(make_chain("abc")[2],))])
    assert batch is not None
    index.apply(A, batch)
    assert match(index, "abcdef") == {A: 2}


def test_removed_and_cleared_blocks_are_not_matched(
    index: PrefixIndex, a: Worker, b: Worker
) -> None:
    index.apply(A, a.store("abc"))
    index.apply(B, b.store("abc"))
    index.apply(A, a.remove("abc", keep=1))
    assert match(index, "abc") == {A: 1, B: 3}
    index.apply(B, b.clear())
    assert match(index, "abc") == {A: 1}
    assert stands(index, a)
    assert stands(index, b)
    assert index.num_blocks == 1


def test_a_gap_asks_for_a_snapshot_and_keeps_what_is_known(index: PrefixIndex, a: Worker) -> None:
    index.apply(A, a.store("ab"))
    a.store("abc")
    assert index.apply(A, a.store("abcd"))
    assert index.needs_snapshot(A)
    assert match(index, "abcd") == {A: 2}
    assert not load_snapshot(index, A, a.published.snapshot())
    assert match(index, "abcd") == {A: 4}
    assert stands(index, a)


def test_missing_batches_that_come_after_all_close_the_gap(index: PrefixIndex, a: Worker) -> None:
    batches = [a.store("a"), a.store("ab"), a.remove("ab", keep=1), a.store("xyz")]
    needs = [index.apply(A, batches[n]) for n in (3, 1, 1, 0, 2, 0, 3)]
    assert needs == [True, True, True, True, False, False, False]
    assert stands(index, a)


def test_batches_go_on_top_of_a_snapshot_that_was_on_its_way(index: PrefixIndex, a: Worker) -> None:
    a.store("ab")
    index.apply(A, a.store("abc"))
    snapshot = a.published.snapshot()
    index.apply(A, a.store("abcd"))
    index.apply(A, a.remove("abcd", keep=3))
    assert not load_snapshot(index, A, snapshot)
    assert stands(index, a)
    index.apply(A, a.store("q"))
    assert stands(index, a)


def test_a_snapshot_older_than_a_gap_leaves_the_worker_behind(
    index: PrefixIndex, a: Worker
) -> None:
    a.store("a")
    snapshot = a.published.snapshot()
    a.store("ab")
    index.apply(A, a.store("abc"))
    assert load_snapshot(index, A, snapshot)
    assert match(index, "abc") == {A: 1}
    assert not load_snapshot(index, A, a.published.snapshot())
    assert stands(index, a)


def test_what_a_request_left_is_matched_before_its_worker_tells(
    index: PrefixIndex, a: Worker, b: Worker
) -> None:
    index.apply(A, a.store("ab"))
    index.expect(A, block_keys(make_chain("abcd")))
    assert match(index, "abcde") == {A: 4}
    assert match(index, "abx") == {A: 2}
    assert index.head(A) == a.published.head
    assert not index.needs_snapshot(A)
    # B's words say nothing about A.
    for _ in range(5):
        index.note_head(B, b.published.head)
    assert match(index, "abcde") == {A: 4}
    index.apply(A, a.store("abcd"))
    assert match(index, "abcde") == {A: 4}
    assert stands(index, a)


def test_what_a_request_left_is_believed_until_the_worker_has_had_its_say(
    index: PrefixIndex, a: Worker
) -> None:
    index.apply(A, a.store("ab"))
    index.expect(A, block_keys(make_chain("abcd")))
    index.apply(A, a.store("x"))
    index.note_head(A, a.published.head)
    assert match(index, "abcd") == {A: 4}
    index.note_head(A, a.published.head)
    assert match(index, "abcd") == {A: 2}


def test_what_a_request_left_and_a_worker_removes_is_not_matched(
    index: PrefixIndex, a: Worker
) -> None:
    index.expect(A, block_keys(make_chain("abcd")))
    a.store("abcd")
    index.apply(A, a.remove("abcd", keep=3))
    assert match(index, "abcd") == {A: 3}
    index.apply(A, a.clear())
    assert match(index, "abcd") == {}
    load_snapshot(index, A, a.published.snapshot())


def test_nothing_is_expected_of_a_worker_that_is_not_followed(
    index: PrefixIndex, a: Worker
) -> None:
    index.expect(B, block_keys(make_chain("ab")))
    assert match(index, "ab") == {}
    index.expect(A, block_keys(make_chain("ab")))
    index.lose(A)
    index.join(A)
    assert match(index, "ab") == {}


def test_of_what_is_expected_of_a_worker_the_oldest_ends_go() -> None:
    def keys(first: int, last: int) -> KeyArray:
        return np.arange(first, last + 1, dtype=np.uint64)

    expected = ExpectedBlocks(max_blocks=3)
    expected.add(keys(1, 5))
    expected.validate()
    assert len(expected) == 3
    assert expected.run_end(keys(1, 5), 0) == 3
    expected.add(keys(7, 8))
    expected.validate()
    assert (expected.run_end(keys(1, 5), 0), expected.run_end(keys(7, 8), 0)) == (1, 2)


def test_a_late_snapshot_takes_nothing_back(index: PrefixIndex, a: Worker) -> None:
    index.apply(A, a.store("abc"))
    snapshot = a.published.snapshot()
    index.apply(A, a.clear())
    assert not load_snapshot(index, A, snapshot)
    assert match(index, "abc") == {}
    assert stands(index, a)


def test_only_the_latest_batches_are_held(index: PrefixIndex, a: Worker) -> None:
    index.apply(A, a.store("a"))
    a.store("b")
    snapshot = a.published.snapshot()
    for letter in "cdef":
        index.apply(A, a.store(letter))
    # Of the four only three were held, so those do not fit onto the snapshot.
    assert load_snapshot(index, A, snapshot)
    assert match(index, "c") == {}
    assert not load_snapshot(index, A, a.published.snapshot())
    assert stands(index, a)


def test_a_batch_too_large_to_hold_is_applied_when_it_is_its_turn(
    index: PrefixIndex, a: Worker
) -> None:
    index.apply(A, a.store("abcdefghijklmnopqrstuvwxyz"))
    assert stands(index, a)
    a.store("1")
    assert index.apply(A, a.store("2abcdefghijklmnopqrstuvwxyz"))
    assert not load_snapshot(index, A, a.published.snapshot())
    assert stands(index, a)


def test_a_heartbeat_tells_that_the_last_batch_was_lost(index: PrefixIndex, a: Worker) -> None:
    index.apply(A, a.store("ab"))
    assert not index.note_head(A, a.published.head)
    batch = a.store("abc")
    assert index.note_head(A, a.published.head)
    assert not index.apply(A, batch)
    assert stands(index, a)


def test_an_old_heartbeat_is_not_compared(index: PrefixIndex, a: Worker) -> None:
    index.apply(A, a.store("ab"))
    head = a.published.head
    index.apply(A, a.store("abc"))
    assert not index.note_head(A, head)
    assert not index.note_head(A, replace(head, digest=1))


@pytest.mark.parametrize("field", ["count", "digest"])
def test_a_head_that_differs_at_equal_sequence_asks_for_a_snapshot(
    index: PrefixIndex, a: Worker, field: str
) -> None:
    index.apply(A, a.store("ab"))
    head = a.published.head
    assert index.note_head(A, replace(head, **{field: getattr(head, field) + 1}))
    # Nothing is built on a set that is known to be wrong, and it does not become right by itself.
    assert index.apply(A, a.store("abc"))
    assert index.note_head(A, a.published.head)
    assert match(index, "abc") == {A: 2}
    assert not load_snapshot(index, A, a.published.snapshot())
    assert stands(index, a)


def test_a_head_heard_ahead_is_compared_when_its_sequence_is_reached(
    index: PrefixIndex, a: Worker
) -> None:
    batch = a.store("ab")
    assert index.note_head(A, replace(a.published.head, digest=7))
    assert index.apply(A, batch)
    assert not load_snapshot(index, A, a.published.snapshot())
    assert stands(index, a)


def test_a_batch_with_a_damaged_key_is_found_out(index: PrefixIndex, a: Worker) -> None:
    batch = a.store("abc")
    damaged = replace(batch, stored_keys=batch.stored_keys ^ np.uint64(4))
    assert index.apply(A, damaged)
    index.validate()
    assert not load_snapshot(index, A, a.published.snapshot())
    assert stands(index, a)
    assert index.num_blocks == 3


def test_a_batch_that_names_keys_twice_or_none_is_found_out(index: PrefixIndex, a: Worker) -> None:
    batch = a.store("abc")
    keys = batch.stored_keys
    for damaged in (keys[[0, 1, 1]], np.append(keys[:2], np.uint64(0))):
        assert index.apply(A, replace(batch, stored_keys=damaged))
        index.validate()
        index.lose(A)
        index.join(A)
    assert not index.apply(A, batch)


def test_a_lost_worker_is_forgotten_and_starts_over(
    index: PrefixIndex, a: Worker, b: Worker
) -> None:
    index.apply(A, a.store("abc"))
    index.apply(B, b.store("ab"))
    index.lose(A)
    index.lose(A)
    assert match(index, "abc") == {B: 2}
    assert not index.needs_snapshot(A)
    assert index.keys_of(A).tolist() == []
    assert index.workers == (B,)
    index.join(A)
    assert index.note_head(A, a.published.head)
    assert not load_snapshot(index, A, a.published.snapshot())
    assert match(index, "abc") == {A: 3, B: 2}


def test_a_new_incarnation_replaces_the_old_one_for_good(index: PrefixIndex, a: Worker) -> None:
    index.apply(A, a.store("abc"))
    reborn = Worker(key_of("a", 2))
    index.join(reborn.key)
    assert match(index, "abc") == {}
    assert not index.apply(A, a.store("q"))
    assert not index.note_head(A, a.published.head)
    assert not load_snapshot(index, A, a.published.snapshot())
    index.join(A)
    assert index.workers == (reborn.key,)
    assert not index.apply(reborn.key, reborn.store("ab"))
    assert match(index, "abc") == {reborn.key: 2}
    index.lose(reborn.key)
    index.join(A)
    assert index.workers == ()


def test_what_is_remembered_of_those_who_are_gone_is_bounded(index: PrefixIndex) -> None:
    index.join(B)
    replaced, latest = key_of("x", 1), key_of("x", 2)
    others = [key_of(f"w{number}") for number in range(4_096)]
    index.join(replaced)
    index.join(latest)
    index.lose(latest)
    for other in others[:-1]:
        index.join(other)
        index.lose(other)
    index.join(replaced)
    assert index.workers == (B,)
    index.join(others[-1])
    index.lose(others[-1])
    # The longest gone of 4,097: its old life is no longer known for that.
    index.join(replaced)
    assert index.workers == (B, replaced)
    index.validate()


def test_nobody_is_followed_before_joining(index: PrefixIndex) -> None:
    stranger = Worker(A)
    assert not index.apply(A, stranger.store("ab"))
    assert not index.note_head(A, stranger.published.head)
    assert match(index, "ab") == {}
    index.join(A)
    index.join(A)
    assert index.note_head(A, stranger.published.head)
    with pytest.raises(KeyError):
        index.head(B)


def test_more_than_sixty_four_workers_are_told_apart(index: PrefixIndex) -> None:
    tokens = "abcdefgh"
    workers = [Worker(key_of(f"w{number}")) for number in range(150)]
    for number, worker in enumerate(workers):
        index.join(worker.key)
        index.apply(worker.key, worker.store(tokens[: 1 + number % len(tokens)]))
    expected = {worker.key: 1 + number % 8 for number, worker in enumerate(workers)}
    assert match(index, tokens) == expected
    for worker in workers[::2]:
        index.lose(worker.key)
    assert match(index, tokens) == {worker.key: expected[worker.key] for worker in workers[1::2]}
    # Numbers of lost workers are given again.
    for number in range(75):
        newcomer = Worker(key_of(f"n{number}"))
        index.join(newcomer.key)
        index.apply(newcomer.key, newcomer.store("ab"))
    assert sum(length for key, length in match(index, tokens).items() if key[0][0] == "n") == 150


def test_a_long_chain_is_matched_to_its_end(index: PrefixIndex, a: Worker, b: Worker) -> None:
    letters = "".join(chr(0x4E00 + n) for n in range(1000))
    index.apply(A, a.store(letters))
    index.apply(B, b.store(letters[:777]))
    assert match(index, letters) == {A: 1000, B: 777}
    assert match(index, letters + "x") == {A: 1000, B: 777}
    assert match(index, letters[:777]) == {A: 777, B: 777}
    assert match(index, letters[:31] + "x" + letters[32:]) == {A: 31, B: 31}


def test_memory_is_given_back_as_blocks_go(index: PrefixIndex, a: Worker) -> None:
    texts = ["".join(chr(0x4E00 + 50 * n + m) for m in range(50)) for n in range(80)]
    for text in texts:
        index.apply(A, a.store(text))
    full = index.num_bytes
    assert full <= 4000 * 200
    for text in texts[1:]:
        index.apply(A, a.remove(text))
    for text in texts[:50]:
        index.apply(A, a.store(text[::-1]))
        index.apply(A, a.remove(text[::-1]))
    assert index.num_bytes < full / 5
    assert stands(index, a)


def test_keys_are_those_of_hashes() -> None:
    index = PrefixIndex()
    index.join(A)
    published = PublishedSet()
    event = BlockStored(hashes=(BlockHash(bytes(8) + bytes(range(24))),), parent_hash=None)
    batch = published.apply([event])
    assert batch is not None
    index.apply(A, batch)
    assert index.match(block_keys(event.hashes)) == {A: 1}


def test_a_large_snapshot_is_loaded_in_pieces_and_batches_wait_meanwhile(
    index: PrefixIndex, a: Worker, b: Worker
) -> None:
    index.apply(A, a.store("abc"))
    index.apply(B, b.store("ab"))
    a.clear()
    large = tuple(make_chain(range(20_000)))
    a.published.apply([BlockStored(hashes=large, parent_hash=None)])
    snapshot = a.published.snapshot()
    pieces = index.loading(A, snapshot)
    lengths = []
    for _ in pieces:
        index.validate()
        assert index.needs_snapshot(A)
        lengths.append(index.match(block_keys(large))[A])
        if len(lengths) == 1:
            # What stood here before is gone, that of others is not; what comes is held.
            assert match(index, "abc") == {B: 2}
            assert index.apply(A, a.store("xyz"))
            assert index.note_head(A, a.published.head)
    assert len(lengths) == 5
    assert lengths == sorted(lengths)
    assert stands(index, a)
    assert match(index, "xyz") == {A: 3}


def test_who_is_lost_while_a_snapshot_is_loaded_holds_nothing(
    index: PrefixIndex, a: Worker
) -> None:
    a.published.apply([BlockStored(hashes=tuple(make_chain(range(20_000))), parent_hash=None)])
    pieces = index.loading(A, a.published.snapshot())
    next(pieces)
    index.lose(A)
    index.join(A)
    assert list(pieces) == []
    assert index.num_blocks == 0
    assert not load_snapshot(index, A, a.published.snapshot())
