"""The C library: copies, leaf digests, the control page, and the arithmetic of a decode step.

    kernels()   what does the work       status()   which form that is, and why

One shared library in plain C, called by ctypes: it knows neither Python nor torch. Without it numpy and
xxhash do the same, except the arithmetic, which is then left to torch.
"""

from __future__ import annotations

from moonpool.native.geometry import (
    DRAW_DTYPE,
    LEAF_CHECK_DTYPE,
    LINEAR_PANEL,
    LeafCheckArray,
    LeafGeometry,
    RangeError,
    leaf_checks,
)
from moonpool.native.kernels import (
    ControlPage,
    CopyCancelledError,
    CopyQueue,
    CopyRoute,
    CopyStream,
    CopyTicket,
    Gathering,
    Kernels,
    LayerFinisher,
    PackedLinear,
    PagedAttention,
    Progress,
    RowKernels,
    SampleKernel,
    StreamRead,
)
from moonpool.native.loading import NativeStatus, kernels, status

__all__ = [
    "DRAW_DTYPE",
    "LEAF_CHECK_DTYPE",
    "LINEAR_PANEL",
    "ControlPage",
    "CopyCancelledError",
    "CopyQueue",
    "CopyRoute",
    "CopyStream",
    "CopyTicket",
    "Gathering",
    "Kernels",
    "LayerFinisher",
    "LeafCheckArray",
    "LeafGeometry",
    "NativeStatus",
    "PackedLinear",
    "PagedAttention",
    "Progress",
    "RangeError",
    "RowKernels",
    "SampleKernel",
    "StreamRead",
    "kernels",
    "leaf_checks",
    "status",
]
