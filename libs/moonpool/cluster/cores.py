"""Which CPU cores each part of a local cluster runs on.

A decode engine is what every token waits for: it gets a core of its own as long as one is left for
everything else. What is left over then goes to prefill engines, one each, which they share with everything
else if there are too few. An engine never gets two: the C library's kernels work in one thread.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

Cores = tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class CorePlan:
    """Cores by part; an empty tuple means all."""

    #: In the order of the decode engines, then of the prefill engines.
    decode_engines: tuple[Cores, ...]
    prefill_engines: tuple[Cores, ...]
    #: Router, broker, and the services of all workers.
    others: Cores


def plan_cores(
    available: Sequence[int], *, num_decode_engines: int, num_prefill_engines: int
) -> CorePlan:
    """Share out `available`. With a single core nothing is pinned."""
    cores = tuple(sorted(available))
    if len(cores) < 2:
        return CorePlan(
            decode_engines=((),) * num_decode_engines,
            prefill_engines=((),) * num_prefill_engines,
            others=(),
        )
    num_own = min(num_decode_engines, len(cores) - 1)
    rest, own = cores[: len(cores) - num_own], cores[len(cores) - num_own :]
    decode_engines: tuple[Cores, ...] = tuple(
        (own[index % num_own],) for index in range(num_decode_engines)
    )
    prefill_engines: tuple[Cores, ...]
    if len(rest) > num_prefill_engines > 0:
        others = rest[: len(rest) - num_prefill_engines]
        prefill_engines = tuple((core,) for core in rest[len(others) :])
    else:
        others = rest
        prefill_engines = tuple((rest[index % len(rest)],) for index in range(num_prefill_engines))
    return CorePlan(decode_engines=decode_engines, prefill_engines=prefill_engines, others=others)
