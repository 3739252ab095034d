"""The wire structs of engine frames and their conversion: msgpack arrays, first element the tag.

One struct for each value of core/protocol.py; token lists and block ids travel as raw uint32.
"""

from __future__ import annotations

import array
import sys
from collections.abc import Callable, Iterable
from typing import Any

import msgspec

from moonpool.core.protocol import (
    Abort,
    Accepted,
    Arrived,
    BlockLedger,
    BlocksArrived,
    ChunkPlanned,
    ClearCache,
    Command,
    CoreFrame,
    Decode,
    Drain,
    HandBackReason,
    HandedBack,
    Prefill,
    PrefillDone,
    PrefillFailed,
    PrefillStarted,
    ReadEnded,
    Refused,
    RefuseReason,
    Release,
    Reply,
    Reserved,
    Revoked,
    TokensReady,
)
from moonpool.ids import AttemptId, BlockId, RequestId
from moonpool.inference.output import FinishReason, TokenRun
from moonpool.inference.request import InferenceRequest
from moonpool.inference.sampling import SamplingParams
from moonpool.wire.engine_messages import EngineBoot, EngineFrameError, TimedFrame

_IS_LITTLE_ENDIAN = sys.byteorder == "little"


class Wire(msgspec.Struct, array_like=True, forbid_unknown_fields=True, gc=False):
    """Base of all wire structs."""


class WireBoot(Wire, tag=1):
    boot: EngineBoot


class WireMapped(Wire, tag=2):
    pid: int


class WireReady(Wire, tag=3):
    load_s: float


class WireFailed(Wire, tag=4):
    code: str
    message: str


class WireRequest(Wire):
    request_id: str
    model: str
    prompt: bytes
    emitted: bytes
    temperature: float
    top_p: float
    top_k: int
    seed: int
    max_tokens: int
    ignore_eos: bool
    stop_token_ids: tuple[int, ...]
    arrival_unix_s: float
    tenant: str
    priority: int
    cache_salt: str
    adapter: str
    traceparent: str


class WirePrefill(Wire, tag=10):
    attempt: int
    request: WireRequest


class WireDecode(Wire, tag=11):
    attempt: int
    has_source: bool
    request: WireRequest


class WireBlocksArrived(Wire, tag=12):
    attempt_id: AttemptId
    num_tokens: int


class WireArrived(Wire, tag=13):
    attempt_id: AttemptId
    num_tokens: int
    first_token: int | None
    finish_reason: FinishReason | None


class WireReadEnded(Wire, tag=14):
    attempt_id: AttemptId


class WireRelease(Wire, tag=15):
    attempt_id: AttemptId


class WireAbort(Wire, tag=16):
    attempt_id: AttemptId


class WireDrain(Wire, tag=17):
    hand_back: bool


class WireClearCache(Wire, tag=18):
    pass


WireCommand = (
    WirePrefill
    | WireDecode
    | WireBlocksArrived
    | WireArrived
    | WireReadEnded
    | WireRelease
    | WireAbort
    | WireDrain
    | WireClearCache
)


class WireCommands(Wire, tag=5):
    commands: list[WireCommand]


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


class WireChunkPlanned(Wire, tag=36):
    attempt_id: AttemptId
    start: int
    end: int


class WirePrefillDone(Wire, tag=37):
    attempt_id: AttemptId
    num_cached_tokens: int
    first_token: int
    finish_reason: FinishReason | None


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
)


class WireLedger(Wire):
    num_total: int
    num_free: int
    num_cached: int
    num_referenced: int
    num_running: int
    num_waiting: int
    num_reserved: int
    num_prefills: int
    num_quarantined: int


class WireFrame(Wire):
    planned_unix_ns: int
    last_layer_unix_ns: int
    computed_unix_ns: int
    step: int
    replies: list[WireReply]
    ledger: WireLedger
    num_queued_tokens: int
    num_preemptions: int
    forward_s: float
    logits_s: float
    sample_s: float
    other_s: float
    num_step_tokens: int


class WireSteps(Wire, tag=6):
    frames: list[WireFrame]


WireToEngine = WireBoot | WireCommands
WireFromEngine = WireMapped | WireReady | WireFailed | WireSteps

# -- numbers as raw little-endian uint32 --


def _pack_u32(values: Iterable[int]) -> bytes:
    packed = array.array("I", values)
    if not _IS_LITTLE_ENDIAN:
        packed.byteswap()
    return packed.tobytes()


def _unpack_u32(data: bytes) -> tuple[int, ...]:
    if len(data) % 4:
        raise EngineFrameError(f"{len(data)} bytes are not a list of uint32")
    values = array.array("I")
    values.frombytes(data)
    if not _IS_LITTLE_ENDIAN:
        values.byteswap()
    return tuple(values)


def _unpack_blocks(data: bytes) -> tuple[BlockId, ...]:
    return _unpack_u32(data)  # type: ignore[return-value]  # BlockId is an int


# -- commands --


def _request_to_wire(request: InferenceRequest) -> WireRequest:
    sampling = request.sampling
    return WireRequest(
        request.request_id,
        request.model,
        _pack_u32(request.prompt_token_ids),
        _pack_u32(request.emitted_token_ids),
        sampling.temperature,
        sampling.top_p,
        sampling.top_k,
        sampling.seed,
        sampling.max_tokens,
        sampling.ignore_eos,
        sampling.stop_token_ids,
        request.arrival_unix_s,
        request.tenant,
        request.priority,
        request.cache_salt,
        request.adapter,
        request.traceparent,
    )


def _request_from_wire(wire: WireRequest) -> InferenceRequest:
    return InferenceRequest(
        request_id=RequestId(wire.request_id),
        model=wire.model,
        prompt_token_ids=_unpack_u32(wire.prompt),
        emitted_token_ids=_unpack_u32(wire.emitted),
        sampling=SamplingParams(
            temperature=wire.temperature,
            top_p=wire.top_p,
            top_k=wire.top_k,
            seed=wire.seed,
            max_tokens=wire.max_tokens,
            ignore_eos=wire.ignore_eos,
            stop_token_ids=wire.stop_token_ids,
        ),
        arrival_unix_s=wire.arrival_unix_s,
        tenant=wire.tenant,
        priority=wire.priority,
        cache_salt=wire.cache_salt,
        adapter=wire.adapter,
        traceparent=wire.traceparent,
    )


#: Any: each converter takes and gives its own type; the key is that type.
_COMMAND_TO_WIRE: dict[type, Callable[[Any], WireCommand]] = {
    Prefill: lambda c: WirePrefill(c.attempt, _request_to_wire(c.request)),
    Decode: lambda c: WireDecode(c.attempt, c.has_source, _request_to_wire(c.request)),
    BlocksArrived: lambda c: WireBlocksArrived(c.attempt_id, c.num_tokens),
    Arrived: lambda c: WireArrived(c.attempt_id, c.num_tokens, c.first_token, c.finish_reason),
    ReadEnded: lambda c: WireReadEnded(c.attempt_id),
    Release: lambda c: WireRelease(c.attempt_id),
    Abort: lambda c: WireAbort(c.attempt_id),
    Drain: lambda c: WireDrain(c.hand_back),
    ClearCache: lambda _: WireClearCache(),
}


_COMMAND_FROM_WIRE: dict[type, Callable[[Any], Command]] = {
    WirePrefill: lambda w: Prefill(request=_request_from_wire(w.request), attempt=w.attempt),
    WireDecode: lambda w: Decode(
        request=_request_from_wire(w.request), attempt=w.attempt, has_source=w.has_source
    ),
    WireBlocksArrived: lambda w: BlocksArrived(attempt_id=w.attempt_id, num_tokens=w.num_tokens),
    WireArrived: lambda w: Arrived(
        attempt_id=w.attempt_id,
        num_tokens=w.num_tokens,
        first_token=w.first_token,
        finish_reason=w.finish_reason,
    ),
    WireReadEnded: lambda w: ReadEnded(attempt_id=w.attempt_id),
    WireRelease: lambda w: Release(attempt_id=w.attempt_id),
    WireAbort: lambda w: Abort(attempt_id=w.attempt_id),
    WireDrain: lambda w: Drain(hand_back=w.hand_back),
    WireClearCache: lambda _: ClearCache(),
}


def command_to_wire(command: Command) -> WireCommand:
    return _COMMAND_TO_WIRE[type(command)](command)


def command_from_wire(wire: WireCommand) -> Command:
    """Raises EngineFrameError."""
    return _COMMAND_FROM_WIRE[type(wire)](wire)


# -- replies --


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
    )


_REPLY_TO_WIRE: dict[type, Callable[[Any], WireReply]] = {
    TokensReady: _tokens_to_wire,
    Accepted: lambda r: WireAccepted(r.attempt_id),
    Refused: lambda r: WireRefused(r.attempt_id, r.reason),
    Reserved: lambda r: WireReserved(r.attempt_id, r.num_cached_tokens, _pack_u32(r.block_ids)),
    Revoked: lambda r: WireRevoked(r.attempt_id),
    HandedBack: lambda r: WireHandedBack(r.attempt_id, r.reason),
    PrefillStarted: lambda r: WirePrefillStarted(
        r.attempt_id, r.num_cached_tokens, _pack_u32(r.block_ids)
    ),
    ChunkPlanned: lambda r: WireChunkPlanned(r.attempt_id, r.start, r.end),
    PrefillDone: lambda r: WirePrefillDone(
        r.attempt_id, r.num_cached_tokens, r.first_token, r.finish_reason
    ),
    PrefillFailed: _prefill_failed_to_wire,
}

_REPLY_FROM_WIRE: dict[type, Callable[[Any], Reply]] = {
    WireTokensReady: _tokens_from_wire,
    WireAccepted: lambda w: Accepted(attempt_id=w.attempt_id),
    WireRefused: lambda w: Refused(attempt_id=w.attempt_id, reason=w.reason),
    WireReserved: lambda w: Reserved(
        attempt_id=w.attempt_id,
        num_cached_tokens=w.num_cached_tokens,
        block_ids=_unpack_blocks(w.block_ids),
    ),
    WireRevoked: lambda w: Revoked(attempt_id=w.attempt_id),
    WireHandedBack: lambda w: HandedBack(attempt_id=w.attempt_id, reason=w.reason),
    WirePrefillStarted: lambda w: PrefillStarted(
        attempt_id=w.attempt_id,
        num_cached_tokens=w.num_cached_tokens,
        block_ids=_unpack_blocks(w.block_ids),
    ),
    WireChunkPlanned: lambda w: ChunkPlanned(attempt_id=w.attempt_id, start=w.start, end=w.end),
    WirePrefillDone: lambda w: PrefillDone(
        attempt_id=w.attempt_id,
        num_cached_tokens=w.num_cached_tokens,
        first_token=w.first_token,
        finish_reason=w.finish_reason,
    ),
    WirePrefillFailed: _prefill_failed_from_wire,
}


def frame_to_wire(timed: TimedFrame) -> WireFrame:
    frame = timed.frame
    ledger = frame.ledger
    return WireFrame(
        timed.planned_unix_ns,
        timed.last_layer_unix_ns,
        timed.computed_unix_ns,
        frame.step,
        [_REPLY_TO_WIRE[type(reply)](reply) for reply in frame.replies],
        WireLedger(
            ledger.num_total,
            ledger.num_free,
            ledger.num_cached,
            ledger.num_referenced,
            ledger.num_running,
            ledger.num_waiting,
            ledger.num_reserved,
            ledger.num_prefills,
            ledger.num_quarantined,
        ),
        frame.num_queued_tokens,
        frame.num_preemptions,
        frame.forward_s,
        frame.logits_s,
        frame.sample_s,
        frame.other_s,
        frame.num_step_tokens,
    )


def frame_from_wire(wire: WireFrame) -> TimedFrame:
    ledger = wire.ledger
    frame = CoreFrame(
        step=wire.step,
        replies=tuple([_REPLY_FROM_WIRE[type(reply)](reply) for reply in wire.replies]),
        ledger=BlockLedger(
            num_total=ledger.num_total,
            num_free=ledger.num_free,
            num_cached=ledger.num_cached,
            num_referenced=ledger.num_referenced,
            num_running=ledger.num_running,
            num_waiting=ledger.num_waiting,
            num_reserved=ledger.num_reserved,
            num_prefills=ledger.num_prefills,
            num_quarantined=ledger.num_quarantined,
        ),
        num_queued_tokens=wire.num_queued_tokens,
        num_preemptions=wire.num_preemptions,
        forward_s=wire.forward_s,
        logits_s=wire.logits_s,
        sample_s=wire.sample_s,
        other_s=wire.other_s,
        num_step_tokens=wire.num_step_tokens,
    )
    return TimedFrame(
        frame=frame,
        planned_unix_ns=wire.planned_unix_ns,
        last_layer_unix_ns=wire.last_layer_unix_ns,
        computed_unix_ns=wire.computed_unix_ns,
    )
