"""Which kernels this process uses, and why."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from pathlib import Path

from moonpool.native.binding import LoadError, load_library
from moonpool.native.compiled import CompiledKernels
from moonpool.native.fallback import FallbackKernels
from moonpool.native.kernels import Kernels

#: As native/build.py names it; not imported, since `python -m` runs that module.
LIBRARY_NAME = "libmoonpool_native.so"


@dataclass(frozen=True, slots=True, kw_only=True)
class NativeStatus:
    """For start-up logs and `moonpool doctor`."""

    is_compiled: bool
    #: baseline, avx2, avx512, avx512_bf16; "python" for the fallback.
    isa: str
    #: One sentence; for the fallback, why and what to do.
    message: str


@functools.cache
def _loaded() -> tuple[Kernels, NativeStatus]:
    try:
        kernels = CompiledKernels(load_library(Path(__file__).with_name(LIBRARY_NAME)))
    except LoadError as error:
        return FallbackKernels(), NativeStatus(
            is_compiled=False,
            isa="python",
            message=f"the C library is not used: {error}; numpy and xxhash do its work, slower. "
            "Build it with: python -m moonpool.native.build",
        )
    return kernels, NativeStatus(
        is_compiled=True, isa=kernels.isa, message=f"C library, {kernels.isa} kernels"
    )


def kernels() -> Kernels:
    """The compiled kernels, or the Python ones where they could not be loaded. Loaded once."""
    return _loaded()[0]


def status() -> NativeStatus:
    """What `kernels()` gives and why. A service logs it once at start; a fallback is never silent."""
    return _loaded()[1]
