"""`python -m moonpool_loadtest.replay TRACE`: hit ratios of placements and of eviction policies.

--what placements   8 workers of 1.05 M tokens each, every policy, then with reads from peers
--what evictions    one pool of 3 M tokens, every eviction policy, and Belady's
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from moonpool.core.config import CoreConfig
from moonpool.errors import MoonpoolError
from moonpool.routing.config import PolicyName, RoutingConfig
from moonpool_loadtest.experiments.numbers import Distribution
from moonpool_loadtest.experiments.report import Finding, print_findings, print_json
from moonpool_loadtest.replay.cluster import Pace, ReplayCluster, Tally
from moonpool_loadtest.replay.one_pool import make_evictions, replay, replay_belady
from moonpool_loadtest.replay.trace import (
    BLOCK_TOKENS,
    SCALE,
    TRACE_BLOCK_TOKENS,
    TraceRequest,
    ideal_hits,
    read_trace,
)

_PROGRESS_S = 5.0


def placements(
    requests: Sequence[TraceRequest],
    *,
    num_workers: int,
    worker_tokens: int,
    policies: Sequence[PolicyName],
    pace: Pace,
) -> tuple[list[Finding], dict[str, object]]:
    """Every policy with private caches, and those that weigh prefixes with reads from peers too."""
    num_blocks = sum(request.num_blocks for request in requests)
    ideal = ideal_hits(requests) / num_blocks
    longest = max(request.num_blocks for request in requests) * BLOCK_TOKENS
    core = CoreConfig(
        num_blocks=worker_tokens // TRACE_BLOCK_TOKENS,
        block_size=BLOCK_TOKENS,
        max_num_batched_tokens=512,
        max_num_seqs=256,
        max_model_len=2 * longest,
        max_queued_steps=8,
    )
    findings = [Finding(what="ideal: a pool that never forgets", value=100 * ideal, unit="%")]
    samples: dict[str, object] = {"ideal": ideal}
    for policy in policies:
        for reads_from_peers in (False, True):
            name = f"{policy}{' + reads from peers' if reads_from_peers else ''}"
            progress = _Progress(name, len(requests))
            started = time.perf_counter()
            tally = ReplayCluster(
                num_workers=num_workers,
                core=core,
                routing=RoutingConfig(
                    policy=policy, reads_from_peers=reads_from_peers, expected_output_tokens=16
                ),
                pace=pace,
            ).run(requests, on_progress=progress)
            findings.append(_finding(name, tally, ideal, policy, reads_from_peers=reads_from_peers))
            samples[name] = _sample(tally, time.perf_counter() - started)
    return findings, samples


def _finding(
    name: str, tally: Tally, ideal: float, policy: PolicyName, *, reads_from_peers: bool
) -> Finding:
    ttft = Distribution.of(tally.ttft_s)
    bar = None
    if policy is PolicyName.MIN_TTFT:
        bar = 26.0 if reads_from_peers else 21.0
    return Finding(
        what=name,
        value=100 * tally.hit_ratio,
        unit="%",
        bar=bar,
        detail=(
            f"{tally.hit_ratio / ideal:.0%} of the ideal; from peers "
            f"{tally.num_peer_hits / tally.num_blocks:.1%}; TTFT p50 {ttft.p50:.2f} s, "
            f"p99 {ttft.p99:.2f} s; {tally.num_failed} failed"
        ),
    )


def _sample(tally: Tally, elapsed_s: float) -> dict[str, object]:
    return {
        "hit_ratio": tally.hit_ratio,
        "device_hits": tally.num_device_hits,
        "peer_hits": tally.num_peer_hits,
        "blocks": tally.num_blocks,
        "failed": tally.num_failed,
        "ttft_s": Distribution.of(tally.ttft_s).as_json(),
        "elapsed_s": elapsed_s,
    }


def evictions(
    requests: Sequence[TraceRequest], *, pool_tokens: int
) -> tuple[list[Finding], dict[str, object]]:
    """One pool for everybody."""
    num_blocks = sum(request.num_blocks for request in requests)
    pool_blocks = pool_tokens // TRACE_BLOCK_TOKENS
    ratios = {
        "ideal": ideal_hits(requests) / num_blocks,
        "belady": replay_belady(requests, pool_blocks) / num_blocks,
    }
    for name, policy in make_evictions(pool_blocks).items():
        print(f"replaying {name}", file=sys.stderr)
        ratios[name] = replay(requests, pool_blocks, policy) / num_blocks
    findings = [Finding(what=name, value=100 * value, unit="%") for name, value in ratios.items()]
    return findings, dict(ratios)


class _Progress:
    """A line now and then."""

    def __init__(self, name: str, num_requests: int) -> None:
        self._name = name
        self._num_requests = num_requests
        self._told_at = time.monotonic()

    def __call__(self, num_arrived: int) -> None:
        now = time.monotonic()
        if now - self._told_at >= _PROGRESS_S or num_arrived == self._num_requests:
            self._told_at = now
            print(f"{self._name}: {num_arrived} of {self._num_requests} requests", file=sys.stderr)


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit code 1 if the trace cannot be read."""
    parser = argparse.ArgumentParser(
        prog="python -m moonpool_loadtest.replay",
        description=f"Replay a trace of Mooncake's at 1/{SCALE} scale; sizes are those of the trace.",
    )
    parser.add_argument("trace", type=Path, help="a .jsonl file of Mooncake's FAST'25 traces")
    parser.add_argument("--what", choices=("placements", "evictions"), default="placements")
    parser.add_argument("--policies", nargs="+", default=list(PolicyName), type=PolicyName)
    parser.add_argument("--workers", type=int, default=8)
    parser.add_argument("--worker-tokens", type=int, default=1_050_000)
    parser.add_argument("--pool-tokens", type=int, default=3_000_000, help="of --what evictions")
    parser.add_argument("--prefill-rate", type=float, default=16_000.0, help="tokens/s of a worker")
    parser.add_argument(
        "--jitter",
        type=float,
        default=0.0,
        help="seconds; 3 undoes the conversation trace's rounding",
    )
    parser.add_argument("--num-requests", type=int, help="only the first so many")
    options = parser.parse_args(arguments)
    try:
        requests = read_trace(options.trace, jitter_s=options.jitter)[: options.num_requests]
    except (OSError, MoonpoolError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    if options.what == "placements":
        findings, samples = placements(
            requests,
            num_workers=options.workers,
            worker_tokens=options.worker_tokens,
            policies=options.policies,
            pace=Pace(prefill_rate=options.prefill_rate),
        )
    else:
        findings, samples = evictions(requests, pool_tokens=options.pool_tokens)
    print_findings(findings)
    print_json(
        scale={
            "trace": options.trace.name,
            "num_requests": len(requests),
            "scale": f"1/{SCALE}",
            "block_tokens": BLOCK_TOKENS,
            "workers": options.workers,
            "worker_tokens": options.worker_tokens,
            "pool_tokens": options.pool_tokens,
            "jitter_s": options.jitter,
            "prefill_rate": options.prefill_rate,
        },
        findings=findings,
        samples=samples,
        is_quick=options.num_requests is not None,
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
