"""Whole clusters of real processes on a tiny model: without faults, and with every fault there is.

One cluster lives through all of it, in the order of this file. Tokens must be those of the model
alone; afterwards every ledger is quiet and nothing is left behind.
"""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from moonpool_loadtest.faults.__main__ import cluster_config, make_kills, sets_for
from moonpool_loadtest.faults.lab import FaultLab
from moonpool_loadtest.faults.scenarios import (
    DECODE,
    PREFILL,
    Kill,
    next_lives,
    run_boot_without_nats,
    run_damage,
    run_disconnects,
    run_freeze,
    run_kill,
    run_nats_restart,
    run_router_restart,
    run_without_fault,
)
from support.fault_lab import check, fault_lab
from support.tiny_llama import TinyLlama, write_tiny_llama

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(300)]

_MODEL = TinyLlama()
#: Each place once or twice: a restart takes seconds. The command tries more layers and tokens.
_KILLS = make_kills(layers=(_MODEL.num_layers - 1,), positions=(0, 20))
_NEXT_LIVES = next_lives(_KILLS)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def lab(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[FaultLab]:
    home = tmp_path_factory.mktemp("faults")
    model = write_tiny_llama(home / "tiny", _MODEL)
    config = cluster_config(str(model), data_dir=home / "data", dtype="float32", is_checked=True)
    async with fault_lab(config, sets_for(_KILLS, vocab_size=_MODEL.vocab_size)) as lab:
        yield lab


async def test_workers_and_router_wait_for_the_broker(lab: FaultLab) -> None:
    check(await run_boot_without_nats(lab))


async def test_two_workers_answer_as_one(lab: FaultLab) -> None:
    check(await run_without_fault(lab))


@pytest.mark.parametrize("kill", _KILLS, ids=[kill.name.replace(" ", "-") for kill in _KILLS])
async def test_a_killed_worker_costs_no_token(lab: FaultLab, kill: Kill) -> None:
    if lab.cluster.part("router").num_starts == 0:
        await run_boot_without_nats(lab)
    check(await run_kill(lab, kill, _NEXT_LIVES[kill]))


async def test_damaged_kv_is_recomputed(lab: FaultLab) -> None:
    check(await run_damage(lab))


@pytest.mark.parametrize("target", [PREFILL, DECODE])
async def test_a_frozen_worker_is_a_dead_one_until_it_wakes(lab: FaultLab, target: str) -> None:
    check(await run_freeze(lab, target))


async def test_the_broker_dies_and_comes_back_under_load(lab: FaultLab) -> None:
    check(await run_nats_restart(lab))


async def test_a_new_router_finds_the_workers(lab: FaultLab) -> None:
    check(await run_router_restart(lab))


async def test_clients_leave_at_every_stage(lab: FaultLab) -> None:
    check(await run_disconnects(lab))
