"""ReuseBooks: of what was asked of this router, how much was reused, and why the rest was not.

A prompt is cut into stretches, each a range of its leading tokens; all of them together are the prompt:

    0 .. device .. | .. peer, store .. | too slow | evicted | routed away | evicted | cold ...... | tail
         found                    missed                                                     no block

- found: what no worker computed for this request, by where it lay (the request's usage).
- too slow: a peer was named that held it, and it was computed all the same: the worker held reading for
  slower, or the peer was too busy or too slow. It held what it said itself, and else what was believed.
- routed away: somebody held it when the request was placed, and it went elsewhere without being told whom
  to read from.
- evicted: asked for before, or held before, and nobody holds it; or who was believed to hold it no longer did:
  the worker that prefilled, or the peer that was named, which had evicted it, drained, was lost, or sent
  what was damaged. What another request is computing at this moment, elsewhere, counts here too.
- cold: never asked for here. Here is this router, since it started, and what its workers have announced.
- tail: the last, partly filled block and the last token: always computed.

What is missed although somebody held it (too slow, routed away) is recomputed while held. The ceiling is
what a cache that never forgets would have found: found + missed, without cold.

Pure: keys and placements in, counts out. A prompt costs two look-ups of its keys as one array, whatever
its length. A request counts when it ends, if a token of it was drawn: whatever its end.

Life of a request: placed (what is known and who holds it, as of the first time) -> placed again (who holds
it now: what was lost in between is gone, what its own attempts left behind does not count) -> ended. Of
several attempts the one that had to compute the most is told of: its usage, its placement, its peer.
"""

from __future__ import annotations

import enum
from collections import OrderedDict
from dataclasses import dataclass, fields, replace

from moonpool.dispatch.effects import EndRequest, Placement
from moonpool.ids import RequestId, WorkerId
from moonpool.kv.asked_keys import AskedKeys, KnownPrefix
from moonpool.kv.block_key import KeyArray
from moonpool.routing.selector import PrefillPlan

#: Whose counts are kept, the latest; a cluster has fewer.
_MAX_WORKERS = 1_024


class MissReason(enum.StrEnum):
    """Why tokens that a block could have spared were computed."""

    COLD = "cold"
    EVICTED = "evicted"
    ROUTED_AWAY = "routed_away"
    TOO_SLOW = "too_slow"

    @property
    def is_held(self) -> bool:
        """Somebody held them all the while."""
        return self in (MissReason.ROUTED_AWAY, MissReason.TOO_SLOW)


@dataclass(frozen=True, slots=True, kw_only=True)
class ReuseCounts:
    """Tokens of prompts, of one request or of many. They sum: see `num_prompt_tokens`."""

    num_requests: int = 0
    #: device + peer + store + cold + evicted + routed away + too slow + tail.
    num_prompt_tokens: int = 0
    num_device_tokens: int = 0
    num_peer_tokens: int = 0
    num_store_tokens: int = 0
    num_cold_tokens: int = 0
    num_evicted_tokens: int = 0
    num_routed_away_tokens: int = 0
    num_too_slow_tokens: int = 0
    num_tail_tokens: int = 0
    #: Expected to be found when it was placed.
    num_predicted_tokens: int = 0
    #: Bound of the error between cold and the rest; 0 while all keys are kept.
    max_error_tokens: int = 0

    @property
    def num_found_tokens(self) -> int:
        return self.num_device_tokens + self.num_peer_tokens + self.num_store_tokens

    @property
    def num_missed_tokens(self) -> dict[MissReason, int]:
        return {
            MissReason.COLD: self.num_cold_tokens,
            MissReason.EVICTED: self.num_evicted_tokens,
            MissReason.ROUTED_AWAY: self.num_routed_away_tokens,
            MissReason.TOO_SLOW: self.num_too_slow_tokens,
        }

    @property
    def num_recomputed_held_tokens(self) -> int:
        """Computed although somebody held them."""
        return self.num_routed_away_tokens + self.num_too_slow_tokens

    @property
    def num_ceiling_tokens(self) -> int:
        """What a cache that never forgets would have found."""
        return self.num_found_tokens + self.num_evicted_tokens + self.num_recomputed_held_tokens

    def __add__(self, other: ReuseCounts) -> ReuseCounts:
        return ReuseCounts(
            **{
                field.name: getattr(self, field.name) + getattr(other, field.name)
                for field in fields(self)
            }
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestReuse:
    """What became of one request's prompt."""

    #: Who prefilled it, in the attempt that is told of.
    worker_id: WorkerId
    counts: ReuseCounts


@dataclass(frozen=True, slots=True, kw_only=True)
class ReuseReport:
    """All that was counted since the router started."""

    total: ReuseCounts
    #: By the worker that prefilled.
    by_worker: dict[WorkerId, ReuseCounts]
    #: Keys that are remembered, and their share of all that were seen.
    num_asked_keys: int
    kept_fraction: float


@dataclass(frozen=True, slots=True, kw_only=True)
class _Placed:
    """One attempt of a request."""

    plan: PrefillPlan
    #: Leading tokens that one worker held at the first placement, and still at this one.
    num_held_tokens: int


@dataclass(slots=True, kw_only=True)
class _Open:
    """A request that was placed and has not ended. All in leading tokens of its prompt."""

    #: What full blocks could spare: all of them short of the last token.
    num_reusable_tokens: int
    #: Asked for before.
    known: KnownPrefix
    block_size: int
    last: _Placed
    #: By attempt, the last one included.
    placed: dict[int, _Placed]


class ReuseBooks:
    """See the file's head.

    Args:
        asked: Its own.
    """

    def __init__(self, asked: AskedKeys) -> None:
        self._asked = asked
        self._open: dict[RequestId, _Open] = {}
        self._total = ReuseCounts()
        self._by_worker: OrderedDict[WorkerId, ReuseCounts] = OrderedDict()

    def on_placed(
        self, placement: Placement, *, num_prompt_tokens: int, keys: KeyArray, block_size: int
    ) -> None:
        """An attempt goes to its workers.

        Args:
            keys: uint64[n], of the prompt's full blocks from its start.
        """
        placed = _Placed(plan=placement.plan, num_held_tokens=placement.record.num_held_tokens)
        opened = self._open.get(placement.request_id)
        if opened is None:
            num_blocks = min(len(keys), (num_prompt_tokens - 1) // block_size)
            opened = _Open(
                num_reusable_tokens=num_blocks * block_size,
                known=self._asked.prefix(keys[:num_blocks]),
                block_size=block_size,
                last=placed,
                placed={placement.attempt: placed},
            )
            self._open[placement.request_id] = opened
            self._asked.add(keys)
        else:
            num_held_tokens = min(opened.last.num_held_tokens, placed.num_held_tokens)
            placed = replace(placed, num_held_tokens=num_held_tokens)
            opened.last = opened.placed[placement.attempt] = placed

    def on_ended(self, end: EndRequest) -> RequestReuse | None:
        """A request is over; None if it does not count."""
        opened = self._open.pop(end.request_id, None)
        if opened is None or not end.usage.num_completion_tokens:
            return None
        counts = _attribute(opened, end)
        worker_id = _told_of(opened, end).plan.key.worker_id
        self._total += counts
        self._by_worker[worker_id] = self._by_worker.pop(worker_id, ReuseCounts()) + counts
        if len(self._by_worker) > _MAX_WORKERS:
            self._by_worker.popitem(last=False)
        return RequestReuse(worker_id=worker_id, counts=counts)

    def on_stored(self, keys: KeyArray) -> None:
        """A worker holds these blocks by now, for whomever it computed them."""
        self._asked.add(keys)

    def report(self) -> ReuseReport:
        """All that was counted."""
        return ReuseReport(
            total=self._total,
            by_worker=dict(self._by_worker),
            num_asked_keys=self._asked.num_keys,
            kept_fraction=self._asked.kept_fraction,
        )

    @property
    def num_open(self) -> int:
        """Requests that were placed and have not ended."""
        return len(self._open)

    def validate(self) -> None:
        """Check every invariant; raises AssertionError."""
        self._asked.validate()
        for counts in (self._total, *self._by_worker.values()):
            parts = counts.num_ceiling_tokens + counts.num_cold_tokens + counts.num_tail_tokens
            assert parts == counts.num_prompt_tokens, counts
            assert min(getattr(counts, field.name) for field in fields(counts)) >= 0, counts
        if len(self._by_worker) < _MAX_WORKERS:
            assert sum(self._by_worker.values(), ReuseCounts()) == self._total


def _told_of(opened: _Open, end: EndRequest) -> _Placed:
    """The attempt whose cached tokens the usage has; the last one if none said what it found."""
    return opened.placed.get(end.cached_attempt, opened.last)


def _attribute(opened: _Open, end: EndRequest) -> ReuseCounts:
    """Cut the prompt at each edge that lies beyond the ones before it."""
    usage, num_reusable_tokens = end.usage, opened.num_reusable_tokens
    placed = _told_of(opened, end)
    plan = placed.plan
    num_held_tokens = min(placed.num_held_tokens, num_reusable_tokens)
    peer_edge = held_edge = plan.peer.num_tokens if plan.peer is not None else 0
    if end.num_peer_held_tokens is not None:
        held_edge = min(held_edge, end.num_peer_held_tokens)
    num_known_tokens = opened.known.num_blocks * opened.block_size
    max_error_tokens = opened.known.max_error_blocks * opened.block_size
    missed = dict.fromkeys(MissReason, 0)
    reached = min(usage.num_cached_tokens, num_reusable_tokens)
    for reason, edge in (
        (MissReason.TOO_SLOW, held_edge),
        (MissReason.EVICTED, max(plan.num_cached_tokens, peer_edge)),
        (MissReason.ROUTED_AWAY, num_held_tokens),
    ):
        reached = _cut(missed, reason, reached, min(edge, num_held_tokens))
    # What was found or held was known: the estimate is as good as what is left of its range.
    max_error_tokens = min(max_error_tokens, max(num_known_tokens + max_error_tokens - reached, 0))
    reached = _cut(missed, MissReason.EVICTED, reached, num_known_tokens)
    _cut(missed, MissReason.COLD, reached, num_reusable_tokens)
    return ReuseCounts(
        num_requests=1,
        num_prompt_tokens=usage.num_prompt_tokens,
        num_device_tokens=usage.num_device_tokens,
        num_peer_tokens=usage.num_peer_tokens,
        num_store_tokens=usage.num_store_tokens,
        num_cold_tokens=missed[MissReason.COLD],
        num_evicted_tokens=missed[MissReason.EVICTED],
        num_routed_away_tokens=missed[MissReason.ROUTED_AWAY],
        num_too_slow_tokens=missed[MissReason.TOO_SLOW],
        num_tail_tokens=usage.num_prompt_tokens - max(usage.num_cached_tokens, num_reusable_tokens),
        num_predicted_tokens=min(plan.num_cached_tokens + plan.num_read_tokens, num_held_tokens),
        max_error_tokens=max_error_tokens,
    )


def _cut(missed: dict[MissReason, int], reason: MissReason, reached: int, edge: int) -> int:
    """Tokens [reached, edge), if there are any, were missed for this reason; returns the end."""
    missed[reason] += max(edge - reached, 0)
    return max(edge, reached)
