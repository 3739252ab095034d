"""Builders for segment logs, and a file system that fails on demand."""

from __future__ import annotations

import errno
import hashlib
import threading
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from moonpool.clock import ManualClock
from moonpool.ids import BlockHash
from moonpool.kv.block_hash import secret_fingerprint
from moonpool.kv.digest import DigestKind, block_leaves
from moonpool.kv.layout import KvLayout
from moonpool.native import kernels
from moonpool.store.base import BlockRecord, BlockTarget, DropReason, KeepHot, ReadOutcome
from moonpool.store.log_identity import LogIdentity
from moonpool.store.segment_files import SegmentFiles
from moonpool.store.segment_log import SegmentLog
from support.kv import SECRET, make_model_namespace

#: 4,096 bytes in two layers: a record is payload and one page.
EVEN = KvLayout.block_major(
    num_blocks=8, num_layers=2, num_kv_heads=1, head_dim=16, dtype="float32"
)
#: 2,304 bytes in three layers: its payload is padded.
ODD = KvLayout.block_major(num_blocks=8, num_layers=3, num_kv_heads=1, head_dim=6, dtype="float32")
SLOT_BYTES = 8_192


def make_identity(*, model: str = "0123abcd", layout: KvLayout = EVEN) -> LogIdentity:
    return LogIdentity(
        model=make_model_namespace(model_fingerprint=model),
        layout=layout,
        digest_kind=DigestKind.XXH3_64,
        secret_fingerprint=secret_fingerprint(SECRET),
    )


def make_hash(number: int) -> BlockHash:
    return BlockHash(hashlib.sha256(str(number).encode()).digest())


def make_record(number: int, *, layout: KvLayout = EVEN, tag: int = 0) -> BlockRecord:
    """The block of that number; its bytes follow from the number."""
    rng = np.random.Generator(np.random.PCG64(number))
    payload = rng.integers(0, 256, layout.block_bytes, np.uint8)
    return BlockRecord(
        block_hash=make_hash(number),
        payload=payload,
        leaves=block_leaves(payload, layout, 0),
        tag=tag,
        link=make_link(number),
    )


def make_link(number: int) -> int:
    """What a record of the block of that number names as the one before it."""
    return 2**64 - 1 - number


def make_target(number: int, *, layout: KvLayout = EVEN) -> BlockTarget:
    return BlockTarget(
        block_hash=make_hash(number),
        payload=np.zeros(layout.block_bytes, np.uint8),
        leaves=np.zeros(layout.num_layers, np.uint64),
    )


async def write(log: SegmentLog, *numbers: int, layout: KvLayout = EVEN) -> tuple[int, ...]:
    """Write blocks; the numbers of those that are kept."""
    records = [make_record(number, layout=layout) for number in numbers]
    kept = set((await log.write(records)).kept)
    return tuple(number for number in numbers if make_hash(number) in kept)


async def readable(log: SegmentLog, *numbers: int, layout: KvLayout = EVEN) -> tuple[int, ...]:
    """The numbers of those blocks that can be read; fails if one is not what was written."""
    targets = [make_target(number, layout=layout) for number in numbers]
    outcomes = await log.read(targets)
    found = []
    for number, target, outcome in zip(numbers, targets, outcomes, strict=True):
        if outcome is ReadOutcome.OK:
            record = make_record(number, layout=layout)
            assert np.array_equal(target.payload, record.payload), number
            assert np.array_equal(target.leaves, record.leaves), number
            found.append(number)
    return tuple(found)


def file_bytes(path: Path) -> int:
    """Of all segment files below a log's directory."""
    return sum(file.stat().st_size for file in segment_files(path))


def segment_files(path: Path) -> list[Path]:
    return sorted(path.glob("*/segment-*.kv"))


def flip(file: Path, offset: int) -> None:
    """Damage one byte."""
    with file.open("r+b") as opened:
        opened.seek(offset)
        (value,) = opened.read(1)
        opened.seek(offset)
        opened.write(bytes([value ^ 0x55]))


@dataclass
class Dropped:
    """An on_dropped that remembers."""

    told: list[tuple[tuple[BlockHash, ...], DropReason]] = field(default_factory=list)

    def __call__(self, hashes: Sequence[BlockHash], reason: DropReason) -> None:
        self.told.append((tuple(hashes), reason))

    @property
    def hashes(self) -> list[BlockHash]:
        return [block_hash for hashes, _ in self.told for block_hash in hashes]


class FaultyFiles:
    """Files that do what a test says; everything else is the real thing.

    Attributes:
        failures: By the name of a call, or a call and a file ("preadv segment-00000001.kv"): what it
            raises, until it is taken out.
        room_bytes: When files have grown by so much, writes are cut short, then refused with ENOSPC;
            removing a file gives nothing back.
        max_bytes: No read or write moves more than this in one call.
        gate: Closed, reads and writes stop before they begin; `waiting` says that one does.
    """

    def __init__(self, inner: SegmentFiles) -> None:
        self._inner = inner
        self.failures: dict[str, OSError] = {}
        self._names: dict[int, str] = {}
        self.room_bytes: int | None = None
        self.max_bytes: int | None = None
        self.gate = threading.Event()
        self.gate.set()
        self.waiting = threading.Event()

    def names(self) -> list[str]:
        self._fail("names")
        return self._inner.names()

    def create(self, name: str) -> int:
        self._fail("create", name)
        fd = self._inner.create(name)
        self._names[fd] = name
        return fd

    def open(self, name: str) -> int:
        self._fail("open", name)
        fd = self._inner.open(name)
        self._names[fd] = name
        return fd

    def file_bytes(self, name: str) -> int | None:
        self._fail("file_bytes", name)
        return self._inner.file_bytes(name)

    def size(self, fd: int) -> int:
        return self._inner.size(fd)

    def preadv(self, fd: int, buffers: Sequence[np.ndarray], offset: int) -> int:
        self._stop_at_gate()
        self._fail("preadv", self._names[fd])
        return self._inner.preadv(fd, self._cut(buffers, self.max_bytes), offset)

    def pwritev(self, fd: int, buffers: Sequence[np.ndarray], offset: int) -> int:
        self._stop_at_gate()
        self._fail("pwritev", self._names[fd])
        buffers = self._cut(buffers, self.max_bytes)
        end = offset + sum(buffer.size for buffer in buffers)
        if self.room_bytes is None or end <= self._inner.size(fd):
            return self._inner.pwritev(fd, buffers, offset)
        buffers = self._cut(buffers, self.room_bytes)
        if not buffers:
            raise OSError(errno.ENOSPC, "no space")
        num_bytes = self._inner.pwritev(fd, buffers, offset)
        self.room_bytes -= num_bytes
        return num_bytes

    def uncache(self, fd: int, offset: int, num_bytes: int) -> None:
        self._inner.uncache(fd, offset, num_bytes)

    def sync(self, fd: int) -> None:
        self._fail("sync")
        self._inner.sync(fd)

    def close(self, fd: int) -> None:
        self._inner.close(fd)

    def unlink(self, name: str) -> None:
        self._fail("unlink", name)
        self._inner.unlink(name)

    def _stop_at_gate(self) -> None:
        if not self.gate.is_set():
            self.waiting.set()
            assert self.gate.wait(10)

    def _fail(self, call: str, name: str = "") -> None:
        for key in (call, f"{call} {name}"):
            if key in self.failures:
                raise self.failures[key]

    @staticmethod
    def _cut(buffers: Sequence[np.ndarray], num_bytes: int | None) -> Sequence[np.ndarray]:
        if num_bytes is None:
            return buffers
        cut = []
        for buffer in buffers:
            if num_bytes > 0:
                cut.append(buffer[:num_bytes])
            num_bytes -= min(num_bytes, buffer.size)
        return cut


@dataclass(kw_only=True)
class LogWorld:
    """A log with what a test moves and watches."""

    log: SegmentLog
    clock: ManualClock
    dropped: Dropped
    files: FaultyFiles


@asynccontextmanager
async def open_log(
    path: Path,
    *,
    identity: LogIdentity | None = None,
    num_slots: int = 64,
    slots_per_segment: int = 4,
    clock: ManualClock | None = None,
    keep_hot: KeepHot | None = None,
    failures: dict[str, OSError] | None = None,
) -> AsyncIterator[LogWorld]:
    """A log of at most `num_slots` records of 8 KiB; validated, then closed. `failures` from the start."""
    clock = clock or ManualClock()
    dropped = Dropped()
    faulty: list[FaultyFiles] = []

    def wrap(files: SegmentFiles) -> SegmentFiles:
        faulty.append(FaultyFiles(files))
        faulty[0].failures.update(failures or {})
        return faulty[0]

    log = await SegmentLog.open(
        path,
        identity=identity or make_identity(),
        capacity_bytes=num_slots * SLOT_BYTES,
        kernels=kernels(),
        clock=clock,
        on_dropped=dropped,
        keep_hot=keep_hot,
        segment_bytes=slots_per_segment * SLOT_BYTES,
        wrap_files=wrap,
    )
    try:
        yield LogWorld(log=log, clock=clock, dropped=dropped, files=faulty[0])
        await log.settle()
        log.validate()
    finally:
        faulty[0].gate.set()
        await log.close()
