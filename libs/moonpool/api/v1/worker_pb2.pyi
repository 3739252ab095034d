from moonpool.api.v1 import kv_pb2 as _kv_pb2
from moonpool.api.v1 import request_pb2 as _request_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Role(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    ROLE_UNSPECIFIED: _ClassVar[Role]
    ROLE_PREFILL: _ClassVar[Role]
    ROLE_DECODE: _ClassVar[Role]
    ROLE_BOTH: _ClassVar[Role]
    ROLE_STORE: _ClassVar[Role]
ROLE_UNSPECIFIED: Role
ROLE_PREFILL: Role
ROLE_DECODE: Role
ROLE_BOTH: Role
ROLE_STORE: Role

class ModelNamespace(_message.Message):
    __slots__ = ("model", "fingerprint", "kv_dtype", "block_size", "extra")
    class ExtraEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    MODEL_FIELD_NUMBER: _ClassVar[int]
    FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    KV_DTYPE_FIELD_NUMBER: _ClassVar[int]
    BLOCK_SIZE_FIELD_NUMBER: _ClassVar[int]
    EXTRA_FIELD_NUMBER: _ClassVar[int]
    model: str
    fingerprint: str
    kv_dtype: str
    block_size: int
    extra: _containers.ScalarMap[str, str]
    def __init__(self, model: _Optional[str] = ..., fingerprint: _Optional[str] = ..., kv_dtype: _Optional[str] = ..., block_size: _Optional[int] = ..., extra: _Optional[_Mapping[str, str]] = ...) -> None: ...

class RouterHello(_message.Message):
    __slots__ = ("protocol_major", "protocol_minor", "router_id", "namespace", "secret_fingerprint")
    PROTOCOL_MAJOR_FIELD_NUMBER: _ClassVar[int]
    PROTOCOL_MINOR_FIELD_NUMBER: _ClassVar[int]
    ROUTER_ID_FIELD_NUMBER: _ClassVar[int]
    NAMESPACE_FIELD_NUMBER: _ClassVar[int]
    SECRET_FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    protocol_major: int
    protocol_minor: int
    router_id: str
    namespace: ModelNamespace
    secret_fingerprint: str
    def __init__(self, protocol_major: _Optional[int] = ..., protocol_minor: _Optional[int] = ..., router_id: _Optional[str] = ..., namespace: _Optional[_Union[ModelNamespace, _Mapping]] = ..., secret_fingerprint: _Optional[str] = ...) -> None: ...

class WorkerHello(_message.Message):
    __slots__ = ("protocol_major", "protocol_minor", "worker", "role", "namespace", "secret_fingerprint", "regions", "max_model_len", "max_num_seqs", "max_num_batched_tokens", "grpc_address", "version", "kv_eviction_policy")
    PROTOCOL_MAJOR_FIELD_NUMBER: _ClassVar[int]
    PROTOCOL_MINOR_FIELD_NUMBER: _ClassVar[int]
    WORKER_FIELD_NUMBER: _ClassVar[int]
    ROLE_FIELD_NUMBER: _ClassVar[int]
    NAMESPACE_FIELD_NUMBER: _ClassVar[int]
    SECRET_FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    REGIONS_FIELD_NUMBER: _ClassVar[int]
    MAX_MODEL_LEN_FIELD_NUMBER: _ClassVar[int]
    MAX_NUM_SEQS_FIELD_NUMBER: _ClassVar[int]
    MAX_NUM_BATCHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    GRPC_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    KV_EVICTION_POLICY_FIELD_NUMBER: _ClassVar[int]
    protocol_major: int
    protocol_minor: int
    worker: _request_pb2.WorkerKey
    role: Role
    namespace: ModelNamespace
    secret_fingerprint: str
    regions: _containers.RepeatedCompositeFieldContainer[_kv_pb2.KvRegion]
    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    grpc_address: str
    version: str
    kv_eviction_policy: str
    def __init__(self, protocol_major: _Optional[int] = ..., protocol_minor: _Optional[int] = ..., worker: _Optional[_Union[_request_pb2.WorkerKey, _Mapping]] = ..., role: _Optional[_Union[Role, str]] = ..., namespace: _Optional[_Union[ModelNamespace, _Mapping]] = ..., secret_fingerprint: _Optional[str] = ..., regions: _Optional[_Iterable[_Union[_kv_pb2.KvRegion, _Mapping]]] = ..., max_model_len: _Optional[int] = ..., max_num_seqs: _Optional[int] = ..., max_num_batched_tokens: _Optional[int] = ..., grpc_address: _Optional[str] = ..., version: _Optional[str] = ..., kv_eviction_policy: _Optional[str] = ...) -> None: ...

class Load(_message.Message):
    __slots__ = ("num_total_blocks", "num_free_blocks", "num_cached_blocks", "num_running", "num_waiting", "num_reserved", "num_prefills", "num_queued_tokens", "step_age_ms", "is_draining", "fits")
    NUM_TOTAL_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    NUM_FREE_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    NUM_CACHED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    NUM_RUNNING_FIELD_NUMBER: _ClassVar[int]
    NUM_WAITING_FIELD_NUMBER: _ClassVar[int]
    NUM_RESERVED_FIELD_NUMBER: _ClassVar[int]
    NUM_PREFILLS_FIELD_NUMBER: _ClassVar[int]
    NUM_QUEUED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    STEP_AGE_MS_FIELD_NUMBER: _ClassVar[int]
    IS_DRAINING_FIELD_NUMBER: _ClassVar[int]
    FITS_FIELD_NUMBER: _ClassVar[int]
    num_total_blocks: int
    num_free_blocks: int
    num_cached_blocks: int
    num_running: int
    num_waiting: int
    num_reserved: int
    num_prefills: int
    num_queued_tokens: int
    step_age_ms: int
    is_draining: bool
    fits: Fits
    def __init__(self, num_total_blocks: _Optional[int] = ..., num_free_blocks: _Optional[int] = ..., num_cached_blocks: _Optional[int] = ..., num_running: _Optional[int] = ..., num_waiting: _Optional[int] = ..., num_reserved: _Optional[int] = ..., num_prefills: _Optional[int] = ..., num_queued_tokens: _Optional[int] = ..., step_age_ms: _Optional[int] = ..., is_draining: _Optional[bool] = ..., fits: _Optional[_Union[Fits, _Mapping]] = ...) -> None: ...

class Fits(_message.Message):
    __slots__ = ("prefill", "decode", "transfers")
    PREFILL_FIELD_NUMBER: _ClassVar[int]
    DECODE_FIELD_NUMBER: _ClassVar[int]
    TRANSFERS_FIELD_NUMBER: _ClassVar[int]
    prefill: PrefillCost
    decode: DecodeCost
    transfers: _containers.RepeatedCompositeFieldContainer[TransferCost]
    def __init__(self, prefill: _Optional[_Union[PrefillCost, _Mapping]] = ..., decode: _Optional[_Union[DecodeCost, _Mapping]] = ..., transfers: _Optional[_Iterable[_Union[TransferCost, _Mapping]]] = ...) -> None: ...

class PrefillCost(_message.Message):
    __slots__ = ("base_s", "per_token_s", "per_work_s", "max_step_tokens")
    BASE_S_FIELD_NUMBER: _ClassVar[int]
    PER_TOKEN_S_FIELD_NUMBER: _ClassVar[int]
    PER_WORK_S_FIELD_NUMBER: _ClassVar[int]
    MAX_STEP_TOKENS_FIELD_NUMBER: _ClassVar[int]
    base_s: float
    per_token_s: float
    per_work_s: float
    max_step_tokens: int
    def __init__(self, base_s: _Optional[float] = ..., per_token_s: _Optional[float] = ..., per_work_s: _Optional[float] = ..., max_step_tokens: _Optional[int] = ...) -> None: ...

class DecodeCost(_message.Message):
    __slots__ = ("base_s", "per_context_token_s", "per_request_s")
    BASE_S_FIELD_NUMBER: _ClassVar[int]
    PER_CONTEXT_TOKEN_S_FIELD_NUMBER: _ClassVar[int]
    PER_REQUEST_S_FIELD_NUMBER: _ClassVar[int]
    base_s: float
    per_context_token_s: float
    per_request_s: float
    def __init__(self, base_s: _Optional[float] = ..., per_context_token_s: _Optional[float] = ..., per_request_s: _Optional[float] = ...) -> None: ...

class TransferCost(_message.Message):
    __slots__ = ("peer", "latency_s", "bytes_per_s")
    PEER_FIELD_NUMBER: _ClassVar[int]
    LATENCY_S_FIELD_NUMBER: _ClassVar[int]
    BYTES_PER_S_FIELD_NUMBER: _ClassVar[int]
    peer: _request_pb2.WorkerKey
    latency_s: float
    bytes_per_s: float
    def __init__(self, peer: _Optional[_Union[_request_pb2.WorkerKey, _Mapping]] = ..., latency_s: _Optional[float] = ..., bytes_per_s: _Optional[float] = ...) -> None: ...

class Source(_message.Message):
    __slots__ = ("worker", "grpc_address")
    WORKER_FIELD_NUMBER: _ClassVar[int]
    GRPC_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    worker: _request_pb2.WorkerKey
    grpc_address: str
    def __init__(self, worker: _Optional[_Union[_request_pb2.WorkerKey, _Mapping]] = ..., grpc_address: _Optional[str] = ...) -> None: ...

class Peer(_message.Message):
    __slots__ = ("worker", "grpc_address", "num_tokens", "is_store")
    WORKER_FIELD_NUMBER: _ClassVar[int]
    GRPC_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    IS_STORE_FIELD_NUMBER: _ClassVar[int]
    worker: _request_pb2.WorkerKey
    grpc_address: str
    num_tokens: int
    is_store: bool
    def __init__(self, worker: _Optional[_Union[_request_pb2.WorkerKey, _Mapping]] = ..., grpc_address: _Optional[str] = ..., num_tokens: _Optional[int] = ..., is_store: _Optional[bool] = ...) -> None: ...

class PrefillCommand(_message.Message):
    __slots__ = ("request", "attempt", "deadline_ms", "peer")
    REQUEST_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    DEADLINE_MS_FIELD_NUMBER: _ClassVar[int]
    PEER_FIELD_NUMBER: _ClassVar[int]
    request: _request_pb2.Request
    attempt: int
    deadline_ms: int
    peer: Peer
    def __init__(self, request: _Optional[_Union[_request_pb2.Request, _Mapping]] = ..., attempt: _Optional[int] = ..., deadline_ms: _Optional[int] = ..., peer: _Optional[_Union[Peer, _Mapping]] = ...) -> None: ...

class DecodeCommand(_message.Message):
    __slots__ = ("request", "attempt", "deadline_ms", "source", "peer")
    REQUEST_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    DEADLINE_MS_FIELD_NUMBER: _ClassVar[int]
    SOURCE_FIELD_NUMBER: _ClassVar[int]
    PEER_FIELD_NUMBER: _ClassVar[int]
    request: _request_pb2.Request
    attempt: int
    deadline_ms: int
    source: Source
    peer: Peer
    def __init__(self, request: _Optional[_Union[_request_pb2.Request, _Mapping]] = ..., attempt: _Optional[int] = ..., deadline_ms: _Optional[int] = ..., source: _Optional[_Union[Source, _Mapping]] = ..., peer: _Optional[_Union[Peer, _Mapping]] = ...) -> None: ...

class AbortCommand(_message.Message):
    __slots__ = ("attempt_id", "choice")
    ATTEMPT_ID_FIELD_NUMBER: _ClassVar[int]
    CHOICE_FIELD_NUMBER: _ClassVar[int]
    attempt_id: _request_pb2.AttemptId
    choice: int
    def __init__(self, attempt_id: _Optional[_Union[_request_pb2.AttemptId, _Mapping]] = ..., choice: _Optional[int] = ...) -> None: ...

class RouterMessage(_message.Message):
    __slots__ = ("hello", "prefill", "decode", "abort", "ping")
    HELLO_FIELD_NUMBER: _ClassVar[int]
    PREFILL_FIELD_NUMBER: _ClassVar[int]
    DECODE_FIELD_NUMBER: _ClassVar[int]
    ABORT_FIELD_NUMBER: _ClassVar[int]
    PING_FIELD_NUMBER: _ClassVar[int]
    hello: RouterHello
    prefill: PrefillCommand
    decode: DecodeCommand
    abort: AbortCommand
    ping: Ping
    def __init__(self, hello: _Optional[_Union[RouterHello, _Mapping]] = ..., prefill: _Optional[_Union[PrefillCommand, _Mapping]] = ..., decode: _Optional[_Union[DecodeCommand, _Mapping]] = ..., abort: _Optional[_Union[AbortCommand, _Mapping]] = ..., ping: _Optional[_Union[Ping, _Mapping]] = ...) -> None: ...

class Ping(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class TokenReport(_message.Message):
    __slots__ = ("attempt_id", "run", "num_cached_tokens", "is_prefill_side", "num_peer_tokens", "num_peer_held_tokens")
    ATTEMPT_ID_FIELD_NUMBER: _ClassVar[int]
    RUN_FIELD_NUMBER: _ClassVar[int]
    NUM_CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    IS_PREFILL_SIDE_FIELD_NUMBER: _ClassVar[int]
    NUM_PEER_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_PEER_HELD_TOKENS_FIELD_NUMBER: _ClassVar[int]
    attempt_id: _request_pb2.AttemptId
    run: _request_pb2.TokenRun
    num_cached_tokens: int
    is_prefill_side: bool
    num_peer_tokens: int
    num_peer_held_tokens: int
    def __init__(self, attempt_id: _Optional[_Union[_request_pb2.AttemptId, _Mapping]] = ..., run: _Optional[_Union[_request_pb2.TokenRun, _Mapping]] = ..., num_cached_tokens: _Optional[int] = ..., is_prefill_side: _Optional[bool] = ..., num_peer_tokens: _Optional[int] = ..., num_peer_held_tokens: _Optional[int] = ...) -> None: ...

class RefusedReport(_message.Message):
    __slots__ = ("attempt_id", "reason", "is_prefill_side")
    ATTEMPT_ID_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    IS_PREFILL_SIDE_FIELD_NUMBER: _ClassVar[int]
    attempt_id: _request_pb2.AttemptId
    reason: str
    is_prefill_side: bool
    def __init__(self, attempt_id: _Optional[_Union[_request_pb2.AttemptId, _Mapping]] = ..., reason: _Optional[str] = ..., is_prefill_side: _Optional[bool] = ...) -> None: ...

class HandedBackReport(_message.Message):
    __slots__ = ("attempt_id", "reason", "is_prefill_side")
    ATTEMPT_ID_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    IS_PREFILL_SIDE_FIELD_NUMBER: _ClassVar[int]
    attempt_id: _request_pb2.AttemptId
    reason: str
    is_prefill_side: bool
    def __init__(self, attempt_id: _Optional[_Union[_request_pb2.AttemptId, _Mapping]] = ..., reason: _Optional[str] = ..., is_prefill_side: _Optional[bool] = ...) -> None: ...

class SpanReport(_message.Message):
    __slots__ = ("trace_id", "span_id", "parent_span_id", "name", "start_unix_ns", "end_unix_ns", "attributes_json", "events_json", "is_error")
    TRACE_ID_FIELD_NUMBER: _ClassVar[int]
    SPAN_ID_FIELD_NUMBER: _ClassVar[int]
    PARENT_SPAN_ID_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    START_UNIX_NS_FIELD_NUMBER: _ClassVar[int]
    END_UNIX_NS_FIELD_NUMBER: _ClassVar[int]
    ATTRIBUTES_JSON_FIELD_NUMBER: _ClassVar[int]
    EVENTS_JSON_FIELD_NUMBER: _ClassVar[int]
    IS_ERROR_FIELD_NUMBER: _ClassVar[int]
    trace_id: str
    span_id: str
    parent_span_id: str
    name: str
    start_unix_ns: int
    end_unix_ns: int
    attributes_json: str
    events_json: str
    is_error: bool
    def __init__(self, trace_id: _Optional[str] = ..., span_id: _Optional[str] = ..., parent_span_id: _Optional[str] = ..., name: _Optional[str] = ..., start_unix_ns: _Optional[int] = ..., end_unix_ns: _Optional[int] = ..., attributes_json: _Optional[str] = ..., events_json: _Optional[str] = ..., is_error: _Optional[bool] = ...) -> None: ...

class WorkerFrame(_message.Message):
    __slots__ = ("tokens", "refused", "handed_back", "spans", "load")
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    REFUSED_FIELD_NUMBER: _ClassVar[int]
    HANDED_BACK_FIELD_NUMBER: _ClassVar[int]
    SPANS_FIELD_NUMBER: _ClassVar[int]
    LOAD_FIELD_NUMBER: _ClassVar[int]
    tokens: _containers.RepeatedCompositeFieldContainer[TokenReport]
    refused: _containers.RepeatedCompositeFieldContainer[RefusedReport]
    handed_back: _containers.RepeatedCompositeFieldContainer[HandedBackReport]
    spans: _containers.RepeatedCompositeFieldContainer[SpanReport]
    load: Load
    def __init__(self, tokens: _Optional[_Iterable[_Union[TokenReport, _Mapping]]] = ..., refused: _Optional[_Iterable[_Union[RefusedReport, _Mapping]]] = ..., handed_back: _Optional[_Iterable[_Union[HandedBackReport, _Mapping]]] = ..., spans: _Optional[_Iterable[_Union[SpanReport, _Mapping]]] = ..., load: _Optional[_Union[Load, _Mapping]] = ...) -> None: ...

class WorkerMessage(_message.Message):
    __slots__ = ("hello", "frame")
    HELLO_FIELD_NUMBER: _ClassVar[int]
    FRAME_FIELD_NUMBER: _ClassVar[int]
    hello: WorkerHello
    frame: WorkerFrame
    def __init__(self, hello: _Optional[_Union[WorkerHello, _Mapping]] = ..., frame: _Optional[_Union[WorkerFrame, _Mapping]] = ...) -> None: ...

class HandoffOpen(_message.Message):
    __slots__ = ("attempt_id", "decode_worker", "prefill_worker", "namespace", "secret_fingerprint", "traceparent", "namespace_fingerprint")
    ATTEMPT_ID_FIELD_NUMBER: _ClassVar[int]
    DECODE_WORKER_FIELD_NUMBER: _ClassVar[int]
    PREFILL_WORKER_FIELD_NUMBER: _ClassVar[int]
    NAMESPACE_FIELD_NUMBER: _ClassVar[int]
    SECRET_FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    TRACEPARENT_FIELD_NUMBER: _ClassVar[int]
    NAMESPACE_FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    attempt_id: _request_pb2.AttemptId
    decode_worker: _request_pb2.WorkerKey
    prefill_worker: _request_pb2.WorkerKey
    namespace: ModelNamespace
    secret_fingerprint: str
    traceparent: str
    namespace_fingerprint: str
    def __init__(self, attempt_id: _Optional[_Union[_request_pb2.AttemptId, _Mapping]] = ..., decode_worker: _Optional[_Union[_request_pb2.WorkerKey, _Mapping]] = ..., prefill_worker: _Optional[_Union[_request_pb2.WorkerKey, _Mapping]] = ..., namespace: _Optional[_Union[ModelNamespace, _Mapping]] = ..., secret_fingerprint: _Optional[str] = ..., traceparent: _Optional[str] = ..., namespace_fingerprint: _Optional[str] = ...) -> None: ...

class FromDecode(_message.Message):
    __slots__ = ("open",)
    OPEN_FIELD_NUMBER: _ClassVar[int]
    open: HandoffOpen
    def __init__(self, open: _Optional[_Union[HandoffOpen, _Mapping]] = ...) -> None: ...

class HandoffOpened(_message.Message):
    __slots__ = ("num_cached_tokens", "block_ids", "leaves", "num_peer_tokens", "num_peer_held_tokens")
    NUM_CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    BLOCK_IDS_FIELD_NUMBER: _ClassVar[int]
    LEAVES_FIELD_NUMBER: _ClassVar[int]
    NUM_PEER_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_PEER_HELD_TOKENS_FIELD_NUMBER: _ClassVar[int]
    num_cached_tokens: int
    block_ids: _containers.RepeatedScalarFieldContainer[int]
    leaves: bytes
    num_peer_tokens: int
    num_peer_held_tokens: int
    def __init__(self, num_cached_tokens: _Optional[int] = ..., block_ids: _Optional[_Iterable[int]] = ..., leaves: _Optional[bytes] = ..., num_peer_tokens: _Optional[int] = ..., num_peer_held_tokens: _Optional[int] = ...) -> None: ...

class HandoffLayersReady(_message.Message):
    __slots__ = ("start", "end", "first_layer", "end_layer", "block_ids", "leaves")
    START_FIELD_NUMBER: _ClassVar[int]
    END_FIELD_NUMBER: _ClassVar[int]
    FIRST_LAYER_FIELD_NUMBER: _ClassVar[int]
    END_LAYER_FIELD_NUMBER: _ClassVar[int]
    BLOCK_IDS_FIELD_NUMBER: _ClassVar[int]
    LEAVES_FIELD_NUMBER: _ClassVar[int]
    start: int
    end: int
    first_layer: int
    end_layer: int
    block_ids: _containers.RepeatedScalarFieldContainer[int]
    leaves: bytes
    def __init__(self, start: _Optional[int] = ..., end: _Optional[int] = ..., first_layer: _Optional[int] = ..., end_layer: _Optional[int] = ..., block_ids: _Optional[_Iterable[int]] = ..., leaves: _Optional[bytes] = ...) -> None: ...

class HandoffCommit(_message.Message):
    __slots__ = ("choice", "first_position", "first_token", "finish_reason", "num_cached_tokens", "last_layer_unix_ns", "first_token_unix_ns", "num_peer_tokens")
    CHOICE_FIELD_NUMBER: _ClassVar[int]
    FIRST_POSITION_FIELD_NUMBER: _ClassVar[int]
    FIRST_TOKEN_FIELD_NUMBER: _ClassVar[int]
    FINISH_REASON_FIELD_NUMBER: _ClassVar[int]
    NUM_CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    LAST_LAYER_UNIX_NS_FIELD_NUMBER: _ClassVar[int]
    FIRST_TOKEN_UNIX_NS_FIELD_NUMBER: _ClassVar[int]
    NUM_PEER_TOKENS_FIELD_NUMBER: _ClassVar[int]
    choice: int
    first_position: int
    first_token: int
    finish_reason: _request_pb2.FinishReason
    num_cached_tokens: int
    last_layer_unix_ns: int
    first_token_unix_ns: int
    num_peer_tokens: int
    def __init__(self, choice: _Optional[int] = ..., first_position: _Optional[int] = ..., first_token: _Optional[int] = ..., finish_reason: _Optional[_Union[_request_pb2.FinishReason, str]] = ..., num_cached_tokens: _Optional[int] = ..., last_layer_unix_ns: _Optional[int] = ..., first_token_unix_ns: _Optional[int] = ..., num_peer_tokens: _Optional[int] = ...) -> None: ...

class HandoffFailed(_message.Message):
    __slots__ = ("reason",)
    REASON_FIELD_NUMBER: _ClassVar[int]
    reason: str
    def __init__(self, reason: _Optional[str] = ...) -> None: ...

class HandoffWaiting(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class HandoffReset(_message.Message):
    __slots__ = ("reason",)
    REASON_FIELD_NUMBER: _ClassVar[int]
    reason: str
    def __init__(self, reason: _Optional[str] = ...) -> None: ...

class FromPrefill(_message.Message):
    __slots__ = ("opened", "layers", "commit", "failed", "waiting", "reset")
    OPENED_FIELD_NUMBER: _ClassVar[int]
    LAYERS_FIELD_NUMBER: _ClassVar[int]
    COMMIT_FIELD_NUMBER: _ClassVar[int]
    FAILED_FIELD_NUMBER: _ClassVar[int]
    WAITING_FIELD_NUMBER: _ClassVar[int]
    RESET_FIELD_NUMBER: _ClassVar[int]
    opened: HandoffOpened
    layers: HandoffLayersReady
    commit: HandoffCommit
    failed: HandoffFailed
    waiting: HandoffWaiting
    reset: HandoffReset
    def __init__(self, opened: _Optional[_Union[HandoffOpened, _Mapping]] = ..., layers: _Optional[_Union[HandoffLayersReady, _Mapping]] = ..., commit: _Optional[_Union[HandoffCommit, _Mapping]] = ..., failed: _Optional[_Union[HandoffFailed, _Mapping]] = ..., waiting: _Optional[_Union[HandoffWaiting, _Mapping]] = ..., reset: _Optional[_Union[HandoffReset, _Mapping]] = ...) -> None: ...

class PrefixOpen(_message.Message):
    __slots__ = ("attempt_id", "reader", "holder", "namespace_fingerprint", "secret_fingerprint", "traceparent", "hashes", "first")
    ATTEMPT_ID_FIELD_NUMBER: _ClassVar[int]
    READER_FIELD_NUMBER: _ClassVar[int]
    HOLDER_FIELD_NUMBER: _ClassVar[int]
    NAMESPACE_FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    SECRET_FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    TRACEPARENT_FIELD_NUMBER: _ClassVar[int]
    HASHES_FIELD_NUMBER: _ClassVar[int]
    FIRST_FIELD_NUMBER: _ClassVar[int]
    attempt_id: _request_pb2.AttemptId
    reader: _request_pb2.WorkerKey
    holder: _request_pb2.WorkerKey
    namespace_fingerprint: str
    secret_fingerprint: str
    traceparent: str
    hashes: _containers.RepeatedScalarFieldContainer[bytes]
    first: int
    def __init__(self, attempt_id: _Optional[_Union[_request_pb2.AttemptId, _Mapping]] = ..., reader: _Optional[_Union[_request_pb2.WorkerKey, _Mapping]] = ..., holder: _Optional[_Union[_request_pb2.WorkerKey, _Mapping]] = ..., namespace_fingerprint: _Optional[str] = ..., secret_fingerprint: _Optional[str] = ..., traceparent: _Optional[str] = ..., hashes: _Optional[_Iterable[bytes]] = ..., first: _Optional[int] = ...) -> None: ...

class PrefixClose(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class FromReader(_message.Message):
    __slots__ = ("open", "close", "lease")
    OPEN_FIELD_NUMBER: _ClassVar[int]
    CLOSE_FIELD_NUMBER: _ClassVar[int]
    LEASE_FIELD_NUMBER: _ClassVar[int]
    open: PrefixOpen
    close: PrefixClose
    lease: int
    def __init__(self, open: _Optional[_Union[PrefixOpen, _Mapping]] = ..., close: _Optional[_Union[PrefixClose, _Mapping]] = ..., lease: _Optional[int] = ...) -> None: ...

class PrefixStaging(_message.Message):
    __slots__ = ("num_ready_blocks", "num_blocks")
    NUM_READY_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    NUM_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    num_ready_blocks: int
    num_blocks: int
    def __init__(self, num_ready_blocks: _Optional[int] = ..., num_blocks: _Optional[int] = ...) -> None: ...

class PrefixOpened(_message.Message):
    __slots__ = ("block_ids", "leaves")
    BLOCK_IDS_FIELD_NUMBER: _ClassVar[int]
    LEAVES_FIELD_NUMBER: _ClassVar[int]
    block_ids: _containers.RepeatedScalarFieldContainer[int]
    leaves: bytes
    def __init__(self, block_ids: _Optional[_Iterable[int]] = ..., leaves: _Optional[bytes] = ...) -> None: ...

class PrefixFailed(_message.Message):
    __slots__ = ("reason", "message")
    REASON_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    reason: str
    message: str
    def __init__(self, reason: _Optional[str] = ..., message: _Optional[str] = ...) -> None: ...

class PrefixEnded(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class FromHolder(_message.Message):
    __slots__ = ("opened", "failed", "ended", "staging", "lease")
    OPENED_FIELD_NUMBER: _ClassVar[int]
    FAILED_FIELD_NUMBER: _ClassVar[int]
    ENDED_FIELD_NUMBER: _ClassVar[int]
    STAGING_FIELD_NUMBER: _ClassVar[int]
    LEASE_FIELD_NUMBER: _ClassVar[int]
    opened: PrefixOpened
    failed: PrefixFailed
    ended: PrefixEnded
    staging: PrefixStaging
    lease: int
    def __init__(self, opened: _Optional[_Union[PrefixOpened, _Mapping]] = ..., failed: _Optional[_Union[PrefixFailed, _Mapping]] = ..., ended: _Optional[_Union[PrefixEnded, _Mapping]] = ..., staging: _Optional[_Union[PrefixStaging, _Mapping]] = ..., lease: _Optional[int] = ...) -> None: ...

class DescribeRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class LedgerRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class LedgerReply(_message.Message):
    __slots__ = ("worker", "num_total", "num_free", "num_cached", "num_referenced", "num_running", "num_waiting", "num_reserved", "num_prefills", "num_quarantined", "num_handoffs", "num_open_streams", "num_reads", "num_router_sessions", "is_quiet", "num_prefix_locks")
    WORKER_FIELD_NUMBER: _ClassVar[int]
    NUM_TOTAL_FIELD_NUMBER: _ClassVar[int]
    NUM_FREE_FIELD_NUMBER: _ClassVar[int]
    NUM_CACHED_FIELD_NUMBER: _ClassVar[int]
    NUM_REFERENCED_FIELD_NUMBER: _ClassVar[int]
    NUM_RUNNING_FIELD_NUMBER: _ClassVar[int]
    NUM_WAITING_FIELD_NUMBER: _ClassVar[int]
    NUM_RESERVED_FIELD_NUMBER: _ClassVar[int]
    NUM_PREFILLS_FIELD_NUMBER: _ClassVar[int]
    NUM_QUARANTINED_FIELD_NUMBER: _ClassVar[int]
    NUM_HANDOFFS_FIELD_NUMBER: _ClassVar[int]
    NUM_OPEN_STREAMS_FIELD_NUMBER: _ClassVar[int]
    NUM_READS_FIELD_NUMBER: _ClassVar[int]
    NUM_ROUTER_SESSIONS_FIELD_NUMBER: _ClassVar[int]
    IS_QUIET_FIELD_NUMBER: _ClassVar[int]
    NUM_PREFIX_LOCKS_FIELD_NUMBER: _ClassVar[int]
    worker: _request_pb2.WorkerKey
    num_total: int
    num_free: int
    num_cached: int
    num_referenced: int
    num_running: int
    num_waiting: int
    num_reserved: int
    num_prefills: int
    num_quarantined: int
    num_handoffs: int
    num_open_streams: int
    num_reads: int
    num_router_sessions: int
    is_quiet: bool
    num_prefix_locks: int
    def __init__(self, worker: _Optional[_Union[_request_pb2.WorkerKey, _Mapping]] = ..., num_total: _Optional[int] = ..., num_free: _Optional[int] = ..., num_cached: _Optional[int] = ..., num_referenced: _Optional[int] = ..., num_running: _Optional[int] = ..., num_waiting: _Optional[int] = ..., num_reserved: _Optional[int] = ..., num_prefills: _Optional[int] = ..., num_quarantined: _Optional[int] = ..., num_handoffs: _Optional[int] = ..., num_open_streams: _Optional[int] = ..., num_reads: _Optional[int] = ..., num_router_sessions: _Optional[int] = ..., is_quiet: _Optional[bool] = ..., num_prefix_locks: _Optional[int] = ...) -> None: ...

class StepsRequest(_message.Message):
    __slots__ = ("after_step", "max_steps")
    AFTER_STEP_FIELD_NUMBER: _ClassVar[int]
    MAX_STEPS_FIELD_NUMBER: _ClassVar[int]
    after_step: int
    max_steps: int
    def __init__(self, after_step: _Optional[int] = ..., max_steps: _Optional[int] = ...) -> None: ...

class StepRecord(_message.Message):
    __slots__ = ("step", "planned_unix_ns", "computed_unix_ns", "num_tokens", "forward_s", "logits_s", "sample_s")
    STEP_FIELD_NUMBER: _ClassVar[int]
    PLANNED_UNIX_NS_FIELD_NUMBER: _ClassVar[int]
    COMPUTED_UNIX_NS_FIELD_NUMBER: _ClassVar[int]
    NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    FORWARD_S_FIELD_NUMBER: _ClassVar[int]
    LOGITS_S_FIELD_NUMBER: _ClassVar[int]
    SAMPLE_S_FIELD_NUMBER: _ClassVar[int]
    step: int
    planned_unix_ns: int
    computed_unix_ns: int
    num_tokens: int
    forward_s: float
    logits_s: float
    sample_s: float
    def __init__(self, step: _Optional[int] = ..., planned_unix_ns: _Optional[int] = ..., computed_unix_ns: _Optional[int] = ..., num_tokens: _Optional[int] = ..., forward_s: _Optional[float] = ..., logits_s: _Optional[float] = ..., sample_s: _Optional[float] = ...) -> None: ...

class StepsReply(_message.Message):
    __slots__ = ("steps",)
    STEPS_FIELD_NUMBER: _ClassVar[int]
    steps: _containers.RepeatedCompositeFieldContainer[StepRecord]
    def __init__(self, steps: _Optional[_Iterable[_Union[StepRecord, _Mapping]]] = ...) -> None: ...

class DrainRequest(_message.Message):
    __slots__ = ("timeout_ms",)
    TIMEOUT_MS_FIELD_NUMBER: _ClassVar[int]
    timeout_ms: int
    def __init__(self, timeout_ms: _Optional[int] = ...) -> None: ...

class DrainReply(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class SnapshotRequest(_message.Message):
    __slots__ = ("worker",)
    WORKER_FIELD_NUMBER: _ClassVar[int]
    worker: _request_pb2.WorkerKey
    def __init__(self, worker: _Optional[_Union[_request_pb2.WorkerKey, _Mapping]] = ...) -> None: ...

class SnapshotPart(_message.Message):
    __slots__ = ("head", "keys")
    HEAD_FIELD_NUMBER: _ClassVar[int]
    KEYS_FIELD_NUMBER: _ClassVar[int]
    head: _kv_pb2.KvSetHead
    keys: bytes
    def __init__(self, head: _Optional[_Union[_kv_pb2.KvSetHead, _Mapping]] = ..., keys: _Optional[bytes] = ...) -> None: ...

class ClearCacheRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ClearCacheReply(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...
