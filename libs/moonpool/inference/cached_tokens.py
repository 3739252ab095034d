"""CachedTokens: leading tokens of a request that were not computed for it, and where they came from."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Self


@dataclass(frozen=True, slots=True, kw_only=True)
class CachedTokens:
    """A prefix: first what lay in the pool of the worker that prefilled, then what it read from a peer.

    0 ........ device ........ | ........ peer ........ | ....... computed ....
                               num_device_tokens        num_tokens
    """

    num_tokens: int
    #: Of these, the last ones.
    num_peer_tokens: int = 0
    #: The peer was a store node.
    is_peer_store: bool = False
    #: Leading tokens of the request that the peer held in the end, as whoever asked it found out; None: as was
    #: believed, for all that is known.
    num_peer_held_tokens: int | None = None

    def __post_init__(self) -> None:
        assert 0 <= self.num_peer_tokens <= self.num_tokens, self

    @property
    def num_device_tokens(self) -> int:
        return self.num_tokens - self.num_peer_tokens

    def within(self, num_tokens: int) -> Self:
        """The part of it that lies in the first `num_tokens` tokens."""
        if num_tokens >= self.num_tokens:
            return self
        num_peer_tokens = max(num_tokens - self.num_device_tokens, 0)
        return replace(self, num_tokens=num_tokens, num_peer_tokens=num_peer_tokens)
