"""A FaultLab on a tiny Llama, judged by the same model in this process; nothing may be left of it."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import uuid
from collections.abc import AsyncIterator, Mapping
from pathlib import Path

from moonpool.config.schema import ClusterConfig
from moonpool_loadtest.faults.lab import CaseSets, FaultLab, FaultReport, open_lab
from support.oracle_answers import answers_in_process
from support.processes import processes_with

_MARK = "MOONPOOL_E2E_MARK"


@contextlib.asynccontextmanager
async def fault_lab(
    config: ClusterConfig,
    sets: CaseSets,
    *,
    is_whole: bool = False,
    failpoints: Mapping[str, str] | None = None,
) -> AsyncIterator[FaultLab]:
    """As open_lab; afterwards no process, port, shared memory or configuration may be left."""
    expected = await asyncio.to_thread(answers_in_process, Path(config.model), sets.judged_cases)
    mark = uuid.uuid4().hex
    shared_memory = set(os.listdir("/dev/shm"))
    async with open_lab(
        config,
        expected=expected,
        sets=sets,
        environment={_MARK: mark},
        is_whole=is_whole,
        failpoints=failpoints,
    ) as lab:
        yield lab
        run_dir = lab.cluster.run_dir
        addresses = [
            str(lab.cluster.part(name).fact("grpc_address"))
            for name in (*lab.cluster.router_names, *lab.cluster.node_ids)
        ]
        addresses.append(lab.cluster.endpoints.nats_url.rpartition("@")[2])
        assert processes_with(_MARK, mark)
    assert processes_with(_MARK, mark) == []
    assert set(os.listdir("/dev/shm")) <= shared_memory
    for address in addresses:
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
    """All is well, and every token is the expected one."""
    assert not report.problems, report
    assert not report.differing, report
    assert report.num_equal == report.num_requests
