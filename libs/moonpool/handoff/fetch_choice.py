"""FetchChooser: whether to read a prefix from a peer or to compute it, and how long to wait for it.

Rules
- Measured against measured: what earlier fetches from this peer took (TransferFit), behind those that
  are under way, against this worker's own prefill cost. What is not known is waited for piece by piece.
- A peer's memory and its disk are known apart. That something of a prefix lies on disk only, the peer says
  when it is asked; then it is decided once more. A hit in memory says nothing good of a disk.
- Patience is in proportion: a peer that has never let us down may take a good part of what computing
  would take to bring its first piece; one that has, and is tried again, a few hundredths of it. So with
  a peer that has become slow, one hit in a while loses a little, and all others nothing.
- A peer is tried again only where it could succeed in that time, or after so many hits were computed
  that one more does not show.
- A peer, or a disk, of which nothing good is known is tried by one fetch at a time.
- A peer that was lost, would not, or sent what does not verify is left alone, each time twice as long.
  One that had no room or time for it is left alone too, but never for longer: that passes.
- When pieces come, their pace decides: the fetch goes on as long as the rest of it will be here sooner
  than it would be computed.

Knowledge is per incarnation, bounded, and forgotten in the order of last use.
"""

from __future__ import annotations

import copy
import enum
from collections import OrderedDict
from dataclasses import dataclass, field, replace

from moonpool.handoff.config import FetchConfig, FetchMode
from moonpool.handoff.messages import PeerPrefix
from moonpool.ids import WorkerKey
from moonpool.latency.costs import PrefillCost, TransferCost
from moonpool.latency.load_or_recompute import load_or_recompute
from moonpool.latency.transfer_fit import PRIOR, TransferFit

#: Incarnations that are remembered.
_MAX_PEERS = 1_024
#: What computing costs while nothing is known of it: then only time limits a fetch.
_UNKNOWN = PrefillCost(base_s=0.0, per_token_s=0.0, per_work_s=0.0, max_step_tokens=1)


class Tier(enum.Enum):
    """Where a peer has a prefix."""

    #: In the memory that it is read from.
    MEMORY = enum.auto()
    #: Part of it, or all, on disk only: the peer brings that into its memory first.
    DISK = enum.auto()


@dataclass(frozen=True, slots=True, kw_only=True)
class FetchPlan:
    """A fetch that was decided, and what it is held to."""

    #: Until the first piece is here.
    patience_s: float
    #: In all: computing would be done by then.
    limit_s: float
    #: What was believed.
    predicted_s: float
    #: 0 if nothing was known.
    recompute_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class FetchTicket:
    """A fetch that has begun, for its end."""

    key: WorkerKey
    tier: Tier
    num_bytes: int
    begun_at: float
    #: What is measured begins here.
    measured_at: float
    #: What that tier of the peer had delivered in all by then.
    num_bytes_before: int


@dataclass(slots=True, kw_only=True)
class _TierView:
    """What is known of one tier of an incarnation."""

    fit: TransferFit = field(default_factory=TransferFit)
    num_fetching: int = 0
    #: Bytes that fetches under way have asked for and not received.
    num_bytes_due: int = 0
    #: Bytes received in all.
    num_bytes_come: int = 0
    #: The last fetch was faster than computing.
    is_proven: bool = False
    #: A fetch has let us down since one was faster than computing.
    is_doubted: bool = False
    #: Hits that were computed since the last fetch.
    num_passed_over: int = 0

    def let_down(self, *, num_bytes: int, elapsed_s: float, now: float) -> None:
        """A fetch was given up."""
        self.is_proven, self.is_doubted = False, True
        self.fit.observe(
            num_bytes=num_bytes, elapsed_s=elapsed_s, is_late=True, now=now, is_complete=False
        )


@dataclass(slots=True, kw_only=True)
class _Peer:
    """What is known of one incarnation."""

    memory: _TierView = field(default_factory=_TierView)
    disk: _TierView = field(default_factory=_TierView)
    #: Times that it was lost, or would not, since a fetch came to its end.
    num_failures: int = 0
    leave_until: float = float("-inf")

    @property
    def num_fetching(self) -> int:
        return self.memory.num_fetching + self.disk.num_fetching

    def tier(self, tier: Tier) -> _TierView:
        return self.memory if tier is Tier.MEMORY else self.disk


class FetchChooser:
    """What one worker knows of its peers as holders."""

    def __init__(self, config: FetchConfig, *, block_size: int) -> None:
        self._config = config
        self._block_size = block_size
        self._peers: OrderedDict[WorkerKey, _Peer] = OrderedDict()
        #: What computing costs here; None while it is not known.
        self.prefill_cost: PrefillCost | None = None
        #: As last told; None after a fetch has begun or ended.
        self._transfer_costs: tuple[tuple[WorkerKey, TransferCost], ...] | None = None

    # -- before --

    def choose(
        self, peer: PeerPrefix, *, num_cached_tokens: int, num_tokens: int, now: float
    ) -> FetchPlan | None:
        """How to read tokens [num_cached_tokens, num_tokens) from the peer; None: compute them.

        It is taken to have them in memory. Changes nothing: `passed_over` and `begin` do.
        """
        config = self._config
        if config.mode is FetchMode.NEVER or num_tokens <= num_cached_tokens:
            return None
        known = self._peers.get(peer.key) or _Peer()
        if config.mode is not FetchMode.ALWAYS and (
            now < known.leave_until or known.num_fetching >= config.max_fetches_per_peer
        ):
            return None
        return self._plan(
            known.memory,
            num_cached_tokens=num_cached_tokens,
            num_tokens=num_tokens,
            now=now,
        )

    def choose_disk(
        self, ticket: FetchTicket, *, num_cached_tokens: int, num_tokens: int, now: float
    ) -> FetchPlan | None:
        """The same for a fetch that has begun, when the peer says that it has to go to its disk first.

        None: do not wait for that. Changes nothing: `waits_for_disk` and `leaves_disk` do.
        """
        return self._plan(
            self._peers[ticket.key].disk,
            num_cached_tokens=num_cached_tokens,
            num_tokens=num_tokens,
            now=now,
        )

    def _plan(
        self,
        known: _TierView,
        *,
        num_cached_tokens: int,
        num_tokens: int,
        now: float,
    ) -> FetchPlan | None:
        config = self._config
        cost = known.fit.cost
        # One token more than is read: the last one of a prompt is always computed.
        choice = load_or_recompute(
            self.prefill_cost or _UNKNOWN,
            cost,
            num_tokens=num_tokens + 1,
            num_cached_tokens=num_cached_tokens,
            num_peer_tokens=num_tokens,
            bytes_per_token=config.block_bytes // self._block_size,
        )
        predicted_s = choice.load_s + known.num_bytes_due / cost.bytes_per_s
        recompute_s = choice.recompute_s
        if config.mode is FetchMode.ALWAYS:
            patience_s = limit_s = config.always_s
        elif known.num_fetching and not known.is_proven:
            return None
        elif self.prefill_cost is None:
            if known.is_doubted and not known.fit.is_probe_due(now):
                return None
            patience_s, limit_s = config.blind_s, config.hold_s
        else:
            limit_s = recompute_s
            if known.is_doubted or predicted_s >= recompute_s:
                if not self._may_probe(known, recompute_s, now):
                    return None
                patience_s = max(config.probe_share * recompute_s, self._least_s)
            else:
                patience_s = max(config.first_share * recompute_s, config.slack * predicted_s)
        return FetchPlan(
            patience_s=min(patience_s, limit_s),
            limit_s=limit_s,
            predicted_s=predicted_s,
            recompute_s=recompute_s,
        )

    def recompute_s(self, *, num_cached_tokens: int, num_tokens: int) -> float | None:
        """What computing [num_cached_tokens, num_tokens) would take here; None if not known."""
        if self.prefill_cost is None:
            return None
        return self.prefill_cost.predict(num_tokens - num_cached_tokens, num_cached_tokens)

    def transfer_costs(self) -> tuple[tuple[WorkerKey, TransferCost], ...]:
        """What reading from each peer's memory is believed to take, in order of their keys.

        The same object as long as nothing has changed: it is asked for at every step.
        """
        if self._transfer_costs is None:
            self._transfer_costs = tuple(
                (key, self._peers[key].memory.fit.cost) for key in sorted(self._peers)
            )
        return self._transfer_costs

    def passed_over(self, key: WorkerKey) -> None:
        """A hit is computed."""
        if key in self._peers:
            self._peers[key].memory.num_passed_over += 1

    def may_tell(self, key: WorkerKey, now: float) -> bool:
        """Whether a peer that will perhaps be read from is worth preparing for it."""
        known = self._peers.get(key) or _Peer()
        if self._config.mode is FetchMode.NEVER or now < known.leave_until:
            return False
        return not known.disk.is_doubted or known.disk.fit.is_probe_due(now)

    def _may_probe(self, known: _TierView, recompute_s: float, now: float) -> bool:
        if known.num_fetching or not known.fit.is_probe_due(now):
            return False
        is_cheap = self._least_s <= self._config.probe_share * recompute_s
        return is_cheap or known.num_passed_over >= self._config.hits_per_probe

    @property
    def _least_s(self) -> float:
        """What the first piece takes from a peer that is well."""
        return PRIOR.predict(self._config.span_blocks * self._config.block_bytes)

    # -- during --

    def begin(self, key: WorkerKey, *, num_bytes: int, now: float) -> FetchTicket:
        """A fetch begins; `end` it once."""
        self._transfer_costs = None
        known = self._peers.setdefault(key, _Peer())
        self._peers.move_to_end(key)
        known.memory.num_fetching += 1
        known.memory.num_passed_over = 0
        known.memory.num_bytes_due += num_bytes
        if len(self._peers) > _MAX_PEERS:
            idle = next((k for k, peer in self._peers.items() if not peer.num_fetching), None)
            if idle is not None:
                del self._peers[idle]
        return FetchTicket(
            key=key,
            tier=Tier.MEMORY,
            num_bytes=num_bytes,
            begun_at=now,
            measured_at=now,
            num_bytes_before=known.memory.num_bytes_come,
        )

    def opened(self, ticket: FetchTicket, now: float) -> FetchTicket:
        """The peer has answered. Goes on with the ticket returned.

        To a peer that was never read from a connection had to be made; the next read need not wait for
        that, so it is not part of what a read is believed to take.
        """
        if ticket.tier is Tier.DISK or self._peers[ticket.key].memory.fit.is_measured:
            return ticket
        return replace(ticket, measured_at=now)

    def waits_for_disk(self, ticket: FetchTicket, now: float) -> FetchTicket:
        """The peer has said that it goes to its disk, and that is waited for. Goes on with the ticket returned."""
        known = self._peers[ticket.key]
        known.memory.num_fetching -= 1
        known.memory.num_bytes_due -= ticket.num_bytes
        known.disk.num_fetching += 1
        known.disk.num_bytes_due += ticket.num_bytes
        known.disk.num_passed_over = 0
        is_connected = known.memory.fit.is_measured or known.disk.fit.is_measured
        return replace(
            ticket,
            tier=Tier.DISK,
            measured_at=ticket.measured_at if is_connected else now,
            num_bytes_before=known.disk.num_bytes_come,
        )

    def leaves_disk(self, ticket: FetchTicket, *, num_bytes: int, now: float) -> FetchTicket:
        """The disk is not waited for, or no longer: only `num_bytes` of the fetch, which lie in memory, are read.

        Goes on with the ticket returned, as if it began now.
        """
        known = self._peers[ticket.key]
        if ticket.tier is Tier.DISK:
            known.disk.let_down(
                num_bytes=ticket.num_bytes, elapsed_s=now - ticket.begun_at, now=now
            )
            known.disk.num_fetching -= 1
            known.memory.num_fetching += 1
            known.disk.num_bytes_due -= ticket.num_bytes
            known.memory.num_bytes_due += ticket.num_bytes
        else:
            known.disk.num_passed_over += 1
        known.memory.num_bytes_due -= ticket.num_bytes - num_bytes
        return replace(
            ticket,
            tier=Tier.MEMORY,
            num_bytes=num_bytes,
            begun_at=now,
            measured_at=now,
            num_bytes_before=known.memory.num_bytes_come,
        )

    def came(self, ticket: FetchTicket, num_bytes: int) -> None:
        """A piece is here."""
        view = self._peers[ticket.key].tier(ticket.tier)
        view.num_bytes_due -= num_bytes
        view.num_bytes_come += num_bytes

    # -- after: exactly one of these --

    def ended(
        self, ticket: FetchTicket, *, num_bytes: int, recompute_s: float | None, now: float
    ) -> None:
        """All `num_bytes` that the peer had have come; computing them would take `recompute_s`."""
        known = self._finish(ticket, num_bytes)
        elapsed_s = now - ticket.begun_at
        is_late = recompute_s is not None and elapsed_s > recompute_s
        known.num_failures = 0
        view = known.tier(ticket.tier)
        view.is_proven, view.is_doubted = not is_late, is_late
        view.fit.observe(
            # With what others read from the peer meanwhile: it is the peer that is measured.
            num_bytes=view.num_bytes_come - ticket.num_bytes_before,
            elapsed_s=now - ticket.measured_at,
            is_late=is_late,
            now=now,
        )

    def gave_up(self, ticket: FetchTicket, *, num_bytes: int, now: float) -> None:
        """It took too long; `num_bytes` had come."""
        known = self._finish(ticket, num_bytes)
        known.tier(ticket.tier).let_down(
            num_bytes=ticket.num_bytes, elapsed_s=now - ticket.begun_at, now=now
        )

    def failed(self, ticket: FetchTicket, *, num_bytes: int, now: float) -> None:
        """The peer was lost, would not, or sent what does not verify."""
        known = self._finish(ticket, num_bytes)
        config = self._config
        leave_s = min(config.min_leave_s * 2.0**known.num_failures, config.max_leave_s)
        known.leave_until = now + leave_s
        known.num_failures = min(known.num_failures + 1, 32)

    def turned_away(self, ticket: FetchTicket, *, num_bytes: int, now: float) -> None:
        """The peer had no room, or no more time, for it: that tells nothing of the peer itself."""
        known = self._finish(ticket, num_bytes)
        known.leave_until = now + self._config.min_leave_s

    def told_nothing(self, ticket: FetchTicket, *, num_bytes: int) -> None:
        """It ended for a reason that is not the peer's, or the peer held nothing."""
        self._finish(ticket, num_bytes)

    def _finish(self, ticket: FetchTicket, num_bytes: int) -> _Peer:
        known = self._peers[ticket.key]
        view = known.tier(ticket.tier)
        view.num_fetching -= 1
        view.num_bytes_due -= ticket.num_bytes - num_bytes
        self._transfer_costs = None
        return known

    # -- copying and checking --

    def fork(self) -> FetchChooser:
        """An independent copy."""
        fork = FetchChooser(self._config, block_size=self._block_size)
        fork.prefill_cost = self.prefill_cost
        if self._peers:
            fork._peers = copy.deepcopy(self._peers)
        return fork

    def validate(self, *, num_fetching: int) -> None:
        """Check every invariant; for tests and debugging."""
        assert sum(known.num_fetching for known in self._peers.values()) == num_fetching
        for known in self._peers.values():
            for view in (known.memory, known.disk):
                view.fit.validate()
                assert view.num_fetching >= 0, known
                assert view.num_bytes_due >= 0, known
                assert view.num_fetching or not view.num_bytes_due, known
                assert not (view.is_proven and view.is_doubted), known
