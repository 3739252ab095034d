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
