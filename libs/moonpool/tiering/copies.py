"""CopyBook: which of a store node's chains others are to take, and which it takes from others. Without IO.

What it is: what this node lends and what all nodes tell (tiering/store_record.py) go in; what this one tells,
and the chains that it is to read from others now, come out. Nobody is sent anything: who takes a chain
reads it as it reads an offer of a worker, and says no by not doing so.

Rules
- A chain's home asks for its replicas: as many as it is read for (tiering/replicas.py), at the nodes that
  would be its home if the first ones were not there. So all nodes agree without talking.
- A chain that is read here and whose home is elsewhere by now is asked for as well, the ones read fastest
  first: the ring has changed. What nobody reads moves to nobody.
- A node that leaves asks for what was put or lent last, the latest first, a windowful at a time; for each
  chain until somebody has come to read all of it, or for a while.
- What was taken once is not taken again for a while: to know whether it came, a taker asks its own cache.
- All of it is advice. Without a view nothing is asked and nothing is taken.

Who leaves or has just come counts less or not at all as a home; the weights are those that workers use
(tiering/homes.py).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field

from moonpool.ids import BlockHash, WorkerId, WorkerKey
from moonpool.tiering.homes import home_key, homes_of, ramp_weight
from moonpool.tiering.offloader import DEFAULT_TENANT
from moonpool.tiering.replicas import ReplicaConfig, ReplicaPlanner
from moonpool.tiering.store_record import (
    MAX_COPIES,
    MAX_COPY_BLOCKS,
    MAX_READS,
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
    #: How long a node that leaves asks for a chain before it asks for the next one.
    asked_s: float = 5.0
    #: Before a chain that was taken is taken again.
    retake_s: float = 30.0
    #: Chains that are taken at the same time.
    max_takes: int = 4
    #: Blocks of chains that are remembered for the day on which this node leaves.
    max_recent_blocks: int = 65_536

    def __post_init__(self) -> None:
        assert self.block_bytes > 0, self
        assert min(self.ramp_s, self.asked_s, self.retake_s) > 0.0, self
        assert min(self.max_takes, self.max_recent_blocks) >= 1, self


@dataclass(frozen=True, slots=True, kw_only=True)
class TakeChain:
    """Read this chain from that node, and keep it; `on_taken` must follow, once."""

    source: WorkerKey
    #: gRPC address, host:port.
    address: str
    tenant: str
    hashes: tuple[BlockHash, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Asked:
    """A chain that a node that leaves asks others to take."""

    chain: tuple[BlockHash, ...]
    ends_at: float


class CopyBook:
    """See the file's head. `now` is monotonic, `now_unix_s` the wall clock."""

    def __init__(self, store_id: WorkerId, config: CopyConfig) -> None:
        self._store_id = store_id
        self._config = config
        self._planner = ReplicaPlanner(config.replicas)
        self._view = RingView()
        #: By the last block: chains in the order in which they were put or lent last.
        self._recent: OrderedDict[BlockHash, tuple[BlockHash, ...]] = OrderedDict()
        self._num_recent_blocks = 0
        #: Chains of a node that leaves which nobody was asked to take yet, in order; and, by their last
        #: block, those that are asked for now.
        self._leaving: list[tuple[BlockHash, ...]] = []
        self._asked: dict[BlockHash, _Asked] = {}
        self._is_leaving = False
        #: By the last block of a chain: when it may be taken again.
        self._taken: OrderedDict[BlockHash, float] = OrderedDict()
        self._num_taking = 0

    # -- what happens --

    def note_kept(self, hashes: tuple[BlockHash, ...]) -> None:
        """This chain was put here, or what of it lies here was lent."""
        if not hashes or self._is_leaving:
            return
        before = self._recent.pop(hashes[-1], ())
        self._recent[hashes[-1]] = hashes
        self._num_recent_blocks += len(hashes) - len(before)
        while self._num_recent_blocks > self._config.max_recent_blocks:
            _, forgotten = self._recent.popitem(last=False)
            self._num_recent_blocks -= len(forgotten)

    def note_lent(self, hashes: tuple[BlockHash, ...], now: float) -> None:
        """A reader was lent these leading blocks of a chain."""
        self.note_kept(hashes)
        if hashes:
            self._asked.pop(hashes[-1], None)
            num_bytes = len(hashes) * self._config.block_bytes
            self._planner.note_read(home_key(hashes), hashes, num_bytes, now)

    def on_view(self, view: RingView) -> None:
        """All nodes' records were read."""
        self._view = view

    def leave(self) -> None:
        """This node leaves the ring, and still lends what it holds. Idempotent."""
        if self._is_leaving:
            return
        self._is_leaving = True
        covered: set[BlockHash] = set()
        for last_hash, chain in reversed(self._recent.items()):
            if last_hash not in covered and len(chain) <= MAX_COPY_BLOCKS:
                covered.update(chain)
                self._leaving.append(chain)
        self._recent.clear()
        self._num_recent_blocks = 0

    def on_taken(self) -> None:
        """A TakeChain has ended, however it went."""
        assert self._num_taking > 0
        self._num_taking -= 1

    # -- what comes of it --

    def record(self, member: StoreMember, now: float, now_unix_s: float) -> StoreRecord:
        """What this node tells the others now."""
        assert member.key.worker_id == self._store_id, member
        weights = self._weights(now_unix_s)
        asks = self._leave_asks(weights, now) if self._is_leaving else self._asks(weights, now)
        least = self._config.replicas.told_share * self._config.replicas.bytes_per_s_of_a_copy
        reads = [chain for chain in self._planner.reads(now) if chain.bytes_per_s > least]
        return StoreRecord(
            member=member,
            copies=_as_many_as_fit(asks),
            reads=tuple(
                ChainReads(home_hash=chain.home_hash, bytes_per_s=chain.bytes_per_s)
                for chain in reads[:MAX_READS]
            ),
        )

    def takes(self, now: float) -> list[TakeChain]:
        """The chains to read from others now. Call when a view has come and when a take has ended."""
        while self._taken and next(iter(self._taken.values())) <= now:
            self._taken.popitem(last=False)
        takes: list[TakeChain] = []
        if self._is_leaving:
            return takes
        for member, copy in self._view.copies_for(self._store_id):
            if self._num_taking >= self._config.max_takes:
                break
            if copy.hashes[-1] in self._taken:
                continue
            self._taken[copy.hashes[-1]] = now + self._config.retake_s
            self._num_taking += 1
            takes.append(
                TakeChain(
                    source=member.key,
                    address=member.address,
                    tenant=copy.tenant,
                    hashes=copy.hashes,
                )
            )
        return takes

    @property
    def num_asked(self) -> int:
        """Chains that a node that leaves asks others to take at this moment."""
        return len(self._asked)

    def is_left(self, now: float) -> bool:
        """Whether a node that leaves has asked for all that it held, each chain long enough."""
        is_over = all(one.ends_at <= now for one in self._asked.values())
        return self._is_leaving and not self._leaving and is_over

    def validate(self) -> None:
        """Check every invariant; raises AssertionError."""
        self._planner.validate()
        assert 0 <= self._num_taking <= self._config.max_takes, self._num_taking
        assert self._is_leaving or not (self._leaving or self._asked)
        ends = list(self._taken.values())
        assert ends == sorted(ends), ends
        assert self._num_recent_blocks == sum(map(len, self._recent.values()))
        assert self._num_recent_blocks <= self._config.max_recent_blocks
        assert all(last_hash == chain[-1] for last_hash, chain in self._recent.items())

    # -- parts --

    def _weights(self, now_unix_s: float) -> dict[WorkerId, float]:
        """Of the nodes that may be a home."""
        return {
            member.key.worker_id: ramp_weight(member.age_s(now_unix_s), self._config.ramp_s)
            for member in self._view.members
            if not member.is_draining
            and not (self._is_leaving and member.key.worker_id == self._store_id)
        }

    def _asks(self, weights: dict[WorkerId, float], now: float) -> list[ChainCopy]:
        """Replicas first, then what lies here and belongs elsewhere."""
        asks = []
        for hot in self._planner.plan(now, self._view.reads_elsewhere(self._store_id)):
            homes = homes_of(weights, hot.home_hash, hot.num_copies)
            if homes[:1] == (self._store_id,) and len(homes) > 1:
                asks.append(_ask(CopyKind.REPLICA, hot.hashes, homes[1:]))
        replicas = {
            home_key(copy.hashes)
            for _, copy in self._view.copies_for(self._store_id)
            if copy.kind is CopyKind.REPLICA
        }
        for chain in self._planner.reads(now):
            homes = homes_of(weights, chain.home_hash, 1)
            if homes and homes != (self._store_id,) and chain.home_hash not in replicas:
                asks.append(_ask(CopyKind.MOVE, chain.hashes, homes))
        return asks

    def _leave_asks(self, weights: dict[WorkerId, float], now: float) -> list[ChainCopy]:
        """The window of chains that are asked for now."""
        asked = self._asked
        for last_hash in [h for h, one in asked.items() if one.ends_at <= now]:
            del asked[last_hash]
        num_blocks = sum(len(one.chain) for one in asked.values())
        num_new = 0
        for chain in self._leaving:
            num_blocks += len(chain)
            if len(asked) >= MAX_COPIES or num_blocks > MAX_COPY_BLOCKS:
                break
            asked[chain[-1]] = _Asked(chain=chain, ends_at=now + self._config.asked_s)
            num_new += 1
        del self._leaving[:num_new]
        return [
            _ask(CopyKind.MOVE, one.chain, homes)
            for one in asked.values()
            if (homes := homes_of(weights, home_key(one.chain), 1))
        ]


def _ask(kind: CopyKind, hashes: tuple[BlockHash, ...], takers: tuple[WorkerId, ...]) -> ChainCopy:
    return ChainCopy(kind=kind, tenant=DEFAULT_TENANT, hashes=hashes, takers=takers)


def _as_many_as_fit(asks: Sequence[ChainCopy]) -> tuple[ChainCopy, ...]:
    """In order, those that a record can hold."""
    chosen: list[ChainCopy] = []
    num_blocks = 0
    for ask in asks:
        if len(chosen) == MAX_COPIES:
            break
        if num_blocks + len(ask.hashes) <= MAX_COPY_BLOCKS:
            num_blocks += len(ask.hashes)
            chosen.append(ask)
    return tuple(chosen)
