"""The life of a process: order of start and stop, failing tasks, signals, readiness, orphans."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from moonpool.errors import UnavailableError
from moonpool.service.life import Life, ReadyFacts, StopPolicy, running, serve
from moonpool.service.loop_lag import watch_loop_lag
from moonpool.service.ready import ReadyPipe
from support.processes import wait_for_exit

_QUICK = StopPolicy(drain_grace_s=0.0, drain_timeout_s=0.2, abort_timeout_s=0.2)
_DEADLINE_S = 10.0


class Recorder:
    """A Service that writes down what happens to it."""

    name = "recorder"

    def __init__(self) -> None:
        self.events: list[str] = []
        self.drain_forever = False
        #: In every step of its stop.
        self.hangs = False
        self.fail_in: str | None = None
        self.task_may_fail = asyncio.Event()
        self.start_blocks = False
        self.is_blocked = asyncio.Event()
        self.may_leave = asyncio.Event()
        self.may_leave.set()

    @contextlib.asynccontextmanager
    async def adapter(self, name: str) -> AsyncIterator[None]:
        self.events.append(f"enter {name}")
        try:
            yield
        finally:
            await self.may_leave.wait()
            self.events.append(f"leave {name}")

    async def start(self, life: Life) -> ReadyFacts:
        await life.enter(self.adapter("bus"))
        await life.enter(self.adapter("rpc"))
        life.spawn(self.work(), name="work")
        if self.start_blocks:
            self.is_blocked.set()
            await asyncio.Event().wait()
        return {"port": 7}

    async def work(self) -> None:
        try:
            await self.task_may_fail.wait()
            raise RuntimeError("task failed")
        finally:
            self.events.append("task ended")

    async def announce_drain(self) -> None:
        self.step("announce")
        if self.hangs:
            await asyncio.Event().wait()

    async def drain(self) -> None:
        self.step("drain")
        if self.drain_forever or self.hangs:
            await asyncio.Event().wait()

    async def abort(self) -> None:
        self.step("abort")
        if self.hangs:
            await asyncio.Event().wait()

    def step(self, name: str) -> None:
        self.events.append(name)
        if self.fail_in == name:
            raise RuntimeError(name)


_WHOLE_LIFE = [
    "enter bus", "enter rpc", "announce", "drain", "abort", "task ended", "leave rpc", "leave bus",
]  # fmt: skip


async def test_start_and_stop_have_one_order() -> None:
    service = Recorder()
    async with running(service) as handle:
        assert handle.facts == {"port": 7}
        assert service.events == ["enter bus", "enter rpc"]
    assert service.events == _WHOLE_LIFE


@pytest.mark.parametrize("step", ["announce", "drain", "abort"])
async def test_a_failing_stop_step_does_not_stop_the_stop(step: str) -> None:
    service = Recorder()
    service.fail_in = step
    async with running(service, policy=_QUICK):
        pass
    assert service.events == _WHOLE_LIFE


async def test_a_drain_that_takes_too_long_is_cut() -> None:
    service = Recorder()
    service.drain_forever = True
    async with running(service, policy=_QUICK) as handle:
        handle.request_stop()
        handle.request_stop()
    assert service.events == _WHOLE_LIFE


@pytest.mark.parametrize("is_failing", [False, True])
async def test_a_close_that_takes_too_long_is_told(is_failing: bool) -> None:
    service = Recorder()
    service.may_leave.clear()
    policy = StopPolicy(
        drain_grace_s=0.0, drain_timeout_s=0.2, abort_timeout_s=0.2, close_timeout_s=0.02
    )
    lates: list[int] = []

    def on_late() -> None:
        lates.append(len(service.events))
        service.may_leave.set()

    lives: list[Life] = []
    with contextlib.suppress(BaseExceptionGroup):
        await serve(
            service,
            policy=policy,
            on_life=lives.append,
            on_ready=lambda _facts: (
                service.task_may_fail.set() if is_failing else lives[0].request_stop()
            ),
            on_late=on_late,
        )
    assert lates == [len(service.events) - 2]
    assert service.events[-2:] == ["leave rpc", "leave bus"]


async def test_a_stop_takes_no_longer_than_its_policy_says() -> None:
    """A supervisor that kills earlier would kill one that was about to end by itself."""
    service = Recorder()
    service.hangs = True
    service.may_leave.clear()
    policy = StopPolicy(
        drain_grace_s=0.05, drain_timeout_s=0.05, abort_timeout_s=0.1, close_timeout_s=0.05
    )
    loop = asyncio.get_running_loop()
    stopping: list[float] = []
    lives: list[Life] = []

    def on_ready(_facts: ReadyFacts) -> None:
        stopping.append(loop.time())
        lives[0].request_stop()

    def on_late() -> None:
        stopping.append(loop.time())
        service.may_leave.set()

    await serve(service, policy=policy, on_life=lives.append, on_ready=on_ready, on_late=on_late)
    began, ended = stopping
    assert policy.total_s == pytest.approx(0.35)
    assert policy.total_s - 0.01 < ended - began


async def test_a_task_that_fails_ends_the_process_without_a_drain() -> None:
    service = Recorder()
    service.task_may_fail.set()
    with pytest.raises(BaseExceptionGroup) as caught:
        await serve(service, policy=_QUICK)
    assert caught.group_contains(RuntimeError, match="task failed")
    assert service.events == ["enter bus", "enter rpc", "task ended", "leave rpc", "leave bus"]


async def test_a_stop_during_the_start_gives_it_up() -> None:
    service = Recorder()
    service.start_blocks = True
    lives: list[Life] = []
    async with asyncio.TaskGroup() as group, asyncio.timeout(_DEADLINE_S):
        group.create_task(serve(service, policy=_QUICK, on_life=lives.append))
        await service.is_blocked.wait()
        lives[0].request_stop()
    assert service.events == ["enter bus", "enter rpc", "task ended", "leave rpc", "leave bus"]


async def test_a_cancelled_serve_is_cancelled() -> None:
    service = Recorder()
    ready = asyncio.Event()
    async with asyncio.TaskGroup() as group, asyncio.timeout(_DEADLINE_S):
        task = group.create_task(serve(service, policy=_QUICK, on_ready=lambda _facts: ready.set()))
        await ready.wait()
        task.cancel()
    assert task.cancelled()
    assert service.events[-2:] == ["leave rpc", "leave bus"]


async def test_loop_lag_is_seen() -> None:
    lags: asyncio.Queue[float] = asyncio.Queue()
    async with asyncio.TaskGroup() as group, asyncio.timeout(_DEADLINE_S):
        watch = group.create_task(
            watch_loop_lag(lags.put_nowait, interval_s=0.001, warn_after_s=60)
        )
        await lags.get()
        blocked_until = asyncio.get_running_loop().time() + 0.05
        while asyncio.get_running_loop().time() < blocked_until:
            pass
        while await lags.get() < 0.03:
            pass
        watch.cancel()


# -- real processes --

_PROGRAM = """
import asyncio, sys, threading
from moonpool.config.schema import TelemetrySettings
from moonpool.errors import ConfigError
from moonpool.service.life import StopPolicy
from moonpool.service.runner import run

mode = sys.argv[1]

class Service:
    name = "child"

    async def start(self, life):
        if mode == "task-fails":
            life.spawn(self.fail(), name="fail")
        if mode == "hangs-at-the-end":
            life.spawn(self.hang(), name="hang")
        if mode == "config-at-start":
            raise ConfigError("bad = 1")
        if mode == "crash-at-start":
            raise ValueError("boom")
        return {"port": 7}

    async def hang(self):
        try:
            await asyncio.Event().wait()
        finally:
            # As a disk that does not answer: nothing ends this thread.
            await asyncio.to_thread(threading.Event().wait)

    async def fail(self):
        raise RuntimeError("task failed")

    async def announce_drain(self):
        print("announce", flush=True)

    async def drain(self):
        print("drain", flush=True)
        if mode == "drains-for-ever":
            await asyncio.Event().wait()

    async def abort(self):
        print("abort", flush=True)

def build(config):
    if mode == "bad-config":
        raise ConfigError("bad = 1")
    return Service()

sys.exit(run(build, None, name="child", telemetry=TelemetrySettings(log_format="json"),
             policy=StopPolicy(drain_grace_s=0.0, drain_timeout_s=60.0, close_timeout_s=0.2)))
"""


@contextlib.contextmanager
def child(mode: str) -> Iterator[tuple[subprocess.Popen[str], ReadyPipe]]:
    pipe = ReadyPipe()
    process = subprocess.Popen(
        [sys.executable, "-c", _PROGRAM, mode],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        pass_fds=(pipe.child_fd,),
        env={**os.environ, **pipe.environment},
    )
    try:
        yield process, pipe
    finally:
        pipe.close()
        process.kill()
        process.communicate()


async def test_a_thread_that_hangs_does_not_hold_up_the_end() -> None:
    with child("hangs-at-the-end") as (process, pipe):
        await pipe.wait(deadline_s=_DEADLINE_S)
        process.send_signal(signal.SIGTERM)
        output, errors = process.communicate(timeout=_DEADLINE_S)
        assert process.returncode == 1, errors
        assert output.split() == ["announce", "drain", "abort"]
        assert '"step": "close"' in errors


async def test_sigterm_drains_and_exits_zero() -> None:
    with child("normal") as (process, pipe):
        report = await pipe.wait(deadline_s=_DEADLINE_S)
        assert (report.name, report.pid, report.facts) == ("child", process.pid, {"port": 7})
        process.send_signal(signal.SIGTERM)
        output, errors = process.communicate(timeout=_DEADLINE_S)
        assert process.returncode == 0, errors
        assert output.split() == ["announce", "drain", "abort"]
        assert '"event": "service.ready"' in errors
        assert '"port": 7' in errors


async def test_a_second_signal_forces() -> None:
    with child("drains-for-ever") as (process, pipe):
        await pipe.wait(deadline_s=_DEADLINE_S)
        assert process.stdout is not None
        process.send_signal(signal.SIGINT)
        assert [process.stdout.readline() for _ in range(2)] == ["announce\n", "drain\n"]
        process.send_signal(signal.SIGINT)
        assert process.wait(timeout=_DEADLINE_S) == 130


@pytest.mark.parametrize(
    ("mode", "status", "text"),
    [
        ("bad-config", 2, "bad = 1"),
        ("config-at-start", 2, "bad = 1"),
        ("crash-at-start", 1, "boom"),
        ("task-fails", 1, "task failed"),
    ],
)
async def test_what_fails_is_logged_once_and_is_an_exit_status(
    mode: str, status: int, text: str
) -> None:
    with child(mode) as (process, pipe):
        if mode != "task-fails":
            with pytest.raises(UnavailableError, match="ended before"):
                await pipe.wait(deadline_s=_DEADLINE_S)
        _, errors = process.communicate(timeout=_DEADLINE_S)
        assert process.returncode == status, errors
        failures = [line for line in errors.splitlines() if text in line]
        assert len(failures) == 1, errors


async def test_a_child_that_is_never_ready_is_given_up() -> None:
    pipe = ReadyPipe()
    keep = os.dup(pipe.child_fd)
    try:
        with pytest.raises(UnavailableError, match="not ready within"):
            await pipe.wait(deadline_s=0.05)
    finally:
        os.close(keep)


def test_a_child_dies_with_its_parent(tmp_path: Path) -> None:
    code = (
        "import os, subprocess, sys, time\n"
        "inner = 'import os, sys; from moonpool.service.parent import die_with_parent;'\n"
        "inner += f'die_with_parent({os.getpid()}); print(os.getpid(), flush=True);'\n"
        "inner += 'sys.stdin.read()'\n"
        "child = subprocess.Popen([sys.executable, '-c', inner], stdin=subprocess.PIPE)\n"
        "child.wait()\n"
    )
    parent = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    pid = int(parent.stdout.readline())
    parent.kill()
    parent.wait()
    parent.stdout.close()
    assert wait_for_exit(pid, timeout_s=_DEADLINE_S)
