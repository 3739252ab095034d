"""Chains that are found on a disk: against a naive look at each block's way to its start."""

from __future__ import annotations

import hashlib

from hypothesis import given
from hypothesis import strategies as st

from moonpool.ids import BlockHash
from moonpool.tiering.found_chains import NO_LINK, START_LINK, FoundChains, parent_link

#: A block is known by all letters up to its own.
paths = st.lists(st.text("ab", min_size=1, max_size=6), max_size=30, unique=True)


def block(path: str) -> BlockHash:
    return BlockHash(hashlib.sha256(path.encode()).digest())


def chain(path: str) -> tuple[BlockHash, ...]:
    return tuple(block(path[:end]) for end in range(1, len(path) + 1))


def link(path: str) -> int:
    return parent_link(block(path[:-1]) if path[:-1] else None)


def is_whole(path: str, found: list[str], unlinked: set[str]) -> bool:
    return all(
        path[:end] in found and path[:end] not in unlinked for end in range(1, len(path) + 1)
    )


@given(found=paths, unlinked=st.sets(st.text("ab", min_size=1, max_size=6), max_size=4))
def test_chains_are_told_as_far_as_they_lie_there_from_their_starts(
    found: list[str], unlinked: set[str]
) -> None:
    chains = FoundChains()
    for path in found:
        chains.add(block(path), NO_LINK if path in unlinked else link(path))
    ends = [
        path
        for path in found
        if is_whole(path, found, unlinked)
        and not any(
            other[:-1] == path and other not in unlinked for other in found if other != path
        )
    ]
    assert chains.chains(1_000) == [chain(path) for path in ends]


@given(found=paths, max_blocks=st.integers(0, 40))
def test_of_too_many_those_that_were_written_last_are_told(
    found: list[str], max_blocks: int
) -> None:
    chains = FoundChains()
    for path in found:
        chains.add(block(path), link(path))
    everything = chains.chains(1_000)
    kept = chains.chains(max_blocks)
    assert kept == everything[len(everything) - len(kept) :]
    assert sum(map(len, kept)) <= max_blocks
    if len(kept) < len(everything):
        one_more = everything[len(everything) - len(kept) - 1]
        assert sum(map(len, kept)) + len(one_more) > max_blocks


def test_what_was_written_again_counts_as_written_last() -> None:
    chains = FoundChains()
    for path in ("a", "b", "a"):
        chains.add(block(path), START_LINK)
    assert chains.chains(10) == [chain("b"), chain("a")]


def test_a_ring_of_links_is_no_chain() -> None:
    chains = FoundChains()
    for path, parent in (("a", "b"), ("b", "a"), ("c", "a")):
        chains.add(block(path), parent_link(block(parent)))
    assert chains.chains(10) == []
