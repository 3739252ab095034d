from moonpool.api.v1 import request_pb2 as _request_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class PutRequest(_message.Message):
    __slots__ = ("store", "tenant", "hashes", "source", "source_address", "deadline_ms")
    STORE_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    HASHES_FIELD_NUMBER: _ClassVar[int]
    SOURCE_FIELD_NUMBER: _ClassVar[int]
    SOURCE_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    DEADLINE_MS_FIELD_NUMBER: _ClassVar[int]
    store: _request_pb2.WorkerKey
    tenant: str
    hashes: _containers.RepeatedScalarFieldContainer[bytes]
    source: _request_pb2.WorkerKey
    source_address: str
    deadline_ms: int
    def __init__(self, store: _Optional[_Union[_request_pb2.WorkerKey, _Mapping]] = ..., tenant: _Optional[str] = ..., hashes: _Optional[_Iterable[bytes]] = ..., source: _Optional[_Union[_request_pb2.WorkerKey, _Mapping]] = ..., source_address: _Optional[str] = ..., deadline_ms: _Optional[int] = ...) -> None: ...

class PutReply(_message.Message):
    __slots__ = ("num_wanted_blocks", "refusal")
    NUM_WANTED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    REFUSAL_FIELD_NUMBER: _ClassVar[int]
    num_wanted_blocks: int
    refusal: str
    def __init__(self, num_wanted_blocks: _Optional[int] = ..., refusal: _Optional[str] = ...) -> None: ...

class StoreStatsRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class HostTier(_message.Message):
    __slots__ = ("num_total_blocks", "num_blocks", "num_pinned_blocks", "num_hit_blocks", "num_evicted_blocks", "num_demoted_blocks")
    NUM_TOTAL_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    NUM_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    NUM_PINNED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    NUM_HIT_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    NUM_EVICTED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    NUM_DEMOTED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    num_total_blocks: int
    num_blocks: int
    num_pinned_blocks: int
    num_hit_blocks: int
    num_evicted_blocks: int
    num_demoted_blocks: int
    def __init__(self, num_total_blocks: _Optional[int] = ..., num_blocks: _Optional[int] = ..., num_pinned_blocks: _Optional[int] = ..., num_hit_blocks: _Optional[int] = ..., num_evicted_blocks: _Optional[int] = ..., num_demoted_blocks: _Optional[int] = ...) -> None: ...

class DiskTier(_message.Message):
    __slots__ = ("num_blocks", "num_hit_blocks", "num_reclaimed_blocks", "num_unwritten_blocks", "num_loading_blocks", "num_written_blocks", "num_failed_write_blocks", "num_loaded_blocks", "num_failed_load_blocks", "num_bad_blocks", "num_unadmitted_blocks", "write_budget_bytes", "write_budget_max_bytes", "reads", "writes", "capacity_bytes", "file_bytes", "written_bytes", "read_bytes")
    NUM_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    NUM_HIT_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    NUM_RECLAIMED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    NUM_UNWRITTEN_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    NUM_LOADING_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    NUM_WRITTEN_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    NUM_FAILED_WRITE_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    NUM_LOADED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    NUM_FAILED_LOAD_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    NUM_BAD_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    NUM_UNADMITTED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    WRITE_BUDGET_BYTES_FIELD_NUMBER: _ClassVar[int]
    WRITE_BUDGET_MAX_BYTES_FIELD_NUMBER: _ClassVar[int]
    READS_FIELD_NUMBER: _ClassVar[int]
    WRITES_FIELD_NUMBER: _ClassVar[int]
    CAPACITY_BYTES_FIELD_NUMBER: _ClassVar[int]
    FILE_BYTES_FIELD_NUMBER: _ClassVar[int]
    WRITTEN_BYTES_FIELD_NUMBER: _ClassVar[int]
    READ_BYTES_FIELD_NUMBER: _ClassVar[int]
    num_blocks: int
    num_hit_blocks: int
    num_reclaimed_blocks: int
    num_unwritten_blocks: int
    num_loading_blocks: int
    num_written_blocks: int
    num_failed_write_blocks: int
    num_loaded_blocks: int
    num_failed_load_blocks: int
    num_bad_blocks: int
    num_unadmitted_blocks: int
    write_budget_bytes: int
    write_budget_max_bytes: int
    reads: str
    writes: str
    capacity_bytes: int
    file_bytes: int
    written_bytes: int
    read_bytes: int
    def __init__(self, num_blocks: _Optional[int] = ..., num_hit_blocks: _Optional[int] = ..., num_reclaimed_blocks: _Optional[int] = ..., num_unwritten_blocks: _Optional[int] = ..., num_loading_blocks: _Optional[int] = ..., num_written_blocks: _Optional[int] = ..., num_failed_write_blocks: _Optional[int] = ..., num_loaded_blocks: _Optional[int] = ..., num_failed_load_blocks: _Optional[int] = ..., num_bad_blocks: _Optional[int] = ..., num_unadmitted_blocks: _Optional[int] = ..., write_budget_bytes: _Optional[int] = ..., write_budget_max_bytes: _Optional[int] = ..., reads: _Optional[str] = ..., writes: _Optional[str] = ..., capacity_bytes: _Optional[int] = ..., file_bytes: _Optional[int] = ..., written_bytes: _Optional[int] = ..., read_bytes: _Optional[int] = ...) -> None: ...

class RefusedPuts(_message.Message):
    __slots__ = ("reason", "num_puts")
    REASON_FIELD_NUMBER: _ClassVar[int]
    NUM_PUTS_FIELD_NUMBER: _ClassVar[int]
    reason: str
    num_puts: int
    def __init__(self, reason: _Optional[str] = ..., num_puts: _Optional[int] = ...) -> None: ...

class TenantUse(_message.Message):
    __slots__ = ("tenant", "num_blocks", "floor_blocks", "max_blocks")
    TENANT_FIELD_NUMBER: _ClassVar[int]
    NUM_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    FLOOR_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    MAX_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    tenant: str
    num_blocks: int
    floor_blocks: int
    max_blocks: int
    def __init__(self, tenant: _Optional[str] = ..., num_blocks: _Optional[int] = ..., floor_blocks: _Optional[int] = ..., max_blocks: _Optional[int] = ...) -> None: ...

class StoreStatsReply(_message.Message):
    __slots__ = ("store", "block_bytes", "host", "disk", "problem", "num_gets", "num_missed_gets", "num_short_gets", "num_puts", "num_put_blocks", "num_known_puts", "num_expired_puts", "refused_puts", "tenants")
    STORE_FIELD_NUMBER: _ClassVar[int]
    BLOCK_BYTES_FIELD_NUMBER: _ClassVar[int]
    HOST_FIELD_NUMBER: _ClassVar[int]
    DISK_FIELD_NUMBER: _ClassVar[int]
    PROBLEM_FIELD_NUMBER: _ClassVar[int]
    NUM_GETS_FIELD_NUMBER: _ClassVar[int]
    NUM_MISSED_GETS_FIELD_NUMBER: _ClassVar[int]
    NUM_SHORT_GETS_FIELD_NUMBER: _ClassVar[int]
    NUM_PUTS_FIELD_NUMBER: _ClassVar[int]
    NUM_PUT_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    NUM_KNOWN_PUTS_FIELD_NUMBER: _ClassVar[int]
    NUM_EXPIRED_PUTS_FIELD_NUMBER: _ClassVar[int]
    REFUSED_PUTS_FIELD_NUMBER: _ClassVar[int]
    TENANTS_FIELD_NUMBER: _ClassVar[int]
    store: _request_pb2.WorkerKey
    block_bytes: int
    host: HostTier
    disk: DiskTier
    problem: str
    num_gets: int
    num_missed_gets: int
    num_short_gets: int
    num_puts: int
    num_put_blocks: int
    num_known_puts: int
    num_expired_puts: int
    refused_puts: _containers.RepeatedCompositeFieldContainer[RefusedPuts]
    tenants: _containers.RepeatedCompositeFieldContainer[TenantUse]
    def __init__(self, store: _Optional[_Union[_request_pb2.WorkerKey, _Mapping]] = ..., block_bytes: _Optional[int] = ..., host: _Optional[_Union[HostTier, _Mapping]] = ..., disk: _Optional[_Union[DiskTier, _Mapping]] = ..., problem: _Optional[str] = ..., num_gets: _Optional[int] = ..., num_missed_gets: _Optional[int] = ..., num_short_gets: _Optional[int] = ..., num_puts: _Optional[int] = ..., num_put_blocks: _Optional[int] = ..., num_known_puts: _Optional[int] = ..., num_expired_puts: _Optional[int] = ..., refused_puts: _Optional[_Iterable[_Union[RefusedPuts, _Mapping]]] = ..., tenants: _Optional[_Iterable[_Union[TenantUse, _Mapping]]] = ...) -> None: ...

class PinRequest(_message.Message):
    __slots__ = ("store", "hashes", "kind", "ttl_ms")
    STORE_FIELD_NUMBER: _ClassVar[int]
    HASHES_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    TTL_MS_FIELD_NUMBER: _ClassVar[int]
    store: _request_pb2.WorkerKey
    hashes: _containers.RepeatedScalarFieldContainer[bytes]
    kind: str
    ttl_ms: int
    def __init__(self, store: _Optional[_Union[_request_pb2.WorkerKey, _Mapping]] = ..., hashes: _Optional[_Iterable[bytes]] = ..., kind: _Optional[str] = ..., ttl_ms: _Optional[int] = ...) -> None: ...

class PinReply(_message.Message):
    __slots__ = ("pin_id", "num_blocks")
    PIN_ID_FIELD_NUMBER: _ClassVar[int]
    NUM_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    pin_id: int
    num_blocks: int
    def __init__(self, pin_id: _Optional[int] = ..., num_blocks: _Optional[int] = ...) -> None: ...

class UnpinRequest(_message.Message):
    __slots__ = ("store", "pin_id")
    STORE_FIELD_NUMBER: _ClassVar[int]
    PIN_ID_FIELD_NUMBER: _ClassVar[int]
    store: _request_pb2.WorkerKey
    pin_id: int
    def __init__(self, store: _Optional[_Union[_request_pb2.WorkerKey, _Mapping]] = ..., pin_id: _Optional[int] = ...) -> None: ...

class UnpinReply(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...
