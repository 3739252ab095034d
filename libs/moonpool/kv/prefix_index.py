"""PrefixIndex: which worker may hold how much of a prompt, as far as this router has heard.

Batches and heartbeats of every worker's PublishedSet (kv/published_set.py) go in, in whatever order they
come; how many leading blocks of a chain each worker holds comes out. Keys contain the namespace, so one
index serves them all.

Rules
- The index is advice: what it believes too much costs a recompute, what it misses costs a hit.
- A worker is followed from sequence 0, its empty set. Batches are applied in sequence, each once.
- Count and digest are those of what stands here, kept as it changes; they are compared with the
  worker's at equal sequence only.
- Whoever is behind (a sequence heard of that is not reached) or wrong (a comparison failed) needs a
  snapshot. Until it comes, what is known stays, and batches that cannot be applied yet are held, the
  latest ones; they are applied on top. A worker that is behind catches up without one if the missing
  batches come after all.
- Nothing is forgotten silently: while a set differs from the last head heard, needs_snapshot says so.
- What a worker must hold by what was seen of a request (kv/expected_blocks.py) is believed for a few words of
  the worker, beside its set: count and digest know nothing of it.
- One incarnation of a worker at a time; one that was replaced is never followed again, until its
  worker is among those longest gone.

Life of a follower

    (absent) -> following       join
    following -> behind         a later sequence is heard of
    behind -> following         the missing batches, or a snapshot
    following, behind -> wrong  count or digest differ at equal sequence
    wrong -> following, behind  a snapshot
    any -> (absent)             lose, or join of another incarnation

Memory: what workers announced (kv/key_table.py), and the batches held, bounded per worker.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np

from moonpool.ids import WorkerKey
from moonpool.kv.block_key import KeyArray, keys_digest
from moonpool.kv.expected_blocks import ExpectedBlocks
from moonpool.kv.key_table import DictKeyTable, KeyTable
from moonpool.kv.published_set import EMPTY_HEAD, EventBatch, SetHead, SetSnapshot
from moonpool.kv.replaced_incarnations import ReplacedIncarnations

_WRAP = 2**64
#: Of a snapshot, as many as the table takes up in a millisecond or two.
_PIECE_KEYS = 4_096


@dataclass(slots=True)
class _Follower:
    #: Of its bit in the table; unique among followers.
    number: int
    #: What stands in the table.
    head: SetHead = EMPTY_HEAD
    #: The highest sequence heard of.
    heard: SetHead = EMPTY_HEAD
    is_wrong: bool = False
    #: Batches that cannot be applied yet, by sequence, each beyond `head`.
    held: dict[int, EventBatch] = field(default_factory=dict)
    num_held_keys: int = 0
    expected: ExpectedBlocks = field(default_factory=ExpectedBlocks)

    @property
    def needs_snapshot(self) -> bool:
        return self.is_wrong or self.heard.sequence > self.head.sequence


class PrefixIndex:
    """See the file's head. What is heard of a worker that is not joined is ignored.

    Args:
        table: Empty, and this index's own; in Python if None.
        max_held_batches: Per worker: batches held while it is behind or wrong.
        max_held_keys: Per worker: keys in them.
    """

    def __init__(
        self,
        table: KeyTable | None = None,
        *,
        max_held_batches: int = 1024,
        max_held_keys: int = 1 << 18,
    ) -> None:
        self._max_held_batches = max_held_batches
        self._max_held_keys = max_held_keys
        self._table = DictKeyTable() if table is None else table
        self._followers: dict[WorkerKey, _Follower] = {}
        self._worker_by_number: dict[int, WorkerKey] = {}
        self._incarnations = ReplacedIncarnations()
        #: Of workers of which something may be expected.
        self._expecting: dict[WorkerKey, ExpectedBlocks] = {}

    # -- who is followed --

    def join(self, worker: WorkerKey) -> None:
        """Follow this worker from its empty set, and no other incarnation of it any more.

        An incarnation that was replaced is ignored; one that is followed goes on.
        """
        if worker in self._followers or self._incarnations.is_replaced(worker):
            return
        replaced = self._incarnations.take(worker)
        if replaced is not None:
            self.lose(replaced)
        number = next(n for n in range(len(self._followers) + 1) if n not in self._worker_by_number)
        self._followers[worker] = _Follower(number)
        self._worker_by_number[number] = worker

    def lose(self, worker: WorkerKey) -> None:
        """Forget what this worker holds. It may be joined again, and starts from its empty set."""
        follower = self._followers.pop(worker, None)
        if follower is not None:
            del self._worker_by_number[follower.number]
            self._table.drop(follower.number)
            self._incarnations.lose(worker)
            self._expecting.pop(worker, None)

    @property
    def workers(self) -> tuple[WorkerKey, ...]:
        """Who is followed, in the order of joining."""
        return tuple(self._followers)

    # -- what is heard; apply and note_head return needs_snapshot(worker) --

    def apply(self, worker: WorkerKey, batch: EventBatch) -> bool:
        """A batch has come, in whatever order."""
        follower = self._followers.get(worker)
        if follower is None:
            return False
        _hear(follower, batch.head)
        if follower.expected:
            if batch.is_cleared:
                follower.expected.clear()
            follower.expected.remove(batch.removed_keys)
        num_ahead = batch.head.sequence - follower.head.sequence
        if num_ahead == 1 and not follower.is_wrong:
            self._change(follower, batch)
            if follower.held:
                self._apply_held(follower)
        elif num_ahead > 0:
            self._hold(follower, batch)
        return follower.needs_snapshot

    def note_head(self, worker: WorkerKey, head: SetHead) -> bool:
        """A heartbeat says what the worker's set is."""
        follower = self._followers.get(worker)
        if follower is None:
            return False
        _hear(follower, head)
        return follower.needs_snapshot

    def loading(self, worker: WorkerKey, snapshot: SetSnapshot) -> Iterator[None]:
        """Load a snapshot that was asked for in pieces; go through all of them. Held batches are applied on top.

        Requires one that is consistent. One that is older than what stands here changes nothing.

        Between two pieces anything may happen but another loading for this worker. Of it the index then
        knows a part; it is wrong, and batches are held, until all is loaded.
        """
        follower = self._followers.get(worker)
        if follower is None:
            return
        follower.expected.on_word()
        head, number = snapshot.head, follower.number
        is_older = head.sequence < follower.head.sequence
        is_known = head.sequence == follower.head.sequence and not follower.is_wrong
        if is_older or is_known:
            return
        if follower.head.count:
            self._table.drop(number)
        follower.head = SetHead(sequence=head.sequence, count=0, digest=0)
        follower.is_wrong = True
        if follower.heard.sequence <= head.sequence:
            follower.heard = head
        for start in range(0, head.count, _PIECE_KEYS):
            piece = snapshot.keys[start : start + _PIECE_KEYS]
            num_stored, of_stored = self._table.add(piece, number)
            follower.head = SetHead(
                sequence=head.sequence,
                count=follower.head.count + num_stored,
                digest=(follower.head.digest + of_stored) % _WRAP,
            )
            yield
            if self._followers.get(worker) is not follower:
                return
        follower.is_wrong = follower.head != head
        self._apply_held(follower)

    def expect(self, worker: WorkerKey, keys: KeyArray) -> None:
        """The worker has just computed, or been given, this whole chain: its events will say so.

        Args:
            keys: uint64[n], the chain's keys from its start.
        """
        follower = self._followers.get(worker)
        if follower is not None:
            numbers, lengths = self._table.runs(keys)
            num_known = dict(zip(numbers, lengths, strict=True)).get(follower.number, 0)
            follower.expected.add(keys[num_known:])
            self._expecting[worker] = follower.expected

    # -- what is known --

    def needs_snapshot(self, worker: WorkerKey) -> bool:
        """Whether the worker's set is known to differ from what stands here: ask it for a snapshot."""
        follower = self._followers.get(worker)
        return follower is not None and follower.needs_snapshot

    def is_wrong(self, worker: WorkerKey) -> bool:
        """Whether a comparison has failed: only a snapshot mends that."""
        follower = self._followers.get(worker)
        return follower is not None and follower.is_wrong

    def match(self, keys: KeyArray) -> dict[WorkerKey, int]:
        """How many leading blocks of a chain each worker is believed to hold; only those with some.

        Args:
            keys: uint64[n], the chain's keys from its start.
        """
        numbers, lengths = self._table.runs(keys)
        runs = dict(zip(map(self._worker_by_number.__getitem__, numbers), lengths, strict=True))
        if self._expecting:
            self._add_expected(runs, keys)
        return runs

    def head(self, worker: WorkerKey) -> SetHead:
        """What stands here for a worker that is followed.

        Raises:
            KeyError: it is not.
        """
        return self._followers[worker].head

    def keys_of(self, worker: WorkerKey) -> KeyArray:
        """uint64[count], ascending: what this worker is believed to hold. O(table)."""
        follower = self._followers.get(worker)
        if follower is None:
            return np.zeros(0, np.uint64)
        return np.sort(self._table.keys_of(follower.number))

    @property
    def num_blocks(self) -> int:
        """Distinct blocks that somebody holds."""
        return self._table.num_held

    @property
    def num_bytes(self) -> int:
        """Memory of the table."""
        return self._table.num_bytes

    def validate(self) -> None:
        """Check every invariant from first principles; raises AssertionError. O(table x workers)."""
        self._table.validate()
        assert len(self._worker_by_number) == len(self._followers)
        for worker, follower in self._followers.items():
            assert self._worker_by_number[follower.number] == worker
            assert self._incarnations.is_latest(worker), worker
            assert not self._incarnations.is_replaced(worker), worker
            keys = self._table.keys_of(follower.number)
            assert follower.head.count == len(keys), worker
            assert follower.head.digest == keys_digest(keys), worker
            assert follower.heard.sequence >= follower.head.sequence, worker
            assert follower.needs_snapshot or not follower.held, worker
            assert all(sequence > follower.head.sequence for sequence in follower.held), worker
            assert len(follower.held) <= self._max_held_batches, worker
            num_keys = sum(batch.num_keys for batch in follower.held.values())
            assert num_keys == follower.num_held_keys <= self._max_held_keys, worker
            follower.expected.validate()
            assert not follower.expected or self._expecting[worker] is follower.expected, worker
        self._incarnations.validate()
        assert self._expecting.keys() <= self._followers.keys()

    # -- parts --

    def _add_expected(self, runs: dict[WorkerKey, int], keys: KeyArray) -> None:
        """Lengthen the runs by what is expected behind them."""
        for worker, expected in tuple(self._expecting.items()):
            if not expected:
                del self._expecting[worker]
                continue
            start = runs.get(worker, 0)
            end = expected.run_end(keys, start)
            if end > start:
                runs[worker] = end

    def _hold(self, follower: _Follower, batch: EventBatch) -> None:
        """Keep the batch until it is its turn; when that is too much, the earliest ones go.

        A snapshot that is asked for later makes up for those first.
        """
        sequence = batch.head.sequence
        if sequence in follower.held:
            return
        follower.held[sequence] = batch
        follower.num_held_keys += batch.num_keys
        while (
            len(follower.held) > self._max_held_batches
            or follower.num_held_keys > self._max_held_keys
        ):
            self._unhold(follower, min(follower.held))

    @staticmethod
    def _unhold(follower: _Follower, sequence: int) -> EventBatch:
        batch = follower.held.pop(sequence)
        follower.num_held_keys -= batch.num_keys
        return batch

    def _apply_held(self, follower: _Follower) -> None:
        """Apply the held batches whose turn it is; those that are overtaken go."""
        for sequence in sorted(follower.held):
            if sequence <= follower.head.sequence:
                self._unhold(follower, sequence)
            elif sequence == follower.head.sequence + 1 and not follower.is_wrong:
                self._change(follower, self._unhold(follower, sequence))
            else:
                break

    def _change(self, follower: _Follower, batch: EventBatch) -> None:
        """Do what the batch says; the head is what came of it, whatever the batch claims."""
        table, number = self._table, follower.number
        count, digest = follower.head.count, follower.head.digest
        if batch.is_cleared:
            table.drop(number)
            count = digest = 0
        if len(batch.removed_keys):
            num_removed, of_removed = table.remove(batch.removed_keys, number)
            count, digest = count - num_removed, digest - of_removed
        if len(batch.stored_keys):
            num_stored, of_stored = table.add(batch.stored_keys, number)
            count, digest = count + num_stored, digest + of_stored
        digest %= _WRAP
        if count == batch.head.count and digest == batch.head.digest:
            follower.head = batch.head
        else:
            sequence = batch.head.sequence
            follower.head = SetHead(sequence=sequence, count=count, digest=digest)
            follower.is_wrong = True
        _compare(follower, follower.heard)


def _hear(follower: _Follower, head: SetHead) -> None:
    follower.expected.on_word()
    if head.sequence > follower.heard.sequence:
        follower.heard = head
    elif head.sequence == follower.head.sequence:
        _compare(follower, head)


def _compare(follower: _Follower, head: SetHead) -> None:
    mine = follower.head
    if head is not mine and head.sequence == mine.sequence and head != mine:
        follower.is_wrong = True
