"""`python -m moonpool_loadtest.replay TRACE`: hit ratios of placements, of stores, of eviction policies.

--what placements   8 workers of 1.05 M tokens each, every policy, then with reads from peers
--what stores       8 workers with small pools and stores that hold the rest of 8.4 M tokens
--what evictions    one pool of 3 M tokens, every eviction policy, and Belady's
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from moonpool.errors import MoonpoolError
from moonpool.kv.eviction import EvictionName
from moonpool.routing.config import PolicyName
from moonpool_loadtest.experiments.report import publish
from moonpool_loadtest.replay.arms import Result, evictions, placements, tiers
from moonpool_loadtest.replay.pace import Pace
from moonpool_loadtest.replay.trace import BLOCK_TOKENS, SCALE, TraceRequest, read_trace


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit code 1 if the trace cannot be read, or does not fit the sizes."""
    options = _parser().parse_args(arguments)
    try:
        requests = read_trace(options.trace, jitter_s=options.jitter)[: options.num_requests]
        findings, samples = _run(options, requests)
    except (OSError, MoonpoolError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    publish(
        scale={
            "trace": options.trace.name,
            "num_requests": len(requests),
            "scale": f"1/{SCALE}",
            "block_tokens": BLOCK_TOKENS,
            "workers": options.workers,
            "worker_tokens": options.worker_tokens,
            "stores": options.stores,
            "total_tokens": options.total_tokens,
            "pool_tokens": options.pool_tokens,
            "jitter_s": options.jitter,
            "prefill_rate": options.prefill_rate,
        },
        findings=findings,
        samples=samples,
        is_quick=options.num_requests is not None,
    )
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m moonpool_loadtest.replay",
        description=f"Replay a trace of Mooncake's at 1/{SCALE} scale; sizes are those of the trace.",
    )
    parser.add_argument("trace", type=Path, help="a .jsonl file of Mooncake's FAST'25 traces")
    parser.add_argument(
        "--what", choices=("placements", "stores", "evictions"), default="placements"
    )
    parser.add_argument("--policies", nargs="+", default=list(PolicyName), type=PolicyName)
    parser.add_argument("--workers", type=int, default=8)
    parser.add_argument("--worker-tokens", type=int, default=1_050_000, help="of --what placements")
    parser.add_argument("--stores", type=int, default=1)
    parser.add_argument(
        "--total-tokens",
        type=int,
        default=8_400_000,
        help="of --what stores: all pools and stores together",
    )
    parser.add_argument(
        "--store-evictions", nargs="+", default=list(EvictionName), type=EvictionName
    )
    parser.add_argument("--pool-tokens", type=int, default=3_000_000, help="of --what evictions")
    parser.add_argument("--prefill-rate", type=float, default=16_000.0, help="tokens/s of a worker")
    parser.add_argument(
        "--jitter",
        type=float,
        default=0.0,
        help="seconds; 3 undoes the conversation trace's rounding",
    )
    parser.add_argument("--num-requests", type=int, help="only the first so many")
    return parser


def _run(options: argparse.Namespace, requests: Sequence[TraceRequest]) -> Result:
    pace = Pace(prefill_rate=options.prefill_rate)
    match options.what:
        case "placements":
            return placements(
                requests,
                num_workers=options.workers,
                worker_tokens=options.worker_tokens,
                policies=options.policies,
                pace=pace,
            )
        case "stores":
            return tiers(
                requests,
                num_workers=options.workers,
                num_stores=options.stores,
                total_tokens=options.total_tokens,
                store_evictions=options.store_evictions,
                pace=pace,
            )
        case _:
            return evictions(requests, pool_tokens=options.pool_tokens)


if __name__ == "__main__":
    sys.exit(main())
