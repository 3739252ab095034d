from moonpool.api.v1 import kv_pb2 as _kv_pb2
from moonpool.api.v1 import request_pb2 as _request_pb2
from moonpool.api.v1 import worker_pb2 as _worker_pb2
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Announce(_message.Message):
    __slots__ = ("protocol_major", "worker", "role", "grpc_address", "model", "sequence", "load", "valid_for_ms", "is_leaving", "kv_head")
    PROTOCOL_MAJOR_FIELD_NUMBER: _ClassVar[int]
    WORKER_FIELD_NUMBER: _ClassVar[int]
    ROLE_FIELD_NUMBER: _ClassVar[int]
    GRPC_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    LOAD_FIELD_NUMBER: _ClassVar[int]
    VALID_FOR_MS_FIELD_NUMBER: _ClassVar[int]
    IS_LEAVING_FIELD_NUMBER: _ClassVar[int]
    KV_HEAD_FIELD_NUMBER: _ClassVar[int]
    protocol_major: int
    worker: _request_pb2.WorkerKey
    role: _worker_pb2.Role
    grpc_address: str
    model: str
    sequence: int
    load: _worker_pb2.Load
    valid_for_ms: int
    is_leaving: bool
    kv_head: _kv_pb2.KvSetHead
    def __init__(self, protocol_major: _Optional[int] = ..., worker: _Optional[_Union[_request_pb2.WorkerKey, _Mapping]] = ..., role: _Optional[_Union[_worker_pb2.Role, str]] = ..., grpc_address: _Optional[str] = ..., model: _Optional[str] = ..., sequence: _Optional[int] = ..., load: _Optional[_Union[_worker_pb2.Load, _Mapping]] = ..., valid_for_ms: _Optional[int] = ..., is_leaving: _Optional[bool] = ..., kv_head: _Optional[_Union[_kv_pb2.KvSetHead, _Mapping]] = ...) -> None: ...

class KvEvents(_message.Message):
    __slots__ = ("protocol_major", "worker", "head", "is_cleared", "removed_keys", "stored_keys")
    PROTOCOL_MAJOR_FIELD_NUMBER: _ClassVar[int]
    WORKER_FIELD_NUMBER: _ClassVar[int]
    HEAD_FIELD_NUMBER: _ClassVar[int]
    IS_CLEARED_FIELD_NUMBER: _ClassVar[int]
    REMOVED_KEYS_FIELD_NUMBER: _ClassVar[int]
    STORED_KEYS_FIELD_NUMBER: _ClassVar[int]
    protocol_major: int
    worker: _request_pb2.WorkerKey
    head: _kv_pb2.KvSetHead
    is_cleared: bool
    removed_keys: bytes
    stored_keys: bytes
    def __init__(self, protocol_major: _Optional[int] = ..., worker: _Optional[_Union[_request_pb2.WorkerKey, _Mapping]] = ..., head: _Optional[_Union[_kv_pb2.KvSetHead, _Mapping]] = ..., is_cleared: _Optional[bool] = ..., removed_keys: _Optional[bytes] = ..., stored_keys: _Optional[bytes] = ...) -> None: ...

class Who(_message.Message):
    __slots__ = ("router_id",)
    ROUTER_ID_FIELD_NUMBER: _ClassVar[int]
    router_id: str
    def __init__(self, router_id: _Optional[str] = ...) -> None: ...
