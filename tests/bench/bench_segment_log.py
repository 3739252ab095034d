"""How fast the SSD tier is beside its disk: `python tests/bench/bench_segment_log.py [--dir DIR]`.

Arms alternate within one run on one file system, and each figure is a ratio to the disk's own rate
there, the median over the rounds:

write   dd      pwrite of 1 MiB pieces into one new file, then fdatasync (dd bs=1M conv=fdatasync)
        log     the product: blocks of 360 KiB in batches of 64, then everything synced
read    dd      pread of 1 MiB pieces of that file, in order (dd bs=1M)
        log     the product: blocks in order of writing, 64 at a time, every leaf checked
        random  the same, blocks in any order
scan    index rebuild of 100,000 records of 4 KiB; and of the blocks, of which only footers are read

Before each write as much memory as it will take in the page cache is used once and given back: a virtual machine
may have to be given memory that it never used, which takes longer than writing it to its disk.
The page cache is given up before each read and scan (posix_fadvise; `--warm` leaves it), as far as the
kernel follows. Prints a table, then JSON.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import mmap
import os
import platform
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from moonpool import native
from moonpool.clock import SystemClock
from moonpool.kv.digest import DigestKind
from moonpool.kv.layout import KvLayout
from moonpool.native.geometry import LeafGeometry
from moonpool.store.base import BlockRecord, BlockTarget, ReadOutcome
from moonpool.store.log_identity import LogIdentity
from moonpool.store.segment_log import SegmentLog
from support.kv import make_model_namespace
from support.segment_log import make_hash

#: SmolLM2-135M in bfloat16: 30 layers, 360 KiB a block.
LARGE = KvLayout.block_major(
    num_blocks=64, num_layers=30, num_kv_heads=3, head_dim=64, dtype="bfloat16"
)
#: 4 KiB a block.
SMALL = KvLayout.block_major(
    num_blocks=256, num_layers=2, num_kv_heads=1, head_dim=32, dtype="bfloat16"
)
PIECE_BYTES = 1 << 20
READS_PER_ROUND = 3
NUM_SCANNED = 100_000
#: As `moonpool up --ssd-size 4GiB`: segments of 64 MiB. The run writes less.
CAPACITY_BYTES = 4 << 30


def aligned(num_bytes: int) -> np.ndarray:
    """Memory as an arena's: on a page. Elsewhere the kernel copies at a third of the speed on Zen 3."""
    return np.frombuffer(mmap.mmap(-1, num_bytes), np.uint8)


class Blocks:
    """An arena full of random blocks that stand for any number of them."""

    def __init__(self, layout: KvLayout) -> None:
        self.layout = layout
        rng = np.random.Generator(np.random.PCG64(1))
        self._pool = aligned(layout.pool_bytes)
        self._pool[:] = rng.integers(0, 256, layout.pool_bytes, np.uint8)
        shape = (layout.num_blocks, layout.num_layers)
        self._leaves = np.zeros(shape, np.uint64)
        block_ids = np.arange(layout.num_blocks, dtype=np.int32)
        geometry = LeafGeometry.of_layout(layout)
        for layer in range(layout.num_layers):
            native.kernels().write_leaves(self._pool, geometry, block_ids, layer, self._leaves)

    def record(self, number: int) -> BlockRecord:
        payload, leaves = self._arrays(number)
        return BlockRecord(block_hash=make_hash(number), payload=payload, leaves=leaves)

    def target(self, number: int) -> BlockTarget:
        payload, leaves = self._arrays(number)
        return BlockTarget(block_hash=make_hash(number), payload=payload, leaves=leaves)

    def _arrays(self, number: int) -> tuple[np.ndarray, np.ndarray]:
        row, size = number % self.layout.num_blocks, self.layout.block_bytes
        return self._pool[row * size : (row + 1) * size], self._leaves[row]


async def open_log(path: Path, layout: KvLayout) -> SegmentLog:
    return await SegmentLog.open(
        path,
        identity=LogIdentity(
            model=make_model_namespace(),
            layout=layout,
            digest_kind=DigestKind.XXH3_64,
            secret_fingerprint="0" * 16,
        ),
        capacity_bytes=CAPACITY_BYTES,
        kernels=native.kernels(),
        clock=SystemClock(),
        on_dropped=lambda _hashes, _reason: None,
    )


def use_once(num_bytes: int) -> None:
    """Take so much memory and give it back, for whoever takes it next."""
    aligned(num_bytes)[:: mmap.PAGESIZE] = 1


class Timer:
    seconds = 0.0


@contextmanager
def timed() -> Iterator[Timer]:
    timer, started = Timer(), time.perf_counter()
    yield timer
    timer.seconds = time.perf_counter() - started


def forget(folder: Path) -> None:
    """Give up the page cache of all files in it."""
    for file in folder.rglob("*"):
        if file.is_file():
            descriptor = os.open(file, os.O_RDONLY)
            os.fdatasync(descriptor)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(descriptor)


def dd_write(path: Path, num_bytes: int) -> float:
    piece = aligned(PIECE_BYTES)
    piece[:] = np.random.Generator(np.random.PCG64(2)).integers(0, 256, PIECE_BYTES, np.uint8)
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    with timed() as timer:
        for offset in range(0, num_bytes, PIECE_BYTES):
            os.pwrite(descriptor, piece, offset)
        os.fdatasync(descriptor)
    os.close(descriptor)
    return num_bytes / timer.seconds


def dd_read(path: Path, num_bytes: int) -> float:
    piece = aligned(PIECE_BYTES)
    descriptor = os.open(path, os.O_RDONLY)
    with timed() as timer:
        for offset in range(0, num_bytes, PIECE_BYTES):
            os.preadv(descriptor, [piece], offset)
    os.close(descriptor)
    return num_bytes / timer.seconds


async def log_write(log: SegmentLog, blocks: Blocks, num_blocks: int) -> float:
    with timed() as timer:
        for first in range(0, num_blocks, 64):
            numbers = range(first, min(first + 64, num_blocks))
            await log.write([blocks.record(number) for number in numbers])
        await log.close()
    return num_blocks * blocks.layout.block_bytes / timer.seconds


async def log_read(log: SegmentLog, blocks: Blocks, order: list[int]) -> float:
    with timed() as timer:
        for first in range(0, len(order), 64):
            targets = [blocks.target(number) for number in order[first : first + 64]]
            outcomes = await log.read(targets)
            assert set(outcomes) == {ReadOutcome.OK}, outcomes
    return len(order) * blocks.layout.block_bytes / timer.seconds


async def one_round(
    folder: Path, blocks: Blocks, num_bytes: int, is_warm: bool
) -> dict[str, float]:
    """Rates in bytes a second; those of reads are medians of alternating turns."""
    num_blocks = num_bytes // blocks.layout.block_bytes
    plain, path = folder / "plain", folder / "log"
    use_once(2 * num_bytes)
    rates = {"dd write": dd_write(plain, num_bytes)}
    log = await open_log(path, blocks.layout)
    use_once(2 * num_bytes)
    rates["log write"] = await log_write(log, blocks, num_blocks)
    if not is_warm:
        forget(folder)
    with timed() as timer:
        log = await open_log(path, blocks.layout)
    rates["scan records/s"] = num_blocks / timer.seconds
    in_order = list(range(num_blocks))
    in_any = np.random.Generator(np.random.PCG64(3)).permutation(num_blocks).tolist()
    reads: dict[str, list[float]] = {"dd read": [], "log read": [], "log random": []}
    for _ in range(READS_PER_ROUND):
        for arm, turns in reads.items():
            if not is_warm:
                forget(folder)
            if arm == "dd read":
                turns.append(dd_read(plain, num_bytes))
            else:
                order = in_order if arm == "log read" else in_any
                turns.append(await log_read(log, blocks, order))
    rates |= {arm: statistics.median(turns) for arm, turns in reads.items()}
    await log.clear()
    await log.close()
    plain.unlink()
    return rates


async def scan(folder: Path, is_warm: bool) -> float:
    """Seconds to rebuild the index of 100,000 small records."""
    blocks = Blocks(SMALL)
    log = await open_log(folder / "small", SMALL)
    for first in range(0, NUM_SCANNED, 512):
        numbers = range(first, min(first + 512, NUM_SCANNED))
        await log.write([blocks.record(number) for number in numbers])
    await log.close()
    if not is_warm:
        forget(folder)
    with timed() as timer:
        log = await open_log(folder / "small", SMALL)
    assert log.stats().num_records == NUM_SCANNED, log.stats()
    await log.clear()
    await log.close()
    return timer.seconds


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--dir", type=Path, help="on the disk to be measured; default: TMPDIR")
    parser.add_argument("--mib", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--warm", action="store_true")
    args = parser.parse_args()

    blocks = Blocks(LARGE)
    with tempfile.TemporaryDirectory(dir=args.dir) as name:
        rounds = [
            await one_round(Path(name), blocks, args.mib << 20, args.warm)
            for _ in range(args.rounds)
        ]
        scan_s = await scan(Path(name), args.warm)
    ratios = {
        arm: [rates[f"log {arm}"] / rates[f"dd {base}"] for rates in rounds]
        for arm, base in (("write", "write"), ("read", "read"), ("random", "read"))
    }
    for arm in rounds[0]:
        values = sorted(rates[arm] for rates in rounds)
        unit, scale = ("", 1.0) if arm.endswith("/s") else (" MB/s", 1e-6)
        print(f"{arm:24} {statistics.median(values) * scale:10.0f}{unit}")
    for arm, values in ratios.items():
        print(
            f"log {arm:7} over dd {statistics.median(values):6.2f}"
            f"  [{min(values):.2f}, {max(values):.2f}]"
        )
    print(f"index of {NUM_SCANNED:,} records of 4 KiB: {scan_s:.2f} s")
    result = {
        "mib": args.mib,
        "is_warm": args.warm,
        "rounds": rounds,
        "ratio": {arm: statistics.median(values) for arm, values in ratios.items()},
        "scan_s": scan_s,
        "kernels": native.status().isa,
        "machine": platform.platform(),
    }
    print(json.dumps(result))


if __name__ == "__main__":
    asyncio.run(main())
