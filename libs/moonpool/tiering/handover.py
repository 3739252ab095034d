"""Handover: what a store node that leaves its ring asks the others to take, until they have it. Without IO.

    chain noted ---> waits ---> asked ---> handed over      a taker tells that it has it
                                ^  | |
                                '--' '---> left             nobody comes for it any more, or all have declined
            of the next home, when one declines

Rules
- The chain that was noted last is asked for first; of each what lies here, and none that another one covers.
  What lies on disk as a whole comes after all others: it is there again if the node is, and to bring it into
  memory pushes out what is in memory only.
  A windowful at a time (store_record.py): what is handed over or left makes room for the next. Of a chain that
  is longer than that its beginning is asked for.
- A chain that loses its end while it is asked for is asked for as far as it still lies here, and for no longer:
  nobody could ever tell that they have all of it.
- A chain is handed over by its taker's word only: that it was lent and given back is no proof, since
  readings end for many reasons.
- By its word only it declines as well: it has tried, and no more of the chain comes, mostly for want of room. Then
  the next home is asked, each once; when all have declined the chain is left.
- Takers come in order, for a few chains at a time. So any sign of a taker (it is lent something, gives it back,
  tells that it has something) is one for all that it is asked for, and while it is lent something nothing of
  that is given up. Without a sign a chain is left after `asked_s`.
- That time runs from when the others can read of it: from the first view in which this node's own record asks
  for it. A directory that does not hear is waited for, for `unheard_s`.
- A chain's taker stays the one that it was at first, as long as it stays in the ring and does not decline:
  homes move by and by while a node that has joined gets its share, and who has begun to read is to end it.
- What is left, and asked for in vain, is still asked for as long as there is room: it costs nothing.
"""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Callable, Mapping, Set
from dataclasses import dataclass, field

from moonpool.ids import BlockHash, WorkerId
from moonpool.tiering.homes import home_key, homes_of
from moonpool.tiering.recent_chains import RecentChains
from moonpool.tiering.store_record import MAX_COPIES, MAX_COPY_BLOCKS, RingView


@dataclass(slots=True, kw_only=True)
class Asked:
    """A chain that others are asked to take."""

    chain: tuple[BlockHash, ...]
    #: As of the last record; none while there is nobody who could.
    takers: tuple[WorkerId, ...]
    #: They were its takers, and will not have it.
    declined: set[WorkerId] = field(default_factory=set)
    #: When it is left, if there is no sign of its taker before.
    ends_at: float
    #: Others can read that it is asked for.
    is_heard: bool = False


class Handover:
    """See the file's head.

    Args:
        asked_s: How long a chain is asked for without a sign of its taker.
        unheard_s: How long it is asked for if nobody can read it.
        max_blocks: Of chains that are noted.
        num_here: How many leading blocks of a chain lie here.
        is_on_disk: Whether all of a chain that lies here does so on disk.
    """

    def __init__(
        self,
        *,
        asked_s: float,
        unheard_s: float,
        max_blocks: int,
        num_here: Callable[[tuple[BlockHash, ...]], int],
        is_on_disk: Callable[[tuple[BlockHash, ...]], bool],
    ) -> None:
        self._asked_s = asked_s
        self._unheard_s = unheard_s
        self._num_here = num_here
        self._is_on_disk = is_on_disk
        #: Those that were not asked for yet; of these, those that come after all others, in their order.
        self._waiting = RecentChains(max_blocks)
        self._on_disk: deque[tuple[BlockHash, ...]] = deque()
        #: By the last block, in the order of asking.
        self._asked: dict[BlockHash, Asked] = {}
        #: All blocks of what is or was asked for, without those that were lost; and of what was handed over.
        self._covered: set[BlockHash] = set()
        self._handed: set[BlockHash] = set()
        #: Chains, or beginnings of them, that each reader is lent.
        self._num_lent: Counter[WorkerId] = Counter()

    # -- what happens --

    def note(self, chain: tuple[BlockHash, ...]) -> None:
        """This chain was put here, or what of it lies here was lent. Requires at least one block."""
        self._waiting.note(chain[:MAX_COPY_BLOCKS])

    def on_lent(self, reader: WorkerId, now: float) -> None:
        """Somebody reads here; `on_returned` follows."""
        self._num_lent[reader] += 1
        self._on_sign(reader, now)

    def on_returned(self, reader: WorkerId, now: float) -> None:
        """It does not read that any more."""
        self._num_lent[reader] -= 1
        if self._num_lent[reader] <= 0:
            # Its reading may be older than this.
            del self._num_lent[reader]
        self._on_sign(reader, now)

    def on_view(self, view: RingView, store_id: WorkerId, now: float) -> None:
        """All nodes' records were read, of which one may be this node's own."""
        for record in view.records:
            member = record.member
            if member.key.worker_id != store_id:
                for last_hash in record.taken:
                    self._on_told(last_hash, member.key.worker_id, now)
                for last_hash in record.declined:
                    self._on_declined(last_hash, member.key.worker_id, now)
            elif member.is_draining:
                for copy in record.copies:
                    asked = self._asked.get(copy.hashes[-1])
                    if asked is not None and not asked.is_heard:
                        asked.is_heard, asked.ends_at = True, now + self._asked_s

    # -- what comes of it --

    def asks(self, weights: Mapping[WorkerId, float], now: float) -> list[Asked]:
        """What is asked for now, in this order; as much as a record holds.

        Args:
            weights: Of the nodes that may take something.
        """
        self._trim()
        before, self._asked = self._asked, {}
        room = _Room()
        for asked in before.values():
            if not self._is_left(asked, now):
                room.take(asked.chain)
                self._ask(asked, weights, now)
        while (chain := self._next()) is not None and room.is_for(chain):
            self._forget_next()
            room.take(chain)
            self._covered.update(chain)
            fresh = Asked(chain=chain, takers=(), ends_at=now + self._unheard_s)
            self._ask(fresh, weights, now)
        for last_hash, asked in before.items():
            if last_hash not in self._asked and room.is_for(asked.chain):
                room.take(asked.chain)
                self._ask(asked, weights, now)
        return list(self._asked.values())

    @property
    def num_asked(self) -> int:
        """Chains that others are asked to take at this moment."""
        return len(self._asked)

    @property
    def handed(self) -> Set[BlockHash]:
        """The blocks that others have told that they have."""
        return self._handed

    def is_over(self, now: float) -> bool:
        """Whether all chains were handed over, or are left."""
        is_all_asked = not len(self._waiting) and not self._on_disk
        return is_all_asked and all(self._is_left(one, now) for one in self._asked.values())

    def validate(self) -> None:
        """Check every invariant; raises AssertionError."""
        self._waiting.validate()
        assert self._handed <= self._covered
        assert len(self._asked) <= MAX_COPIES
        assert min(self._num_lent.values(), default=1) > 0, self._num_lent
        for last_hash, asked in self._asked.items():
            assert last_hash == asked.chain[-1], asked
            assert self._covered.issuperset(asked.chain), asked
            assert math.isfinite(asked.ends_at), asked
            assert asked.declined.isdisjoint(asked.takers), asked

    # -- parts --

    def _next(self) -> tuple[BlockHash, ...] | None:
        """What is to be asked for next of what was not yet, as far as it lies here."""
        while (chain := self._waiting.latest()) is not None:
            chain = chain[: self._num_here(chain)]
            if chain and chain[-1] not in self._covered:
                if not self._is_on_disk(chain):
                    return chain
                self._on_disk.append(chain)
            self._waiting.forget_latest()
        while self._on_disk:
            chain = self._on_disk[0]
            chain = chain[: self._num_here(chain)]
            if chain and chain[-1] not in self._covered:
                return chain
            self._on_disk.popleft()
        return None

    def _forget_next(self) -> None:
        if len(self._waiting):
            self._waiting.forget_latest()
        else:
            self._on_disk.popleft()

    def _trim(self) -> None:
        """Of each chain that is asked for keep what still lies here, unless others cover that."""
        before, self._asked = self._asked, {}
        for asked in before.values():
            num_here = self._num_here(asked.chain)
            if num_here < len(asked.chain):
                # What comes again is asked for again.
                self._covered.difference_update(set(asked.chain[num_here:]) - self._handed)
                asked.chain = asked.chain[:num_here]
                # There may be room for so much.
                asked.declined.clear()
        # A hash vouches for all before it: whatever ends at one of these is a beginning of another chain.
        inner = {block_hash for asked in before.values() for block_hash in asked.chain[:-1]}
        for last_hash, asked in before.items():
            last_here = asked.chain[-1] if asked.chain else None
            if last_here == last_hash:
                self._asked[last_hash] = asked
            elif last_here is not None and last_here not in inner and last_here not in self._handed:
                self._asked.setdefault(last_here, asked)

    def _ask(self, asked: Asked, weights: Mapping[WorkerId, float], now: float) -> None:
        if not asked.takers or not weights.keys() >= set(asked.takers):
            able = {node: weights[node] for node in weights if node not in asked.declined}
            asked.takers = homes_of(able, home_key(asked.chain), 1)
            if asked.takers:
                # Another one: it has not had its time.
                asked.ends_at = max(asked.ends_at, now + self._asked_s)
            elif weights:
                asked.ends_at = min(asked.ends_at, now)
        self._asked[asked.chain[-1]] = asked

    def _on_told(self, last_hash: BlockHash, taker: WorkerId, now: float) -> None:
        asked = self._asked.get(last_hash)
        if asked is not None and (taker in asked.takers or taker in asked.declined):
            del self._asked[last_hash]
            self._handed.update(asked.chain)
            self._on_sign(taker, now)

    def _on_declined(self, last_hash: BlockHash, taker: WorkerId, now: float) -> None:
        asked = self._asked.get(last_hash)
        if asked is not None and taker in asked.takers:
            # Of this chain too: until the next record names another one it is not left.
            self._on_sign(taker, now)
            asked.takers = ()
            asked.declined.add(taker)

    def _on_sign(self, taker: WorkerId, now: float) -> None:
        for asked in self._asked.values():
            if taker in asked.takers:
                asked.ends_at = max(asked.ends_at, now + self._asked_s)

    def _is_left(self, asked: Asked, now: float) -> bool:
        is_read = any(self._num_lent[taker] for taker in asked.takers)
        return asked.ends_at <= now and not is_read


class _Room:
    """What a record still holds."""

    def __init__(self) -> None:
        self._num_copies = MAX_COPIES
        self._num_blocks = MAX_COPY_BLOCKS

    def is_for(self, chain: tuple[BlockHash, ...]) -> bool:
        return self._num_copies > 0 and len(chain) <= self._num_blocks

    def take(self, chain: tuple[BlockHash, ...]) -> None:
        """Requires that there is room."""
        self._num_copies -= 1
        self._num_blocks -= len(chain)
