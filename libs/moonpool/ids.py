"""Identifier types shared by every part of Moonpool.

They are values without behaviour. Whoever mints an id is named beside it.
"""

from __future__ import annotations

from typing import NamedTuple, NewType

#: Chosen by the operator (or derived from role and index); unique among live workers.
WorkerId = NewType("WorkerId", str)

#: 16 hex digits, minted at each engine start. A dead incarnation is never accepted again.
Incarnation = NewType("Incarnation", str)

#: Minted by the router that owns the request; a client's x-request-id is only a label.
RequestId = NewType("RequestId", str)

#: Index of a block in one worker's pool. Meaningless outside that worker's incarnation.
BlockId = NewType("BlockId", int)

#: 32 bytes: what the values of a full block are (see kv/block_hash.py).
BlockHash = NewType("BlockHash", bytes)


class AttemptId(NamedTuple):
    """One placement of one request. Everything about a request on a worker carries it."""

    request_id: RequestId
    #: Counts from 1; a worker that sees a higher attempt drops the lower.
    attempt: int

    def __str__(self) -> str:
        return f"{self.request_id}#{self.attempt}"


class WorkerKey(NamedTuple):
    """One life of one worker."""

    worker_id: WorkerId
    incarnation: Incarnation

    def __str__(self) -> str:
        return f"{self.worker_id}@{self.incarnation}"
