"""The least loaded worker among those that may take a request: filters first, then one score.

Prefill is scored in uncached tokens queued (one unit beats a blend of unlike signals; llm-d),
decode in requests there, the used fraction of its pool as the part behind the point. Ties go to the
smaller worker key, so that the same views always give the same choice.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable
from dataclasses import dataclass

from moonpool.ids import WorkerKey
from moonpool.routing.worker_view import WorkerView


class FilterReason(enum.StrEnum):
    """Why a worker of the right role is no candidate."""

    DRAINING = "draining"
    #: It refused and has shown no more room since, or its pool cannot hold the request now.
    NO_ROOM = "no_room"
    #: It failed on a request path a moment ago, and others are there.
    INHIBITED = "inhibited"
    #: It said that it can never hold this request, or its whole pool is too small for it.
    NEVER_FITS = "never_fits"
    #: It vanished in the middle of a handoff of this request.
    LOST_SOURCE = "lost_source"
    #: It is the request's decode worker.
    IS_DECODE = "is_decode"


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """One worker in a selection: its score, or why it has none."""

    key: WorkerKey
    score: float | None
    filtered: FilterReason | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Selection:
    """Whom the selector chose, and what it saw."""

    #: None if every worker is filtered.
    key: WorkerKey | None
    #: All workers of the right role, by key.
    candidates: tuple[Candidate, ...]

    @property
    def num_workers(self) -> int:
        """Workers that could take it now or when they have room."""
        return sum(
            candidate.filtered in (None, FilterReason.NO_ROOM, FilterReason.INHIBITED)
            for candidate in self.candidates
        )

    @property
    def can_never_fit(self) -> bool:
        """There are workers, and none of them can ever hold the request."""
        return bool(self.candidates) and all(
            candidate.filtered is FilterReason.NEVER_FITS for candidate in self.candidates
        )


def select_decode(
    views: Iterable[WorkerView],
    *,
    num_blocks: int,
    unfit: frozenset[WorkerKey] = frozenset(),
) -> Selection:
    """The decode worker with the fewest requests, its pool's used fraction breaking ties.

    Args:
        num_blocks: What the request takes there, whatever is cached.
        unfit: Workers that said that they can never hold this request.
    """
    rated: list[tuple[WorkerView, float, FilterReason | None]] = []
    for view in views:
        if not view.info.role.can_decode:
            continue
        num_total_blocks = view.load.num_total_blocks
        reason = _common_filter(view, unfit)
        if num_total_blocks and num_blocks > num_total_blocks:
            reason = FilterReason.NEVER_FITS
        elif reason is None and num_total_blocks and num_blocks > view.num_available_blocks:
            reason = FilterReason.NO_ROOM
        rated.append((view, view.num_requests + view.used_fraction, reason))
    return _select(rated)


def select_prefill(
    views: Iterable[WorkerView],
    *,
    decode: WorkerKey,
    unfit: frozenset[WorkerKey] = frozenset(),
    lost: frozenset[WorkerKey] = frozenset(),
) -> Selection:
    """The prefill worker with the fewest uncached tokens queued, other than `decode`.

    Args:
        unfit: Workers that said that they can never hold this request.
        lost: Workers that vanished in the middle of a handoff of this request.
    """
    rated: list[tuple[WorkerView, float, FilterReason | None]] = []
    for view in views:
        if not view.info.role.can_prefill:
            continue
        if view.key == decode:
            reason: FilterReason | None = FilterReason.IS_DECODE
        elif view.key in lost:
            reason = FilterReason.LOST_SOURCE
        else:
            reason = _common_filter(view, unfit)
        rated.append((view, float(view.num_queued_tokens), reason))
    return _select(rated)


def _common_filter(view: WorkerView, unfit: frozenset[WorkerKey]) -> FilterReason | None:
    if view.key in unfit:
        return FilterReason.NEVER_FITS
    if view.load.is_draining:
        return FilterReason.DRAINING
    return FilterReason.NO_ROOM if view.is_full else None


def _select(rated: list[tuple[WorkerView, float, FilterReason | None]]) -> Selection:
    rated.sort(key=lambda entry: entry[0].key)
    has_healthy = any(reason is None and not view.is_inhibited for view, _, reason in rated)
    candidates = []
    for view, score, reason in rated:
        if reason is None and view.is_inhibited and has_healthy:
            reason = FilterReason.INHIBITED
        candidates.append(
            Candidate(key=view.key, score=score if reason is None else None, filtered=reason)
        )
    best = min(
        (candidate for candidate in candidates if candidate.score is not None),
        key=lambda candidate: (candidate.score, candidate.key),
        default=None,
    )
    return Selection(key=best.key if best else None, candidates=tuple(candidates))
