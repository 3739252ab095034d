"""Whole clusters of real processes on a tiny model: without faults, and with every fault there is.

One cluster lives through all of it, in the order of this file. Tokens must be those of one aggregated
worker; afterwards every ledger is quiet and nothing is left behind.
"""

from __future__ import annotations

import asyncio
import os
import socket
import uuid
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from moonpool_loadtest.faults.__main__ import cluster_config, make_kills, sets_for
from moonpool_loadtest.faults.lab import (
    FaultLab,
    FaultReport,
    answers_without_faults,
    open_lab,
)
from moonpool_loadtest.faults.scenarios import (
    DECODE,
    PREFILL,
    Kill,
    run_boot_without_nats,
    run_damage,
    run_disconnects,
    run_freeze,
    run_kill,
    run_nats_restart,
    run_router_restart,
    run_without_fault,
)
from support.processes import processes_with
from support.tiny_llama import TinyLlama, write_tiny_llama

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(300)]

_MODEL = TinyLlama()
#: Each place once or twice: a restart takes seconds. The command tries more layers and tokens.
_KILLS = make_kills(layers=(1, _MODEL.num_layers - 1), positions=(0, 1, 20))
_FOLLOWING = dict(zip(_KILLS, (*_KILLS[1:], None), strict=True))
_MARK = "MOONPOOL_E2E_MARK"


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def lab(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[FaultLab]:
    home = tmp_path_factory.mktemp("faults")
    model = write_tiny_llama(home / "tiny", _MODEL)
    config = cluster_config(str(model), data_dir=home / "data", dtype="float32", is_checked=True)
    sets = sets_for(_KILLS, vocab_size=_MODEL.vocab_size)
    expected = await answers_without_faults(config, sets.judged_cases)
    mark = uuid.uuid4().hex
    shared_memory = set(os.listdir("/dev/shm"))
    async with open_lab(config, expected=expected, sets=sets, environment={_MARK: mark}) as lab:
        yield lab
        endpoints = lab.cluster.endpoints
        run_dir = lab.cluster.run_dir
        assert processes_with(_MARK, mark)
    assert processes_with(_MARK, mark) == []
    assert set(os.listdir("/dev/shm")) <= shared_memory
    for address in (endpoints.grpc_address, endpoints.nats_url.rpartition("@")[2]):
        assert not await asyncio.to_thread(is_listening, address), address
    # Logs stay, configurations and whatever else was needed to run do not.
    assert {path.suffix for path in run_dir.iterdir() if path.is_file()} == {".log"}
    assert run_dir.stat().st_mode & 0o077 == 0


def is_listening(address: str) -> bool:
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host, int(port)), timeout=1.0).close()
    except OSError:
        return False
    return True


def check(report: FaultReport) -> None:
    assert not report.problems, report
    assert not report.differing, report
    assert report.num_equal == report.num_requests


async def test_workers_and_router_wait_for_the_broker(lab: FaultLab) -> None:
    check(await run_boot_without_nats(lab))


async def test_two_workers_answer_as_one(lab: FaultLab) -> None:
    check(await run_without_fault(lab))


@pytest.mark.parametrize("kill", _KILLS, ids=[kill.name.replace(" ", "-") for kill in _KILLS])
async def test_a_killed_worker_costs_no_token(lab: FaultLab, kill: Kill) -> None:
    if lab.cluster.part("router").num_starts == 0:
        await run_boot_without_nats(lab)
    check(await run_kill(lab, kill, _FOLLOWING[kill]))


@pytest.mark.parametrize("target", [PREFILL, DECODE])
async def test_a_frozen_worker_is_a_dead_one_until_it_wakes(lab: FaultLab, target: str) -> None:
    check(await run_freeze(lab, target))


async def test_the_broker_dies_and_comes_back_under_load(lab: FaultLab) -> None:
    check(await run_nats_restart(lab))


async def test_a_new_router_finds_the_workers(lab: FaultLab) -> None:
    check(await run_router_restart(lab))


async def test_damaged_kv_is_recomputed(lab: FaultLab) -> None:
    check(await run_damage(lab))


async def test_clients_leave_at_every_stage(lab: FaultLab) -> None:
    check(await run_disconnects(lab))
