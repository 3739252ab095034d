"""The C library: copies, leaf digests and the control page, with a numpy and xxhash fallback.

    kernels()   what does the work       status()   which form that is, and why

One shared library in plain C, called by ctypes: it knows neither Python nor torch.
"""

from __future__ import annotations

from moonpool.native.geometry import (
    LEAF_CHECK_DTYPE,
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
    Kernels,
    LayerFinisher,
    Progress,
)
from moonpool.native.loading import NativeStatus, kernels, status

__all__ = [
    "LEAF_CHECK_DTYPE",
    "ControlPage",
    "CopyCancelledError",
    "CopyQueue",
    "CopyRoute",
    "CopyStream",
    "CopyTicket",
    "Kernels",
    "LayerFinisher",
    "LeafCheckArray",
    "LeafGeometry",
    "NativeStatus",
    "Progress",
    "RangeError",
    "kernels",
    "leaf_checks",
    "status",
]
