"""Homes: at which store node a chain of blocks lies, by rendezvous hashing. Without state or IO.

A whole chain lies at one home, so that a reader asks one peer. The home is that of the hash of block number
min(len, 64) - 1: chains that share their first 64 blocks lie together, and shorter beginnings, the popular
ones, lie at the homes of whoever goes on from them as well, which is how they come to have several copies.

Every offering worker computes homes by itself, from the stores that it knows of. Two that know different
ones may put a chain at two places: that costs room, never a hit, since readers go by what stores publish.

Weights (Schindelhauer and Schomaker, Weighted distributed hash tables, SPAA 2005, the logarithmic
method): a node has a share of the keys in proportion to its weight, and a change of one weight moves
keys only to or from that node. A node that joins gets its share by and by (`ramp_weight`), so that it is
not asked to take a whole share at once.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import xxhash

from moonpool.ids import BlockHash, WorkerId

#: Blocks of a chain's beginning that decide where it lies. No setting: workers and stores compute homes each by
#: themselves, so whoever was set otherwise would look for a chain, or ask for copies of it, where nobody else does.
#: 64 blocks of 16 tokens are longer than most of what all requests begin with, which is to be spread over the
#: nodes with what goes on from it, and shorter than what tells one chat or document from another, whose chains
#: are to lie together. (A simulation in which blocks are longer scales it.)
HOME_BLOCKS = 64
#: The least weight: of a node that has joined this moment.
MIN_WEIGHT = 0.05

#: Of a hash, as many bits as a float holds below 1.
_NUM_BITS = 52


def home_key(hashes: Sequence[BlockHash], home_blocks: int = HOME_BLOCKS) -> BlockHash:
    """The hash that decides a chain's home. Requires at least one block."""
    return hashes[min(len(hashes), home_blocks) - 1]


def home_of(weights: Mapping[WorkerId, float], key: BlockHash) -> WorkerId | None:
    """The node that has this key: the same for the same nodes and weights, whatever their order.

    Args:
        weights: Of the nodes that may have it, above 0; only their ratios mean something.
    """
    return max(weights, key=lambda node: (_score(node, weights[node], key), node), default=None)


def homes_of(
    weights: Mapping[WorkerId, float], key: BlockHash, num_homes: int
) -> tuple[WorkerId, ...]:
    """The first so many nodes for this key, `home_of` first: each is home if those before it are gone."""
    ranked = sorted(
        weights, key=lambda node: (_score(node, weights[node], key), node), reverse=True
    )
    return tuple(ranked[:num_homes])


def ramp_weight(age_s: float, ramp_s: float) -> float:
    """The weight of a node that joined `age_s` ago: grows to 1 within `ramp_s`."""
    if age_s >= ramp_s:
        return 1.0
    return max(age_s / ramp_s, MIN_WEIGHT)


def _score(node: WorkerId, weight: float, key: BlockHash) -> float:
    """The highest wins; exponentially distributed with the weight as its scale."""
    assert weight > 0.0, (node, weight)
    number = xxhash.xxh3_64_intdigest(key, seed=xxhash.xxh3_64_intdigest(node.encode()))
    return -weight / math.log(((number >> (64 - _NUM_BITS)) + 0.5) / 2**_NUM_BITS)
