"""The wire structs of commands to the core, and their conversion: one for each value of core/protocol.py."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from moonpool.core.protocol import (
    Abort,
    Arrived,
    BlocksArrived,
    BlocksFetched,
    ClearCache,
    Command,
    Decode,
    Drain,
    FetchEnded,
    LockPrefix,
    Prefill,
    ReadEnded,
    Release,
    UnlockPrefix,
)
from moonpool.ids import AttemptId, RequestId, WorkerKey
from moonpool.inference.output import FinishReason
from moonpool.inference.request import InferenceRequest
from moonpool.inference.sampling import SamplingParams
from moonpool.wire.engine_base import Wire, pack_hashes, pack_u32, unpack_hashes, unpack_u32


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
    num_peer_tokens: int
    request: WireRequest


class WireDecode(Wire, tag=11):
    attempt: int
    has_source: bool
    num_peer_tokens: int
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


class WireBlocksFetched(Wire, tag=19):
    attempt_id: AttemptId
    num_tokens: int


class WireFetchEnded(Wire, tag=20):
    attempt_id: AttemptId
    num_tokens: int


class WireLockPrefix(Wire, tag=21):
    read_id: int
    hashes: bytes
    reader: WorkerKey | None


class WireUnlockPrefix(Wire, tag=22):
    read_id: int


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
    | WireBlocksFetched
    | WireFetchEnded
    | WireLockPrefix
    | WireUnlockPrefix
)


def _request_to_wire(request: InferenceRequest) -> WireRequest:
    sampling = request.sampling
    return WireRequest(
        request.request_id,
        request.model,
        pack_u32(request.prompt_token_ids),
        pack_u32(request.emitted_token_ids),
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
        prompt_token_ids=unpack_u32(wire.prompt),
        emitted_token_ids=unpack_u32(wire.emitted),
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
    Prefill: lambda c: WirePrefill(c.attempt, c.num_peer_tokens, _request_to_wire(c.request)),
    Decode: lambda c: WireDecode(
        c.attempt, c.has_source, c.num_peer_tokens, _request_to_wire(c.request)
    ),
    BlocksArrived: lambda c: WireBlocksArrived(c.attempt_id, c.num_tokens),
    Arrived: lambda c: WireArrived(c.attempt_id, c.num_tokens, c.first_token, c.finish_reason),
    ReadEnded: lambda c: WireReadEnded(c.attempt_id),
    Release: lambda c: WireRelease(c.attempt_id),
    Abort: lambda c: WireAbort(c.attempt_id),
    Drain: lambda c: WireDrain(c.hand_back),
    ClearCache: lambda _: WireClearCache(),
    BlocksFetched: lambda c: WireBlocksFetched(c.attempt_id, c.num_tokens),
    FetchEnded: lambda c: WireFetchEnded(c.attempt_id, c.num_tokens),
    LockPrefix: lambda c: WireLockPrefix(c.read_id, pack_hashes(c.hashes), c.reader),
    UnlockPrefix: lambda c: WireUnlockPrefix(c.read_id),
}


_COMMAND_FROM_WIRE: dict[type, Callable[[Any], Command]] = {
    WirePrefill: lambda w: Prefill(
        request=_request_from_wire(w.request),
        attempt=w.attempt,
        num_peer_tokens=w.num_peer_tokens,
    ),
    WireDecode: lambda w: Decode(
        request=_request_from_wire(w.request),
        attempt=w.attempt,
        has_source=w.has_source,
        num_peer_tokens=w.num_peer_tokens,
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
    WireBlocksFetched: lambda w: BlocksFetched(attempt_id=w.attempt_id, num_tokens=w.num_tokens),
    WireFetchEnded: lambda w: FetchEnded(attempt_id=w.attempt_id, num_tokens=w.num_tokens),
    WireLockPrefix: lambda w: LockPrefix(
        read_id=w.read_id, hashes=unpack_hashes(w.hashes), reader=w.reader
    ),
    WireUnlockPrefix: lambda w: UnlockPrefix(read_id=w.read_id),
}


def command_to_wire(command: Command) -> WireCommand:
    return _COMMAND_TO_WIRE[type(command)](command)


def command_from_wire(wire: WireCommand) -> Command:
    """Raises EngineFrameError."""
    return _COMMAND_FROM_WIRE[type(wire)](wire)
