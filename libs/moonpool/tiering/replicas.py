"""ReplicaPlanner: which chains should lie on several store nodes, by how fast they are read.

    num_copies = clamp(ceil(bytes_per_s / bytes_per_s_of_a_copy), 1, max_copies)

The rate is that of all copies together: what this node measures of its own reads, and what the holders
of the others tell of theirs. A copy comes as soon as the formula asks for it, and goes only when the
others would have `slack` to spare, so a rate that wavers by less than that changes nothing:

    copies    rise when bytes_per_s exceeds        fall when bytes_per_s is at most
    1 -> 2    1.0 of what a copy serves
    2 -> 1                                         (1 - slack) of it
    2 -> 3    2.0
    3 -> 2                                         2 (1 - slack)

Rates decay by half in `half_life_s`; each read counts in full when it comes. Chains are known by the
block that decides their home. Memory is bounded: of too many chains, or too many blocks of them, the ones
read least are forgotten.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from moonpool.ids import BlockHash

#: Less is nothing.
_COLD_BYTES_PER_S = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaConfig:
    """Validated in config/; here only asserted."""

    #: What one copy should serve at most.
    bytes_per_s_of_a_copy: float = 1e9
    #: The first one included.
    max_copies: int = 3
    #: Share of what a copy serves that the rest must have to spare before one is given up.
    slack: float = 0.3
    half_life_s: float = 30.0
    #: Chains that are watched.
    max_chains: int = 1_024
    #: Blocks of these chains; what two of them share counts twice.
    max_blocks: int = 65_536
    #: Chains read more slowly than this share of what a copy serves are not told of.
    told_share: float = 0.05

    def __post_init__(self) -> None:
        assert self.bytes_per_s_of_a_copy > 0.0, self
        assert self.max_copies >= 1, self
        assert 0.0 < self.slack < 1.0, self
        assert self.half_life_s > 0.0, self
        assert min(self.max_chains, self.max_blocks) >= 1, self
        assert 0.0 <= self.told_share < 1.0, self


@dataclass(frozen=True, slots=True, kw_only=True)
class HotChain:
    """A chain that should lie on several nodes."""

    home_hash: BlockHash
    #: From the start: what all its readers asked for.
    hashes: tuple[BlockHash, ...]
    #: All copies, the first one included; at least 2.
    num_copies: int
    #: Of all copies.
    bytes_per_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadChain:
    """A chain that this node lends."""

    home_hash: BlockHash
    #: As in HotChain.
    hashes: tuple[BlockHash, ...]
    #: Of this node's copy.
    bytes_per_s: float


def copies_needed(bytes_per_s: float, config: ReplicaConfig) -> int:
    """The formula of the file's head."""
    num_copies = math.ceil(bytes_per_s / config.bytes_per_s_of_a_copy)
    return min(max(num_copies, 1), config.max_copies)


@dataclass(slots=True, kw_only=True)
class _Chain:
    hashes: tuple[BlockHash, ...]
    #: As of `at_s`.
    bytes_per_s: float
    at_s: float
    num_copies: int = 1


class ReplicaPlanner:
    """See the file's head. One node's; `now` never goes back."""

    def __init__(self, config: ReplicaConfig) -> None:
        self._config = config
        self._chains: dict[BlockHash, _Chain] = {}
        self._num_blocks = 0

    def note_read(
        self, home_hash: BlockHash, hashes: tuple[BlockHash, ...], num_bytes: int, now: float
    ) -> None:
        """A reader was given so many bytes of this chain, which the home's block is part of."""
        chain = self._chains.get(home_hash)
        if chain is None:
            chain = self._chains[home_hash] = _Chain(hashes=hashes, bytes_per_s=0.0, at_s=now)
            self._num_blocks += len(hashes)
            self._forget_coldest(now)
        added_bytes_per_s = num_bytes * math.log(2.0) / self._config.half_life_s
        chain.bytes_per_s = self._rate(chain, now) + added_bytes_per_s
        chain.at_s = now
        common = _common_prefix(chain.hashes, hashes)
        self._num_blocks -= len(chain.hashes) - len(common)
        chain.hashes = common

    def plan(self, now: float, elsewhere: Mapping[BlockHash, float]) -> tuple[HotChain, ...]:
        """The chains that should lie on several nodes, the hottest first.

        Args:
            elsewhere: Bytes per second that other nodes give of their copies, by home hash.
        """
        hot = []
        for home_hash, chain in self._chains.items():
            bytes_per_s = self._rate(chain, now) + elsewhere.get(home_hash, 0.0)
            chain.num_copies = self._num_copies(chain.num_copies, bytes_per_s)
            if chain.num_copies > 1:
                hot.append(
                    HotChain(
                        home_hash=home_hash,
                        hashes=chain.hashes,
                        num_copies=chain.num_copies,
                        bytes_per_s=bytes_per_s,
                    )
                )
        return tuple(sorted(hot, key=lambda chain: (-chain.bytes_per_s, chain.home_hash)))

    def reads(self, now: float, max_reads: int) -> tuple[ReadChain, ...]:
        """What this node lends, the hottest first, at most so many; of what is long ago nothing is left."""
        rates = [
            (-rate, home_hash)
            for home_hash, chain in self._chains.items()
            if (rate := self._rate(chain, now)) >= _COLD_BYTES_PER_S
        ]
        rates.sort()
        return tuple(
            ReadChain(
                home_hash=home_hash, hashes=self._chains[home_hash].hashes, bytes_per_s=-negated
            )
            for negated, home_hash in rates[:max_reads]
        )

    def validate(self) -> None:
        """Check every invariant; raises AssertionError."""
        assert len(self._chains) <= self._config.max_chains
        assert self._num_blocks == sum(len(chain.hashes) for chain in self._chains.values())
        assert self._num_blocks <= self._config.max_blocks or len(self._chains) == 1
        for home_hash, chain in self._chains.items():
            assert home_hash in chain.hashes, chain
            assert 0.0 <= chain.bytes_per_s < math.inf, chain
            assert 1 <= chain.num_copies <= self._config.max_copies, chain

    # -- parts --

    def _rate(self, chain: _Chain, now: float) -> float:
        return chain.bytes_per_s * math.exp2((chain.at_s - now) / self._config.half_life_s)

    def _num_copies(self, num_before: int, bytes_per_s: float) -> int:
        config = self._config
        if bytes_per_s <= (1.0 - config.slack) * config.bytes_per_s_of_a_copy:
            return 1
        least = copies_needed(bytes_per_s, config)
        most = copies_needed(bytes_per_s / (1.0 - config.slack), config)
        return min(max(num_before, least), most)

    def _forget_coldest(self, now: float) -> None:
        """Down to three quarters at once, so that it is seldom done; never the one that came last."""
        config = self._config
        if len(self._chains) <= config.max_chains and self._num_blocks <= config.max_blocks:
            return
        newest = next(reversed(self._chains))
        coldest_first = sorted(
            (home_hash for home_hash in self._chains if home_hash != newest),
            key=lambda home_hash: (self._rate(self._chains[home_hash], now), home_hash),
        )
        max_chains, max_blocks = config.max_chains * 3 // 4, config.max_blocks * 3 // 4
        for home_hash in coldest_first:
            if len(self._chains) <= max_chains and self._num_blocks <= max_blocks:
                return
            self._num_blocks -= len(self._chains.pop(home_hash).hashes)


def _common_prefix(
    one: tuple[BlockHash, ...], other: tuple[BlockHash, ...]
) -> tuple[BlockHash, ...]:
    """Of two chains: a hash that agrees vouches for all before it."""
    num_common = min(len(one), len(other))
    while num_common and one[num_common - 1] != other[num_common - 1]:
        num_common -= 1
    return one[:num_common]
