"""PrefixHolds: the holder's side of all reads of prefixes by peers, in the service process.

A reader names a chain of block hashes; what of it lies here is locked for as long as its lease is open,
and read one-sided. One stream carries all leases of a reader (worker/holder_leases.py). Events in, effects
out; `now` is an argument; no IO.

Rules
- The lease is the lock: it ends with the lease, whoever ends that, at the latest with the reader's stream.
- The owner answers, not the index: what is told is what the core has locked, perhaps nothing.
- A reader of another cluster, of other values, or of an earlier life of this worker is refused, in words.
- Locks keep blocks from being evicted, so they are bounded: in number, for one reader and in all, and
  in time.

Life of one lease

    state      event                              effects and next state
    -          PrefixOpen, refused                PrefixFailed, end of lease         -> ended
    -          PrefixOpen, nothing wanted yet     StagePrefix, PrefixOpened, end     -> ended
    -          PrefixOpen                         core LockPrefix                    -> LOCKING
    LOCKING    PrefixDelayed (a store's disk)     PrefixStaging                      -> LOCKING
    LOCKING    core PrefixLocked                  PrefixOpened                       -> LOCKED
    LOCKING    core PrefixLocked, nothing wanted  PrefixOpened, end, core Unlock     -> ended
    LOCKING    no answer in 2 s (a long step)     PrefixFailed, end, core Unlock     -> ended
    LOCKED     30 s have passed                   PrefixFailed, end, core Unlock     -> ended
    any        the reader closes it, or is gone   core UnlockPrefix                  -> ended

What it deliberately does not do: it never looks at digests (the shell attaches them when it sends),
and does not know what of the prefix has been read.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace

from moonpool.core.protocol import Command, LockPrefix, PrefixLocked, UnlockPrefix
from moonpool.handoff.config import FetchConfig
from moonpool.handoff.effects import (
    EndPrefixLease,
    HoldEffect,
    SendCommand,
    SendOnPrefixLease,
    StagePrefix,
)
from moonpool.handoff.events import (
    CoreFrameReceived,
    HoldEvent,
    PrefixDelayed,
    PrefixLeaseClosed,
    PrefixOpenReceived,
)
from moonpool.handoff.messages import (
    HolderMessage,
    LeaseId,
    PrefixFailed,
    PrefixOpen,
    PrefixOpened,
    PrefixRefusal,
    PrefixStaging,
)
from moonpool.ids import AttemptId, WorkerKey


@dataclass(frozen=True, slots=True, kw_only=True)
class _Hold:
    """One reader's lock."""

    attempt_id: AttemptId
    reader: WorkerKey
    #: Index of the first block that is wanted.
    first: int
    #: When it is given up: LOCKING, the core's time; LOCKED, the reader's.
    end_at: float
    is_locked: bool = False


class PrefixHolds:
    """All prefixes of this worker that peers read.

    Args:
        key: This worker's id and incarnation; an open for another is refused.
        namespace: Fingerprint of all that changes the values of this worker's KV.
        secret_fingerprint: Of the cluster's secret.
    """

    def __init__(
        self, *, key: WorkerKey, namespace: str, secret_fingerprint: str, config: FetchConfig
    ) -> None:
        self._key = key
        self._namespace = namespace
        self._secret_fingerprint = secret_fingerprint
        self._config = config
        self._holds: dict[LeaseId, _Hold] = {}
        self._num_by_reader: Counter[WorkerKey] = Counter()
        self._effects: list[HoldEffect] = []

    # -- the interface --

    def handle(self, event: HoldEvent, now: float) -> list[HoldEffect]:
        """Take one event; returns what is to be done, in order."""
        match event:
            case PrefixOpenReceived():
                self._on_open(event, now)
            case PrefixDelayed():
                self._on_delayed(event)
            case PrefixLeaseClosed(lease_id=lease_id):
                if lease_id in self._holds:
                    self._unlock(lease_id)
            case CoreFrameReceived(replies=replies):
                for reply in replies:
                    if isinstance(reply, PrefixLocked):
                        self._on_locked(reply, now)
        return self._take_effects()

    def tick(self, now: float) -> list[HoldEffect]:
        """Do what is due. Call at `next_wakeup()` or later; too early or too often does nothing."""
        for lease_id, hold in list(self._holds.items()):
            if hold.end_at > now:
                continue
            if hold.is_locked:
                reason = PrefixRefusal.EXPIRED
                words = f"A reader has {self._config.hold_s:g} s."
            else:
                reason = PrefixRefusal.BUSY
                words = f"The engine did not answer in {self._config.core_answer_s:g} s."
            self._fail(lease_id, hold.attempt_id, reason, words)
            self._unlock(lease_id)
        return self._take_effects()

    def next_wakeup(self) -> float | None:
        """When `tick` has something to do next, or None."""
        return min((hold.end_at for hold in self._holds.values()), default=None)

    @property
    def num_holds(self) -> int:
        """Leases whose prefix is locked or about to be."""
        return len(self._holds)

    @property
    def is_quiet(self) -> bool:
        """Nobody reads a prefix here."""
        return not self._holds

    def fork(self) -> PrefixHolds:
        """An independent copy, for exploration."""
        fork = PrefixHolds(
            key=self._key,
            namespace=self._namespace,
            secret_fingerprint=self._secret_fingerprint,
            config=self._config,
        )
        fork._holds = dict(self._holds)
        fork._num_by_reader = self._num_by_reader.copy()
        return fork

    def key(self) -> tuple[object, ...]:
        """Equal for machines that behave alike, their timers' exact times apart."""
        return tuple(
            (lease_id, hold.reader, hold.first, hold.is_locked)
            for lease_id, hold in sorted(self._holds.items())
        )

    def validate(self) -> None:
        """Check every invariant; for tests and debugging."""
        assert not self._effects
        counts = Counter(hold.reader for hold in self._holds.values())
        assert counts == self._num_by_reader, (counts, self._num_by_reader)
        assert len(self._holds) <= self._config.max_locks, self._holds
        assert max(counts.values(), default=0) <= self._config.max_locks_per_reader, counts

    # -- the reader --

    def _on_open(self, event: PrefixOpenReceived, now: float) -> None:
        lease_id, open_ = event.lease_id, event.open
        assert lease_id not in self._holds, event
        refusal = self._refuse(open_)
        if refusal is not None:
            self._fail(lease_id, open_.attempt_id, *refusal)
            return
        if open_.first == len(open_.hashes):
            self._effects.append(StagePrefix(hashes=open_.hashes))
            self._send(lease_id, PrefixOpened(attempt_id=open_.attempt_id, block_ids=()))
            self._end_stream(lease_id)
            return
        self._holds[lease_id] = _Hold(
            attempt_id=open_.attempt_id,
            reader=open_.reader,
            first=open_.first,
            end_at=now + self._config.core_answer_s,
        )
        self._num_by_reader[open_.reader] += 1
        self._command(LockPrefix(read_id=lease_id, hashes=open_.hashes, reader=open_.reader))

    def _refuse(self, open_: PrefixOpen) -> tuple[PrefixRefusal, str] | None:
        config = self._config
        if open_.holder != self._key:
            return PrefixRefusal.WRONG_INCARNATION, f"This is {self._key}, not {open_.holder}."
        if open_.secret_fingerprint != self._secret_fingerprint:
            return (
                PrefixRefusal.WRONG_SECRET,
                f"{open_.reader} has another cluster secret (fingerprint "
                f"{open_.secret_fingerprint or 'none'} != {self._secret_fingerprint}).",
            )
        if open_.namespace != self._namespace:
            return (
                PrefixRefusal.WRONG_NAMESPACE,
                f"{open_.reader} and {self._key} do not compute the same KV.",
            )
        if len(self._holds) >= config.max_locks:
            return PrefixRefusal.TOO_MANY_LOCKS, f"{len(self._holds)} prefixes are locked here."
        num_locks = self._num_by_reader[open_.reader]
        if num_locks >= config.max_locks_per_reader:
            return (
                PrefixRefusal.TOO_MANY_LOCKS,
                f"{num_locks} prefixes are locked here for {open_.reader}.",
            )
        return None

    # -- the core --

    def _on_delayed(self, event: PrefixDelayed) -> None:
        hold = self._holds.get(event.lease_id)
        if hold is None or hold.is_locked or event.num_blocks <= hold.first:
            return
        staging = PrefixStaging(
            attempt_id=hold.attempt_id,
            num_ready_blocks=max(event.num_ready_blocks - hold.first, 0),
            num_blocks=event.num_blocks - hold.first,
        )
        self._send(event.lease_id, staging)

    def _on_locked(self, reply: PrefixLocked, now: float) -> None:
        lease_id = LeaseId(reply.read_id)
        hold = self._holds.get(lease_id)
        if hold is None:
            # The reader has gone, and the core has been told.
            return
        block_ids = reply.block_ids[hold.first :]
        self._send(lease_id, PrefixOpened(attempt_id=hold.attempt_id, block_ids=block_ids))
        if block_ids:
            self._holds[lease_id] = replace(hold, is_locked=True, end_at=now + self._config.hold_s)
        else:
            self._end_stream(lease_id)
            self._unlock(lease_id)

    # -- ends --

    def _fail(
        self, lease_id: LeaseId, attempt_id: AttemptId, reason: PrefixRefusal, words: str
    ) -> None:
        self._send(lease_id, PrefixFailed(attempt_id=attempt_id, reason=reason, message=words))
        self._end_stream(lease_id)

    def _unlock(self, lease_id: LeaseId) -> None:
        hold = self._holds.pop(lease_id)
        self._num_by_reader[hold.reader] -= 1
        if not self._num_by_reader[hold.reader]:
            del self._num_by_reader[hold.reader]
        self._command(UnlockPrefix(read_id=lease_id))

    # -- plumbing --

    def _send(self, lease_id: LeaseId, message: HolderMessage) -> None:
        self._effects.append(SendOnPrefixLease(lease_id=lease_id, message=message))

    def _end_stream(self, lease_id: LeaseId) -> None:
        self._effects.append(EndPrefixLease(lease_id=lease_id))

    def _command(self, command: Command) -> None:
        self._effects.append(SendCommand(command=command))

    def _take_effects(self) -> list[HoldEffect]:
        effects, self._effects = self._effects, []
        return effects
