"""PlacementQuery: what is to be placed, and what is believed of where its prefix lies."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from moonpool.ids import RequestId, WorkerKey


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacementQuery:
    """One attempt of one request that looks for its workers."""

    request_id: RequestId
    attempt: int
    #: prompt + emitted.
    num_tokens: int
    #: How much longer it is expected to become.
    num_expected_tokens: int = 0
    #: Leading tokens that each worker is believed to hold; workers that hold none are left out.
    num_cached_tokens: Mapping[WorkerKey, int] = field(default_factory=dict)
    #: Workers that said that they can never hold it.
    unfit: frozenset[WorkerKey] = frozenset()
    #: Workers that vanished in the middle of a handoff of this request.
    lost: frozenset[WorkerKey] = frozenset()
    #: How many placements this router made before.
    sequence: int = 0
