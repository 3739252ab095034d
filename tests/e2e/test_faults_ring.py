"""Stores that come, leave and die, Redis and the broker that go and come back, in a cluster of real processes.

One ring lives through all of it, in the order of its scenarios, always under load. Tokens must be those of
the model alone; afterwards every ledger is quiet, what was computed before is found in stores, and nothing
is left behind.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable

import pytest
import pytest_asyncio

from moonpool_loadtest.faults.lab import FamilySizes, FaultReport, make_families
from moonpool_loadtest.faults.ring import Ring, open_ring
from moonpool_loadtest.faults.store_cluster import store_cluster
from moonpool_loadtest.faults.store_ring import (
    NUM_FIRST_FAMILIES,
    run_all_at_once,
    run_join,
    run_leave,
    run_without_fault,
)
from support.fault_lab import check, fault_lab
from support.redis_server import redis_server
from support.tiny_llama import TinyLlama, write_tiny_llama

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(300)]

_MODEL = TinyLlama()
#: The command has what comes all at once here one by one as well.
_SCENARIOS = (run_without_fault, run_join, run_leave, run_all_at_once)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def ring(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Ring]:
    home = tmp_path_factory.mktemp("faults-ring")
    ssd_dir, redis_dir = home / "ssd", home / "redis"
    for path in (ssd_dir, redis_dir):
        path.mkdir()
    with redis_server(redis_dir) as redis:
        config = store_cluster(
            str(write_tiny_llama(home / "tiny", _MODEL)),
            data_dir=home / "data",
            ssd_dir=ssd_dir,
            redis_url=redis.url,
            dtype="float32",
            is_checked=True,
            num_workers=1,
        )
        sets = make_families(
            FamilySizes(vocab_size=_MODEL.vocab_size, tails=(17, 34, 130), max_tokens=12),
            num_judged=NUM_FIRST_FAMILIES + len(_SCENARIOS) - 1,
            num_for_leavers=0,
        )
        began = asyncio.get_running_loop().time()
        async with fault_lab(config, sets, is_whole=True) as lab:
            yield await open_ring(lab, redis, began=began, num_at_home=1, num_at_once=2)


@pytest.mark.parametrize("scenario", _SCENARIOS, ids=[run.__name__ for run in _SCENARIOS])
async def test_no_fault_of_the_ring_costs_a_token(
    ring: Ring, scenario: Callable[[Ring], Awaitable[FaultReport]]
) -> None:
    check(await scenario(ring))
