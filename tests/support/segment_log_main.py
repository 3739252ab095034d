"""A segment log in a process of its own.

PATH forever FIRST              writes blocks in fours until it is killed; a line for each write:
                                those it kept
PATH fill NUM_BLOCKS [BYTES]    writes so many, in files of at most so many bytes, reads back what
                                the log says it has, prints one line
"""

from __future__ import annotations

import asyncio
import itertools
import json
import resource
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from support.segment_log import LogWorld, make_hash, make_record, open_log, readable, write


async def forever(world: LogWorld, start: int) -> None:
    for first in itertools.count(start, 4):
        kept = await write(world.log, *range(first, first + 4))
        sys.stdout.write(json.dumps(kept) + "\n")
        sys.stdout.flush()


async def fill(world: LogWorld, num_blocks: int) -> None:
    problems: set[str] = set()
    for number in range(num_blocks):
        world.clock.advance(60.0)
        problems.add((await world.log.write([make_record(number)])).problem)
        await world.log.settle()
    there = [number for number in range(num_blocks) if world.log.has(make_hash(number))]
    assert await readable(world.log, *range(num_blocks)) == tuple(there)
    stats = world.log.stats()
    line = {"there": there, "problems": sorted(problems - {""}), "file_bytes": stats.file_bytes}
    sys.stdout.write(json.dumps(line) + "\n")


async def main(path: Path, what: str, number: int, file_limit: int | None = None) -> None:
    if file_limit is not None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (file_limit, file_limit))
    slots_per_segment = 256 if what == "forever" else 16
    async with open_log(path, num_slots=1 << 16, slots_per_segment=slots_per_segment) as world:
        await (forever if what == "forever" else fill)(world, number)


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1]), sys.argv[2], *map(int, sys.argv[3:])))
