"""Engine frames: what the engine process and its service process say to each other, as bytes.

Both ends are the same version of the same program, parent and child, over a private socketpair: the
format is free to change, but it is decoded strictly, so that a bug on one side is an error on the
other and never a wrong value.

    frame  = u32 little-endian length of the rest | msgpack array [tag, fields ...]

    service -> engine   EngineBoot                     once, first
                        EngineCommands(commands)       as many as had gathered
    engine -> service   EngineMapped                   its maps stand: the memfds may be sealed now
                        EngineReady | EngineFailed     the model is loaded, or why it is not
                        EngineSteps(frames)            one frame, or several that had to wait

Rules
  1. Token lists travel as raw little-endian uint32, never as msgpack integers: 8k tokens cost
     microseconds.
  2. A value of core/protocol.py maps to exactly one struct here and back; nothing is optional that
     is not optional there.
  3. A frame longer than MAX_FRAME_BYTES, an unknown tag, a missing or an additional field raise
     EngineFrameError.
"""

from __future__ import annotations

import array
import struct
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import msgspec

from moonpool.core.config import CoreConfig
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
from moonpool.kv.block_hash import ModelNamespace
from moonpool.kv.layout import KvDtype, KvLayout

#: Far above the longest prompt; a length beyond it means that the stream is out of step.
MAX_FRAME_BYTES = 64 << 20

_LENGTH = struct.Struct("<I")
_IS_LITTLE_ENDIAN = sys.byteorder == "little"


class EngineFrameError(RuntimeError):
    """The bytes are not a frame of ours: a bug, since both ends are ours."""


# -- the messages --


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineBoot:
    """All that an engine process needs to know; its descriptors are inherited under these numbers."""

    worker_id: str
    incarnation: str
    #: Directory of the model's files (resolved by hub/ in the service process).
    model_path: str
    model_name: str
    data_dir: str
    dtype: KvDtype
    layout: KvLayout
    core: CoreConfig
    #: With a request's tenant, salt and adapter: what seeds its block hash chain.
    namespace: ModelNamespace
    #: The cluster's secret, which keys the seeds.
    secret: bytes = field(repr=False)
    pool_fd: int
    leaves_fd: int
    control_fd: int
    #: eventfd that tells the service of finished layers (memory.WorkerMemory.bell).
    bell_fd: int
    #: The bell rings after every so many layers, and after the last.
    layer_group: int
    #: CPUs this process is bound to; empty for no binding.
    cpu_affinity: tuple[int, ...] = ()
    num_threads: int = 1
    #: Failpoints of the engine's places (see failpoints/); empty in production.
    failpoints: str = ""
    log_level: str = "info"


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineMapped:
    """The engine mapped its memory writable; later writable maps may be forbidden."""

    pid: int


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineReady:
    """The model is loaded and warm."""

    load_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineFailed:
    """The engine cannot start. `message` is for the operator."""

    code: str
    message: str


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineCommands:
    """Commands for the core, in order."""

    commands: tuple[Command, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class TimedFrame:
    """A frame of the core, and when what it tells of happened, by the host's wall clock."""

    frame: CoreFrame
    #: When the frame was made: its plan runs from then on.
    planned_unix_ns: int = 0
    #: When the last layer's KV of the step before could be read, and when that step's tokens were
    #: drawn; 0 if there was none.
    last_layer_unix_ns: int = 0
    computed_unix_ns: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSteps:
    """Frames of the core, in order. Every step but the last one's plan has been computed whole."""

    frames: tuple[TimedFrame, ...]


ToEngine = EngineBoot | EngineCommands
FromEngine = EngineMapped | EngineReady | EngineFailed | EngineSteps

# -- their wire form: msgpack arrays, first element the tag --


class _Wire(msgspec.Struct, array_like=True, forbid_unknown_fields=True, gc=False):
    """Base of all wire structs."""


class _Boot(_Wire, tag=1):
    boot: EngineBoot


class _Mapped(_Wire, tag=2):
    pid: int


class _Ready(_Wire, tag=3):
    load_s: float


class _Failed(_Wire, tag=4):
    code: str
    message: str


class _Request(_Wire):
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


class _Prefill(_Wire, tag=10):
    attempt: int
    request: _Request


class _Decode(_Wire, tag=11):
    attempt: int
    has_source: bool
    request: _Request


class _BlocksArrived(_Wire, tag=12):
    attempt_id: AttemptId
    num_tokens: int


class _Arrived(_Wire, tag=13):
    attempt_id: AttemptId
    num_tokens: int
    first_token: int | None
    finish_reason: FinishReason | None


class _ReadEnded(_Wire, tag=14):
    attempt_id: AttemptId


class _Release(_Wire, tag=15):
    attempt_id: AttemptId


class _Abort(_Wire, tag=16):
    attempt_id: AttemptId


class _Drain(_Wire, tag=17):
    hand_back: bool


class _ClearCache(_Wire, tag=18):
    pass


_WireCommand = (
    _Prefill
    | _Decode
    | _BlocksArrived
    | _Arrived
    | _ReadEnded
    | _Release
    | _Abort
    | _Drain
    | _ClearCache
)


class _Commands(_Wire, tag=5):
    commands: list[_WireCommand]


class _Accepted(_Wire, tag=30):
    attempt_id: AttemptId


class _Refused(_Wire, tag=31):
    attempt_id: AttemptId
    reason: RefuseReason


class _Reserved(_Wire, tag=32):
    attempt_id: AttemptId
    num_cached_tokens: int
    block_ids: bytes


class _Revoked(_Wire, tag=33):
    attempt_id: AttemptId


class _HandedBack(_Wire, tag=34):
    attempt_id: AttemptId
    reason: HandBackReason


class _PrefillStarted(_Wire, tag=35):
    attempt_id: AttemptId
    num_cached_tokens: int
    block_ids: bytes


class _ChunkPlanned(_Wire, tag=36):
    attempt_id: AttemptId
    start: int
    end: int


class _PrefillDone(_Wire, tag=37):
    attempt_id: AttemptId
    num_cached_tokens: int
    first_token: int
    finish_reason: FinishReason | None


class _PrefillFailed(_Wire, tag=38):
    attempt_id: AttemptId
    hand_back: HandBackReason | None
    finish: FinishReason | None


class _TokensReady(_Wire, tag=39):
    attempt_id: AttemptId
    choice: int
    first_position: int
    token_ids: tuple[int, ...]
    finish_reason: FinishReason | None
    num_cached_tokens: int | None


_WireReply = (
    _Accepted
    | _Refused
    | _Reserved
    | _Revoked
    | _HandedBack
    | _PrefillStarted
    | _ChunkPlanned
    | _PrefillDone
    | _PrefillFailed
    | _TokensReady
)


class _Ledger(_Wire):
    num_total: int
    num_free: int
    num_cached: int
    num_referenced: int
    num_running: int
    num_waiting: int
    num_reserved: int
    num_prefills: int
    num_quarantined: int


class _Frame(_Wire):
    planned_unix_ns: int
    last_layer_unix_ns: int
    computed_unix_ns: int
    step: int
    replies: list[_WireReply]
    ledger: _Ledger
    num_queued_tokens: int
    num_preemptions: int
    forward_s: float
    logits_s: float
    sample_s: float
    other_s: float
    num_step_tokens: int


class _Steps(_Wire, tag=6):
    frames: list[_Frame]


_WireToEngine = _Boot | _Commands
_WireFromEngine = _Mapped | _Ready | _Failed | _Steps

_encoder = msgspec.msgpack.Encoder()
_to_engine_decoder: msgspec.msgpack.Decoder[_WireToEngine] = msgspec.msgpack.Decoder(_WireToEngine)
_from_engine_decoder: msgspec.msgpack.Decoder[_WireFromEngine] = msgspec.msgpack.Decoder(
    _WireFromEngine
)

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


def _request_to_wire(request: InferenceRequest) -> _Request:
    sampling = request.sampling
    return _Request(
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


def _request_from_wire(wire: _Request) -> InferenceRequest:
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
_COMMAND_TO_WIRE: dict[type, Callable[[Any], _WireCommand]] = {
    Prefill: lambda c: _Prefill(c.attempt, _request_to_wire(c.request)),
    Decode: lambda c: _Decode(c.attempt, c.has_source, _request_to_wire(c.request)),
    BlocksArrived: lambda c: _BlocksArrived(c.attempt_id, c.num_tokens),
    Arrived: lambda c: _Arrived(c.attempt_id, c.num_tokens, c.first_token, c.finish_reason),
    ReadEnded: lambda c: _ReadEnded(c.attempt_id),
    Release: lambda c: _Release(c.attempt_id),
    Abort: lambda c: _Abort(c.attempt_id),
    Drain: lambda c: _Drain(c.hand_back),
    ClearCache: lambda _: _ClearCache(),
}


_COMMAND_FROM_WIRE: dict[type, Callable[[Any], Command]] = {
    _Prefill: lambda w: Prefill(request=_request_from_wire(w.request), attempt=w.attempt),
    _Decode: lambda w: Decode(
        request=_request_from_wire(w.request), attempt=w.attempt, has_source=w.has_source
    ),
    _BlocksArrived: lambda w: BlocksArrived(attempt_id=w.attempt_id, num_tokens=w.num_tokens),
    _Arrived: lambda w: Arrived(
        attempt_id=w.attempt_id,
        num_tokens=w.num_tokens,
        first_token=w.first_token,
        finish_reason=w.finish_reason,
    ),
    _ReadEnded: lambda w: ReadEnded(attempt_id=w.attempt_id),
    _Release: lambda w: Release(attempt_id=w.attempt_id),
    _Abort: lambda w: Abort(attempt_id=w.attempt_id),
    _Drain: lambda w: Drain(hand_back=w.hand_back),
    _ClearCache: lambda _: ClearCache(),
}

# -- replies --


def _prefill_failed_to_wire(reply: PrefillFailed) -> _PrefillFailed:
    reason = reply.reason
    if isinstance(reason, HandBackReason):
        return _PrefillFailed(reply.attempt_id, reason, None)
    return _PrefillFailed(reply.attempt_id, None, reason)


def _prefill_failed_from_wire(wire: _PrefillFailed) -> PrefillFailed:
    reason = wire.hand_back or wire.finish
    if reason is None:
        raise EngineFrameError("a failed prefill without a reason")
    return PrefillFailed(attempt_id=wire.attempt_id, reason=reason)


def _tokens_to_wire(reply: TokensReady) -> _TokensReady:
    run = reply.run
    return _TokensReady(
        reply.attempt_id,
        run.choice,
        run.first_position,
        run.token_ids,
        run.finish_reason,
        reply.num_cached_tokens,
    )


def _tokens_from_wire(wire: _TokensReady) -> TokensReady:
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


_REPLY_TO_WIRE: dict[type, Callable[[Any], _WireReply]] = {
    TokensReady: _tokens_to_wire,
    Accepted: lambda r: _Accepted(r.attempt_id),
    Refused: lambda r: _Refused(r.attempt_id, r.reason),
    Reserved: lambda r: _Reserved(r.attempt_id, r.num_cached_tokens, _pack_u32(r.block_ids)),
    Revoked: lambda r: _Revoked(r.attempt_id),
    HandedBack: lambda r: _HandedBack(r.attempt_id, r.reason),
    PrefillStarted: lambda r: _PrefillStarted(
        r.attempt_id, r.num_cached_tokens, _pack_u32(r.block_ids)
    ),
    ChunkPlanned: lambda r: _ChunkPlanned(r.attempt_id, r.start, r.end),
    PrefillDone: lambda r: _PrefillDone(
        r.attempt_id, r.num_cached_tokens, r.first_token, r.finish_reason
    ),
    PrefillFailed: _prefill_failed_to_wire,
}

_REPLY_FROM_WIRE: dict[type, Callable[[Any], Reply]] = {
    _TokensReady: _tokens_from_wire,
    _Accepted: lambda w: Accepted(attempt_id=w.attempt_id),
    _Refused: lambda w: Refused(attempt_id=w.attempt_id, reason=w.reason),
    _Reserved: lambda w: Reserved(
        attempt_id=w.attempt_id,
        num_cached_tokens=w.num_cached_tokens,
        block_ids=_unpack_blocks(w.block_ids),
    ),
    _Revoked: lambda w: Revoked(attempt_id=w.attempt_id),
    _HandedBack: lambda w: HandedBack(attempt_id=w.attempt_id, reason=w.reason),
    _PrefillStarted: lambda w: PrefillStarted(
        attempt_id=w.attempt_id,
        num_cached_tokens=w.num_cached_tokens,
        block_ids=_unpack_blocks(w.block_ids),
    ),
    _ChunkPlanned: lambda w: ChunkPlanned(attempt_id=w.attempt_id, start=w.start, end=w.end),
    _PrefillDone: lambda w: PrefillDone(
        attempt_id=w.attempt_id,
        num_cached_tokens=w.num_cached_tokens,
        first_token=w.first_token,
        finish_reason=w.finish_reason,
    ),
    _PrefillFailed: _prefill_failed_from_wire,
}


def _frame_to_wire(timed: TimedFrame) -> _Frame:
    frame = timed.frame
    ledger = frame.ledger
    return _Frame(
        timed.planned_unix_ns,
        timed.last_layer_unix_ns,
        timed.computed_unix_ns,
        frame.step,
        [_REPLY_TO_WIRE[type(reply)](reply) for reply in frame.replies],
        _Ledger(
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


def _frame_from_wire(wire: _Frame) -> TimedFrame:
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


# -- the public functions --


def encode_to_engine(message: ToEngine) -> bytes:
    """A whole frame, length first."""
    if isinstance(message, EngineCommands):
        return _framed(_Commands([_COMMAND_TO_WIRE[type(c)](c) for c in message.commands]))
    return _framed(_Boot(message))


def decode_to_engine(payload: bytes | bytearray | memoryview) -> ToEngine:
    """Decode a frame without its length. Raises EngineFrameError."""
    try:
        wire = _to_engine_decoder.decode(payload)
    except msgspec.DecodeError as error:
        raise EngineFrameError(f"not a frame for an engine: {error}") from error
    if isinstance(wire, _Commands):
        return EngineCommands(
            commands=tuple([_COMMAND_FROM_WIRE[type(c)](c) for c in wire.commands])
        )
    return wire.boot


def encode_from_engine(message: FromEngine) -> bytes:
    """A whole frame, length first."""
    if isinstance(message, EngineSteps):
        return _framed(_Steps([_frame_to_wire(frame) for frame in message.frames]))
    if isinstance(message, EngineMapped):
        return _framed(_Mapped(message.pid))
    if isinstance(message, EngineReady):
        return _framed(_Ready(message.load_s))
    return _framed(_Failed(message.code, message.message))


def decode_from_engine(payload: bytes | bytearray | memoryview) -> FromEngine:
    """Decode a frame without its length. Raises EngineFrameError."""
    try:
        wire = _from_engine_decoder.decode(payload)
    except msgspec.DecodeError as error:
        raise EngineFrameError(f"not a frame of an engine: {error}") from error
    if isinstance(wire, _Steps):
        return EngineSteps(frames=tuple([_frame_from_wire(frame) for frame in wire.frames]))
    if isinstance(wire, _Mapped):
        return EngineMapped(pid=wire.pid)
    if isinstance(wire, _Ready):
        return EngineReady(load_s=wire.load_s)
    return EngineFailed(code=wire.code, message=wire.message)


def _framed(wire: _Wire) -> bytes:
    buffer = bytearray(_LENGTH.size)
    _encoder.encode_into(wire, buffer, _LENGTH.size)
    num_bytes = len(buffer) - _LENGTH.size
    if num_bytes > MAX_FRAME_BYTES:
        raise EngineFrameError(f"a frame of {num_bytes} bytes is longer than {MAX_FRAME_BYTES}")
    _LENGTH.pack_into(buffer, 0, num_bytes)
    return bytes(buffer)


class FrameBuffer:
    """Cuts a byte stream into frames; bytes of an unfinished one wait for the rest."""

    def __init__(self) -> None:
        self._data = bytearray()

    def feed(self, data: bytes | memoryview) -> None:
        self._data += data

    @property
    def num_waiting_bytes(self) -> int:
        return len(self._data)

    def frames(self) -> Iterator[bytes]:
        """Yield every complete frame's payload and forget it. Raises EngineFrameError."""
        offset = 0
        data = self._data
        try:
            while len(data) - offset >= _LENGTH.size:
                (num_bytes,) = _LENGTH.unpack_from(data, offset)
                if num_bytes > MAX_FRAME_BYTES:
                    raise EngineFrameError(f"a frame claims {num_bytes} bytes")
                end = offset + _LENGTH.size + num_bytes
                if len(data) < end:
                    break
                payload = bytes(memoryview(data)[offset + _LENGTH.size : end])
                offset = end
                yield payload
        finally:
            if offset:
                del data[:offset]


def merge_frames(waiting: list[TimedFrame], newest: TimedFrame) -> None:
    """Add a frame to those that could not be sent yet; in place.

    The last waiting one is absorbed by the newest unless it plans chunks: a ChunkPlanned belongs to
    its frame's step. So the list stays as short as the prefill work that was accepted, however long
    the reader sleeps.
    """
    if waiting and not _plans_chunks(waiting[-1].frame):
        newest = _merged(waiting.pop(), newest)
    waiting.append(newest)


def _plans_chunks(frame: CoreFrame) -> bool:
    return any(isinstance(reply, ChunkPlanned) for reply in frame.replies)


def _merged(older: TimedFrame, newer: TimedFrame) -> TimedFrame:
    frame = replace(
        newer.frame,
        replies=older.frame.replies + newer.frame.replies,
        num_preemptions=older.frame.num_preemptions + newer.frame.num_preemptions,
    )
    return replace(newer, frame=frame)
