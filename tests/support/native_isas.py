"""The variants of the C library's kernels."""

from __future__ import annotations

from moonpool import native

#: From the least to the most that a machine needs.
ALL_ISAS = ("baseline", "avx2", "avx512", "avx512_bf16")


def runnable_isas() -> tuple[str, ...]:
    """Those that this machine runs; none if the library was not built."""
    status = native.status()
    return ALL_ISAS[: ALL_ISAS.index(status.isa) + 1] if status.is_compiled else ()
