"""What test_faults.py shows, over NIXL: the same tokens, and no token lost when either side is killed."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from moonpool_loadtest.faults.__main__ import cluster_config
from moonpool_loadtest.faults.lab import FaultLab, LabSizes, make_sets
from moonpool_loadtest.faults.scenarios import (
    DECODE,
    PREFILL,
    Kill,
    run_boot_without_nats,
    run_kill,
    run_without_fault,
)
from support.fault_lab import check, fault_lab
from support.tiny_llama import TinyLlama, write_tiny_llama

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(300)]

_MODEL = TinyLlama()
_KILLS = (
    Kill(name="prefill in mid-read", target=PREFILL, failpoints="prefill.after_layer(1)=kill"),
    Kill(name="decode in mid-read", target=DECODE, failpoints="decode.after_read=kill"),
)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def lab(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[FaultLab]:
    home = tmp_path_factory.mktemp("faults-nixl")
    model = write_tiny_llama(home / "tiny", _MODEL)
    config = cluster_config(
        str(model), data_dir=home / "data", dtype="float32", is_checked=True, transport="nixl"
    )
    sizes = LabSizes(vocab_size=_MODEL.vocab_size)
    sets = make_sets(sizes, num_judged=4 + len(_KILLS), num_for_leavers=0)
    async with fault_lab(config, sets) as lab:
        yield lab


async def test_workers_that_read_by_nixl_answer_as_one(lab: FaultLab) -> None:
    check(await run_boot_without_nats(lab))
    check(await run_without_fault(lab))


@pytest.mark.parametrize("kill", _KILLS, ids=[kill.name.replace(" ", "-") for kill in _KILLS])
async def test_a_worker_killed_while_nixl_reads_costs_no_token(lab: FaultLab, kill: Kill) -> None:
    if lab.cluster.part("router").num_starts == 0:
        await run_boot_without_nats(lab)
    check(await run_kill(lab, kill))
