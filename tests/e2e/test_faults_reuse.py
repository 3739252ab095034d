"""Faults of prefix reads, of the router's index and of two routers, in a cluster of real processes.

One cluster lives through all of it, in the order of this file: each life of the worker that dies is armed
for the next scenario. Tokens must be those of the model alone; afterwards every ledger is quiet, each
router's index is true, and nothing is left behind.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable

import pytest
import pytest_asyncio

from moonpool_loadtest.faults.lab import FamilySizes, FaultLab, FaultReport, make_families
from moonpool_loadtest.faults.reuse import (
    FAILPOINTS,
    NUM_FAMILIES,
    NUM_FAMILIES_FOR_LEAVERS,
    SCENARIOS,
    reuse_config,
)
from support.fault_lab import check, fault_lab
from support.tiny_llama import TinyLlama, write_tiny_llama

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(300)]

_MODEL = TinyLlama()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def lab(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[FaultLab]:
    home = tmp_path_factory.mktemp("faults-reuse")
    model = write_tiny_llama(home / "tiny", _MODEL)
    config = reuse_config(str(model), data_dir=home / "data", dtype="float32", is_checked=True)
    sets = make_families(
        FamilySizes(vocab_size=_MODEL.vocab_size),
        num_judged=NUM_FAMILIES,
        num_for_leavers=NUM_FAMILIES_FOR_LEAVERS,
    )
    async with fault_lab(config, sets, is_whole=True, failpoints=FAILPOINTS) as lab:
        yield lab


@pytest.mark.parametrize("scenario", SCENARIOS, ids=[run.__name__ for run in SCENARIOS])
async def test_no_fault_of_reuse_costs_a_token(
    lab: FaultLab, scenario: Callable[[FaultLab], Awaitable[FaultReport]]
) -> None:
    check(await scenario(lab))
