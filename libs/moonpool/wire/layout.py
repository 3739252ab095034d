"""KvLayout and KvRegion <-> protobuf. A peer's layout is checked to lie inside the pool it describes."""

from __future__ import annotations

from typing import get_args

from moonpool.api.v1 import kv_pb2 as pb
from moonpool.kv.layout import KvDtype, KvGroup, KvLayout
from moonpool.kv.region import DeviceAccess, KvRegion, NixlAccess
from moonpool.wire.fields import between, invalid, name, text
from moonpool.wire.request import worker_key_from_pb, worker_key_to_pb

_DTYPES: tuple[KvDtype, ...] = get_args(KvDtype)
_MAX_GROUPS = 64
_MAX_LAYERS = 4_096
_MAX_HEADS = 65_536
_MAX_PLANES = 16
_MAX_BYTES = 1 << 46
_MAX_AGENT_METADATA_BYTES = 1 << 16
#: cudaIpcMemHandle_t has 64.
_MAX_IPC_HANDLE_BYTES = 256


def layout_to_pb(layout: KvLayout) -> pb.KvLayout:
    return pb.KvLayout(
        block_size=layout.block_size,
        num_blocks=layout.num_blocks,
        groups=[
            pb.KvGroup(
                first_layer=group.first_layer,
                num_layers=group.num_layers,
                num_kv_heads=group.num_kv_heads,
                first_kv_head=group.first_kv_head,
                total_kv_heads=group.total_kv_heads,
                head_dim=group.head_dim,
                dtype=group.dtype,
                planes=group.planes,
                window=group.window,
                block_stride_bytes=group.block_stride_bytes,
                layer_stride_bytes=group.layer_stride_bytes,
                plane_stride_bytes=group.plane_stride_bytes,
            )
            for group in layout.groups
        ],
    )


def layout_from_pb(message: pb.KvLayout, path: str = "layout") -> KvLayout:
    """Raises InvalidMessageError."""
    if not 1 <= len(message.groups) <= _MAX_GROUPS:
        raise invalid(f"{path}.groups", f"are {len(message.groups)}; allowed is 1 to {_MAX_GROUPS}")
    layout = KvLayout(
        block_size=between(message.block_size, f"{path}.block_size", low=1, high=1_024),
        num_blocks=between(message.num_blocks, f"{path}.num_blocks", low=1, high=2**31 - 1),
        groups=tuple(
            _group_from_pb(group, f"{path}.groups[{index}]")
            for index, group in enumerate(message.groups)
        ),
    )
    problems = layout.problems()
    if problems:
        raise invalid(path, f"does not make sense: {'; '.join(problems)}")
    return layout


def region_to_pb(region: KvRegion) -> pb.KvRegion:
    return pb.KvRegion(
        worker=worker_key_to_pb(region.worker),
        layout=layout_to_pb(region.layout),
        pool_bytes=region.pool_bytes,
        digest_kind=region.digest_kind,
        host_id=region.host_id,
        fd_socket=region.fd_socket,
        grpc_address=region.grpc_address,
        nixl=None if region.nixl is None else _nixl_to_pb(region.nixl),
        device=None if region.device is None else _device_to_pb(region.device),
    )


def region_from_pb(message: pb.KvRegion, path: str = "region") -> KvRegion:
    """Raises InvalidMessageError: also for a layout that is larger than the pool."""
    region = KvRegion(
        worker=worker_key_from_pb(message.worker, f"{path}.worker"),
        layout=layout_from_pb(message.layout, f"{path}.layout"),
        pool_bytes=between(message.pool_bytes, f"{path}.pool_bytes", low=1, high=_MAX_BYTES),
        digest_kind=name(message.digest_kind, f"{path}.digest_kind"),
        host_id=text(message.host_id, f"{path}.host_id"),
        fd_socket=text(message.fd_socket, f"{path}.fd_socket", max_length=107),
        grpc_address=text(message.grpc_address, f"{path}.grpc_address"),
        nixl=_nixl_from_pb(message.nixl, f"{path}.nixl") if message.HasField("nixl") else None,
        device=_device_from_pb(message.device, f"{path}.device")
        if message.HasField("device")
        else None,
    )
    if region.pool_bytes < region.layout.pool_bytes:
        raise invalid(
            f"{path}.pool_bytes",
            f"is {region.pool_bytes}; the layout needs {region.layout.pool_bytes}",
        )
    return region


def _nixl_to_pb(access: NixlAccess) -> pb.NixlAccess:
    return pb.NixlAccess(agent_metadata=access.agent_metadata, base_address=access.base_address)


def _nixl_from_pb(message: pb.NixlAccess, path: str) -> NixlAccess:
    size = len(message.agent_metadata)
    if not 1 <= size <= _MAX_AGENT_METADATA_BYTES:
        raise invalid(
            f"{path}.agent_metadata",
            f"has {size} bytes; allowed is 1 to {_MAX_AGENT_METADATA_BYTES}",
        )
    return NixlAccess(
        agent_metadata=message.agent_metadata,
        base_address=between(
            message.base_address, f"{path}.base_address", low=1, high=2**63 - _MAX_BYTES
        ),
    )


def _device_to_pb(access: DeviceAccess) -> pb.DeviceAccess:
    return pb.DeviceAccess(gpu=access.gpu, ipc_handle=access.ipc_handle, num_bytes=access.num_bytes)


def _device_from_pb(message: pb.DeviceAccess, path: str) -> DeviceAccess:
    size = len(message.ipc_handle)
    if not 1 <= size <= _MAX_IPC_HANDLE_BYTES:
        raise invalid(
            f"{path}.ipc_handle", f"has {size} bytes; allowed is 1 to {_MAX_IPC_HANDLE_BYTES}"
        )
    return DeviceAccess(
        gpu=name(message.gpu, f"{path}.gpu"),
        ipc_handle=message.ipc_handle,
        num_bytes=between(message.num_bytes, f"{path}.num_bytes", low=1, high=_MAX_BYTES),
    )


def _group_from_pb(message: pb.KvGroup, path: str) -> KvGroup:
    dtypes = {str(dtype): dtype for dtype in _DTYPES}
    if message.dtype not in dtypes:
        raise invalid(
            f"{path}.dtype", f"is {message.dtype[:64]!r}; allowed are {', '.join(dtypes)}"
        )
    if not 1 <= len(message.planes) <= _MAX_PLANES:
        raise invalid(f"{path}.planes", f"are {len(message.planes)}; allowed is 1 to {_MAX_PLANES}")
    num_kv_heads = between(message.num_kv_heads, f"{path}.num_kv_heads", low=1, high=_MAX_HEADS)
    total = between(
        message.total_kv_heads, f"{path}.total_kv_heads", low=num_kv_heads, high=_MAX_HEADS
    )
    return KvGroup(
        first_layer=between(message.first_layer, f"{path}.first_layer", low=0, high=_MAX_LAYERS),
        num_layers=between(message.num_layers, f"{path}.num_layers", low=1, high=_MAX_LAYERS),
        num_kv_heads=num_kv_heads,
        first_kv_head=between(
            message.first_kv_head, f"{path}.first_kv_head", low=0, high=total - num_kv_heads
        ),
        total_kv_heads=total,
        head_dim=between(message.head_dim, f"{path}.head_dim", low=1, high=_MAX_HEADS),
        dtype=dtypes[message.dtype],
        planes=tuple(name(plane, f"{path}.planes") for plane in message.planes),
        window=between(message.window, f"{path}.window", low=1, high=2**31 - 1)
        if message.HasField("window")
        else None,
        block_stride_bytes=_stride(message.block_stride_bytes, f"{path}.block_stride_bytes"),
        layer_stride_bytes=_stride(message.layer_stride_bytes, f"{path}.layer_stride_bytes"),
        plane_stride_bytes=_stride(message.plane_stride_bytes, f"{path}.plane_stride_bytes"),
    )


def _stride(value: int, path: str) -> int:
    return between(value, path, low=1, high=_MAX_BYTES)
