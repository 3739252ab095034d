"""Chains that were put or lent last: against a naive list, bounded by blocks."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from moonpool.ids import BlockHash
from moonpool.tiering.recent_chains import RecentChains

MAX_BLOCKS = 12
Chain = tuple[BlockHash, ...]


def chain(path: str) -> Chain:
    """One block a letter; a block is known by all letters up to its own."""
    return tuple(BlockHash(path[:end].encode().ljust(32)) for end in range(1, len(path) + 1))


@given(paths=st.lists(st.text("ab", min_size=1, max_size=MAX_BLOCKS + 2), max_size=30))
def test_the_latest_are_kept_and_none_beside_one_that_extends_it(paths: list[str]) -> None:
    recent = RecentChains(MAX_BLOCKS)
    kept: list[str] = []
    for path in paths:
        recent.note(chain(path))
        recent.validate()
        if len(path) <= MAX_BLOCKS:
            kept = [*(before for before in kept if not path.startswith(before)), path]
        while sum(map(len, kept)) > MAX_BLOCKS:
            del kept[0]
        assert (len(recent), recent.num_blocks) == (len(kept), sum(map(len, kept)))
    while kept:
        assert recent.latest() == chain(kept.pop())
        recent.forget_latest()
        recent.validate()
    assert recent.latest() is None


def test_a_chat_that_grows_is_one_chain() -> None:
    recent = RecentChains(1_000)
    path = ""
    for _ in range(100):
        path += "abc"
        recent.note(chain(path))
    assert (len(recent), recent.num_blocks) == (1, 300)
