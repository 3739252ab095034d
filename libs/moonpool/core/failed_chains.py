"""FailedChains: which chains of blocks have led to output that is not finite here, for a while.

This worker forgets such a chain at once, but a peer that it was read from may not know: it would be read
from there again. Computing it is safe, and whoever has computed it holds it.
"""

from __future__ import annotations

from moonpool.ids import BlockHash

#: Longer than clients try again; a peer forgets the chain when it meets the fault itself.
_REMEMBERED_S = 60.0
_MAX_ENTRIES = 1024


class FailedChains:
    """Chains by the hash of their first block, as the cache forgets them. The oldest go first."""

    def __init__(self) -> None:
        #: First hash -> when it was noted last, in that order.
        self._noted_at: dict[BlockHash, float] = {}

    def note(self, first_hash: BlockHash, now: float) -> None:
        """A chain that begins so has failed."""
        self._noted_at.pop(first_hash, None)
        self._noted_at[first_hash] = now
        if len(self._noted_at) > _MAX_ENTRIES:
            del self._noted_at[next(iter(self._noted_at))]

    def has(self, first_hash: BlockHash, now: float) -> bool:
        """Whether a chain that begins so has failed within a minute."""
        noted_at = self._noted_at.get(first_hash)
        return noted_at is not None and now - noted_at < _REMEMBERED_S

    def key(self) -> tuple[BlockHash, ...]:
        """What is remembered, without the times."""
        return tuple(sorted(self._noted_at))

    def fork(self) -> FailedChains:
        """An independent copy."""
        other = FailedChains()
        other._noted_at = dict(self._noted_at)
        return other
