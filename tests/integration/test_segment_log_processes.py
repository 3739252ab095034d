"""The log in real processes: killed while it writes, on a full file system, under a limit."""

from __future__ import annotations

import asyncio
import json
import shutil
import subprocess
import sys
from asyncio.subprocess import PIPE
from pathlib import Path

import pytest

from support.segment_log import SLOT_BYTES, open_log, readable

MAIN = Path(__file__).resolve().parents[1] / "support" / "segment_log_main.py"

#: A tmpfs of 1 MiB that nobody else sees and that needs no privileges.
ON_SMALL_DISK = (
    "unshare",
    "--user",
    "--map-root-user",
    "--mount",
    "sh",
    "-ec",
    'mount -t tmpfs -o size=1m,mode=700 none "$1"; shift; exec "$@"',
    "sh",
)


async def test_a_kill_in_the_middle_of_writes_loses_nothing_that_was_told(tmp_path: Path) -> None:
    told: list[int] = []
    for kill_after in (1, 7, 20):
        process = await asyncio.create_subprocess_exec(
            sys.executable, MAIN, tmp_path / "log", "forever", str(kill_after * 10_000), stdout=PIPE
        )
        assert process.stdout is not None
        async with asyncio.timeout(60):
            for _ in range(kill_after):
                told += json.loads(await process.stdout.readline())
            process.kill()
            # What it said before it died counts too; a line that it did not end does not.
            rest = (await process.stdout.read()).split(b"\n")[:-1]
            told += [number for line in rest for number in json.loads(line)]
            await process.wait()
        async with open_log(tmp_path / "log", num_slots=1 << 16, slots_per_segment=256) as world:
            assert await readable(world.log, *told) == tuple(told)
            assert world.log.stats().num_corrupt_records == 0


def run_fill(
    path: Path, num_blocks: int, *, prefix: tuple[str, ...] = (), file_limit: int | None = None
) -> dict[str, object]:
    command = [*prefix, sys.executable, str(MAIN), str(path / "log"), "fill", str(num_blocks)]
    command += [] if file_limit is None else [str(file_limit)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    result: dict[str, object] = json.loads(done.stdout.splitlines()[-1])
    return result


def can_mount() -> bool:
    if shutil.which("unshare") is None:
        return False
    command = [*ON_SMALL_DISK, "/mnt", "true"]
    return subprocess.run(command, capture_output=True, timeout=10).returncode == 0


def test_a_full_file_system_makes_the_tier_smaller(tmp_path: Path) -> None:
    if not can_mount():
        pytest.skip("no user namespaces here")
    disk = tmp_path / "disk"
    disk.mkdir()
    result = run_fill(disk, 400, prefix=(*ON_SMALL_DISK, str(disk)))
    there = result["there"]
    assert isinstance(there, list)
    # 128 records are 1 MiB; a segment goes whenever the disk is full, and the newest block stays.
    assert 64 < len(there) < 128
    assert there[-1] == 399
    assert isinstance(result["file_bytes"], int)
    assert result["file_bytes"] <= 1 << 20


def test_a_limit_of_file_sizes_is_told_and_survived(tmp_path: Path) -> None:
    result = run_fill(tmp_path, 40, file_limit=10 * SLOT_BYTES + 100)
    assert result["problems"]
    assert "ulimit -f" in str(result["problems"])
    there = result["there"]
    assert isinstance(there, list)
    assert len(there) >= 30
