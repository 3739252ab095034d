"""`python -m moonpool_loadtest.faults`: each fault once, a table, and exit status 1 if any failed."""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import get_args

from moonpool.config.schema import ClusterConfig, TransportName, default_data_dir
from moonpool.errors import MoonpoolError
from moonpool.hub.model_dir import resolve
from moonpool_loadtest.faults.lab import (
    CaseSets,
    FamilySizes,
    FaultReport,
    LabSizes,
    answers_without_faults,
    make_families,
    make_sets,
    open_lab,
)
from moonpool_loadtest.faults.redis_server import RedisServer, redis_server, server_path
from moonpool_loadtest.faults.reuse import (
    FAILPOINTS,
    NUM_FAMILIES,
    NUM_FAMILIES_FOR_LEAVERS,
    SCENARIOS,
    reuse_config,
)
from moonpool_loadtest.faults.ring import open_ring
from moonpool_loadtest.faults.scenarios import (
    DECODE,
    PREFILL,
    Kill,
    decode_kills,
    next_lives,
    prefill_kills,
    run_boot_without_nats,
    run_damage,
    run_disconnects,
    run_freeze,
    run_kill,
    run_nats_restart,
    run_router_restart,
    run_without_fault,
)
from moonpool_loadtest.faults.store_cluster import store_cluster
from moonpool_loadtest.faults.store_quota import (
    NUM_FAMILIES_BESIDE_FLOOD,
    run_flood,
    with_floors,
)
from moonpool_loadtest.faults.store_ring import NUM_RING_FAMILIES, RING_SCENARIOS
from moonpool_loadtest.faults.stores import (
    NUM_FAMILIES_BESIDE_KILLS,
    run_outlives_itself,
    run_outlives_workers,
    run_store_kills,
)

_KINDS = ("handoff", "reuse", "stores", "ring")
_POSITIONS = (0, 1, 7, 20)
#: Families of a tenant that floods a store.
_NUM_FLOODS = 8


def cluster_config(
    model: str, *, data_dir: Path, dtype: str, is_checked: bool, transport: TransportName = "shm"
) -> ClusterConfig:
    """A prefill worker, two decode workers with four slots each, a router on free ports.

    Args:
        transport: How the first decode worker reads, which is the one that dies; the other by gRPC.
    """
    offered = ["shm", "nixl", "grpc"] if transport == "nixl" else ["shm", "grpc"]
    settings = {
        "num_blocks": 256,
        "max_num_batched_tokens": 128,
        "max_num_seqs": 4,
        "max_model_len": 512,
        "is_checked": is_checked,
    }
    return ClusterConfig.model_validate(
        {
            "name": "faults",
            "data_dir": data_dir,
            "model": model,
            "dtype": dtype,
            "local_prefill_tokens": 64,
            # What takes the long way is asked for, not what is faster; and every worker gets its share.
            "router": {
                "http_port": 0,
                "grpc_port": 0,
                "placement": {"disagg": "threshold", "mode": "least_loaded"},
            },
            "worker": settings,
            "workers": [
                {"role": "prefill", "transports": offered},
                {"role": "decode", "transports": [transport]},
                {"role": "decode", "name": "grpc", "transports": ["grpc"]},
            ],
        }
    )


def make_kills(*, layers: Sequence[int], positions: Sequence[int] = _POSITIONS) -> tuple[Kill, ...]:
    """All of them, in an order that restarts as little as it can.

    Args:
        layers: After which layers of the first chunk prefill dies.
        positions: At which tokens decode dies.
    """
    return (*prefill_kills(layers=layers), *decode_kills(positions=positions))


def sets_for(kills: Sequence[Kill], *, vocab_size: int) -> CaseSets:
    """As many requests as all scenarios take together."""
    boot, plain, freezes, nats, router, damage, stages = 1, 3, 2, 3, 1, 1, 5
    leave_queue, leave_elsewhere = 4, 4
    return make_sets(
        LabSizes(vocab_size=vocab_size),
        num_judged=boot + plain + len(kills) + freezes + nats + router + damage + stages,
        num_for_leavers=router + leave_queue + leave_elsewhere,
    )


async def run_handoff_faults(
    config: ClusterConfig, *, vocab_size: int, num_layers: int
) -> list[FaultReport]:
    """Every fault of workers, broker, router and clients once. Prints a row as soon as it is known."""
    kills = make_kills(layers=(0, num_layers // 2, num_layers - 1))
    sets = sets_for(kills, vocab_size=vocab_size)
    print("answers without faults ...", flush=True)
    expected = await answers_without_faults(config, sets.judged_cases)
    print(header(), flush=True)
    async with open_lab(config, expected=expected, sets=sets) as lab:
        show(await run_boot_without_nats(lab))
        show(await run_without_fault(lab))
        for kill, next_life in next_lives(kills).items():
            show(await run_kill(lab, kill, next_life))
        show(await run_damage(lab))
        show(await run_freeze(lab, PREFILL))
        show(await run_freeze(lab, DECODE))
        show(await run_nats_restart(lab))
        show(await run_router_restart(lab))
        show(await run_disconnects(lab))
    show(lab.reports[-1])
    return lab.reports


async def run_reuse_faults(config: ClusterConfig, *, vocab_size: int) -> list[FaultReport]:
    """Every fault of prefix reads, index and two routers once. Prints a row as soon as it is known."""
    sets = make_families(
        FamilySizes(vocab_size=vocab_size),
        num_judged=NUM_FAMILIES,
        num_for_leavers=NUM_FAMILIES_FOR_LEAVERS,
    )
    print("answers without faults ...", flush=True)
    expected = await answers_without_faults(config, sets.judged_cases)
    print(header(), flush=True)
    async with open_lab(
        config, expected=expected, sets=sets, is_whole=True, failpoints=FAILPOINTS
    ) as lab:
        for scenario in SCENARIOS:
            show(await scenario(lab))
    show(lab.reports[-1])
    return lab.reports


async def run_store_faults(
    config: ClusterConfig, *, vocab_size: int, num_kills: int
) -> list[FaultReport]:
    """What a store keeps, for whom, and what its deaths cost. Prints a row as soon as it is known."""
    sets = make_families(
        FamilySizes(vocab_size=vocab_size),
        num_judged=(
            NUM_FAMILIES_BESIDE_KILLS + num_kills + NUM_FAMILIES_BESIDE_FLOOD + _NUM_FLOODS
        ),
        num_for_leavers=0,
    )
    print("answers without faults ...", flush=True)
    expected = await answers_without_faults(config, sets.judged_cases)
    print(header(), flush=True)
    async with open_lab(config, expected=expected, sets=sets, is_whole=True) as lab:
        show(await run_outlives_workers(lab))
        show(await run_outlives_itself(lab))
        show(await run_store_kills(lab, num_kills=num_kills))
        show(await run_flood(lab, num_floods=_NUM_FLOODS))
    show(lab.reports[-1])
    return lab.reports


async def run_ring_faults(
    config: ClusterConfig, redis: RedisServer, *, vocab_size: int
) -> list[FaultReport]:
    """Stores that come and go, and all that they find each other by. Prints a row as soon as it is known.

    Args:
        redis: That of the configuration; it runs.
    """
    sets = make_families(
        FamilySizes(vocab_size=vocab_size), num_judged=NUM_RING_FAMILIES, num_for_leavers=0
    )
    print("answers without faults ...", flush=True)
    expected = await answers_without_faults(config, sets.judged_cases)
    print(header(), flush=True)
    began = asyncio.get_running_loop().time()
    async with open_lab(config, expected=expected, sets=sets, is_whole=True) as lab:
        ring = await open_ring(lab, redis, began=began)
        for scenario in RING_SCENARIOS:
            show(await scenario(ring))
    show(lab.reports[-1])
    return lab.reports


def show(report: FaultReport) -> None:
    print(row(report), flush=True)


def header() -> str:
    return (
        f"{'fault':<58} {'requests':>8} {'equal':>5} {'differ':>6} {'attempts':>8} {'slowest':>8}"
    )


def row(report: FaultReport) -> str:
    """One line, and one more for each thing that is wrong or worth knowing."""
    lines = [
        f"{report.fault:<58} {report.num_requests:>8} {report.num_equal:>5} "
        f"{len(report.differing):>6} {report.num_attempts:>8} {report.slowest_s:>6.1f} s"
    ]
    lines += [f"    differs: {text}" for text in report.differing]
    lines += [f"    WRONG: {text}" for text in report.problems]
    lines += [f"    {report.note}"] if report.note else []
    return "\n".join(lines)


def verdict(reports: Sequence[FaultReport], *, dtype: str) -> tuple[bool, str]:
    """Whether all is well, and the sum in one line."""
    num_requests = sum(report.num_requests for report in reports)
    num_differing = sum(len(report.differing) for report in reports)
    num_wrong = sum(len(report.problems) for report in reports)
    # In bfloat16 another batch or chunk is another rounding: only loss, doubling and order are judged.
    may_differ = dtype == "bfloat16"
    num_faults = sum(1 for report in reports if report.num_requests)
    text = (
        f"{num_faults} faults, {num_requests} requests: {num_wrong} wrong, {num_differing} with "
        f"other tokens ({'any' if may_differ else 'none'} may)"
    )
    return num_wrong == 0 and (may_differ or num_differing == 0), text


def main(arguments: Iterable[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="moonpool_loadtest.faults", description=__doc__)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--transport", choices=get_args(TransportName), default="shm")
    parser.add_argument("--only", choices=_KINDS, help="faults of one kind")
    parser.add_argument("--store-kills", type=int, default=50, help="deaths of the store")
    parser.add_argument("--data-dir", type=Path, help="where models are; logs go there too")
    parser.add_argument("--check", action="store_true", help="workers check all invariants")
    options = parser.parse_args(None if arguments is None else list(arguments))
    data_dir = (options.data_dir or default_data_dir(os.environ)).absolute()
    kinds = _KINDS if options.only is None else (options.only,)
    try:
        if "ring" in kinds:
            # Told before anything has run.
            server_path()
        model = resolve(options.model, data_dir=data_dir)
        vocab_size, num_layers = model.config.vocab_size, model.config.num_layers
        reports: list[FaultReport] = []
        with tempfile.TemporaryDirectory(prefix="moonpool-faults-") as home:
            common = {
                "data_dir": Path(home),
                "dtype": options.dtype,
                "is_checked": options.check,
            }
            if "handoff" in kinds:
                config = cluster_config(str(model.path), transport=options.transport, **common)
                faults = run_handoff_faults(config, vocab_size=vocab_size, num_layers=num_layers)
                reports += asyncio.run(faults)
            if "reuse" in kinds:
                config = reuse_config(str(model.path), **common)
                reports += asyncio.run(run_reuse_faults(config, vocab_size=vocab_size))
            if "stores" in kinds:
                ssd_dir = Path(home, "ssd")
                ssd_dir.mkdir()
                config = with_floors(store_cluster(str(model.path), ssd_dir=ssd_dir, **common))
                faults = run_store_faults(
                    config, vocab_size=vocab_size, num_kills=options.store_kills
                )
                reports += asyncio.run(faults)
            if "ring" in kinds:
                ssd_dir, redis_dir = Path(home, "ring-ssd"), Path(home, "redis")
                ssd_dir.mkdir()
                redis_dir.mkdir()
                with redis_server(redis_dir) as redis:
                    config = store_cluster(
                        str(model.path), ssd_dir=ssd_dir, redis_url=redis.url, **common
                    )
                    faults = run_ring_faults(config, redis, vocab_size=vocab_size)
                    reports += asyncio.run(faults)
    except MoonpoolError as error:
        sys.stderr.write(f"{error.message}\n")
        return 1
    is_good, text = verdict(reports, dtype=options.dtype)
    print(text)
    return 0 if is_good else 1


if __name__ == "__main__":
    sys.exit(main())
