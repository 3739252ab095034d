"""The log on a disk that fails: what is lost is a miss, told and counted, and nothing raises."""

from __future__ import annotations

import errno
from collections.abc import Sequence
from pathlib import Path

import pytest
import structlog

from moonpool.clock import ManualClock
from moonpool.errors import ConfigError
from moonpool.ids import BlockHash
from moonpool.store.base import DropReason, ReadOutcome
from moonpool.store.rare_log import RareLog
from support.segment_log import (
    EVEN,
    SLOT_BYTES,
    file_bytes,
    flip,
    make_hash,
    make_record,
    make_target,
    open_log,
    readable,
    segment_files,
    write,
)

PAYLOAD_BYTES = EVEN.block_bytes


async def test_a_flipped_byte_in_a_block_is_a_miss_told_once_and_for_ever(tmp_path: Path) -> None:
    async with open_log(tmp_path / "log") as world:
        await write(world.log, *range(4))
        (file,) = segment_files(tmp_path / "log")
        flip(file, 2 * SLOT_BYTES + 1234)
        assert await world.log.read([make_target(2)]) == (ReadOutcome.CORRUPT,)
        assert world.dropped.told == [((make_hash(2),), DropReason.CORRUPT)]
        assert await world.log.read([make_target(2)]) == (ReadOutcome.ABSENT,)
        assert world.log.stats().num_corrupt_records == 1
        assert await readable(world.log, *range(4)) == (0, 1, 3)
    async with open_log(tmp_path / "log") as world:
        assert not world.log.has(make_hash(2))
        assert world.log.stats().num_corrupt_footers == 0
        assert await write(world.log, 2) == (2,)
        assert await readable(world.log, *range(4)) == (0, 1, 2, 3)


@pytest.mark.parametrize("offset", [0, 8, 40, 64, 100, 111])
async def test_a_damaged_footer_hides_its_own_record_only(tmp_path: Path, offset: int) -> None:
    async with open_log(tmp_path / "log") as world:
        await write(world.log, *range(4))
    (file,) = segment_files(tmp_path / "log")
    flip(file, SLOT_BYTES + PAYLOAD_BYTES + offset)
    async with open_log(tmp_path / "log") as world:
        assert await readable(world.log, *range(4)) == (0, 2, 3)
        assert world.log.stats().num_corrupt_footers == 1
        assert world.dropped.told == []


async def test_damaged_leaves_are_a_damaged_block(tmp_path: Path) -> None:
    async with open_log(tmp_path / "log") as world:
        await write(world.log, 1)
        (file,) = segment_files(tmp_path / "log")
        flip(file, PAYLOAD_BYTES + 112)
        assert await world.log.read([make_target(1)]) == (ReadOutcome.CORRUPT,)


async def test_a_segment_under_another_ones_name_is_not_believed(tmp_path: Path) -> None:
    async with open_log(tmp_path / "log") as world:
        await write(world.log, *range(8))
    first, second = segment_files(tmp_path / "log")
    second.unlink()
    first.rename(second)
    async with open_log(tmp_path / "log") as world:
        assert list(world.log.contents()) == []
        assert world.log.stats().num_corrupt_footers == 4
    assert segment_files(tmp_path / "log") == []


@pytest.mark.parametrize("num_bytes", [1, PAYLOAD_BYTES, PAYLOAD_BYTES + 111, SLOT_BYTES])
async def test_a_torn_tail_is_left_out(tmp_path: Path, num_bytes: int) -> None:
    async with open_log(tmp_path / "log") as world:
        await write(world.log, *range(3))
    (file,) = segment_files(tmp_path / "log")
    with file.open("r+b") as opened:
        opened.truncate(2 * SLOT_BYTES + num_bytes)
    async with open_log(tmp_path / "log") as world:
        is_whole = num_bytes == SLOT_BYTES
        assert await readable(world.log, *range(3)) == ((0, 1, 2) if is_whole else (0, 1))
        assert world.log.stats().num_torn_records == (0 if is_whole else 1)
        assert world.log.stats().file_bytes == 3 * SLOT_BYTES
        # The torn segment is sealed: what is written next lies elsewhere.
        assert await write(world.log, 3) == (3,)
        assert len(segment_files(tmp_path / "log")) == 2


async def test_a_hole_is_left_out(tmp_path: Path) -> None:
    async with open_log(tmp_path / "log") as world:
        await write(world.log, *range(3))
    (file,) = segment_files(tmp_path / "log")
    with file.open("r+b") as opened:
        opened.seek(SLOT_BYTES)
        opened.write(bytes(SLOT_BYTES))
    async with open_log(tmp_path / "log") as world:
        assert await readable(world.log, *range(3)) == (0, 2)
        stats = world.log.stats()
    assert (stats.num_torn_records, stats.num_corrupt_footers) == (1, 0)


async def test_short_reads_and_writes_are_continued(tmp_path: Path) -> None:
    async with open_log(tmp_path / "log") as world:
        world.files.max_bytes = 1_000
        assert await write(world.log, *range(6)) == tuple(range(6))
        assert await readable(world.log, *range(6)) == tuple(range(6))


@pytest.mark.parametrize(
    ("call", "number", "words"),
    [
        ("pwritev", errno.EIO, "dmesg"),
        ("create", errno.EROFS, "writable"),
        ("create", errno.EMFILE, "ulimit -n"),
        ("create", errno.ENOENT, "start again"),
        ("pwritev", errno.EFBIG, "ulimit -f"),
    ],
)
async def test_a_refused_write_pauses_writes_and_nothing_else(
    tmp_path: Path, call: str, number: int, words: str
) -> None:
    async with open_log(tmp_path / "log") as world:
        await write(world.log, *range(4))
        world.files.failures[call] = OSError(number, "refused")
        result = await world.log.write([make_record(4)])
        assert result.kept == ()
        assert words in result.problem
        health = world.log.health()
        assert (health.is_writable, health.problem) == (False, result.problem)
        assert health.retry_after_s == 1.0
        assert await readable(world.log, *range(5)) == (0, 1, 2, 3)

        # Within the pause nothing is tried; after it one write is, and the next pause is longer.
        num_errors = world.log.stats().num_write_errors
        assert await write(world.log, 4) == ()
        assert world.log.stats().num_write_errors == num_errors
        world.clock.advance(1.0)
        health = world.log.health()
        # That it is tried again does not mean that it works.
        assert (health.is_writable, health.problem) == (True, result.problem)
        assert await write(world.log, 4) == ()
        assert world.log.health().retry_after_s == 2.0

        del world.files.failures[call]
        world.clock.advance(2.0)
        assert await write(world.log, 4) == (4,)
        health = world.log.health()
        assert (health.is_writable, health.problem) == (True, "")
        assert await readable(world.log, *range(5)) == (0, 1, 2, 3, 4)
    async with open_log(tmp_path / "log") as world:
        assert await readable(world.log, *range(5)) == (0, 1, 2, 3, 4)


@pytest.mark.parametrize("number", [errno.EIO, errno.ENOSPC])
async def test_a_refused_carry_over_ends_the_write(tmp_path: Path, number: int) -> None:
    def keep_hot(hashes: Sequence[BlockHash], _max_blocks: int) -> Sequence[BlockHash]:
        return hashes

    path = tmp_path / "log"
    async with open_log(path, num_slots=16, keep_hot=keep_hot) as world:
        await write(world.log, *range(12))
        world.files.failures["pwritev"] = OSError(number, "refused")
        result = await world.log.write([make_record(12)])
        assert (result.kept, result.problem) == ((), world.log.health().problem)
        assert world.log.stats().num_write_errors == 1
        # On a full disk what cannot be carried over makes room all the same.
        is_full = number == errno.ENOSPC
        assert await readable(world.log, *range(12)) == tuple(range(4 if is_full else 0, 12))
        num_files = len(segment_files(path))
        del world.files.failures["pwritev"]
        world.clock.advance(1.0)
        assert await write(world.log, 12) == (12,)
        # Into a new segment: nothing more was written into the one that was refused.
        assert len(segment_files(path)) >= num_files
        assert world.log.health().problem == ""
        assert await readable(world.log, *range(13)) == (
            tuple(range(4, 13)) if is_full else (0, 1, *range(4, 13))
        )


@pytest.mark.parametrize("num_whole", [1, 2])
async def test_a_full_disk_makes_the_tier_smaller(tmp_path: Path, num_whole: int) -> None:
    async with open_log(tmp_path / "log") as world:
        await write(world.log, *range(8))
        world.files.room_bytes = num_whole * SLOT_BYTES + 100
        # Some records are whole; the others wait for the oldest segment to go, and find no room yet.
        result = await world.log.write([make_record(number) for number in range(8, 12)])
        assert result.kept == tuple(make_hash(number) for number in range(8, 8 + num_whole))
        assert "make room" in result.problem
        assert world.dropped.hashes == [make_hash(number) for number in range(4)]
        # The place that the failed write has reached counts, what it has not reached does not.
        assert world.log.stats().file_bytes == (4 + num_whole + 1) * SLOT_BYTES
        world.files.room_bytes = None
        world.clock.advance(60.0)
        assert await write(world.log, *range(8 + num_whole, 12)) == tuple(range(8 + num_whole, 12))
        assert await readable(world.log, *range(12)) == tuple(range(4, 12))
    async with open_log(tmp_path / "log") as world:
        assert await readable(world.log, *range(12)) == tuple(range(4, 12))


async def test_a_disk_full_from_the_start(tmp_path: Path) -> None:
    async with open_log(tmp_path / "log") as world:
        world.files.room_bytes = 100
        result = await world.log.write([make_record(1)])
        assert result.kept == ()
        assert "make room" in result.problem
    assert file_bytes(tmp_path / "log") == 0


async def test_what_cannot_be_synced_pauses_writes_and_can_be_read(tmp_path: Path) -> None:
    async with open_log(tmp_path / "log") as world:
        await write(world.log, *range(4))
        world.files.failures["sync"] = OSError(errno.EIO, "lost")
        await write(world.log, 4)
        await world.log.settle()
        assert not world.log.health().is_writable
        assert "keeps no writes" in world.log.health().problem
        assert world.log.stats().num_sync_errors == 1
        assert await readable(world.log, *range(5)) == (0, 1, 2, 3, 4)


async def test_a_block_that_cannot_be_read_is_given_up(tmp_path: Path) -> None:
    async with open_log(tmp_path / "log") as world:
        await write(world.log, 1, 2)
        world.files.failures["preadv"] = OSError(errno.EIO, "bad sector")
        assert await world.log.read([make_target(1)]) == (ReadOutcome.FAILED,)
        del world.files.failures["preadv"]
        assert world.dropped.told == [((make_hash(1),), DropReason.FAILED)]
        assert await readable(world.log, 1, 2) == (2,)
        assert world.log.stats().num_read_errors == 1


async def test_a_file_cut_under_the_log_is_a_miss(tmp_path: Path) -> None:
    async with open_log(tmp_path / "log") as world:
        await write(world.log, 1, 2)
        (file,) = segment_files(tmp_path / "log")
        with file.open("r+b") as opened:
            opened.truncate(SLOT_BYTES + 10)
        assert await readable(world.log, 1, 2) == (1,)


async def test_files_removed_under_the_log_can_be_read_on(tmp_path: Path) -> None:
    async with open_log(tmp_path / "log", num_slots=16) as world:
        await write(world.log, *range(4))
        for file in segment_files(tmp_path / "log"):
            file.unlink()
        assert await write(world.log, *range(4, 20)) == tuple(range(8, 20))
        assert await readable(world.log, *range(20)) == tuple(range(8, 20))


async def test_what_cannot_be_marked_or_removed_is_only_counted(tmp_path: Path) -> None:
    async with open_log(tmp_path / "log") as world:
        await write(world.log, *range(8))
        world.files.failures["pwritev"] = OSError(errno.EROFS, "read-only")
        world.files.failures["unlink"] = OSError(errno.EROFS, "read-only")
        assert await world.log.drop([make_hash(number) for number in (0, 4, 5, 6, 7)]) == 5
        assert await readable(world.log, *range(8)) == (1, 2, 3)
        assert world.log.stats().num_write_errors >= 1


async def test_an_unreadable_segment_is_left_out_at_the_start(tmp_path: Path) -> None:
    async with open_log(tmp_path / "log") as world:
        await write(world.log, *range(8))
    first, _ = segment_files(tmp_path / "log")
    first.unlink()
    first.symlink_to("/etc/passwd")
    async with open_log(tmp_path / "log") as world:
        assert await readable(world.log, *range(8)) == (4, 5, 6, 7)
        assert world.log.stats().num_read_errors == 1
    assert not first.is_symlink()


@pytest.mark.parametrize("call", ["open", "preadv"])
async def test_a_segment_that_gives_an_error_at_the_start_is_there_at_the_next(
    tmp_path: Path, call: str
) -> None:
    path = tmp_path / "log"
    async with open_log(path, num_slots=16) as world:
        await write(world.log, *range(8))
    first, _ = segment_files(path)
    async with open_log(
        path, num_slots=16, failures={f"{call} {first.name}": OSError(errno.EIO, "once")}
    ) as world:
        assert await readable(world.log, *range(8)) == (4, 5, 6, 7)
        stats = world.log.stats()
        # It takes its part of the capacity, and nobody makes room of it.
        assert (stats.num_read_errors, stats.foreign_bytes) == (1, 4 * SLOT_BYTES)
        assert await write(world.log, *range(8, 20)) == tuple(range(12, 20))
        assert file_bytes(path) <= 16 * SLOT_BYTES
    assert first.exists()
    async with open_log(path, num_slots=16) as world:
        assert await readable(world.log, *range(20)) == (0, 1, 2, 3, *range(12, 20))
        assert world.log.stats().foreign_bytes == 0


async def test_clearing_removes_also_what_could_not_be_read(tmp_path: Path) -> None:
    path = tmp_path / "log"
    async with open_log(path) as world:
        await write(world.log, *range(8))
    first, _ = segment_files(path)
    error = OSError(errno.EIO, "once")
    async with open_log(path, failures={f"open {first.name}": error}) as world:
        assert await world.log.clear() == 4
        assert world.log.stats().foreign_bytes == 0
        assert segment_files(path) == []


async def test_a_log_of_which_nothing_can_be_read_is_refused_and_left_as_it_is(
    tmp_path: Path,
) -> None:
    path = tmp_path / "log"
    async with open_log(path) as world:
        await write(world.log, *range(8))
    with pytest.raises(ConfigError, match="dmesg") as caught:
        async with open_log(path, failures={"preadv": OSError(errno.EIO, "bad")}):
            pass
    assert caught.value.code == "ssd_unusable"
    async with open_log(path) as world:
        assert await readable(world.log, *range(8)) == tuple(range(8))


async def test_other_files_are_left_alone(tmp_path: Path) -> None:
    async with open_log(tmp_path / "log") as world:
        await write(world.log, 1)
        folder = segment_files(tmp_path / "log")[0].parent
    strangers = [folder / "segment-1.kv", folder / "notes", tmp_path / "log" / ("0" * 32)]
    for stranger in strangers:
        stranger.write_text("mine")
    async with open_log(tmp_path / "log") as world:
        await world.log.clear()
    assert [stranger.read_text() for stranger in strangers] == ["mine"] * 3


async def test_files_and_folders_are_private(tmp_path: Path) -> None:
    async with open_log(tmp_path / "log") as world:
        await write(world.log, 1)
    found = {
        path.stat().st_mode & 0o777 for path in (tmp_path / "log").rglob("*") if not path.is_dir()
    }
    assert found == {0o600}
    folders = [tmp_path / "log", *(path for path in (tmp_path / "log").iterdir() if path.is_dir())]
    assert {folder.stat().st_mode & 0o777 for folder in folders} == {0o700}


async def test_two_nodes_never_share_a_directory(tmp_path: Path) -> None:
    async with open_log(tmp_path / "log") as world:
        await write(world.log, 1)
        with pytest.raises(ConfigError, match=r"another store node uses it \(process \d+\)"):
            async with open_log(tmp_path / "log"):
                pass
        assert await readable(world.log, 1) == (1,)
    async with open_log(tmp_path / "log") as world:
        assert await readable(world.log, 1) == (1,)


def link(path: Path) -> None:
    target = path.parent / "target"
    target.mkdir(mode=0o700)
    path.symlink_to(target)


def open_to_others(path: Path) -> None:
    path.mkdir()
    path.chmod(0o755)


@pytest.mark.parametrize(
    ("prepare", "words"),
    [
        (link, "only a link"),
        (open_to_others, "chmod 700"),
        (lambda path: path.write_text(""), "no directory"),
        (lambda path: path.parent.rmdir(), "create that"),
    ],
    ids=["link", "mode", "file", "no parent"],
)
async def test_a_directory_that_cannot_be_used_is_refused_with_a_fix(
    tmp_path: Path, prepare: object, words: str
) -> None:
    (tmp_path / "parent").mkdir()
    path = tmp_path / "parent" / "log"
    assert callable(prepare)
    prepare(path)
    with pytest.raises(ConfigError, match=words) as caught:
        async with open_log(path):
            pass
    assert caught.value.code == "ssd_unusable"
    assert str(path) in caught.value.message


def test_a_warning_is_logged_once_a_minute() -> None:
    clock = ManualClock()
    rare_log = RareLog(clock, "moonpool.store")
    with structlog.testing.capture_logs() as lines:
        for _ in range(5):
            rare_log.warning("full", problem="x")
        rare_log.warning("other")
        clock.advance(60.0)
        rare_log.warning("full", problem="x")
    assert [(line["event"], line["num_left_out"]) for line in lines] == [
        ("full", 0),
        ("other", 0),
        ("full", 4),
    ]
