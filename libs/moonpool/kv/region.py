"""KvRegion: where one rank's pool can be read, as its owner tells its peers."""

from __future__ import annotations

from dataclasses import dataclass

from moonpool.ids import WorkerKey
from moonpool.kv.layout import KvLayout


@dataclass(frozen=True, slots=True, kw_only=True)
class NixlAccess:
    """What a reader gives to its own NIXL agent."""

    #: As the owner's agent serialises it: its name, its addresses, its memory's keys.
    agent_metadata: bytes
    #: Where the pool begins in the owner's address space.
    base_address: int


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceAccess:
    """What a reader on the same GPU opens the owner's pool in that GPU's memory with."""

    #: The GPU's own identity, which no reboot changes.
    gpu: str
    #: As CUDA made it for the memory (cudaIpcMemHandle_t): of this incarnation alone.
    ipc_handle: bytes
    num_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class KvRegion:
    """One incarnation's pool. A new incarnation has a new region; nothing else about it changes."""

    worker: WorkerKey
    layout: KvLayout
    pool_bytes: int
    #: kv.digest.DigestKind of the leaves that travel with the blocks.
    digest_kind: str
    #: memory.host.host_id() of the owner; readers with an equal id can map the pool.
    host_id: str
    #: Abstract Unix socket that hands out the pool's descriptor; empty if it is not host memory.
    fd_socket: str
    #: `host:port` that serves KvPlane.Read; empty if it does not.
    grpc_address: str
    #: None if the pool cannot be read by NIXL.
    nixl: NixlAccess | None = None
    #: None if it has no pool on a GPU, or none that others can open.
    device: DeviceAccess | None = None
