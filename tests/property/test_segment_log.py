"""Whatever is written, dropped, crashed and damaged: what comes back is exactly what was written."""

from __future__ import annotations

import asyncio
import shutil
import tempfile
from dataclasses import dataclass, field
from pathlib import Path

from hypothesis import example, given, settings
from hypothesis import strategies as st

from moonpool.ids import BlockHash
from moonpool.kv.layout import KvLayout
from support.segment_log import (
    EVEN,
    ODD,
    SLOT_BYTES,
    LogWorld,
    file_bytes,
    flip,
    make_hash,
    make_identity,
    make_link,
    open_log,
    readable,
    segment_files,
    write,
)

NUM_BLOCKS = 24
NUM_SLOTS = 16

numbers = st.integers(0, NUM_BLOCKS - 1)
steps = st.one_of(
    st.tuples(st.just("write"), st.lists(numbers, min_size=1, max_size=8)),
    st.tuples(st.just("drop"), st.lists(numbers, min_size=1, max_size=4)),
    st.tuples(st.just("room"), st.lists(st.integers(0, 3 * SLOT_BYTES), min_size=1, max_size=1)),
    st.tuples(st.just("clear"), st.just([])),
    st.tuples(st.just("reopen"), st.just([])),
)


@dataclass
class Model:
    """What must be there, by what the log has told."""

    path: Path
    layout: KvLayout
    there: set[int] = field(default_factory=set)

    async def run(self, program: list[tuple[str, list[int]]]) -> None:
        """Run a program, with a restart at each "reopen"; compare after each step."""
        left = list(program)
        is_over = False
        while not is_over:
            async with open_log(
                self.path,
                identity=make_identity(layout=self.layout),
                num_slots=NUM_SLOTS,
            ) as world:
                await self.compare(world)
                while left and left[0][0] != "reopen":
                    await self.step(world, *left.pop(0))
                    await world.log.settle()
                    assert file_bytes(self.path) <= NUM_SLOTS * SLOT_BYTES
                    await self.compare(world)
                is_over = not left
                left = left[1:]

    async def step(self, world: LogWorld, kind: str, arguments: list[int]) -> None:
        world.clock.advance(60.0)
        if kind == "write":
            self.there |= set(await write(world.log, *arguments, layout=self.layout))
        elif kind == "drop":
            await world.log.drop([make_hash(number) for number in arguments])
            self.there -= set(arguments)
        elif kind == "clear":
            await world.log.clear()
            self.there.clear()
        else:
            world.files.room_bytes = arguments[0]

    async def compare(self, world: LogWorld) -> None:
        told = set(world.dropped.hashes)
        world.dropped.told.clear()
        self.there -= {
            number
            for number in self.there
            if make_hash(number) in told and not world.log.has(make_hash(number))
        }
        assert set(await readable(world.log, *range(NUM_BLOCKS), layout=self.layout)) == self.there
        contents = [record for part in world.log.contents() for record in part]
        assert {record.block_hash: record.link for record in contents} == {
            make_hash(number): make_link(number) for number in self.there
        }
        assert len(contents) == len(self.there)


def hashes(of: set[int]) -> list[BlockHash]:
    return [make_hash(number) for number in of]


@settings(max_examples=40)
@given(program=st.lists(steps, max_size=12), layout=st.sampled_from([EVEN, ODD]))
@example(
    program=[("write", [0, 1, 2, 3, 4, 5]), ("room", [SLOT_BYTES + 1]), ("write", [6, 7, 8])],
    layout=EVEN,
)
def test_the_log_holds_what_it_says(program: list[tuple[str, list[int]]], layout: KvLayout) -> None:
    with tempfile.TemporaryDirectory() as folder:
        asyncio.run(Model(Path(folder) / "log", layout).run(program))


@settings(max_examples=40)
@given(
    num_written=st.integers(1, 14),
    dropped=st.sets(st.integers(0, 13), max_size=3),
    cut_bytes=st.integers(0, 5 * SLOT_BYTES),
    flips=st.lists(st.integers(0, 14 * SLOT_BYTES - 1), max_size=4, unique=True),
    layout=st.sampled_from([EVEN, ODD]),
)
def test_a_crash_and_bad_bytes_cost_what_they_hit(
    num_written: int, dropped: set[int], cut_bytes: int, flips: list[int], layout: KvLayout
) -> None:
    with tempfile.TemporaryDirectory() as folder:
        asyncio.run(_crash(Path(folder), num_written, dropped, cut_bytes, flips, layout))


async def _crash(
    folder: Path,
    num_written: int,
    dropped: set[int],
    cut_bytes: int,
    flips: list[int],
    layout: KvLayout,
) -> None:
    identity = make_identity(layout=layout)
    async with open_log(folder / "log", identity=identity) as world:
        await write(world.log, *range(num_written), layout=layout)
        await world.log.drop(hashes(dropped))
        # What a dead process leaves: the files as they are, without a close.
        shutil.copytree(folder / "log", folder / "crashed")
    files = segment_files(folder / "crashed")
    there = set(range(num_written)) - dropped
    # Blocks lie in order of writing in slots of one size: four a file, but for what a drop emptied.
    first_by_file = {file: 4 * (int(file.stem.split("-")[1], 16) - 1) for file in files}

    hit: set[int] = set()
    for place in flips:
        file = next(
            (file for file in files if first_by_file[file] == place // SLOT_BYTES // 4 * 4), None
        )
        offset = place - (place // SLOT_BYTES // 4 * 4) * SLOT_BYTES
        if file is not None and offset < file.stat().st_size:
            flip(file, offset)
            hit.add(place // SLOT_BYTES)
    if files and cut_bytes:
        last = files[-1]
        size = max(0, last.stat().st_size - cut_bytes)
        with last.open("r+b") as opened:
            opened.truncate(size)
        hit |= set(range(first_by_file[last] + size // SLOT_BYTES, num_written))

    async with open_log(folder / "crashed", identity=identity) as world:
        found = set(await readable(world.log, *range(num_written), layout=layout))
        assert there - hit <= found <= there, (there, hit, found)
        # A second look finds the same: what was bad is gone, what was good has stayed.
        assert set(await readable(world.log, *range(num_written), layout=layout)) == found
        await world.log.settle()
    async with open_log(folder / "crashed", identity=identity) as world:
        assert set(await readable(world.log, *range(num_written), layout=layout)) == found
