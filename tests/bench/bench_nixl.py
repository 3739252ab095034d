"""What a verified read by NIXL costs over a bare one: `python tests/bench/bench_nixl.py`.

A source process serves its pool by NIXL and does nothing else; this process reads. Arms alternate within one
run, as in bench_transport.py; prints a table, then JSON. Once over what UCX takes by itself and once
over TCP. Ratios are of time, and (`cpu`) of this process's CPU time, which other work on the machine
does not change as much.

bare    one thread, no event loop: post the READ (the same descriptors), ask until it is done
hashed  the same, then XXH3-64 of each leaf: what a verified read costs
nixl    the product: peer.read, 8 reads at once (`alone`: one after another)
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

import numpy as np
import uvloop
from bench_transport import LAYOUTS, RUNS, SMOLLM2, ratio, read_all

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from moonpool import native
from moonpool.api.v1 import kv_pb2
from moonpool.kv.region import KvRegion
from moonpool.native.geometry import DigestArray
from moonpool.transport.base import KvPeer, KvRead, LocalPool
from moonpool.transport.nixl import coalesce, descriptors
from moonpool.transport.nixl_agent import NixlAgent, address_of, nixl_facts
from moonpool.wire.layout import region_from_pb, region_to_pb
from support.kv_source import UCX_BY_NAME, block_read, make_transport, reader_pool, serve_kv

CONCURRENT = 8
RATIOS = {"hashed": "bare", "nixl": "hashed", "alone": "hashed"}


async def serve(layout: str, by: str) -> None:
    """The source process: prints its region and digests, ends with its standard input."""
    async with serve_kv(LAYOUTS[layout], by=by) as source:
        line = {
            "region": region_to_pb(source.region).SerializeToString().hex(),
            "digests": source.memory.leaf_digests.tobytes().hex(),
        }
        sys.stdout.write(json.dumps(line) + "\n")
        sys.stdout.flush()
        await asyncio.to_thread(sys.stdin.read)


class Source:
    """The other process."""

    def __init__(self, layout: str, by: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, __file__, "--serve", layout, by],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self.process.stdout is not None
        line = json.loads(self.process.stdout.readline())
        self.region: KvRegion = region_from_pb(
            kv_pb2.KvRegion.FromString(bytes.fromhex(line["region"]))
        )
        digests = np.frombuffer(bytes.fromhex(line["digests"]), np.uint64)
        self.digests: DigestArray = digests.reshape(-1, self.region.layout.num_layers)

    def stop(self) -> None:
        self.process.communicate("")


def scatter_reads(digests: DigestArray, count: int) -> list[KvRead]:
    """One layer of 32 random blocks each; those in flight together touch other layers."""
    rng = np.random.default_rng(1)
    return [
        block_read(
            SMOLLM2,
            digests,
            rng.permutation(SMOLLM2.num_blocks)[:32].tolist(),
            rng.permutation(SMOLLM2.num_blocks)[:32].tolist(),
            [number % SMOLLM2.num_layers],
        )
        for number in range(count)
    ]


def run_reads(digests: DigestArray, size_bytes: int, count: int) -> list[KvRead]:
    """One contiguous run each, in leaves of 64 KiB, each to a place of its own."""
    rng = np.random.default_rng(2)
    num_blocks = size_bytes // RUNS.block_bytes
    blocks = np.arange(num_blocks)
    reads = []
    for number in range(count):
        source = int(rng.integers(0, RUNS.num_blocks - num_blocks + 1))
        target = number * num_blocks
        reads.append(
            KvRead.of(
                np.array([[source * RUNS.block_bytes, target * RUNS.block_bytes, size_bytes]]),
                blocks=target + blocks,
                layers=0,
                expected=digests[source + blocks, 0],
                after_span=0,
            )
        )
    return reads


class BareReader:
    """NIXL without Moonpool around it."""

    def __init__(self, region: KvRegion, pool: LocalPool, by: str) -> None:
        assert region.nixl is not None
        self._pool = pool
        self._agent = NixlAgent("bench-bare", [pool.bytes], ucx=UCX_BY_NAME[by])
        self._peer = self._agent.add_peer(region.nixl.agent_metadata)
        self._bases = (region.nixl.base_address, address_of(pool.bytes))

    def read(self, read: KvRead) -> None:
        spans = coalesce(read.spans)
        sides = (
            descriptors(base, spans[:, column], spans[:, 2])
            for column, base in enumerate(self._bases)
        )
        handle = self._agent.read(self._peer, *sides)
        while not self._agent.is_done(handle):
            pass
        self._agent.release(handle)

    def verify(self, read: KvRead) -> None:
        kernels, pool = native.kernels(), self._pool
        assert not kernels.verify_leaves(pool.bytes, pool.geometry, read.checks).any()

    def close(self) -> None:
        self._agent.close()


def arms(
    bare: BareReader, peer: KvPeer, reads: list[KvRead]
) -> dict[str, Callable[[], Awaitable[None]]]:
    async def only_read() -> None:
        for read in reads:
            bare.read(read)

    async def read_and_hash() -> None:
        for read in reads:
            bare.read(read)
            bare.verify(read)

    return {
        "bare": only_read,
        "hashed": read_and_hash,
        "nixl": lambda: read_all(peer, reads, CONCURRENT),
        "alone": lambda: read_all(peer, reads, 1),
    }


async def alternate(
    arms: dict[str, Callable[[], Awaitable[None]]], rounds: int
) -> tuple[dict[str, list[float]], dict[str, list[float]]]:
    """Seconds and CPU seconds of each arm in each round, after one round of warming up."""
    seconds: dict[str, list[float]] = {name: [] for name in arms}
    cpu_seconds: dict[str, list[float]] = {name: [] for name in arms}
    for turn in range(rounds + 1):
        for name, arm in arms.items():
            started, cpu_started = time.perf_counter(), time.process_time()
            await arm()
            if turn:
                seconds[name].append(time.perf_counter() - started)
                cpu_seconds[name].append(time.process_time() - cpu_started)
    return seconds, cpu_seconds


async def measure(
    source: Source, by: str, label: str, reads: list[KvRead], rounds: int
) -> dict[str, object]:
    pool = reader_pool(source.region.layout)
    async with make_transport(by, pool) as transport:
        peer = await transport.connect(source.region, timeout_s=10)
        bare = BareReader(source.region, pool, by)
        try:
            seconds, cpu_seconds = await alternate(arms(bare, peer, reads), rounds)
        finally:
            bare.close()
    num_bytes = sum(read.num_bytes for read in reads)
    medians = {name: sorted(values)[len(values) // 2] for name, values in seconds.items()}
    return {
        "case": label,
        "transport": by,
        "gb_per_s": {name: round(num_bytes / value / 1e9, 2) for name, value in medians.items()},
        "ratios": {
            f"{arm}/{base}": round(ratio(seconds, arm, base), 3) for arm, base in RATIOS.items()
        },
        "cpu_ratios": {
            f"{arm}/{base}": round(ratio(cpu_seconds, arm, base), 3) for arm, base in RATIOS.items()
        },
    }


async def run(rounds: int) -> list[dict[str, object]]:
    rows: list[dict[str, object]] = []
    for by in UCX_BY_NAME:
        source = Source("runs", by)
        try:
            for label, size, count in (
                ("64 KiB", 1 << 16, 256),
                ("1 MiB", 1 << 20, 32),
                ("16 MiB", 1 << 24, 4),
            ):
                reads = run_reads(source.digests, size, count)
                rows.append(await measure(source, by, label, reads, rounds))
        finally:
            source.stop()
        source = Source("smollm2", by)
        try:
            reads = scatter_reads(source.digests, 50)
            rows.append(await measure(source, by, "32 x 12 KiB", reads, rounds))
        finally:
            source.stop()
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--serve", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        if options.serve:
            runner.run(serve(*options.serve))
            return
        rows = runner.run(run(options.rounds))
    sys.stdout.write(f"{'case':12} {'transport':10} {'GB/s':50} ratios, cpu\n")
    for row in rows:
        speeds = "  ".join(f"{name} {value}" for name, value in row["gb_per_s"].items())
        ratios = "  ".join(f"{name} {value}" for name, value in row["ratios"].items())
        cpu = "  ".join(f"{value}" for value in row["cpu_ratios"].values())
        sys.stdout.write(
            f"{row['case']:12} {row['transport']:10} {speeds:50} {ratios}  cpu {cpu}\n"
        )
    machine = {
        "cpu_count": os.cpu_count(),
        "machine": platform.machine(),
        "python": platform.python_version(),
        "nixl": nixl_facts().version,
        "native": native.status().message,
        "rounds": options.rounds,
    }
    sys.stdout.write(json.dumps({"machine": machine, "rows": rows}) + "\n")


if __name__ == "__main__":
    main()
