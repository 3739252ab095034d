"""What a store keeps, for whom, and what its deaths cost, in a cluster of real processes.

One cluster lives through all of it, in the order of this file. Tokens must be those of the model alone;
afterwards every ledger is quiet, and nothing is left behind but what lies on the disk.
"""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from moonpool_loadtest.faults.lab import FamilySizes, FaultLab, make_families
from moonpool_loadtest.faults.store_cluster import store_cluster
from moonpool_loadtest.faults.store_quota import (
    NUM_FAMILIES_BESIDE_FLOOD,
    run_flood,
    with_floors,
)
from moonpool_loadtest.faults.stores import (
    NUM_FAMILIES_BESIDE_KILLS,
    PLACES,
    run_outlives_itself,
    run_outlives_workers,
    run_store_kills,
)
from support.fault_lab import check, fault_lab
from support.tiny_llama import TinyLlama, write_tiny_llama

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(300)]

_MODEL = TinyLlama()
_NUM_FLOODS = 12


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def lab(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[FaultLab]:
    home = tmp_path_factory.mktemp("faults-stores")
    ssd_dir = home / "ssd"
    ssd_dir.mkdir()
    config = store_cluster(
        str(write_tiny_llama(home / "tiny", _MODEL)),
        data_dir=home / "data",
        ssd_dir=ssd_dir,
        dtype="float32",
        is_checked=True,
        num_workers=1,
    )
    sets = make_families(
        FamilySizes(vocab_size=_MODEL.vocab_size, tails=(8, 45), max_tokens=12),
        num_judged=(
            NUM_FAMILIES_BESIDE_KILLS + len(PLACES) + NUM_FAMILIES_BESIDE_FLOOD + _NUM_FLOODS
        ),
        num_for_leavers=0,
    )
    async with fault_lab(with_floors(config), sets, is_whole=True) as lab:
        yield lab


async def test_what_workers_computed_outlives_them(lab: FaultLab) -> None:
    check(await run_outlives_workers(lab))


async def test_what_a_store_wrote_outlives_it(lab: FaultLab) -> None:
    check(await run_outlives_itself(lab))


async def test_a_store_that_is_killed_in_the_middle_costs_no_token(lab: FaultLab) -> None:
    """Once at each place. The command does it 50 times."""
    check(await run_store_kills(lab, num_kills=len(PLACES)))


async def test_a_tenants_flood_takes_nothing_below_anothers_floor(lab: FaultLab) -> None:
    check(await run_flood(lab, num_floods=_NUM_FLOODS))
