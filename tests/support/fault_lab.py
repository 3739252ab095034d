"""A FaultLab on a tiny Llama, judged by the same model in this process; nothing may be left of it."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Mapping
from pathlib import Path

from moonpool.config.schema import ClusterConfig
from moonpool_loadtest.faults.lab import CaseSets, FaultLab, FaultReport, open_lab
from support.oracle_answers import answers_in_process


@contextlib.asynccontextmanager
async def fault_lab(
    config: ClusterConfig,
    sets: CaseSets,
    *,
    is_whole: bool = False,
    failpoints: Mapping[str, str] | None = None,
) -> AsyncIterator[FaultLab]:
    """As open_lab."""
    expected = await asyncio.to_thread(answers_in_process, Path(config.model), sets.judged_cases)
    async with open_lab(
        config, expected=expected, sets=sets, is_whole=is_whole, failpoints=failpoints
    ) as lab:
        yield lab
    check(lab.reports[-1])


def check(report: FaultReport) -> None:
    """All is well, and every token is the expected one."""
    assert not report.problems, report
    assert not report.differing, report
    assert report.num_equal == report.num_requests
