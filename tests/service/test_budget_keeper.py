"""BudgetKeeper: what was left of the write budget outlives a store, and cannot be had by damaging its file."""

from __future__ import annotations

import stat
from pathlib import Path

from moonpool.clock import ManualClock
from moonpool.store.budget_keeper import FILE_NAME, BudgetKeeper, budget_left
from moonpool.tiering.write_budget import BudgetLeft


class Writer:
    """A store that writes."""

    def __init__(self, path: Path, clock: ManualClock) -> None:
        self.left_bytes = 100
        self.written_bytes = 0
        self.keeper = BudgetKeeper(
            path,
            left_bytes=lambda: self.left_bytes,
            written_bytes=lambda: self.written_bytes,
            clock=clock,
        )


async def test_what_is_left_is_found_again_with_its_age(tmp_path: Path) -> None:
    clock = ManualClock()
    assert await budget_left(tmp_path, clock) is None
    writer = Writer(tmp_path, clock)
    await writer.keeper.keep()
    writer.left_bytes, writer.written_bytes = 40, 60
    await writer.keeper.keep()
    # Nothing is written meanwhile: what is kept holds, its age says the rest.
    clock.advance(5.0)
    writer.left_bytes = 45
    await writer.keeper.keep()
    assert await budget_left(tmp_path, clock) == BudgetLeft(num_bytes=40, age_s=5.0)
    assert stat.S_IMODE((tmp_path / FILE_NAME).stat().st_mode) == 0o600


async def test_a_file_that_cannot_be_read_leaves_nothing(tmp_path: Path) -> None:
    for data in (b"", b"{}", b'{"left_bytes": "many", "unix_s": 1}'):
        (tmp_path / FILE_NAME).write_bytes(data)
        assert await budget_left(tmp_path, ManualClock()) == BudgetLeft(num_bytes=0, age_s=0.0)


async def test_a_clock_that_went_back_fills_nothing_up(tmp_path: Path) -> None:
    await Writer(tmp_path, ManualClock(unix=2_000.0)).keeper.keep()
    left = await budget_left(tmp_path, ManualClock(unix=1_000.0))
    assert left == BudgetLeft(num_bytes=100, age_s=0.0)


async def test_a_directory_that_has_gone_is_borne(tmp_path: Path) -> None:
    await Writer(tmp_path / "gone", ManualClock()).keeper.keep()
