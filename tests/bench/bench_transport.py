"""How fast KV moves between two processes of one machine, digests on: `python tests/bench/bench_transport.py`.

A source process owns a pool and serves it by shm and gRPC; this process reads. Every figure is a ratio
of arms that alternate within one run, since the machine's own speed drifts. Prints a table, then JSON.

shm     pieces       one bare memcpy of each piece, in one C loop
        loop         memcpy + XXH3-64 of each piece, in one C loop: what a verified copy costs
        shm          the product: peer.read, 8 reads at once (`alone`: one after another)
grpc    bare         a grpc.aio stream of 64 ready-made 1 MiB messages, hashed by its receiver; five
                     receivers take turns, and their median counts
        kept         the same; its receiver keeps freed memory, as the product's does
        grpc         the product: peer.read, 8 reads at once: gathered, streamed, scattered, verified
        many         the same, 30 reads at once: a layer each of a model as deep as SmolLM2

Bare receivers are processes of their own: how glibc treats freed memory is a process's. By what the
process did before, a plain one keeps its messages' memory or takes new pages for each: its speed is one or the
other for as long as it lives, twofold apart.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack
from pathlib import Path

import grpc
import numpy as np
import uvloop
import xxhash

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from moonpool import native
from moonpool.api.v1 import kv_pb2
from moonpool.kv.layout import KvLayout
from moonpool.kv.region import KvRegion
from moonpool.memory.heap import keep_freed_memory
from moonpool.native.geometry import DigestArray
from moonpool.transport.base import KvPeer, KvRead, LocalPool
from moonpool.wire.layout import region_from_pb, region_to_pb
from support.kv_source import block_read, make_transport, reader_pool, serve_kv

BARE_METHOD = "/bench.Bare/Stream"
BARE_BYTES = 1 << 20
CONCURRENT, MANY = 8, 30
PLAIN_RECEIVERS = 5

#: Does its work once; returns the seconds, or None for as long as the call takes.
Arm = Callable[[], Awaitable[float | None]]

#: SmolLM2-135M in bfloat16: 30 layers, 12 KiB a layer and block, 360 KiB a block.
SMOLLM2 = KvLayout.block_major(
    num_blocks=512, num_layers=30, num_kv_heads=3, head_dim=64, dtype="bfloat16"
)
#: One leaf of 64 KiB a block, so that a run of blocks is a run of pieces.
RUNS = KvLayout.block_major(
    num_blocks=2048, num_layers=1, num_kv_heads=8, head_dim=64, dtype="float32"
)
LAYOUTS = {"smollm2": SMOLLM2, "runs": RUNS}


async def _bare(
    requests: AsyncIterator[bytes], _context: grpc.aio.ServicerContext
) -> AsyncIterator[bytes]:
    payloads = itertools.cycle([os.urandom(BARE_BYTES) for _ in range(64)])
    async for request in requests:
        for _ in range(int.from_bytes(request, "little")):
            yield next(payloads)


async def receive_bare(address: str, *, keeps_memory: bool) -> None:
    """A bare receiver: for each number read, receives and hashes so many messages, and says so."""
    if keeps_memory:
        keep_freed_memory()
    async with grpc.aio.insecure_channel(address) as channel:
        call = channel.stream_stream(BARE_METHOD)()
        while line := await asyncio.to_thread(sys.stdin.readline):
            started = time.perf_counter()
            await call.write(int(line).to_bytes(8, "little"))
            for _ in range(int(line)):
                xxhash.xxh3_64_intdigest(await call.read())
            sys.stdout.write(f"{time.perf_counter() - started}\n")
            sys.stdout.flush()
        call.cancel()


async def serve(name: str) -> None:
    """The source process: prints its region and its digests' file, ends with its standard input."""
    bare = grpc.aio.server()
    port = bare.add_insecure_port("127.0.0.1:0")
    handler = grpc.stream_stream_rpc_method_handler(_bare)
    bare.add_generic_rpc_handlers(
        (grpc.method_handlers_generic_handler("bench.Bare", {"Stream": handler}),)
    )
    await bare.start()
    async with serve_kv(LAYOUTS[name]) as source:
        line = {
            "region": region_to_pb(source.region).SerializeToString().hex(),
            "digests": source.memory.leaf_digests.tobytes().hex(),
            "bare": f"127.0.0.1:{port}",
        }
        sys.stdout.write(json.dumps(line) + "\n")
        sys.stdout.flush()
        await asyncio.to_thread(sys.stdin.read)
    await bare.stop(0)


def scatter_reads(digests: DigestArray, count: int) -> list[KvRead]:
    """One layer of 32 random blocks each. No two go to the same place: they may be under way at once."""
    rng = np.random.default_rng(1)
    targets = [rng.permutation(512) for _ in range(SMOLLM2.num_layers)]
    reads = []
    for number in range(count):
        turn, layer = divmod(number, SMOLLM2.num_layers)
        own = targets[layer][turn * 32 : (turn + 1) * 32]
        sources = rng.permutation(512)[:32].tolist()
        reads.append(block_read(SMOLLM2, digests, sources, own.tolist(), [layer]))
    return reads


def run_reads(digests: DigestArray, size_bytes: int, count: int) -> list[KvRead]:
    """One contiguous run each, in pieces of 64 KiB. Those that are under way at once go to places of their own."""
    rng = np.random.default_rng(2)
    num_blocks = size_bytes // RUNS.block_bytes
    places = rng.permutation(RUNS.num_blocks // num_blocks) * num_blocks
    reads = []
    for number in range(count):
        source = int(rng.integers(0, RUNS.num_blocks - num_blocks + 1))
        target = int(places[number % len(places)])
        blocks = np.arange(num_blocks)
        span = [source * RUNS.block_bytes, target * RUNS.block_bytes, size_bytes]
        reads.append(
            KvRead.of(
                np.array([span], np.int64),
                blocks=target + blocks,
                layers=0,
                expected=digests[source + blocks, 0],
                after_span=0,
            )
        )
    return reads


async def read_all(peer: KvPeer, reads: list[KvRead], concurrent: int) -> None:
    waiting = iter(reads)

    async def work() -> None:
        for read in waiting:
            result = await peer.read(read, timeout_s=30)
            assert not result.bad_leaves, result

    async with asyncio.TaskGroup() as group:
        for _ in range(concurrent):
            group.create_task(work())


async def alternate(arms: dict[str, Arm], rounds: int) -> dict[str, list[float]]:
    """Seconds of each arm in each round, as it says or as it takes, after one round of warming up."""
    seconds: dict[str, list[float]] = {name: [] for name in arms}
    for turn in range(rounds + 1):
        for name, arm in arms.items():
            started = time.perf_counter()
            told = await arm()
            if turn:
                seconds[name].append(told or time.perf_counter() - started)
    return seconds


def ratio(seconds: dict[str, list[float]], arm: str, base: str) -> float:
    """Median over rounds of the speed of `arm` relative to `base` in the same round."""
    pairs = zip(seconds[arm], seconds[base], strict=True)
    return statistics.median(theirs / ours for ours, theirs in pairs)


class Source:
    """The other process."""

    def __init__(self, name: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, __file__, "--serve", name],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self.process.stdout is not None
        line = json.loads(self.process.stdout.readline())
        self.layout = LAYOUTS[name]
        self.region: KvRegion = region_from_pb(
            kv_pb2.KvRegion.FromString(bytes.fromhex(line["region"]))
        )
        digests = np.frombuffer(bytes.fromhex(line["digests"]), np.uint64)
        self.digests: DigestArray = digests.reshape(-1, self.layout.num_layers)
        self.bare_address: str = line["bare"]

    def stop(self) -> None:
        self.process.communicate("")


async def measure(
    source: Source, label: str, reads: list[KvRead], rounds: int
) -> list[dict[str, object]]:
    """Both transports on the same reads, each with its own base."""
    pool = reader_pool(source.layout)
    num_bytes = sum(read.num_bytes for read in reads)
    rows: list[dict[str, object]] = []

    def row(transport: str, seconds: dict[str, list[float]], targets: dict[str, str]) -> None:
        speeds = {
            name: round(num_bytes / statistics.median(values) / 1e9, 2)
            for name, values in seconds.items()
        }
        ratios = {
            f"{arm}/{base}": round(ratio(seconds, arm, base), 3) for arm, base in targets.items()
        }
        rows.append({"case": label, "transport": transport, "gb_per_s": speeds, "ratios": ratios})

    async with make_transport("shm", pool) as transport:
        peer = await transport.connect(source.region, timeout_s=10)
        seconds = await alternate(shm_arms(peer, pool, reads), rounds)
        row("shm", seconds, {"loop": "pieces", "shm": "loop", "alone": "loop"})
    count = -(-num_bytes // BARE_BYTES)
    async with make_transport("grpc", pool) as transport, AsyncExitStack() as stack:

        def receiver(*options: str) -> Arm:
            one = BareReceiver(source.bare_address, *options)
            stack.push_async_callback(one.close)
            receivers.append(one)
            return lambda: one.receive(count)

        receivers: list[BareReceiver] = []
        plain = {f"bare {number}": receiver() for number in range(PLAIN_RECEIVERS)}
        peer = await transport.connect(source.region, timeout_s=10)
        arms: dict[str, Arm] = {
            **plain,
            "kept": receiver("--keep-freed-memory"),
            "grpc": lambda: read_all(peer, reads, CONCURRENT),
            "many": lambda: read_all(peer, reads, MANY),
        }
        seconds = await alternate(arms, rounds)
        each = [seconds.pop(name) for name in plain]
        seconds = {"bare": [statistics.median(turn) for turn in zip(*each, strict=True)], **seconds}
        row("grpc", seconds, {"grpc": "bare", "many": "bare", "kept": "bare"})
        rows[-1]["plain receivers"] = [
            round(num_bytes / statistics.median(one) / 1e9, 2) for one in each
        ]
        rows[-1]["dead receivers"] = sum(one.num_deaths for one in receivers)
    return rows


class BareReceiver:
    """A bare receiver's process, started again when it has died: gRPC's library ends it now and then."""

    def __init__(self, address: str, *options: str) -> None:
        self._command = (sys.executable, __file__, "--receive", address, *options)
        self._process: asyncio.subprocess.Process | None = None
        self.num_deaths = 0

    async def receive(self, count: int) -> float:
        """Receive so many messages; the seconds that it took."""
        while True:
            if self._process is None:
                self._process = await asyncio.create_subprocess_exec(
                    *self._command, stdin=subprocess.PIPE, stdout=subprocess.PIPE
                )
            stdin, stdout = self._process.stdin, self._process.stdout
            assert stdin is not None
            assert stdout is not None
            if self._process.returncode is None and not stdin.is_closing():
                stdin.write(b"%d\n" % count)
                if line := await stdout.readline():
                    return float(line)
            await self.close()
            self.num_deaths += 1

    async def close(self) -> None:
        if self._process is not None:
            assert self._process.stdin is not None
            self._process.stdin.close()
            await self._process.wait()
            self._process = None


def shm_arms(peer: KvPeer, pool: LocalPool, reads: list[KvRead]) -> dict[str, Arm]:
    kernels, mapped = native.kernels(), peer._mapped.bytes  # type: ignore[attr-defined]
    spans = np.concatenate([read.spans for read in reads])
    pieces, checks, first = [], [], 0
    for read in reads:
        order = np.arange(len(read.checks))
        length = int(read.spans[:, 2].sum()) // len(read.checks)
        offsets = read.spans[0] + np.outer(order, [length, length, 0])
        cut = read.spans if len(read.spans) > 1 else offsets
        cut[:, 2] = length
        pieces.append(cut)
        own = read.checks.copy()
        own["after_span"] = first + order
        checks.append(own)
        first += len(cut)
    all_pieces, all_checks = np.ascontiguousarray(np.concatenate(pieces)), np.concatenate(checks)
    assert int(all_pieces[:, 2].sum()) == int(spans[:, 2].sum())

    async def copy_pieces() -> None:
        kernels.copy_verify(mapped, pool.bytes, all_pieces, pool.geometry, all_checks[:0])

    async def loop() -> None:
        is_bad = kernels.copy_verify(mapped, pool.bytes, all_pieces, pool.geometry, all_checks)
        assert not is_bad.any()

    return {
        "pieces": copy_pieces,
        "loop": loop,
        "shm": lambda: read_all(peer, reads, CONCURRENT),
        "alone": lambda: read_all(peer, reads, 1),
    }


async def run(rounds: int) -> list[dict[str, object]]:
    rows: list[dict[str, object]] = []
    source = Source("runs")
    try:
        for label, size, count in (
            ("64 KiB", 1 << 16, 512),
            ("1 MiB", 1 << 20, 64),
            ("16 MiB", 1 << 24, 4),
        ):
            rows += await measure(source, label, run_reads(source.digests, size, count), rounds)
    finally:
        source.stop()
    source = Source("smollm2")
    try:
        reads = scatter_reads(source.digests, 100)
        rows += await measure(source, "32 x 12 KiB", reads, rounds)
    finally:
        source.stop()
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--serve", choices=sorted(LAYOUTS), help=argparse.SUPPRESS)
    parser.add_argument("--receive", help=argparse.SUPPRESS)
    parser.add_argument("--keep-freed-memory", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        if options.serve:
            runner.run(serve(options.serve))
            return
        if options.receive:
            receiver = receive_bare(options.receive, keeps_memory=options.keep_freed_memory)
            runner.run(receiver)
            return
        rows = runner.run(run(options.rounds))
    sys.stdout.write(f"{'case':12} {'transport':10} {'GB/s':62} ratios\n")
    for row in rows:
        speeds = "  ".join(f"{name} {value}" for name, value in row["gb_per_s"].items())
        ratios = "  ".join(f"{name} {value}" for name, value in row["ratios"].items())
        sys.stdout.write(f"{row['case']:12} {row['transport']:10} {speeds:62} {ratios}\n")
    machine = {
        "cpu_count": os.cpu_count(),
        "machine": platform.machine(),
        "python": platform.python_version(),
        "grpc": grpc.__version__,
        "native": native.status().message,
        "rounds": options.rounds,
        "load_average": [round(load, 1) for load in os.getloadavg()],
    }
    sys.stdout.write(json.dumps({"machine": machine, "rows": rows}) + "\n")


if __name__ == "__main__":
    main()
