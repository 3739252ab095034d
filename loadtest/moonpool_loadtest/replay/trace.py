"""Mooncake's traces: requests as chains of block ids, each id naming a whole prefix.

A row is {"timestamp": ms, "input_length": n, "output_length": n, "hash_ids": [...]}, one id per 512
tokens. Lengths are divided by 32, which turns a 512-token block into one block of 16 tokens: which
blocks are equal, and so every hit ratio, stays. The last block of a prompt may be partly filled; as in
the trace it counts as a block that can be found again.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from moonpool.errors import InvalidRequestError
from moonpool.ids import BlockHash

#: Tokens of a block in the trace, and in the replay.
TRACE_BLOCK_TOKENS = 512
BLOCK_TOKENS = 16
SCALE = TRACE_BLOCK_TOKENS // BLOCK_TOKENS


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceRequest:
    """One row, scaled."""

    #: Since the trace began, by the trace's own clock.
    arrived_s: float
    #: One id per block; equal ids have equal prefixes.
    block_ids: tuple[int, ...]
    num_output_tokens: int

    @property
    def num_blocks(self) -> int:
        return len(self.block_ids)


def read_trace(path: Path, *, jitter_s: float = 0.0, seed: int = 0) -> list[TraceRequest]:
    """All requests, in order of arrival.

    Args:
        jitter_s: Each arrives up to this much later, evenly drawn: the conversation trace's times are
            multiples of 3 s, so that what came within 3 s would come at once.

    Raises:
        InvalidRequestError: not such a trace; names file and line.
    """
    requests = []
    rng = np.random.default_rng(seed)
    with path.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, start=1):
            try:
                row = json.loads(line)
                request = TraceRequest(
                    arrived_s=row["timestamp"] / 1e3 + jitter_s * rng.random(),
                    block_ids=tuple(int(block_id) for block_id in row["hash_ids"]),
                    num_output_tokens=max(round(row["output_length"] / SCALE), 1),
                )
            except (ValueError, KeyError, TypeError) as error:
                raise InvalidRequestError(
                    f"{path}, line {number}: not a row of a Mooncake trace ({error!r}).",
                    param="trace",
                ) from error
            requests.append(request)
    return sorted(requests, key=lambda request: request.arrived_s)


def block_hashes(block_ids: Iterable[int]) -> list[BlockHash]:
    """What the product would call these blocks: 32 bytes each, equal where the ids are."""
    return [
        BlockHash(hashlib.sha256(block_id.to_bytes(8, "little")).digest()) for block_id in block_ids
    ]


def ideal_hits(requests: Sequence[TraceRequest]) -> int:
    """Blocks that were asked for before: what a cache that never forgets serves."""
    seen: set[int] = set()
    num_hits = 0
    for request in requests:
        num_hits += sum(block_id in seen for block_id in request.block_ids)
        seen.update(request.block_ids)
    return num_hits
