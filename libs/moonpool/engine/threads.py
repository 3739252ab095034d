"""Which kernels an engine of so many threads computes with."""

from __future__ import annotations

from moonpool.native import Kernels
from moonpool.native.fallback import FallbackKernels


def kernels_for(kernels: Kernels, num_threads: int) -> Kernels:
    """`kernels` for one thread; for several, those that leave all arithmetic to torch and oneDNN.

    The C library works in the thread that calls it: products, attention, and the rows between them. One of
    them in C among others that share the work would have the other threads wait.
    """
    return kernels if num_threads == 1 else FallbackKernels()
