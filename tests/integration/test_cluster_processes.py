"""Children of the supervisor, with real processes and the real broker."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import cast
from urllib.parse import urlsplit

import pytest

from moonpool.bus.nats import NatsBus
from moonpool.cluster.nats_server import NatsServer
from moonpool.cluster.process import ChildProcess, descendants_of, living_group_members
from moonpool.errors import UnavailableError
from support.connected_bus import connected
from support.eventually import eventually
from support.processes import wait_for_exit

_SUPERVISOR = """
import asyncio, pathlib, sys
from moonpool.cluster.process import ChildProcess

async def main():
    child = await ChildProcess.start(
        "sleeper", ["sleep", "600"], log_path=pathlib.Path(sys.argv[1]), environment={"PATH": sys.argv[2]}
    )
    print(child.pid, flush=True)
    await child.wait()

asyncio.run(main())
"""


async def start(tmp_path: Path, *program: str, cores: tuple[int, ...] = ()) -> ChildProcess:
    return await ChildProcess.start(
        "child",
        program,
        log_path=tmp_path / "child.log",
        environment={"PATH": os.environ["PATH"]},
        cores=cores,
    )


async def test_output_goes_to_a_private_log_and_the_exit_status_is_the_programs(
    tmp_path: Path,
) -> None:
    child = await start(tmp_path, "sh", "-c", "echo out; echo err >&2; exit 7")
    assert await child.wait() == 7
    assert child.log_tail() == "out\nerr"
    assert child.log_path.stat().st_mode & 0o077 == 0


async def test_a_child_runs_on_the_cores_it_was_given(tmp_path: Path) -> None:
    core = min(os.sched_getaffinity(0))
    child = await start(
        tmp_path,
        sys.executable,
        "-c",
        "import os; print(os.sched_getaffinity(0))",
        cores=(core,),
    )
    await child.wait()
    assert child.log_tail() == str({core})


async def test_kill_leaves_no_grandchild(tmp_path: Path) -> None:
    child = await start(tmp_path, "sh", "-c", "sleep 600 & sleep 600")
    await child.kill()
    assert child.returncode == -signal.SIGKILL
    assert living_group_members(child.pid) == ()
    await child.kill()


async def test_kill_finds_a_grandchild_in_a_session_of_its_own(tmp_path: Path) -> None:
    child = await start(tmp_path, "sh", "-c", "setsid sleep 600 & echo started; wait")
    await eventually(lambda: "started" in child.log_tail(), timeout_s=10, what="started")
    await eventually(
        lambda: any(one.group_id == one.pid for one in descendants_of(child.pid)),
        timeout_s=10,
        what="the grandchild has its session",
    )
    descendants = descendants_of(child.pid)
    await child.kill()
    assert not any(one.is_living for one in descendants)


async def test_what_has_ended_does_not_take_whoever_got_its_id_with_it(tmp_path: Path) -> None:
    stranger = await start(tmp_path, "sleep", "600")
    ended = ChildProcess(
        "ended",
        cast("asyncio.subprocess.Process", EndedProcess(pid=stranger.pid)),
        tmp_path / "ended.log",
    )
    await ended.kill()
    assert await ended.stop(timeout_s=0.2) == 0
    assert stranger.is_running
    assert living_group_members(stranger.pid) == (stranger.pid,)
    await stranger.kill()


@dataclass(frozen=True, kw_only=True)
class EndedProcess:
    """What asyncio knows of a program that it has waited for; its id is free for others."""

    pid: int
    returncode: int = 0

    async def wait(self) -> int:
        return self.returncode


async def test_what_a_program_left_behind_is_killed_after_its_end(tmp_path: Path) -> None:
    child = await start(tmp_path, "sh", "-c", "sleep 600 & exit 3")
    assert await child.wait() == 3
    assert living_group_members(child.pid)
    await child.kill()
    assert living_group_members(child.pid) == ()


async def test_stop_kills_what_does_not_obey(tmp_path: Path) -> None:
    child = await start(tmp_path, "sh", "-c", "trap '' TERM; echo ready; sleep 600; sleep 600")
    await eventually(lambda: "ready" in child.log_tail(), timeout_s=10, what="the child is up")
    assert await child.stop(timeout_s=0.2) == -signal.SIGKILL


def test_children_die_with_a_killed_supervisor(tmp_path: Path) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", _SUPERVISOR, str(tmp_path / "log"), os.environ["PATH"]],
        stdout=subprocess.PIPE,
        text=True,
    ) as supervisor:
        assert supervisor.stdout is not None
        pid = int(supervisor.stdout.readline())
        supervisor.kill()
    assert wait_for_exit(pid, timeout_s=5)


async def test_nats_starts_again_on_the_same_port(tmp_path: Path) -> None:
    server = NatsServer(run_dir=tmp_path)
    url = await server.start()
    await server.kill()
    assert await server.start() == url
    await server.stop()
    assert server.process is not None
    assert server.process.returncode == 0


async def test_nats_on_a_taken_port_says_so(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        server = NatsServer(run_dir=tmp_path, port=taken.getsockname()[1])
        with pytest.raises(UnavailableError, match="address already in use"):
            await server.start()


async def test_nats_url_is_a_loopback_address(tmp_path: Path) -> None:
    server = NatsServer(run_dir=tmp_path)
    parts = urlsplit(await server.start())
    await server.stop()
    assert parts.hostname == "127.0.0.1"


async def test_nats_takes_only_who_has_its_url(tmp_path: Path) -> None:
    server = NatsServer(run_dir=tmp_path)
    url = await server.start()
    try:
        assert server.process is not None
        token = urlsplit(url).username
        assert token
        assert token not in command_line(server.process.pid)
        async with (
            NatsBus(url.replace(f"{token}@", ""), name="stranger") as stranger,
            NatsBus(url, name="ours") as ours,
        ):
            async with asyncio.timeout(5):
                await connected(ours)
            assert not stranger.is_connected
    finally:
        await server.stop()
    # Nothing that was needed to run is left, except the log.
    assert files_below(tmp_path) == ["nats.log"]


def command_line(pid: int) -> str:
    return Path(f"/proc/{pid}/cmdline").read_text()


def files_below(directory: Path) -> list[str]:
    return [path.name for path in directory.rglob("*") if path.is_file()]
