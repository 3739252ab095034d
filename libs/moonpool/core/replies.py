"""From an attempt's state to what is said about it."""

from __future__ import annotations

from moonpool.core.protocol import (
    FetchReserved,
    HandBackReason,
    HandedBack,
    PrefillDone,
    PrefillFailed,
    PrefillStarted,
    Reserved,
    TokensReady,
)
from moonpool.inference.output import FinishReason, TokenRun
from moonpool.sched.request import RequestState, Role


def reserved(state: RequestState) -> Reserved:
    return Reserved(
        attempt_id=state.attempt_id,
        num_cached_tokens=state.num_computed_tokens,
        block_ids=tuple(state.block_ids),
    )


def fetch_reserved(state: RequestState) -> FetchReserved:
    num_blocks = state.fetch_end // state.block_size
    return FetchReserved(
        attempt_id=state.attempt_id,
        num_cached_tokens=state.fetch_start,
        num_tokens=state.fetch_end,
        block_ids=tuple(state.block_ids[:num_blocks]),
        hashes=tuple(state.block_hashes[:num_blocks]),
    )


def prefill_started(state: RequestState) -> PrefillStarted:
    return PrefillStarted(
        attempt_id=state.attempt_id,
        num_cached_tokens=state.num_cached_tokens,
        block_ids=tuple(state.block_ids),
        num_peer_tokens=state.num_peer_tokens,
    )


def prefill_done(
    state: RequestState, first_token: int, finish_reason: FinishReason | None
) -> PrefillDone:
    return PrefillDone(
        attempt_id=state.attempt_id,
        num_cached_tokens=state.num_cached_tokens,
        first_token=first_token,
        finish_reason=finish_reason,
        num_peer_tokens=state.num_peer_tokens,
    )


def tokens_ready(state: RequestState, run: TokenRun) -> TokensReady:
    """With the cached tokens if this is the attempt's first run."""
    if state.is_cached_reported:
        return TokensReady(attempt_id=state.attempt_id, run=run)
    return TokensReady(
        attempt_id=state.attempt_id,
        run=run,
        num_cached_tokens=state.num_cached_tokens,
        num_peer_tokens=state.num_peer_tokens,
    )


def given_back(
    state: RequestState, reason: HandBackReason | FinishReason
) -> PrefillFailed | HandedBack:
    """An attempt ended here without an answer. A decode is given back for a HandBackReason only."""
    if state.role is Role.PREFILL:
        return PrefillFailed(attempt_id=state.attempt_id, reason=reason)
    assert isinstance(reason, HandBackReason), reason
    return HandedBack(attempt_id=state.attempt_id, reason=reason)
