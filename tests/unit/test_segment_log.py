"""The log without faults: what is written, dropped, reclaimed, and found again."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from moonpool.errors import ConfigError
from moonpool.ids import BlockHash
from moonpool.kv.layout import KvLayout
from moonpool.store.base import PART_BLOCKS, DropReason, ReadOutcome, StoredRecord
from support.segment_log import (
    EVEN,
    ODD,
    SLOT_BYTES,
    file_bytes,
    make_hash,
    make_identity,
    make_link,
    make_record,
    make_target,
    open_log,
    readable,
    segment_files,
    write,
)

LAYOUTS = pytest.mark.parametrize("layout", [EVEN, ODD], ids=["even", "padded"])


@LAYOUTS
async def test_a_block_reads_as_it_was_written_also_after_a_restart(
    tmp_path: Path, layout: KvLayout
) -> None:
    identity = make_identity(layout=layout)
    async with open_log(tmp_path / "log", identity=identity) as world:
        assert world.log.record_bytes == SLOT_BYTES
        assert await write(world.log, 1, 2, 3, layout=layout) == (1, 2, 3)
        assert await readable(world.log, 3, 1, 2, 4, layout=layout) == (3, 1, 2)

    async with open_log(tmp_path / "log", identity=identity) as world:
        ((*records,),) = world.log.contents()
        assert [record.block_hash for record in records] == [
            make_hash(number) for number in (1, 2, 3)
        ]
        assert await readable(world.log, 1, 2, 3, 4, layout=layout) == (1, 2, 3)
        assert world.dropped.told == []


async def test_tags_and_links_come_back(tmp_path: Path) -> None:
    async with open_log(tmp_path / "log") as world:
        await world.log.write([make_record(1, tag=7), make_record(2, tag=2**64 - 1)])
    async with open_log(tmp_path / "log") as world:
        assert list(world.log.contents()) == [
            (
                StoredRecord(block_hash=make_hash(1), tag=7, link=make_link(1)),
                StoredRecord(block_hash=make_hash(2), tag=2**64 - 1, link=make_link(2)),
            )
        ]


async def test_a_block_is_written_once(tmp_path: Path) -> None:
    async with open_log(tmp_path / "log") as world:
        assert await write(world.log, 1, 1, 2) == (1, 1, 2)
        assert await write(world.log, 2, 3) == (2, 3)
        stats = world.log.stats()
    assert stats.num_records == 3
    assert stats.written_bytes == stats.written_record_bytes == stats.file_bytes == 3 * SLOT_BYTES
    assert file_bytes(tmp_path / "log") == 3 * SLOT_BYTES


async def test_neighbours_go_out_in_one_write(tmp_path: Path) -> None:
    async with open_log(tmp_path / "log", num_slots=64, slots_per_segment=16) as world:
        await write(world.log, *range(16))
        assert world.log.stats().num_writes == 1
        await readable(world.log, *range(4))
        stats = world.log.stats()
    assert (stats.num_reads, stats.read_bytes) == (4, 4 * SLOT_BYTES)


async def test_what_is_not_there_is_absent(tmp_path: Path) -> None:
    async with open_log(tmp_path / "log") as world:
        assert await world.log.read([make_target(1)]) == (ReadOutcome.ABSENT,)
        assert await world.log.read([]) == ()
        assert not world.log.has(make_hash(1))
        assert (await world.log.write([])).kept == ()
    assert segment_files(tmp_path / "log") == []


async def test_dropped_blocks_stay_away_after_a_restart(tmp_path: Path) -> None:
    async with open_log(tmp_path / "log") as world:
        await write(world.log, *range(6))
        assert await world.log.drop([make_hash(number) for number in (1, 4, 4, 99)]) == 2
        assert await readable(world.log, *range(6)) == (0, 2, 3, 5)
        assert world.dropped.told == []
    async with open_log(tmp_path / "log") as world:
        assert await readable(world.log, *range(6)) == (0, 2, 3, 5)
        assert world.log.stats().num_corrupt_footers == 0
        assert await write(world.log, 4) == (4,)
        assert await readable(world.log, 4) == (4,)


async def test_a_segment_goes_with_its_last_block(tmp_path: Path) -> None:
    async with open_log(tmp_path / "log") as world:
        await write(world.log, *range(10))
        assert len(segment_files(tmp_path / "log")) == 3
        await world.log.drop([make_hash(number) for number in range(4)])
        assert len(segment_files(tmp_path / "log")) == 2
        assert world.log.stats().file_bytes == 6 * SLOT_BYTES


async def test_clear_leaves_nothing_on_the_disk(tmp_path: Path) -> None:
    async with open_log(tmp_path / "log") as world:
        await write(world.log, *range(10))
        assert await world.log.clear() == 10
        assert segment_files(tmp_path / "log") == []
        assert await readable(world.log, *range(10)) == ()
        assert await write(world.log, 3) == (3,)
    async with open_log(tmp_path / "log") as world:
        assert await readable(world.log, *range(10)) == (3,)


async def test_the_oldest_segment_makes_room_and_the_capacity_holds(tmp_path: Path) -> None:
    async with open_log(tmp_path / "log", num_slots=16) as world:
        for number in range(40):
            assert await write(world.log, number) == (number,)
            assert file_bytes(tmp_path / "log") <= 16 * SLOT_BYTES
        # Two sealed segments and the open one; the fourth of the capacity is kept free.
        assert await readable(world.log, *range(40)) == tuple(range(28, 40))
        assert [reason for _, reason in world.dropped.told] == [DropReason.RECLAIMED] * 7
        assert world.dropped.hashes == [make_hash(number) for number in range(28)]
        stats = world.log.stats()
    assert (stats.num_reclaimed_segments, stats.num_reclaimed_records) == (7, 28)


async def test_a_write_larger_than_the_capacity_keeps_its_end(tmp_path: Path) -> None:
    async with open_log(tmp_path / "log", num_slots=16) as world:
        result = await world.log.write([make_record(number) for number in range(40)])
        assert result.kept == tuple(make_hash(number) for number in range(28, 40))
        assert "more than the capacity" in result.problem


async def test_a_segment_that_is_half_dead_goes_before_the_oldest(tmp_path: Path) -> None:
    async with open_log(tmp_path / "log", num_slots=16) as world:
        await write(world.log, *range(12))
        await world.log.drop([make_hash(number) for number in (4, 5)])
        await write(world.log, 12)
        assert await readable(world.log, *range(13)) == (0, 1, 2, 3, 8, 9, 10, 11, 12)


async def test_what_is_hot_is_carried_over(tmp_path: Path) -> None:
    asked: list[tuple[list[BlockHash], int]] = []

    def keep_hot(hashes: Sequence[BlockHash], max_blocks: int) -> Sequence[BlockHash]:
        asked.append((list(hashes), max_blocks))
        return [make_hash(number) for number in (2, 77, 2, 1, 0, 3)]

    async with open_log(tmp_path / "log", num_slots=16, keep_hot=keep_hot) as world:
        await write(world.log, *range(13))
        assert asked == [([make_hash(number) for number in range(4)], 2)]
        # Half a segment at most, best first.
        assert await readable(world.log, *range(13)) == (1, 2, *range(4, 13))
        assert world.dropped.hashes == [make_hash(0), make_hash(3)]
        stats = world.log.stats()
        assert (stats.num_carried_records, stats.carried_bytes) == (2, 2 * SLOT_BYTES)
        assert stats.written_bytes == 15 * SLOT_BYTES
    async with open_log(tmp_path / "log", num_slots=16) as world:
        assert await readable(world.log, *range(13)) == (1, 2, *range(4, 13))
        links = {one.block_hash: one.link for part in world.log.contents() for one in part}
        assert (links[make_hash(1)], links[make_hash(2)]) == (make_link(1), make_link(2))


async def test_a_large_segment_is_asked_about_and_told_of_in_parts(tmp_path: Path) -> None:
    num_slots = 2 * PART_BLOCKS + 10
    asked: list[tuple[int, int]] = []
    num_carried = 0

    def keep_hot(hashes: Sequence[BlockHash], max_blocks: int) -> Sequence[BlockHash]:
        nonlocal num_carried
        asked.append((len(hashes), max_blocks))
        num_carried += min(max_blocks, PART_BLOCKS - 7)
        return hashes[: PART_BLOCKS - 7]

    layout = KvLayout.block_major(
        num_blocks=8, num_layers=1, num_kv_heads=1, head_dim=2, dtype="float32"
    )
    record = make_record(0, layout=layout)
    records = [replace(record, block_hash=make_hash(number)) for number in range(3 * num_slots)]
    async with open_log(
        tmp_path / "log",
        identity=make_identity(layout=layout),
        num_slots=4 * num_slots,
        slots_per_segment=num_slots,
        keep_hot=keep_hot,
    ) as world:
        await world.log.write(records)
        await world.log.write([replace(record, block_hash=make_hash(-1))])
        # Half of it at most, in all.
        room = num_slots // 2
        assert asked == [(PART_BLOCKS, room), (PART_BLOCKS, room - PART_BLOCKS + 7)]
        assert world.log.stats().num_carried_records == room
        told = [len(hashes) for hashes, _ in world.dropped.told]
        assert max(told) <= PART_BLOCKS
        assert sum(told) == num_slots - room == world.log.stats().num_reclaimed_records
        assert [len(part) for part in world.log.contents()][:2] == [PART_BLOCKS, PART_BLOCKS]


async def test_what_is_told_of_the_contents_holds_when_they_change_meanwhile(
    tmp_path: Path,
) -> None:
    def keep_hot(hashes: Sequence[BlockHash], _max_blocks: int) -> Sequence[BlockHash]:
        return [make_hash(5)]

    async with open_log(tmp_path / "log", num_slots=16, keep_hot=keep_hot) as world:
        await write(world.log, *range(12))
        contents = world.log.contents()
        told = [record.block_hash for record in next(contents)]
        await world.log.drop([make_hash(8)])
        # Another segment goes than the one that was told; what is kept of it is told where it lies then.
        await world.log.drop([make_hash(number) for number in (6, 7)])
        await write(world.log, 12)
        told += [record.block_hash for part in contents for record in part]
        assert told == [make_hash(number) for number in (0, 1, 2, 3, 9, 10, 11, 5, 12)]


async def test_a_smaller_capacity_holds_from_the_start(tmp_path: Path) -> None:
    async with open_log(tmp_path / "log") as world:
        await write(world.log, *range(40))
    async with open_log(tmp_path / "log", num_slots=16) as world:
        assert file_bytes(tmp_path / "log") <= 16 * SLOT_BYTES
        assert await readable(world.log, *range(40)) == tuple(range(24, 40))
        assert world.dropped.told == []


async def test_files_are_few_however_small_they_are(tmp_path: Path) -> None:
    async with open_log(tmp_path / "log", num_slots=1024, slots_per_segment=1) as world:
        await write(world.log, *range(270))
        assert len(segment_files(tmp_path / "log")) == 256
        assert await readable(world.log, *range(270)) == tuple(range(14, 270))


async def test_another_model_finds_nothing_and_takes_the_room(tmp_path: Path) -> None:
    mine, other = make_identity(), make_identity(model="cafe")
    async with open_log(tmp_path / "log", identity=mine, num_slots=16) as world:
        await write(world.log, *range(8))
    async with open_log(tmp_path / "log", identity=other, num_slots=16) as world:
        assert list(world.log.contents()) == []
        assert world.log.stats().foreign_bytes == 8 * SLOT_BYTES
        await write(world.log, *range(100, 108))
        assert world.log.stats().foreign_bytes == 4 * SLOT_BYTES
        assert file_bytes(tmp_path / "log") == 12 * SLOT_BYTES
    async with open_log(tmp_path / "log", identity=mine, num_slots=16) as world:
        assert await readable(world.log, *range(8)) == (4, 5, 6, 7)
        await write(world.log, *range(10, 18))
        assert world.log.stats().foreign_bytes == 0
        assert await readable(world.log, *range(4, 18)) == (4, 5, 6, 7, *range(10, 18))
    assert len([entry for entry in (tmp_path / "log").iterdir() if entry.is_dir()]) == 1


def test_the_identity_says_what_a_block_is() -> None:
    digests = {
        make_identity().digest,
        make_identity(model="cafe").digest,
        make_identity(layout=ODD).digest,
        replace(make_identity(), secret_fingerprint="0" * 16).digest,
        replace(make_identity(), digest_kind="other").digest,
    }
    assert len(digests) == 5
    assert make_identity(layout=replace(EVEN, num_blocks=99)).digest == make_identity().digest
    layer_major = KvLayout.layer_major(
        num_blocks=8, num_layers=2, num_kv_heads=1, head_dim=16, dtype="float32"
    )
    with pytest.raises(ValueError, match="one run"):
        make_identity(layout=layer_major)


async def test_arrays_of_another_shape_are_a_bug_of_the_caller(tmp_path: Path) -> None:
    record, target = make_record(1), make_target(1)
    async with open_log(tmp_path / "log") as world:
        for payload in (record.payload[:-1], record.payload[::-1], record.payload.view(np.int8)):
            with pytest.raises(ValueError, match="contiguous"):
                await world.log.write([replace(record, payload=payload)])
        with pytest.raises(ValueError, match="contiguous"):
            await world.log.read([replace(target, leaves=target.leaves[:1])])


async def test_a_capacity_below_four_segments_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="at least 131072") as caught:
        async with open_log(tmp_path / "log", num_slots=15):
            pass
    assert caught.value.code == "ssd_too_small"


async def test_a_cancelled_write_first_waits_for_its_io(tmp_path: Path) -> None:
    async with open_log(tmp_path / "log") as world:
        world.files.gate.clear()
        writing = asyncio.ensure_future(world.log.write([make_record(1)]))
        await asyncio.to_thread(world.files.waiting.wait, 10)
        writing.cancel()
        await asyncio.wait([writing], timeout=0.01)
        assert not writing.done()
        world.files.gate.set()
        with pytest.raises(asyncio.CancelledError):
            await writing
        assert await write(world.log, 1, 2) == (1, 2)
        assert await readable(world.log, 1, 2) == (1, 2)


async def test_a_cancelled_read_touches_nothing_afterwards(tmp_path: Path) -> None:
    async with open_log(tmp_path / "log", slots_per_segment=16) as world:
        await write(world.log, *range(16))
        targets = [make_target(number) for number in range(16)]
        world.files.gate.clear()
        reading = asyncio.ensure_future(world.log.read(targets))
        await asyncio.to_thread(world.files.waiting.wait, 10)
        reading.cancel()
        await asyncio.wait([reading], timeout=0.01)
        assert not reading.done()
        world.files.gate.set()
        with pytest.raises(asyncio.CancelledError):
            await reading
        before = [target.payload.copy() for target in targets]
        assert not before[-1].any()
        await world.log.settle()
        for target, payload in zip(targets, before, strict=True):
            assert np.array_equal(target.payload, payload)
        assert await readable(world.log, *range(16)) == tuple(range(16))


async def test_a_block_that_is_dropped_while_it_is_written_is_not_there(tmp_path: Path) -> None:
    async with open_log(tmp_path / "log") as world:
        world.files.gate.clear()
        writing = asyncio.ensure_future(
            world.log.write([make_record(number) for number in range(6)])
        )
        await asyncio.to_thread(world.files.waiting.wait, 10)
        assert await world.log.drop([make_hash(1), make_hash(5)]) == 0
        world.files.gate.set()
        result = await writing
        assert result.kept == tuple(make_hash(number) for number in (0, 2, 3, 4))
        assert "dropped while" in result.problem
        await world.log.settle()
    async with open_log(tmp_path / "log") as world:
        assert await readable(world.log, *range(6)) == (0, 2, 3, 4)


async def test_a_clear_beats_the_write_that_runs(tmp_path: Path) -> None:
    async with open_log(tmp_path / "log") as world:
        await write(world.log, 8)
        world.files.gate.clear()
        writing = asyncio.ensure_future(
            world.log.write([make_record(number) for number in range(6)])
        )
        await asyncio.to_thread(world.files.waiting.wait, 10)
        clearing = asyncio.ensure_future(world.log.clear())
        await asyncio.sleep(0)
        assert not world.log.has(make_hash(8))
        world.files.gate.set()
        assert await clearing == 1
        assert (await writing).kept == ()
        assert segment_files(tmp_path / "log") == []


async def test_reads_run_beside_a_write_and_outlive_their_segment(tmp_path: Path) -> None:
    async with open_log(tmp_path / "log", num_slots=16) as world:
        await write(world.log, *range(12))
        async with asyncio.TaskGroup() as group:
            reads = [group.create_task(readable(world.log, *range(12))) for _ in range(4)]
            group.create_task(write(world.log, *range(20, 32)))
        # Whatever was found was right; readable() has compared it.
        assert reads[0].result() == tuple(range(12))
        assert await readable(world.log, *range(12)) == ()


async def test_close_may_come_twice(tmp_path: Path) -> None:
    async with open_log(tmp_path / "log") as world:
        await write(world.log, 1)
    await world.log.close()
