"""Selection: whom a policy chose for one role, and everything that it saw of each candidate."""

from __future__ import annotations

import enum
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from moonpool.ids import WorkerKey


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
    """One worker in a selection: its score and every term, or why it is none."""

    key: WorkerKey
    #: The policy's, the lowest is best; None if it is filtered.
    score: float | None
    filtered: FilterReason | None = None
    #: By name, units in the names; infinite: not possible.
    terms: tuple[tuple[str, float], ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Selection:
    """One leg of a placement. Columns over all workers of the right role, by key."""

    #: None if every worker is filtered.
    key: WorkerKey | None
    keys: tuple[WorkerKey, ...]
    filtered: tuple[FilterReason | None, ...]
    scores: tuple[float, ...]
    terms: tuple[tuple[str, tuple[float, ...]], ...] = ()

    @property
    def candidates(self) -> tuple[Candidate, ...]:
        """One value per worker, made when it is asked for."""
        return tuple(
            Candidate(
                key=key,
                score=score if reason is None else None,
                filtered=reason,
                terms=tuple((name, column[row]) for name, column in self.terms),
            )
            for row, (key, reason, score) in enumerate(
                zip(self.keys, self.filtered, self.scores, strict=True)
            )
        )

    @property
    def num_workers(self) -> int:
        """Workers that could take it now or when they have room."""
        return sum(
            reason in (None, FilterReason.NO_ROOM, FilterReason.INHIBITED)
            for reason in self.filtered
        )

    @property
    def can_never_fit(self) -> bool:
        """There are workers, and none of them can ever hold the request."""
        return bool(self.filtered) and all(
            reason is FilterReason.NEVER_FITS for reason in self.filtered
        )

    def term(self, key: WorkerKey, name: str) -> float:
        """One term of one candidate."""
        return dict(self.terms)[name][self.keys.index(key)]


#: A term's name and its column over a fleet.
Term = tuple[str, npt.NDArray[np.float64] | npt.NDArray[np.int64]]

#: A filter as a number in a column; 0 is a candidate, the last is a worker of another role.
FILTERS: tuple[FilterReason | None, ...] = (None, *FilterReason)
FILTER_NUMBER = {reason: number for number, reason in enumerate(FILTERS)}
OTHER_ROLE = len(FILTERS)


def make_selection(
    *,
    keys: tuple[WorkerKey, ...],
    filters: npt.NDArray[np.int8],
    row: int | None,
    scores: npt.NDArray[np.float64],
    terms: tuple[Term, ...],
) -> Selection:
    """The record of a choice among all workers of a table; those of another role are left out.

    Args:
        filters: int8[worker], indices into FILTERS, or OTHER_ROLE.
        row: The chosen worker's.
    """
    is_here = filters != OTHER_ROLE
    if is_here.all():
        return Selection(
            key=keys[row] if row is not None else None,
            keys=keys,
            filtered=tuple([FILTERS[number] for number in filters.tolist()]),
            scores=tuple(scores.tolist()),
            terms=tuple([(name, tuple(column.tolist())) for name, column in terms]),
        )
    rows = np.flatnonzero(is_here)
    return Selection(
        key=keys[row] if row is not None else None,
        keys=tuple([keys[here] for here in rows.tolist()]),
        filtered=tuple([FILTERS[number] for number in filters[rows].tolist()]),
        scores=tuple(scores[rows].tolist()),
        terms=tuple([(name, tuple(column[rows].tolist())) for name, column in terms]),
    )
