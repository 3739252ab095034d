"""The wire structs of the core's replies, and their conversion: one for each value of core/protocol.py."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from moonpool.core.protocol import (
    Accepted,
    ChunkPlanned,
    FetchReserved,
    HandBackReason,
    HandedBack,
    PrefillDone,
    PrefillFailed,
    PrefillStarted,
    PrefixLocked,
    Refused,
    RefuseReason,
    Reply,
    Reserved,
    Revoked,
    TokensReady,
)
from moonpool.ids import AttemptId
from moonpool.inference.output import FinishReason, TokenRun
from moonpool.wire.engine_base import Wire, pack_hashes, pack_u32, unpack_blocks, unpack_hashes
from moonpool.wire.engine_messages import EngineFrameError


class WireAccepted(Wire, tag=30):
    attempt_id: AttemptId


class WireRefused(Wire, tag=31):
    attempt_id: AttemptId
    reason: RefuseReason


class WireReserved(Wire, tag=32):
    attempt_id: AttemptId
    num_cached_tokens: int
    block_ids: bytes


class WireRevoked(Wire, tag=33):
    attempt_id: AttemptId


class WireHandedBack(Wire, tag=34):
    attempt_id: AttemptId
    reason: HandBackReason


class WirePrefillStarted(Wire, tag=35):
    attempt_id: AttemptId
    num_cached_tokens: int
    block_ids: bytes
    num_peer_tokens: int


class WireChunkPlanned(Wire, tag=36):
    attempt_id: AttemptId
    start: int
    end: int


class WirePrefillDone(Wire, tag=37):
    attempt_id: AttemptId
    num_cached_tokens: int
    first_token: int
    finish_reason: FinishReason | None
    num_peer_tokens: int


class WirePrefillFailed(Wire, tag=38):
    attempt_id: AttemptId
    hand_back: HandBackReason | None
    finish: FinishReason | None


class WireTokensReady(Wire, tag=39):
    attempt_id: AttemptId
    choice: int
    first_position: int
    token_ids: tuple[int, ...]
    finish_reason: FinishReason | None
    num_cached_tokens: int | None
    num_peer_tokens: int


class WireFetchReserved(Wire, tag=40):
    attempt_id: AttemptId
    num_cached_tokens: int
    num_tokens: int
    block_ids: bytes
    hashes: bytes


class WirePrefixLocked(Wire, tag=41):
    read_id: int
    block_ids: bytes


WireReply = (
    WireAccepted
    | WireRefused
    | WireReserved
    | WireRevoked
    | WireHandedBack
    | WirePrefillStarted
    | WireChunkPlanned
    | WirePrefillDone
    | WirePrefillFailed
    | WireTokensReady
    | WireFetchReserved
    | WirePrefixLocked
)


def _prefill_failed_to_wire(reply: PrefillFailed) -> WirePrefillFailed:
    reason = reply.reason
    if isinstance(reason, HandBackReason):
        return WirePrefillFailed(reply.attempt_id, reason, None)
    return WirePrefillFailed(reply.attempt_id, None, reason)


def _prefill_failed_from_wire(wire: WirePrefillFailed) -> PrefillFailed:
    reason = wire.hand_back or wire.finish
    if reason is None:
        raise EngineFrameError("a failed prefill without a reason")
    return PrefillFailed(attempt_id=wire.attempt_id, reason=reason)


def _tokens_to_wire(reply: TokensReady) -> WireTokensReady:
    run = reply.run
    return WireTokensReady(
        reply.attempt_id,
        run.choice,
        run.first_position,
        run.token_ids,
        run.finish_reason,
        reply.num_cached_tokens,
        reply.num_peer_tokens,
    )


def _tokens_from_wire(wire: WireTokensReady) -> TokensReady:
    return TokensReady(
        attempt_id=wire.attempt_id,
        run=TokenRun(
            first_position=wire.first_position,
            token_ids=wire.token_ids,
            choice=wire.choice,
            finish_reason=wire.finish_reason,
        ),
        num_cached_tokens=wire.num_cached_tokens,
        num_peer_tokens=wire.num_peer_tokens,
    )


_REPLY_TO_WIRE: dict[type, Callable[[Any], WireReply]] = {
    TokensReady: _tokens_to_wire,
    Accepted: lambda r: WireAccepted(r.attempt_id),
    Refused: lambda r: WireRefused(r.attempt_id, r.reason),
    Reserved: lambda r: WireReserved(r.attempt_id, r.num_cached_tokens, pack_u32(r.block_ids)),
    Revoked: lambda r: WireRevoked(r.attempt_id),
    HandedBack: lambda r: WireHandedBack(r.attempt_id, r.reason),
    PrefillStarted: lambda r: WirePrefillStarted(
        r.attempt_id, r.num_cached_tokens, pack_u32(r.block_ids), r.num_peer_tokens
    ),
    ChunkPlanned: lambda r: WireChunkPlanned(r.attempt_id, r.start, r.end),
    PrefillDone: lambda r: WirePrefillDone(
        r.attempt_id, r.num_cached_tokens, r.first_token, r.finish_reason, r.num_peer_tokens
    ),
    PrefillFailed: _prefill_failed_to_wire,
    FetchReserved: lambda r: WireFetchReserved(
        r.attempt_id,
        r.num_cached_tokens,
        r.num_tokens,
        pack_u32(r.block_ids),
        pack_hashes(r.hashes),
    ),
    PrefixLocked: lambda r: WirePrefixLocked(r.read_id, pack_u32(r.block_ids)),
}

_REPLY_FROM_WIRE: dict[type, Callable[[Any], Reply]] = {
    WireTokensReady: _tokens_from_wire,
    WireAccepted: lambda w: Accepted(attempt_id=w.attempt_id),
    WireRefused: lambda w: Refused(attempt_id=w.attempt_id, reason=w.reason),
    WireReserved: lambda w: Reserved(
        attempt_id=w.attempt_id,
        num_cached_tokens=w.num_cached_tokens,
        block_ids=unpack_blocks(w.block_ids),
    ),
    WireRevoked: lambda w: Revoked(attempt_id=w.attempt_id),
    WireHandedBack: lambda w: HandedBack(attempt_id=w.attempt_id, reason=w.reason),
    WirePrefillStarted: lambda w: PrefillStarted(
        attempt_id=w.attempt_id,
        num_cached_tokens=w.num_cached_tokens,
        block_ids=unpack_blocks(w.block_ids),
        num_peer_tokens=w.num_peer_tokens,
    ),
    WireChunkPlanned: lambda w: ChunkPlanned(attempt_id=w.attempt_id, start=w.start, end=w.end),
    WirePrefillDone: lambda w: PrefillDone(
        attempt_id=w.attempt_id,
        num_cached_tokens=w.num_cached_tokens,
        first_token=w.first_token,
        finish_reason=w.finish_reason,
        num_peer_tokens=w.num_peer_tokens,
    ),
    WirePrefillFailed: _prefill_failed_from_wire,
    WireFetchReserved: lambda w: FetchReserved(
        attempt_id=w.attempt_id,
        num_cached_tokens=w.num_cached_tokens,
        num_tokens=w.num_tokens,
        block_ids=unpack_blocks(w.block_ids),
        hashes=unpack_hashes(w.hashes),
    ),
    WirePrefixLocked: lambda w: PrefixLocked(
        read_id=w.read_id, block_ids=unpack_blocks(w.block_ids)
    ),
}


def reply_to_wire(reply: Reply) -> WireReply:
    return _REPLY_TO_WIRE[type(reply)](reply)


def reply_from_wire(wire: WireReply) -> Reply:
    """Raises EngineFrameError."""
    return _REPLY_FROM_WIRE[type(wire)](wire)
