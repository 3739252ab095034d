from moonpool.api.v1 import worker_pb2 as _worker_pb2
from moonpool.api.v1 import request_pb2 as _request_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class StatusRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class WorkerStatus(_message.Message):
    __slots__ = ("worker", "role", "grpc_address", "state", "load", "refused_because")
    WORKER_FIELD_NUMBER: _ClassVar[int]
    ROLE_FIELD_NUMBER: _ClassVar[int]
    GRPC_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    LOAD_FIELD_NUMBER: _ClassVar[int]
    REFUSED_BECAUSE_FIELD_NUMBER: _ClassVar[int]
    worker: _request_pb2.WorkerKey
    role: _worker_pb2.Role
    grpc_address: str
    state: str
    load: _worker_pb2.Load
    refused_because: str
    def __init__(self, worker: _Optional[_Union[_request_pb2.WorkerKey, _Mapping]] = ..., role: _Optional[_Union[_worker_pb2.Role, str]] = ..., grpc_address: _Optional[str] = ..., state: _Optional[str] = ..., load: _Optional[_Union[_worker_pb2.Load, _Mapping]] = ..., refused_because: _Optional[str] = ...) -> None: ...

class StatusReply(_message.Message):
    __slots__ = ("router_id", "model", "is_ready", "not_ready_because", "is_bus_connected", "num_queued", "num_running", "workers")
    ROUTER_ID_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    IS_READY_FIELD_NUMBER: _ClassVar[int]
    NOT_READY_BECAUSE_FIELD_NUMBER: _ClassVar[int]
    IS_BUS_CONNECTED_FIELD_NUMBER: _ClassVar[int]
    NUM_QUEUED_FIELD_NUMBER: _ClassVar[int]
    NUM_RUNNING_FIELD_NUMBER: _ClassVar[int]
    WORKERS_FIELD_NUMBER: _ClassVar[int]
    router_id: str
    model: str
    is_ready: bool
    not_ready_because: str
    is_bus_connected: bool
    num_queued: int
    num_running: int
    workers: _containers.RepeatedCompositeFieldContainer[WorkerStatus]
    def __init__(self, router_id: _Optional[str] = ..., model: _Optional[str] = ..., is_ready: _Optional[bool] = ..., not_ready_because: _Optional[str] = ..., is_bus_connected: _Optional[bool] = ..., num_queued: _Optional[int] = ..., num_running: _Optional[int] = ..., workers: _Optional[_Iterable[_Union[WorkerStatus, _Mapping]]] = ...) -> None: ...

class TraceRequest(_message.Message):
    __slots__ = ("request_id",)
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    def __init__(self, request_id: _Optional[str] = ...) -> None: ...

class TraceReply(_message.Message):
    __slots__ = ("request_id", "spans")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    SPANS_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    spans: _containers.RepeatedCompositeFieldContainer[_worker_pb2.SpanReport]
    def __init__(self, request_id: _Optional[str] = ..., spans: _Optional[_Iterable[_Union[_worker_pb2.SpanReport, _Mapping]]] = ...) -> None: ...

class ExplainRequest(_message.Message):
    __slots__ = ("request_id",)
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    def __init__(self, request_id: _Optional[str] = ...) -> None: ...

class ExplainedCandidate(_message.Message):
    __slots__ = ("worker", "filtered", "score", "terms")
    WORKER_FIELD_NUMBER: _ClassVar[int]
    FILTERED_FIELD_NUMBER: _ClassVar[int]
    SCORE_FIELD_NUMBER: _ClassVar[int]
    TERMS_FIELD_NUMBER: _ClassVar[int]
    worker: _request_pb2.WorkerKey
    filtered: str
    score: float
    terms: _containers.RepeatedScalarFieldContainer[float]
    def __init__(self, worker: _Optional[_Union[_request_pb2.WorkerKey, _Mapping]] = ..., filtered: _Optional[str] = ..., score: _Optional[float] = ..., terms: _Optional[_Iterable[float]] = ...) -> None: ...

class ExplainedInput(_message.Message):
    __slots__ = ("name", "value")
    NAME_FIELD_NUMBER: _ClassVar[int]
    VALUE_FIELD_NUMBER: _ClassVar[int]
    name: str
    value: float
    def __init__(self, name: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...

class ExplainedLeg(_message.Message):
    __slots__ = ("chosen", "term_names", "candidates", "inputs")
    CHOSEN_FIELD_NUMBER: _ClassVar[int]
    TERM_NAMES_FIELD_NUMBER: _ClassVar[int]
    CANDIDATES_FIELD_NUMBER: _ClassVar[int]
    INPUTS_FIELD_NUMBER: _ClassVar[int]
    chosen: _request_pb2.WorkerKey
    term_names: _containers.RepeatedScalarFieldContainer[str]
    candidates: _containers.RepeatedCompositeFieldContainer[ExplainedCandidate]
    inputs: _containers.RepeatedCompositeFieldContainer[ExplainedInput]
    def __init__(self, chosen: _Optional[_Union[_request_pb2.WorkerKey, _Mapping]] = ..., term_names: _Optional[_Iterable[str]] = ..., candidates: _Optional[_Iterable[_Union[ExplainedCandidate, _Mapping]]] = ..., inputs: _Optional[_Iterable[_Union[ExplainedInput, _Mapping]]] = ...) -> None: ...

class ExplainedDisagg(_message.Message):
    __slots__ = ("is_remote", "reason", "num_uncached_tokens", "num_cached_tokens", "threshold_tokens", "num_prefill_workers", "least_queued_tokens", "local_s", "remote_s", "breaks_tpot")
    IS_REMOTE_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    NUM_UNCACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    THRESHOLD_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_PREFILL_WORKERS_FIELD_NUMBER: _ClassVar[int]
    LEAST_QUEUED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    LOCAL_S_FIELD_NUMBER: _ClassVar[int]
    REMOTE_S_FIELD_NUMBER: _ClassVar[int]
    BREAKS_TPOT_FIELD_NUMBER: _ClassVar[int]
    is_remote: bool
    reason: str
    num_uncached_tokens: int
    num_cached_tokens: int
    threshold_tokens: int
    num_prefill_workers: int
    least_queued_tokens: int
    local_s: float
    remote_s: float
    breaks_tpot: bool
    def __init__(self, is_remote: _Optional[bool] = ..., reason: _Optional[str] = ..., num_uncached_tokens: _Optional[int] = ..., num_cached_tokens: _Optional[int] = ..., threshold_tokens: _Optional[int] = ..., num_prefill_workers: _Optional[int] = ..., least_queued_tokens: _Optional[int] = ..., local_s: _Optional[float] = ..., remote_s: _Optional[float] = ..., breaks_tpot: _Optional[bool] = ...) -> None: ...

class ExplainedPlan(_message.Message):
    __slots__ = ("worker", "kind", "num_cached_tokens", "num_read_tokens", "num_computed_tokens", "peer", "num_peer_tokens", "queue_s", "load_s", "compute_s", "exposed_s", "is_peer_store")
    WORKER_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    NUM_CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_READ_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_COMPUTED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    PEER_FIELD_NUMBER: _ClassVar[int]
    NUM_PEER_TOKENS_FIELD_NUMBER: _ClassVar[int]
    QUEUE_S_FIELD_NUMBER: _ClassVar[int]
    LOAD_S_FIELD_NUMBER: _ClassVar[int]
    COMPUTE_S_FIELD_NUMBER: _ClassVar[int]
    EXPOSED_S_FIELD_NUMBER: _ClassVar[int]
    IS_PEER_STORE_FIELD_NUMBER: _ClassVar[int]
    worker: _request_pb2.WorkerKey
    kind: str
    num_cached_tokens: int
    num_read_tokens: int
    num_computed_tokens: int
    peer: _request_pb2.WorkerKey
    num_peer_tokens: int
    queue_s: float
    load_s: float
    compute_s: float
    exposed_s: float
    is_peer_store: bool
    def __init__(self, worker: _Optional[_Union[_request_pb2.WorkerKey, _Mapping]] = ..., kind: _Optional[str] = ..., num_cached_tokens: _Optional[int] = ..., num_read_tokens: _Optional[int] = ..., num_computed_tokens: _Optional[int] = ..., peer: _Optional[_Union[_request_pb2.WorkerKey, _Mapping]] = ..., num_peer_tokens: _Optional[int] = ..., queue_s: _Optional[float] = ..., load_s: _Optional[float] = ..., compute_s: _Optional[float] = ..., exposed_s: _Optional[float] = ..., is_peer_store: _Optional[bool] = ...) -> None: ...

class ExplainedPlacement(_message.Message):
    __slots__ = ("attempt", "policy", "is_measured", "num_tokens", "decode", "disagg", "prefill", "plan", "previous_outcome", "age_s")
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    POLICY_FIELD_NUMBER: _ClassVar[int]
    IS_MEASURED_FIELD_NUMBER: _ClassVar[int]
    NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    DECODE_FIELD_NUMBER: _ClassVar[int]
    DISAGG_FIELD_NUMBER: _ClassVar[int]
    PREFILL_FIELD_NUMBER: _ClassVar[int]
    PLAN_FIELD_NUMBER: _ClassVar[int]
    PREVIOUS_OUTCOME_FIELD_NUMBER: _ClassVar[int]
    AGE_S_FIELD_NUMBER: _ClassVar[int]
    attempt: int
    policy: str
    is_measured: bool
    num_tokens: int
    decode: ExplainedLeg
    disagg: ExplainedDisagg
    prefill: ExplainedLeg
    plan: ExplainedPlan
    previous_outcome: str
    age_s: float
    def __init__(self, attempt: _Optional[int] = ..., policy: _Optional[str] = ..., is_measured: _Optional[bool] = ..., num_tokens: _Optional[int] = ..., decode: _Optional[_Union[ExplainedLeg, _Mapping]] = ..., disagg: _Optional[_Union[ExplainedDisagg, _Mapping]] = ..., prefill: _Optional[_Union[ExplainedLeg, _Mapping]] = ..., plan: _Optional[_Union[ExplainedPlan, _Mapping]] = ..., previous_outcome: _Optional[str] = ..., age_s: _Optional[float] = ...) -> None: ...

class ExplainReply(_message.Message):
    __slots__ = ("request_id", "placements")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    PLACEMENTS_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    placements: _containers.RepeatedCompositeFieldContainer[ExplainedPlacement]
    def __init__(self, request_id: _Optional[str] = ..., placements: _Optional[_Iterable[_Union[ExplainedPlacement, _Mapping]]] = ...) -> None: ...

class ReuseCounts(_message.Message):
    __slots__ = ("num_requests", "num_prompt_tokens", "num_device_tokens", "num_peer_tokens", "num_cold_tokens", "num_evicted_tokens", "num_routed_away_tokens", "num_too_slow_tokens", "num_tail_tokens", "num_predicted_tokens", "max_error_tokens", "num_store_tokens")
    NUM_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    NUM_PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_DEVICE_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_PEER_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_COLD_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_EVICTED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_ROUTED_AWAY_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_TOO_SLOW_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_TAIL_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_PREDICTED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MAX_ERROR_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_STORE_TOKENS_FIELD_NUMBER: _ClassVar[int]
    num_requests: int
    num_prompt_tokens: int
    num_device_tokens: int
    num_peer_tokens: int
    num_cold_tokens: int
    num_evicted_tokens: int
    num_routed_away_tokens: int
    num_too_slow_tokens: int
    num_tail_tokens: int
    num_predicted_tokens: int
    max_error_tokens: int
    num_store_tokens: int
    def __init__(self, num_requests: _Optional[int] = ..., num_prompt_tokens: _Optional[int] = ..., num_device_tokens: _Optional[int] = ..., num_peer_tokens: _Optional[int] = ..., num_cold_tokens: _Optional[int] = ..., num_evicted_tokens: _Optional[int] = ..., num_routed_away_tokens: _Optional[int] = ..., num_too_slow_tokens: _Optional[int] = ..., num_tail_tokens: _Optional[int] = ..., num_predicted_tokens: _Optional[int] = ..., max_error_tokens: _Optional[int] = ..., num_store_tokens: _Optional[int] = ...) -> None: ...

class WorkerCache(_message.Message):
    __slots__ = ("worker_id", "is_live", "role", "counts", "num_published_blocks", "num_total_blocks", "kv_eviction_policy", "published_digest")
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    IS_LIVE_FIELD_NUMBER: _ClassVar[int]
    ROLE_FIELD_NUMBER: _ClassVar[int]
    COUNTS_FIELD_NUMBER: _ClassVar[int]
    NUM_PUBLISHED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    NUM_TOTAL_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    KV_EVICTION_POLICY_FIELD_NUMBER: _ClassVar[int]
    PUBLISHED_DIGEST_FIELD_NUMBER: _ClassVar[int]
    worker_id: str
    is_live: bool
    role: _worker_pb2.Role
    counts: ReuseCounts
    num_published_blocks: int
    num_total_blocks: int
    kv_eviction_policy: str
    published_digest: int
    def __init__(self, worker_id: _Optional[str] = ..., is_live: _Optional[bool] = ..., role: _Optional[_Union[_worker_pb2.Role, str]] = ..., counts: _Optional[_Union[ReuseCounts, _Mapping]] = ..., num_published_blocks: _Optional[int] = ..., num_total_blocks: _Optional[int] = ..., kv_eviction_policy: _Optional[str] = ..., published_digest: _Optional[int] = ...) -> None: ...

class CacheStatsRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class CacheStatsReply(_message.Message):
    __slots__ = ("router_id", "model", "block_size", "total", "workers", "num_indexed_blocks", "num_asked_keys", "kept_fraction")
    ROUTER_ID_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    BLOCK_SIZE_FIELD_NUMBER: _ClassVar[int]
    TOTAL_FIELD_NUMBER: _ClassVar[int]
    WORKERS_FIELD_NUMBER: _ClassVar[int]
    NUM_INDEXED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    NUM_ASKED_KEYS_FIELD_NUMBER: _ClassVar[int]
    KEPT_FRACTION_FIELD_NUMBER: _ClassVar[int]
    router_id: str
    model: str
    block_size: int
    total: ReuseCounts
    workers: _containers.RepeatedCompositeFieldContainer[WorkerCache]
    num_indexed_blocks: int
    num_asked_keys: int
    kept_fraction: float
    def __init__(self, router_id: _Optional[str] = ..., model: _Optional[str] = ..., block_size: _Optional[int] = ..., total: _Optional[_Union[ReuseCounts, _Mapping]] = ..., workers: _Optional[_Iterable[_Union[WorkerCache, _Mapping]]] = ..., num_indexed_blocks: _Optional[int] = ..., num_asked_keys: _Optional[int] = ..., kept_fraction: _Optional[float] = ...) -> None: ...
