"""CopyBook: which of a store node's chains others are to take, and which it takes from others. Without IO.

What it is: what this node lends and what all nodes tell (tiering/store_record.py) go in; what this one tells,
and the chains that it is to read from others now, come out. Nobody is sent anything: who takes a chain
reads it as it reads an offer of a worker, and says no by not doing so.

Rules
- A chain's home asks for its replicas: as many as it is read for (tiering/replicas.py), at the nodes that
  would be its home if the first ones were not there. So all nodes agree without talking.
- A chain that is read here and whose home is elsewhere by now is asked for as well, the ones read fastest
  first: the ring has changed. What nobody reads, or hardly anybody, moves to nobody.
- A node that leaves asks for what was put or lent last, the latest first, until others tell that they have it or
  nobody comes for it any more (tiering/handover.py).
- A few chains are taken at a time, each from the offer to this node's own core until its reading has ended.
  What was taken once is not taken again for a while: to know whether it came, a taker asks its own cache.
  What its core refused is offered again when the next view comes, and what a node that leaves asks for until
  all of it lies here: a part of it may have been lost on its way, or lie on the other's disk.
- What a node that leaves asks for and of which no more has come for a while, however often it was tried, is
  declined: there is no room for all of it, or it cannot be read from here. Another node may have more luck.
- A node that leaves asks for what was used last first. So when the first chain that was taken from it has gone
  again, all others on its account are declined: they would push out what is worth more than they are.
- All of it is advice. Without neighbours nothing is asked and nothing is taken, and before the first of them
  nothing is noted but what lay on this node's disk when it started. What was noted stays, as far as there is room:
  a directory that has lost its records has them again soon.

Who leaves or has just come counts less or not at all as a home; the weights are those that workers use
(tiering/homes.py).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Set
from dataclasses import dataclass, field

from moonpool.ids import BlockHash, WorkerId, WorkerKey
from moonpool.tiering.handover import Handover
from moonpool.tiering.homes import home_key, homes_of, ramp_weight
from moonpool.tiering.protocol import PutRefusal
from moonpool.tiering.replicas import ReadChain, ReplicaConfig, ReplicaPlanner
from moonpool.tiering.store_record import (
    MAX_COPIES,
    MAX_COPY_BLOCKS,
    MAX_READS,
    MAX_TAKEN,
    ChainCopy,
    ChainReads,
    CopyKind,
    RingView,
    StoreMember,
    StoreRecord,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class CopyConfig:
    """Validated in config/; here only asserted."""

    #: What a block's bytes count as in a chain's rate.
    block_bytes: int
    replicas: ReplicaConfig = field(default_factory=ReplicaConfig)
    #: Until a node that has joined has its whole share of the chains.
    ramp_s: float = 60.0
    #: How long a node that leaves asks for a chain without a sign of who is to take it; and, before that, without
    #: being heard by anybody.
    asked_s: float = 5.0
    unheard_s: float = 10.0
    #: How long one that a node that leaves asks for is tried without more of it coming. Less than `asked_s`, so
    #: that the node hears of it before it has given up.
    vain_s: float = 2.0
    #: Before a chain that was taken is taken again.
    retake_s: float = 30.0
    #: Chains that are taken at the same time.
    max_takes: int = 4
    #: Blocks of chains that are remembered for the day on which this node leaves.
    max_recent_blocks: int = 65_536

    def __post_init__(self) -> None:
        assert self.block_bytes > 0, self
        times = (self.ramp_s, self.asked_s, self.unheard_s, self.vain_s, self.retake_s)
        assert min(times) > 0.0, self
        assert min(self.max_takes, self.max_recent_blocks) >= 1, self


@dataclass(frozen=True, slots=True, kw_only=True)
class TakeChain:
    """Read this chain from that node, and keep it; `on_taken` must follow, once."""

    source: WorkerKey
    #: gRPC address, host:port.
    address: str
    tenant: str
    hashes: tuple[BlockHash, ...]
    #: That node leaves: what does not come now will never.
    is_source_leaving: bool = False


@dataclass(slots=True, kw_only=True)
class _Try:
    """A chain that a node that leaves asks this one to take, and that does not lie here as a whole."""

    #: Leading blocks that were here when the most of it was.
    most_here: int
    #: When it was first taken without more of it coming.
    vain_since: float | None = None


class CopyBook:
    """See the file's head. `now` is monotonic, `now_unix_s` the wall clock.

    Args:
        tenant_of: On whose account a block is kept here.
        num_here: How many leading blocks of a chain lie here.
        is_on_disk: Whether all of a chain that lies here does so on disk.
    """

    def __init__(
        self,
        store_id: WorkerId,
        config: CopyConfig,
        *,
        tenant_of: Callable[[BlockHash], str],
        num_here: Callable[[tuple[BlockHash, ...]], int],
        is_on_disk: Callable[[tuple[BlockHash, ...]], bool],
    ) -> None:
        self._store_id = store_id
        self._config = config
        self._tenant_of = tenant_of
        self._num_here = num_here
        self._planner = ReplicaPlanner(config.replicas)
        self._view = RingView()
        self._has_neighbours = False
        #: There have been others: they may be away for a moment only.
        self._has_met_others = False
        #: For the day on which this node leaves.
        self._handover = Handover(
            asked_s=config.asked_s,
            unheard_s=config.unheard_s,
            max_blocks=config.max_recent_blocks,
            num_here=num_here,
            is_on_disk=is_on_disk,
        )
        self._is_leaving = False
        #: By their last blocks: chains that are taken now, those that are offered again at the next view, and when
        #: those that were begun may be taken again.
        self._taking: dict[BlockHash, TakeChain] = {}
        self._refused: set[BlockHash] = set()
        self._taken: OrderedDict[BlockHash, float] = OrderedDict()
        #: Of what nodes that leave ask for: what was tried, what lies here, and what is not tried any more.
        self._tries: dict[BlockHash, _Try] = {}
        self._held: set[BlockHash] = set()
        self._declined: set[BlockHash] = set()
        #: The first chain of each account that was taken from a node that leaves.
        self._first: dict[tuple[WorkerKey, str], tuple[BlockHash, ...]] = {}
        self._is_waited_for = False

    # -- what happens --

    def note_kept(self, hashes: tuple[BlockHash, ...]) -> None:
        """This chain was put here. What comes while this node leaves, it asks for as well."""
        if hashes and self._has_met_others:
            self._handover.note(hashes)

    def note_found(self, chains: Iterable[tuple[BlockHash, ...]]) -> None:
        """These lay on this node's disk when it started, the latest last. Before anything else is noted."""
        for hashes in chains:
            self._handover.note(hashes)

    def note_lent(
        self, hashes: tuple[BlockHash, ...], now: float, *, reader: WorkerId | None = None
    ) -> None:
        """A reader was lent these leading blocks of a chain; `note_returned` follows if it is known."""
        if reader is not None:
            self._handover.on_lent(reader, now)
        if not self._is_leaving:
            self.note_kept(hashes)
        if hashes and self._has_met_others:
            num_bytes = len(hashes) * self._config.block_bytes
            self._planner.note_read(home_key(hashes), hashes[:MAX_COPY_BLOCKS], num_bytes, now)

    def note_returned(self, reader: WorkerId, now: float) -> None:
        """A reader reads what it was lent no more."""
        self._handover.on_returned(reader, now)

    def on_view(self, view: RingView, now: float) -> None:
        """All nodes' records were read."""
        self._view = view
        self._has_neighbours = any(
            member.key.worker_id != self._store_id for member in view.members
        )
        self._has_met_others |= self._has_neighbours
        self._refused.clear()
        self._handover.on_view(view, self._store_id, now)
        wanted = {
            copy.hashes[-1]: copy.hashes
            for member, copy in view.copies_for(self._store_id)
            if member.is_draining
        }
        self._held &= wanted.keys()
        self._declined &= wanted.keys()
        self._tries = {last: tried for last, tried in self._tries.items() if last in wanted}
        # What was declined a worker may have brought.
        come = {last for last in self._declined if self._is_here(wanted[last])}
        self._declined -= come
        self._held |= come
        self._is_waited_for = bool(wanted)
        leaving = {member.key for member in view.members if member.is_draining}
        self._first = {which: first for which, first in self._first.items() if which[0] in leaving}

    def leave(self) -> None:
        """This node leaves the ring, and still lends what it holds. Idempotent."""
        self._is_leaving = True

    def on_taken(self, take: TakeChain, now: float, *, refusal: PutRefusal | None) -> bool:
        """A TakeChain has ended, however it went.

        Returns:
            Whether a node that leaves waits to be told: all of it lies here, or no more of it will.
        """
        last_hash = take.hashes[-1]
        del self._taking[last_hash]
        if take.is_source_leaving:
            return self._on_tried(take, refusal, now)
        if refusal is not None:
            self._taken.pop(last_hash, None)
            self._refused.add(last_hash)
        return False

    # -- what comes of it --

    def record(self, member: StoreMember, now: float, now_unix_s: float) -> StoreRecord:
        """What this node tells the others now."""
        assert member.key.worker_id == self._store_id, member
        if not (self._has_neighbours or self._is_leaving):
            return StoreRecord(member=member)
        weights, reads = self._weights(now_unix_s), self._planner.reads(now, MAX_READS)
        if self._is_leaving:
            copies = [
                self._ask(CopyKind.MOVE, asked.chain, asked.takers)
                for asked in self._handover.asks(weights, now)
            ]
        else:
            copies = self._asks(weights, reads, now).copies
        least = self._config.replicas.told_share * self._config.replicas.bytes_per_s_of_a_copy
        return StoreRecord(
            member=member,
            copies=tuple(copies),
            reads=tuple(
                ChainReads(home_hash=chain.home_hash, bytes_per_s=chain.bytes_per_s)
                for chain in reads
                if chain.bytes_per_s > least
            ),
            taken=tuple(sorted(self._held)[:MAX_TAKEN]),
            declined=tuple(sorted(self._declined)[:MAX_TAKEN]),
        )

    def takes(self, now: float) -> list[TakeChain]:
        """The chains to read from others now. Call when a view has come and when a take has ended."""
        while self._taken and next(iter(self._taken.values())) <= now:
            self._taken.popitem(last=False)
        takes: list[TakeChain] = []
        if self._is_leaving:
            return takes
        full = {which for which, first in self._first.items() if not self._is_here(first)}
        ended = self._held | self._declined
        for member, copy in self._view.copies_for(self._store_id):
            if len(self._taking) >= self._config.max_takes:
                break
            last_hash = copy.hashes[-1]
            is_done = last_hash in (ended if member.is_draining else self._taken)
            if is_done or last_hash in self._taking or last_hash in self._refused:
                continue
            if member.is_draining and (member.key, copy.tenant) in full:
                self._declined.add(last_hash)
                continue
            self._taken.pop(last_hash, None)
            self._taken[last_hash] = now + self._config.retake_s
            if member.is_draining and last_hash not in self._tries:
                self._tries[last_hash] = _Try(most_here=self._num_here(copy.hashes))
            self._taking[last_hash] = TakeChain(
                source=member.key,
                address=member.address,
                tenant=copy.tenant,
                hashes=copy.hashes,
                is_source_leaving=member.is_draining,
            )
            takes.append(self._taking[last_hash])
        return takes

    @property
    def max_recent_blocks(self) -> int:
        """Blocks of chains that are remembered for the day on which this node leaves."""
        return self._config.max_recent_blocks

    @property
    def num_asked(self) -> int:
        """Chains that a node that leaves asks others to take at this moment."""
        return self._handover.num_asked

    @property
    def handed(self) -> Set[BlockHash]:
        """Blocks of a node that leaves that others have told that they have."""
        return self._handover.handed

    @property
    def is_waited_for(self) -> bool:
        """Whether a node that leaves asks this one to take something, as of the last view."""
        return self._is_waited_for

    @property
    def num_taking(self) -> int:
        """Chains that this node takes from others at this moment."""
        return len(self._taking)

    def is_left(self, now: float) -> bool:
        """Whether others have all that a node that leaves has asked for, or come for it no more."""
        return self._is_leaving and self._handover.is_over(now)

    def validate(self) -> None:
        """Check every invariant; raises AssertionError."""
        self._planner.validate()
        self._handover.validate()
        assert len(self._taking) <= self._config.max_takes, self._taking
        assert not self._refused & (self._taken.keys() | self._taking.keys())
        assert not self._held & self._declined
        for last_hash, take in self._taking.items():
            assert last_hash == take.hashes[-1], take
        assert self._is_leaving or not self._handover.num_asked
        ends = list(self._taken.values())
        assert ends == sorted(ends), ends

    # -- parts --

    def _on_tried(self, take: TakeChain, refusal: PutRefusal | None, now: float) -> bool:
        """One that a node that leaves asks for was taken. Whether that node waits to be told."""
        last_hash = take.hashes[-1]
        num_here = self._num_here(take.hashes)
        if num_here == len(take.hashes):
            self._held.add(last_hash)
            self._first.setdefault((take.source, take.tenant), take.hashes)
            return True
        self._taken.pop(last_hash, None)
        tried = self._tries.get(last_hash)
        if tried is not None and num_here > tried.most_here:
            # There is more where that came from.
            tried.most_here, tried.vain_since = num_here, None
            return False
        self._refused.add(last_hash)
        is_on_its_way = any(take.hashes[num_here] in one.hashes for one in self._taking.values())
        if tried is None or is_on_its_way or refusal is PutRefusal.TOO_MANY_PUTS:
            return False
        if tried.vain_since is None:
            tried.vain_since = now
        if now < tried.vain_since + self._config.vain_s:
            return False
        self._declined.add(last_hash)
        return True

    def _is_here(self, hashes: tuple[BlockHash, ...]) -> bool:
        return self._num_here(hashes) == len(hashes)

    def _weights(self, now_unix_s: float) -> dict[WorkerId, float]:
        """Of the nodes that may be a home."""
        return {
            member.key.worker_id: ramp_weight(member.age_s(now_unix_s), self._config.ramp_s)
            for member in self._view.members
            if not member.is_draining
            and not (self._is_leaving and member.key.worker_id == self._store_id)
        }

    def _asks(
        self, weights: dict[WorkerId, float], reads: tuple[ReadChain, ...], now: float
    ) -> _Asks:
        """Replicas first, then what lies here and belongs elsewhere."""
        asks = _Asks()
        for hot in self._planner.plan(now, self._view.reads_elsewhere(self._store_id)):
            if asks.has_room(hot.hashes):
                homes = homes_of(weights, hot.home_hash, hot.num_copies)
                if homes[:1] == (self._store_id,) and len(homes) > 1:
                    asks.add(self._ask(CopyKind.REPLICA, hot.hashes, homes[1:]))
        replicas = {
            home_key(copy.hashes)
            for _, copy in self._view.copies_for(self._store_id)
            if copy.kind is CopyKind.REPLICA
        }
        for chain in reads:
            if asks.has_room(chain.hashes) and chain.home_hash not in replicas:
                homes = homes_of(weights, chain.home_hash, 1)
                if homes and homes != (self._store_id,):
                    asks.add(self._ask(CopyKind.MOVE, chain.hashes, homes))
        return asks

    def _ask(
        self, kind: CopyKind, hashes: tuple[BlockHash, ...], takers: tuple[WorkerId, ...]
    ) -> ChainCopy:
        tenant = self._tenant_of(hashes[-1])
        return ChainCopy(kind=kind, tenant=tenant, hashes=hashes, takers=takers)


class _Asks:
    """As many as a record can hold."""

    def __init__(self) -> None:
        self.copies: list[ChainCopy] = []
        self._num_blocks = 0

    def has_room(self, chain: tuple[BlockHash, ...]) -> bool:
        is_full = len(self.copies) >= MAX_COPIES
        return not is_full and self._num_blocks + len(chain) <= MAX_COPY_BLOCKS

    def add(self, copy: ChainCopy) -> None:
        """Requires room for it."""
        self.copies.append(copy)
        self._num_blocks += len(copy.hashes)
