"""A worker's pool with random KV, offered to readers by every transport; and the reads of it."""

from __future__ import annotations

import asyncio
import contextlib
import mmap
import os
import socket
import threading
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import grpc
import numpy as np
import numpy.typing as npt

from moonpool import native
from moonpool.errors import FailedPreconditionError
from moonpool.ids import Incarnation, WorkerId, WorkerKey
from moonpool.kv.layout import KvLayout
from moonpool.kv.region import KvRegion, NixlAccess
from moonpool.memory.fd_server import FdServer, socket_name
from moonpool.memory.host import host_id
from moonpool.memory.worker_memory import POOL_NAME, WorkerMemory
from moonpool.native.geometry import ByteArray, LeafGeometry
from moonpool.rpc.channel import make_channel
from moonpool.rpc.options import INTERNAL_MESSAGE_BYTES, server_options
from moonpool.transport.base import KvRead, LocalPool
from moonpool.transport.grpc_reader import GrpcTransport
from moonpool.transport.grpc_server import kv_read_handler
from moonpool.transport.nixl import NixlTransport
from moonpool.transport.nixl_source import access_of
from moonpool.transport.nixl_source_main import serve
from moonpool.transport.shm import ShmTransport

SMALL = KvLayout.block_major(
    num_blocks=24, num_layers=3, num_kv_heads=2, head_dim=8, dtype="float32"
)


@dataclass(kw_only=True)
class KvSource:
    """The owner's side: memory, its digests, and where it can be read."""

    memory: WorkerMemory
    region: KvRegion
    seen: list[WorkerKey] = field(default_factory=list)

    @property
    def layout(self) -> KvLayout:
        return self.memory.layout

    @property
    def pool(self) -> ByteArray:
        return self.memory.pool.bytes

    def pool_of(self, worker: WorkerKey) -> ByteArray:
        self.seen.append(worker)
        if worker != self.region.worker:
            raise FailedPreconditionError(f"{worker} does not live here")
        return self.pool


def fill_with_random_kv(memory: WorkerMemory, seed: int) -> None:
    """Random bytes everywhere, and the leaves of every block."""
    rng = np.random.default_rng(seed)
    memory.pool.bytes[:] = rng.integers(0, 256, memory.layout.pool_bytes, np.uint8)
    blocks = np.arange(memory.layout.num_blocks, dtype=np.int32)
    for layer in range(memory.layout.num_layers):
        native.kernels().write_leaves(
            memory.pool.bytes,
            LeafGeometry.of_layout(memory.layout),
            blocks,
            layer,
            memory.leaf_digests,
        )


@asynccontextmanager
async def serve_kv(
    layout: KvLayout = SMALL, *, seed: int = 0, by: str = ""
) -> AsyncIterator[KvSource]:
    """A source in this process, by shm and gRPC, and by NIXL if that is how it will be read."""
    worker = WorkerKey(WorkerId("source"), Incarnation(os.urandom(8).hex()))
    async with contextlib.AsyncExitStack() as stack:
        memory = WorkerMemory.create(layout)
        stack.callback(memory.close)
        fill_with_random_kv(memory, seed)
        nixl = None
        if by in UCX_BY_NAME:
            nixl = await stack.enter_async_context(
                served_by_nixl(memory, str(worker), UCX_BY_NAME[by])
            )
        memory.seal()
        server = grpc.aio.server(options=server_options(INTERNAL_MESSAGE_BYTES))
        port = server.add_insecure_port("127.0.0.1:0")
        source = KvSource(
            memory=memory,
            region=KvRegion(
                worker=worker,
                layout=layout,
                pool_bytes=layout.pool_bytes,
                digest_kind="xxh3-64",
                host_id=host_id(),
                fd_socket=socket_name(worker),
                grpc_address=f"127.0.0.1:{port}",
                nixl=nixl,
            ),
        )
        server.add_generic_rpc_handlers((kv_read_handler(source.pool_of, native.kernels()),))
        fd_server = FdServer(source.region.fd_socket, {POOL_NAME: memory.pool.fd})
        async with asyncio.TaskGroup() as group:
            task = group.create_task(fd_server.run())
            await server.start()
            try:
                yield source
            finally:
                await server.stop(0)
                task.cancel()


@asynccontextmanager
async def served_by_nixl(
    memory: WorkerMemory, name: str, ucx: Mapping[str, str]
) -> AsyncIterator[NixlAccess]:
    """What a NixlSource's process does, in a thread of this one: it starts sooner."""
    ours, theirs = socket.socketpair()
    with theirs, ours:
        thread = threading.Thread(
            target=serve,
            args=(theirs, memory.pool, name, ucx),
            # Without signs of what comes, look more often.
            kwargs={"most_s": 1e-3, "is_alone": False},
        )
        thread.start()
        try:
            yield access_of(await asyncio.to_thread(ours.makefile().readline))
        finally:
            ours.shutdown(socket.SHUT_RDWR)
            await asyncio.to_thread(thread.join)


def reader_pool(layout: KvLayout = SMALL) -> LocalPool:
    """Zeros that begin with a page, as a worker's pool does."""
    memory = mmap.mmap(-1, layout.pool_bytes)
    return LocalPool.of(np.frombuffer(memory, np.uint8), layout)


#: What UCX may use, by the name of the transport in a test.
UCX_BY_NAME = {"nixl": {"NET_DEVICES": "lo"}, "nixl-tcp": {"NET_DEVICES": "lo", "TLS": "tcp"}}
ALL_TRANSPORTS = ("shm", "grpc", *UCX_BY_NAME)


def make_transport(
    name: str, pool: LocalPool, **options: int
) -> ShmTransport | GrpcTransport | NixlTransport:
    """A reader's transport by its name, with this process's kernels."""
    if name == "shm":
        return ShmTransport(pool=pool, host_id=host_id(), kernels=native.kernels())
    if name in UCX_BY_NAME:
        return NixlTransport(
            pool=pool,
            agent=f"test@{os.urandom(8).hex()}",
            kernels=native.kernels(),
            ucx=UCX_BY_NAME[name],
        )
    return GrpcTransport(pool=pool, kernels=native.kernels(), make_channel=make_channel, **options)


def leaf_bytes(layout: KvLayout, block: int, layer: int) -> tuple[int, int]:
    """[start, end) of a leaf whose planes are neighbours."""
    (group,) = layout.groups
    start = block * group.block_stride_bytes + layer * group.layer_stride_bytes
    return start, start + layout.layer_block_bytes(group)


def block_read(
    layout: KvLayout,
    digests: npt.NDArray[np.uint64],
    source_blocks: Sequence[int],
    target_blocks: Sequence[int],
    layers: Sequence[int],
) -> KvRead:
    """Read `layers` of each block, one span per leaf; leaf i * len(layers) + j is block i, layer j."""
    leaves = [
        (source, target, layer)
        for source, target in zip(source_blocks, target_blocks, strict=True)
        for layer in layers
    ]
    spans = []
    for source, target, layer in leaves:
        begin, end = leaf_bytes(layout, source, layer)
        spans.append((begin, leaf_bytes(layout, target, layer)[0], end - begin))
    sources, targets, of_layers = np.array(leaves).T
    return KvRead.of(
        np.array(spans, np.int64),
        blocks=targets,
        layers=of_layers,
        expected=digests[sources, of_layers],
        after_span=np.arange(len(spans)),
    )
