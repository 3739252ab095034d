"""Selection: whom a policy chose for one role, and everything that it saw of each candidate."""

from __future__ import annotations

import enum
from collections.abc import Sequence
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


#: A filter as a number in a column; 0 is a candidate, the last is a worker of another role.
FILTERS: tuple[FilterReason | None, ...] = (None, *FilterReason)
FILTER_NUMBER = {reason: number for number, reason in enumerate(FILTERS)}
OTHER_ROLE = len(FILTERS)

_NEVER_FITS = FILTER_NUMBER[FilterReason.NEVER_FITS]
#: It could take the request now or when it has room; of a worker of another role nothing is asked.
_IS_POSSIBLE = np.array(
    [
        *(reason in (None, FilterReason.NO_ROOM, FilterReason.INHIBITED) for reason in FILTERS),
        False,
    ]
)

#: A term's name and its column over a fleet.
Term = tuple[str, npt.NDArray[np.float64] | npt.NDArray[np.int64] | npt.NDArray[np.bool_]]
#: The name of a number that a policy decided by and that is no candidate's, and the number.
Input = tuple[str, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """One worker in a selection: its score and every term, or why it is none."""

    key: WorkerKey
    #: The policy's, the lowest is best; None if it is filtered.
    score: float | None
    filtered: FilterReason | None = None
    #: By name, units in the names; infinite: not possible; `has_` is 0 or 1.
    terms: tuple[tuple[str, float], ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Selection:
    """One leg of a placement. Columns over all workers of the right role, by key; never changed.

    The scores and the choice follow from the terms, the inputs and the number of tokens of the request.
    Many are kept, and few are looked at: `candidates` makes values of the columns.
    """

    #: None if every worker is filtered.
    key: WorkerKey | None
    keys: tuple[WorkerKey, ...]
    #: int8[worker], indices into FILTERS.
    filters: npt.NDArray[np.int8]
    term_names: tuple[str, ...]
    #: float64[1 + term, worker]: the policy's scores, then the terms.
    values: npt.NDArray[np.float64]
    #: What the policy decided by beside them: its settings, what it drew.
    inputs: tuple[Input, ...] = ()

    @property
    def candidates(self) -> tuple[Candidate, ...]:
        """One value per worker, made when it is asked for."""
        rows = self.values.T.tolist()
        return tuple(
            Candidate(
                key=key,
                score=score if number == 0 else None,
                filtered=FILTERS[number],
                terms=tuple(zip(self.term_names, terms, strict=True)),
            )
            for key, number, (score, *terms) in zip(
                self.keys, self.filters.tolist(), rows, strict=True
            )
        )

    @property
    def can_never_fit(self) -> bool:
        """There are workers, and none of them can ever hold the request."""
        return bool(self.keys) and bool((self.filters == _NEVER_FITS).all())

    def term(self, key: WorkerKey, name: str) -> float:
        """One term of one candidate."""
        return float(self.values[1 + self.term_names.index(name), self.keys.index(key)])


def num_possible(filters: npt.NDArray[np.int8]) -> int:
    """Workers that could take the request now or when they have room.

    Args:
        filters: int8[worker], indices into FILTERS, or OTHER_ROLE.
    """
    return int(_IS_POSSIBLE[filters].sum())


def make_selection(
    *,
    keys: tuple[WorkerKey, ...],
    filters: npt.NDArray[np.int8],
    row: int | None,
    scores: npt.NDArray[np.float64],
    terms: Sequence[Term],
    inputs: tuple[Input, ...] = (),
) -> Selection:
    """The record of a choice among all workers of a table; those of another role are left out.

    Args:
        filters: int8[worker], indices into FILTERS, or OTHER_ROLE.
        row: The chosen worker's.
    """
    key = keys[row] if row is not None else None
    values = np.array([scores, *(column for _, column in terms)], np.float64)
    is_here = filters != OTHER_ROLE
    if not is_here.all():
        rows = np.flatnonzero(is_here)
        keys, filters, values = (
            tuple([keys[i] for i in rows.tolist()]),
            filters[rows],
            values[:, rows],
        )
    return Selection(
        key=key,
        keys=keys,
        filters=filters,
        term_names=tuple([name for name, _ in terms]),
        values=values,
        inputs=inputs,
    )
