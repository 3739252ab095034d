"""What a replay compares: placements, caches with stores below them, and eviction policies of one pool."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence

from moonpool.core.config import CoreConfig
from moonpool.errors import InvalidRequestError
from moonpool.kv.eviction import EvictionName
from moonpool.routing.config import PolicyName, RoutingConfig
from moonpool.tiering.config import StoreConfig
from moonpool_loadtest.experiments.numbers import Distribution
from moonpool_loadtest.experiments.report import Finding
from moonpool_loadtest.replay.cluster import ReplayCluster
from moonpool_loadtest.replay.one_pool import make_evictions, replay, replay_belady
from moonpool_loadtest.replay.pace import BYTES_PER_TOKEN, Pace, Tally
from moonpool_loadtest.replay.progress import Progress
from moonpool_loadtest.replay.trace import (
    BLOCK_TOKENS,
    TRACE_BLOCK_TOKENS,
    TraceRequest,
    ideal_hits,
)

Result = tuple[list[Finding], dict[str, object]]

#: Blocks of a pool beyond the longest prompt: its answer, and a little to work with.
_SPARE_BLOCKS = 9


def placements(
    requests: Sequence[TraceRequest],
    *,
    num_workers: int,
    worker_tokens: int,
    policies: Sequence[PolicyName],
    pace: Pace,
) -> Result:
    """Every policy with private caches, and those that weigh prefixes with reads from peers too."""
    ideal = _ideal(requests)
    findings = [Finding(what="ideal: a pool that never forgets", value=100 * ideal, unit="%")]
    samples: dict[str, object] = {"ideal": ideal}
    for policy in policies:
        for reads_from_peers in (False, True):
            name = f"{policy}{' + reads from peers' if reads_from_peers else ''}"
            bar = None
            if policy is PolicyName.MIN_TTFT:
                bar = 26.0 if reads_from_peers else 21.0
            started = time.perf_counter()
            tally = ReplayCluster(
                num_workers=num_workers,
                core=_core(requests, worker_tokens // TRACE_BLOCK_TOKENS),
                routing=_routing(policy, reads_from_peers=reads_from_peers),
                pace=pace,
            ).run(requests, on_progress=Progress(name, len(requests)))
            findings.append(_told(_finding(name, tally, ideal, bar)))
            samples[name] = _sample(tally, time.perf_counter() - started)
    return findings, samples


def tiers(
    requests: Sequence[TraceRequest],
    *,
    num_workers: int,
    num_stores: int,
    total_tokens: int,
    store_evictions: Sequence[EvictionName],
    pace: Pace,
) -> Result:
    """Workers with the smallest pools that take every prompt, and stores that hold the rest.

    Raises:
        InvalidRequestError: The workers' pools alone are larger than all together shall be.
    """
    ideal, num_total_blocks = _ideal(requests), total_tokens // TRACE_BLOCK_TOKENS
    num_worker_blocks = max(request.num_blocks for request in requests) + _SPARE_BLOCKS
    num_store_blocks = (num_total_blocks - num_workers * num_worker_blocks) // num_stores
    if num_store_blocks <= 0:
        raise InvalidRequestError(
            f"{num_workers} workers that can take the longest prompt hold "
            f"{num_workers * num_worker_blocks * TRACE_BLOCK_TOKENS} tokens: --total-tokens must be more.",
            param="total_tokens",
        )
    split = f"{num_workers} x {num_worker_blocks} + {num_stores} x {num_store_blocks} blocks"
    findings = [Finding(what="ideal: a pool that never forgets", value=100 * ideal, unit="%")]
    samples: dict[str, object] = {"ideal": ideal}
    best = 0.0
    for eviction in store_evictions:
        name = f"stores, {eviction}"
        started = time.perf_counter()
        tally = ReplayCluster(
            num_workers=num_workers,
            core=_core(requests, num_worker_blocks),
            routing=_routing(PolicyName.MIN_TTFT, reads_from_peers=True),
            pace=pace,
            stores=[
                StoreConfig(
                    num_blocks=num_store_blocks,
                    block_size=BLOCK_TOKENS,
                    block_bytes=BLOCK_TOKENS * BYTES_PER_TOKEN,
                    eviction=eviction,
                )
                for _ in range(num_stores)
            ],
        ).run(requests, on_progress=Progress(name, len(requests)))
        best = max(best, tally.hit_ratio)
        findings.append(_told(_finding(name, tally, ideal, bar=None)))
        samples[name] = _sample(tally, time.perf_counter() - started)
    findings.append(
        Finding(what="the best of these", value=100 * best, unit="%", bar=26.0, detail=split)
    )
    return findings, samples


def evictions(requests: Sequence[TraceRequest], *, pool_tokens: int) -> Result:
    """One pool for everybody."""
    num_blocks = sum(request.num_blocks for request in requests)
    pool_blocks = pool_tokens // TRACE_BLOCK_TOKENS
    ratios = {
        "ideal": _ideal(requests),
        "belady": replay_belady(requests, pool_blocks) / num_blocks,
    }
    for name, policy in make_evictions(pool_blocks).items():
        print(f"replaying {name}", file=sys.stderr)
        ratios[name] = replay(requests, pool_blocks, policy) / num_blocks
    findings = [Finding(what=name, value=100 * value, unit="%") for name, value in ratios.items()]
    return findings, dict(ratios)


def _ideal(requests: Sequence[TraceRequest]) -> float:
    return ideal_hits(requests) / sum(request.num_blocks for request in requests)


def _core(requests: Sequence[TraceRequest], num_blocks: int) -> CoreConfig:
    longest = max(request.num_blocks for request in requests) * BLOCK_TOKENS
    return CoreConfig(
        num_blocks=num_blocks,
        block_size=BLOCK_TOKENS,
        max_num_batched_tokens=512,
        max_num_seqs=256,
        max_model_len=2 * longest,
        max_queued_steps=8,
    )


def _routing(policy: PolicyName, *, reads_from_peers: bool) -> RoutingConfig:
    return RoutingConfig(
        policy=policy, reads_from_peers=reads_from_peers, expected_output_tokens=16
    )


def _finding(name: str, tally: Tally, ideal: float, bar: float | None) -> Finding:
    ttft = Distribution.of(tally.ttft_s)
    sources = f"from peers {tally.num_peer_hits / tally.num_blocks:.1%}"
    if tally.num_puts:
        sources += f", from stores {tally.num_store_hits / tally.num_blocks:.1%}"
    return Finding(
        what=name,
        value=100 * tally.hit_ratio,
        unit="%",
        bar=bar,
        detail=(
            f"{tally.hit_ratio / ideal:.0%} of the ideal; {sources}; computed "
            f"{tally.computed_ratio:.1%}; TTFT p50 {ttft.p50:.2f} s, p99 {ttft.p99:.2f} s; "
            f"{tally.num_failed} failed"
        ),
    )


def _told(finding: Finding) -> Finding:
    """An arm takes minutes: its figure is not to wait for the others."""
    print(f"{finding.what}: {finding.value:.2f} {finding.unit}; {finding.detail}", file=sys.stderr)
    return finding


def _sample(tally: Tally, elapsed_s: float) -> dict[str, object]:
    return {
        "hit_ratio": tally.hit_ratio,
        "computed_ratio": tally.computed_ratio,
        "device_hits": tally.num_device_hits,
        "peer_hits": tally.num_peer_hits,
        "store_hits": tally.num_store_hits,
        "blocks": tally.num_blocks,
        "puts": tally.num_puts,
        "refused_puts": tally.num_refused_puts,
        "put_blocks": tally.num_put_blocks,
        "failed": tally.num_failed,
        "ttft_s": Distribution.of(tally.ttft_s).as_json(),
        "elapsed_s": elapsed_s,
    }
