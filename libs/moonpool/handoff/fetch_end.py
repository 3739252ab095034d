"""What is made of a fetch that has ended: what its reader learns of the peer, and what the books are told."""

from __future__ import annotations

from moonpool.handoff.effects import FetchOutcome, RecordFetch
from moonpool.handoff.fetch import Fetch
from moonpool.handoff.fetch_choice import FetchChooser, Tier


def learn(
    fetch: Fetch, outcome: FetchOutcome, chooser: FetchChooser, *, num_tokens: int, now: float
) -> None:
    """Tell the chooser how it went; ends the fetch's ticket.

    Args:
        num_tokens: Leading tokens that are verified, those that were cached among them.
    """
    ticket, reserved, num_bytes = fetch.ticket, fetch.reserved, fetch.num_bytes
    assert ticket is not None, fetch
    assert reserved is not None, fetch
    match outcome:
        case FetchOutcome.WHOLE | FetchOutcome.SHORT | FetchOutcome.MEMORY_ONLY:
            recompute_s = chooser.recompute_s(
                num_cached_tokens=reserved.num_cached_tokens, num_tokens=num_tokens
            )
            chooser.ended(ticket, num_bytes=num_bytes, recompute_s=recompute_s, now=now)
        case FetchOutcome.ABSENT if ticket.tier is Tier.DISK:
            # It waited for its disk as long as it does, in vain.
            chooser.gave_up(ticket, num_bytes=num_bytes, now=now)
        case FetchOutcome.SLOW:
            chooser.gave_up(ticket, num_bytes=num_bytes, now=now)
        case FetchOutcome.REFUSED if fetch.refusal is not None and fetch.refusal.is_passing:
            chooser.turned_away(ticket, num_bytes=num_bytes, now=now)
        case FetchOutcome.LOST | FetchOutcome.REFUSED | FetchOutcome.DAMAGED:
            chooser.failed(ticket, num_bytes=num_bytes, now=now)
        case _:
            chooser.told_nothing(ticket, num_bytes=num_bytes)


def record_of(
    fetch: Fetch, outcome: FetchOutcome, *, num_tokens: int, block_size: int, elapsed_s: float
) -> RecordFetch:
    """For the books."""
    plan, reserved = fetch.plan, fetch.reserved
    assert reserved is not None, fetch
    return RecordFetch(
        attempt_id=fetch.attempt_id,
        holder=fetch.peer.key,
        outcome=outcome,
        num_wanted_blocks=fetch.num_wanted_blocks(block_size),
        num_blocks=(num_tokens - reserved.num_cached_tokens) // block_size,
        num_held_tokens=_num_held_tokens(fetch, outcome, num_tokens, block_size),
        elapsed_s=elapsed_s,
        predicted_s=plan.predicted_s if plan is not None else 0.0,
        recompute_s=plan.recompute_s if plan is not None else 0.0,
        message=fetch.message,
    )


def _num_held_tokens(
    fetch: Fetch, outcome: FetchOutcome, num_tokens: int, block_size: int
) -> int | None:
    """Leading tokens that the peer turned out to hold; None: all that was wanted, for all that is known."""
    reserved = fetch.reserved
    assert reserved is not None, fetch
    match outcome:
        case FetchOutcome.LOST | FetchOutcome.DAMAGED:
            num_held_tokens = num_tokens
        case FetchOutcome.REFUSED if fetch.refusal is not None and not fetch.refusal.is_passing:
            # It is not whom it was taken for.
            num_held_tokens = num_tokens
        case _ if fetch.staging is not None:
            # What did not come from its disk did not come in time.
            num_held_tokens = reserved.num_cached_tokens + fetch.staging.num_blocks * block_size
        case FetchOutcome.SHORT | FetchOutcome.ABSENT:
            num_held_tokens = num_tokens
        case _ if fetch.opened is not None:
            num_locked_blocks = len(fetch.opened.block_ids)
            num_held_tokens = reserved.num_cached_tokens + num_locked_blocks * block_size
        case _:
            return None
    return num_held_tokens if num_held_tokens < reserved.num_tokens else None
