from moonpool.api.v1 import request_pb2 as _request_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class KvGroup(_message.Message):
    __slots__ = ("first_layer", "num_layers", "num_kv_heads", "first_kv_head", "total_kv_heads", "head_dim", "dtype", "planes", "window", "block_stride_bytes", "layer_stride_bytes", "plane_stride_bytes")
    FIRST_LAYER_FIELD_NUMBER: _ClassVar[int]
    NUM_LAYERS_FIELD_NUMBER: _ClassVar[int]
    NUM_KV_HEADS_FIELD_NUMBER: _ClassVar[int]
    FIRST_KV_HEAD_FIELD_NUMBER: _ClassVar[int]
    TOTAL_KV_HEADS_FIELD_NUMBER: _ClassVar[int]
    HEAD_DIM_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    PLANES_FIELD_NUMBER: _ClassVar[int]
    WINDOW_FIELD_NUMBER: _ClassVar[int]
    BLOCK_STRIDE_BYTES_FIELD_NUMBER: _ClassVar[int]
    LAYER_STRIDE_BYTES_FIELD_NUMBER: _ClassVar[int]
    PLANE_STRIDE_BYTES_FIELD_NUMBER: _ClassVar[int]
    first_layer: int
    num_layers: int
    num_kv_heads: int
    first_kv_head: int
    total_kv_heads: int
    head_dim: int
    dtype: str
    planes: _containers.RepeatedScalarFieldContainer[str]
    window: int
    block_stride_bytes: int
    layer_stride_bytes: int
    plane_stride_bytes: int
    def __init__(self, first_layer: _Optional[int] = ..., num_layers: _Optional[int] = ..., num_kv_heads: _Optional[int] = ..., first_kv_head: _Optional[int] = ..., total_kv_heads: _Optional[int] = ..., head_dim: _Optional[int] = ..., dtype: _Optional[str] = ..., planes: _Optional[_Iterable[str]] = ..., window: _Optional[int] = ..., block_stride_bytes: _Optional[int] = ..., layer_stride_bytes: _Optional[int] = ..., plane_stride_bytes: _Optional[int] = ...) -> None: ...

class KvLayout(_message.Message):
    __slots__ = ("block_size", "num_blocks", "groups")
    BLOCK_SIZE_FIELD_NUMBER: _ClassVar[int]
    NUM_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    GROUPS_FIELD_NUMBER: _ClassVar[int]
    block_size: int
    num_blocks: int
    groups: _containers.RepeatedCompositeFieldContainer[KvGroup]
    def __init__(self, block_size: _Optional[int] = ..., num_blocks: _Optional[int] = ..., groups: _Optional[_Iterable[_Union[KvGroup, _Mapping]]] = ...) -> None: ...

class KvRegion(_message.Message):
    __slots__ = ("worker", "layout", "pool_bytes", "digest_kind", "host_id", "fd_socket", "grpc_address", "nixl", "device")
    WORKER_FIELD_NUMBER: _ClassVar[int]
    LAYOUT_FIELD_NUMBER: _ClassVar[int]
    POOL_BYTES_FIELD_NUMBER: _ClassVar[int]
    DIGEST_KIND_FIELD_NUMBER: _ClassVar[int]
    HOST_ID_FIELD_NUMBER: _ClassVar[int]
    FD_SOCKET_FIELD_NUMBER: _ClassVar[int]
    GRPC_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    NIXL_FIELD_NUMBER: _ClassVar[int]
    DEVICE_FIELD_NUMBER: _ClassVar[int]
    worker: _request_pb2.WorkerKey
    layout: KvLayout
    pool_bytes: int
    digest_kind: str
    host_id: str
    fd_socket: str
    grpc_address: str
    nixl: NixlAccess
    device: DeviceAccess
    def __init__(self, worker: _Optional[_Union[_request_pb2.WorkerKey, _Mapping]] = ..., layout: _Optional[_Union[KvLayout, _Mapping]] = ..., pool_bytes: _Optional[int] = ..., digest_kind: _Optional[str] = ..., host_id: _Optional[str] = ..., fd_socket: _Optional[str] = ..., grpc_address: _Optional[str] = ..., nixl: _Optional[_Union[NixlAccess, _Mapping]] = ..., device: _Optional[_Union[DeviceAccess, _Mapping]] = ...) -> None: ...

class NixlAccess(_message.Message):
    __slots__ = ("agent_metadata", "base_address")
    AGENT_METADATA_FIELD_NUMBER: _ClassVar[int]
    BASE_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    agent_metadata: bytes
    base_address: int
    def __init__(self, agent_metadata: _Optional[bytes] = ..., base_address: _Optional[int] = ...) -> None: ...

class DeviceAccess(_message.Message):
    __slots__ = ("gpu", "ipc_handle", "num_bytes")
    GPU_FIELD_NUMBER: _ClassVar[int]
    IPC_HANDLE_FIELD_NUMBER: _ClassVar[int]
    NUM_BYTES_FIELD_NUMBER: _ClassVar[int]
    gpu: str
    ipc_handle: bytes
    num_bytes: int
    def __init__(self, gpu: _Optional[str] = ..., ipc_handle: _Optional[bytes] = ..., num_bytes: _Optional[int] = ...) -> None: ...

class KvSetHead(_message.Message):
    __slots__ = ("sequence", "count", "digest")
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    COUNT_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    sequence: int
    count: int
    digest: int
    def __init__(self, sequence: _Optional[int] = ..., count: _Optional[int] = ..., digest: _Optional[int] = ...) -> None: ...

class ReadRequest(_message.Message):
    __slots__ = ("open", "spans", "credit_bytes")
    OPEN_FIELD_NUMBER: _ClassVar[int]
    SPANS_FIELD_NUMBER: _ClassVar[int]
    CREDIT_BYTES_FIELD_NUMBER: _ClassVar[int]
    open: ReadOpen
    spans: ReadSpans
    credit_bytes: int
    def __init__(self, open: _Optional[_Union[ReadOpen, _Mapping]] = ..., spans: _Optional[_Union[ReadSpans, _Mapping]] = ..., credit_bytes: _Optional[int] = ...) -> None: ...

class ReadOpen(_message.Message):
    __slots__ = ("source", "credit_bytes")
    SOURCE_FIELD_NUMBER: _ClassVar[int]
    CREDIT_BYTES_FIELD_NUMBER: _ClassVar[int]
    source: _request_pb2.WorkerKey
    credit_bytes: int
    def __init__(self, source: _Optional[_Union[_request_pb2.WorkerKey, _Mapping]] = ..., credit_bytes: _Optional[int] = ...) -> None: ...

class ReadSpans(_message.Message):
    __slots__ = ("pairs",)
    PAIRS_FIELD_NUMBER: _ClassVar[int]
    pairs: bytes
    def __init__(self, pairs: _Optional[bytes] = ...) -> None: ...

class RawBytes(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...
