"""What this machine's CPU computes with, as far as a cluster's configuration depends on it. No torch."""

from __future__ import annotations

from pathlib import Path

_CPUINFO = Path("/proc/cpuinfo")
#: What oneDNN needs for its bfloat16 products: one of these sets.
_X86 = (
    {"avx512f", "avx512bw", "avx512vl", "avx512dq"},
    {"avx_vnni_int8", "avx_ne_convert"},
)
_ARM = ({"bf16"},)


def has_bfloat16_products(cpuinfo: str | None = None) -> bool:
    """True if bfloat16 matrices are multiplied faster as they are than in float32.

    Args:
        cpuinfo: What /proc/cpuinfo says; by default this machine's.
    """
    if cpuinfo is None:
        try:
            cpuinfo = _CPUINFO.read_text()
        except OSError:
            return False
    for line in cpuinfo.splitlines():
        key, _, value = line.partition(":")
        needed = {"flags": _X86, "Features": _ARM}.get(key.strip())
        if needed is not None:
            return any(flags <= set(value.split()) for flags in needed)
    return False
