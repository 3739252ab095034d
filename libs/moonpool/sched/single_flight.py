"""Single flight: a block that one request here is about to make is not made by another one as well.

    leader      holds the block and will write it: it computes, or fetches from a peer
    follower    waits in the queue for exactly that block, holding nothing

Nothing is remembered: who follows whom is looked up from what requests hold, so a follower looks again
whenever its leader has made the block, or has ended, or lost its blocks, in whatever way. The oldest
of several followers finds nobody before it then, and leads the others.

Rules
- Whoever waits never leads, so a follower's leader follows nobody, and there is no circle.
- A leader is as old as its oldest follower, in all that age decides: its own age may be less, and an
  old request must not wait for one that gives way to everybody.
- A decode that reads from its source leads nobody. What it waits for is another worker's progress,
  which may wait for ours: two workers of role 'both' could wait for each other for ever. What a fetch
  reads lies ready at the peer.
"""

from __future__ import annotations

from collections.abc import Iterable

from moonpool.sched.request import Order, RequestState


def find_leader(
    state: RequestState, num_matched_blocks: int, producers: Iterable[RequestState]
) -> RequestState | None:
    """Who of `producers` is about to make the block after the first `num_matched_blocks` of `state`."""
    if num_matched_blocks >= state.num_matchable_blocks:
        return None
    wanted = state.block_hashes[num_matched_blocks]
    for other in producers:
        if (
            other.num_final_blocks <= num_matched_blocks < len(other.block_hashes)
            and other.block_hashes[num_matched_blocks] == wanted
        ):
            return other
    return None


def num_common_blocks(state: RequestState, leader: RequestState) -> int:
    """How many blocks of `state` the leader has or will have made, all that are matched included."""
    low, high = 0, min(state.num_matchable_blocks, len(leader.block_hashes))
    # A hash names its whole prefix: chains that differ in one place differ in all places after it.
    while low < high:
        middle = (low + high + 1) // 2
        if state.block_hashes[middle - 1] == leader.block_hashes[middle - 1]:
            low = middle
        else:
            high = middle - 1
    return low


def inherit_orders(
    leaders: Iterable[tuple[RequestState, RequestState]],
) -> dict[RequestState, Order]:
    """From pairs of (follower, leader): the orders of those leaders that are younger than a follower."""
    inherited: dict[RequestState, Order] = {}
    for follower, leader in leaders:
        order = min(follower.order, inherited.get(leader, leader.order))
        if order != leader.order:
            inherited[leader] = order
    return inherited
