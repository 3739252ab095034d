"""TRANSPORTS: the ways by which a node's memory is read and it reads that of others, by their names in the
configuration."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from moonpool.rpc.channel import make_channel
from moonpool.transport.cuda_ipc import CudaIpcTransport
from moonpool.transport.grpc_reader import GrpcTransport
from moonpool.transport.nixl import NixlTransport
from moonpool.transport.shm import ShmTransport
from moonpool.worker.node import EnterableTransport, TransportContext


def _shm(context: TransportContext) -> ShmTransport:
    return ShmTransport(pool=context.pool, host_id=context.host_id, kernels=context.kernels)


def _cuda_ipc(context: TransportContext) -> CudaIpcTransport:
    assert context.device is not None, "only workers on a GPU are configured to use it"
    return CudaIpcTransport(link=context.device, layout=context.layout, host=_shm(context))


def _nixl(context: TransportContext) -> NixlTransport:
    return NixlTransport(
        pool=context.pool,
        agent=str(context.worker),
        kernels=context.kernels,
        pool_fd=context.pool_fd,
        ucx={"NET_DEVICES": "lo"} if context.is_host_only else None,
    )


def _grpc(context: TransportContext) -> GrpcTransport:
    return GrpcTransport(
        pool=context.pool,
        kernels=context.kernels,
        make_channel=make_channel,
        metadata=context.metadata,
    )


#: For NodeAdapters.
TRANSPORTS: Mapping[str, Callable[[TransportContext], EnterableTransport]] = {
    "shm": _shm,
    "cuda_ipc": _cuda_ipc,
    "nixl": _nixl,
    "grpc": _grpc,
}
