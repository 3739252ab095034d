"""The supervisor's care for one process: readiness, restarts, ports, failpoints, stop."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from moonpool.cluster.part import Part, PartEvent, PartSpec, PartState, RestartPolicy
from moonpool.config.process import RouterConfig, router_config
from moonpool.config.schema import ClusterConfig, RouterSettings
from moonpool.errors import UnavailableError
from support.eventually import eventually

_TESTS = Path(__file__).resolve().parents[1]
_RESTART = RestartPolicy(min_pause_s=0.01, max_pause_s=0.05)


@asynccontextmanager
async def supervised(
    run_dir: Path,
    *,
    first: str = "",
    restart: RestartPolicy = _RESTART,
    ready_timeout_s: float = 30.0,
    on_event: Callable[[PartEvent], None] = lambda _event: None,
) -> AsyncIterator[Part]:
    config = ClusterConfig(
        data_dir=run_dir, router=RouterSettings(http_port=0, grpc_port=0, drain_timeout_s=1.0)
    )
    part = Part(
        PartSpec(
            name="router",
            module="support.part_main",
            document=router_config(config, nats_url="nats://127.0.0.1:1"),
            environment={"PYTHONPATH": str(_TESTS)},
        ),
        run_dir=run_dir,
        restart=restart,
        ready_timeout_s=ready_timeout_s,
        on_event=on_event,
    )
    part.arm(first)
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(part.run())
        try:
            yield part
        finally:
            await part.stop(timeout_s=10.0)


async def test_a_part_is_ready_when_it_says_so_and_stops_when_told(tmp_path: Path) -> None:
    events: list[PartEvent] = []
    async with supervised(tmp_path, on_event=events.append) as part:
        await part.wait_ready(timeout_s=30)
        assert part.fact("grpc_address") == "127.0.0.1:40000"
    assert part.process is not None
    assert part.process.returncode == 0
    assert [event.state for event in events] == [
        PartState.STARTING,
        PartState.READY,
        PartState.STOPPED,
    ]


async def test_a_first_start_that_fails_is_not_tried_again_and_shows_the_log(
    tmp_path: Path,
) -> None:
    async with supervised(tmp_path, first="exit") as part:
        with pytest.raises(UnavailableError, match="cannot start: no such thing"):
            await part.wait_ready(timeout_s=30)
        assert (part.state, part.num_starts) == (PartState.FAILED, 1)


async def test_a_part_that_never_reports_is_killed(tmp_path: Path) -> None:
    async with supervised(tmp_path, first="hang", ready_timeout_s=0.5) as part:
        with pytest.raises(UnavailableError, match="not ready within"):
            await part.wait_ready(timeout_s=30)
        assert part.process is not None
        assert not part.process.is_running


async def test_each_of_the_next_lives_can_be_armed(tmp_path: Path) -> None:
    async with supervised(tmp_path) as part:
        part.arm("crash", "crash", "", "crash")
        await part.wait_starts(3, timeout_s=30)
        await part.kill()
        await part.wait_starts(5, timeout_s=30)
        assert part.num_starts == 5


async def test_a_crash_is_followed_by_another_life_on_the_same_port(tmp_path: Path) -> None:
    """Failpoints hold for one life, ports for all."""
    async with supervised(tmp_path, first="crash") as part:
        await part.wait_starts(2, timeout_s=30)
        assert isinstance(part.spec.document, RouterConfig)
        assert part.spec.document.router.grpc_port == 40_000
        assert part.spec.document.common.failpoints == ""
        await part.kill()
        await part.wait_starts(3, timeout_s=30)
        assert part.fact("grpc_port") == 40_000


async def test_a_held_part_begins_no_other_life(tmp_path: Path) -> None:
    restart = RestartPolicy(min_pause_s=0.0, max_pause_s=0.0)
    async with supervised(tmp_path, restart=restart) as part:
        await part.wait_ready(timeout_s=30)
        with part.held():
            await part.kill()
            await eventually(lambda: part.state is PartState.CRASHED, timeout_s=10, what="its end")
            for _ in range(100):
                await asyncio.sleep(0)
            assert (part.state, part.num_starts) == (PartState.CRASHED, 1)
        await part.wait_starts(2, timeout_s=30)
        with part.held():
            await part.kill()
            await part.stop(timeout_s=10)
    assert (part.state, part.num_starts) == (PartState.STOPPED, 2)


async def test_without_restarts_a_crash_is_the_end(tmp_path: Path) -> None:
    restart = RestartPolicy(is_enabled=False)
    async with supervised(tmp_path, restart=restart) as part:
        await part.wait_ready(timeout_s=30)
        await part.kill()
        await eventually(lambda: part.state is PartState.FAILED, timeout_s=10, what="the end")
        with pytest.raises(UnavailableError, match="ended with status -9"):
            await part.wait_ready(timeout_s=10)
        assert part.num_starts == 1


async def test_stopping_in_the_middle_of_a_start_leaves_nothing(tmp_path: Path) -> None:
    async with supervised(tmp_path, first="hang") as part:
        await eventually(lambda: part.process is not None, timeout_s=30, what="started")
    assert part.process is not None
    assert part.state is PartState.STOPPED
    assert not part.process.is_running


async def test_a_stop_does_not_wait_for_the_next_start(tmp_path: Path) -> None:
    restart = RestartPolicy(min_pause_s=60.0, max_pause_s=60.0)
    async with asyncio.timeout(30), supervised(tmp_path, restart=restart) as part:
        await part.wait_ready(timeout_s=20)
        await part.kill()
        await eventually(
            lambda: part.state is PartState.CRASHED, timeout_s=10, what="the pause before the next"
        )
    assert (part.state, part.num_starts) == (PartState.STOPPED, 1)


async def test_force_ends_it_for_good(tmp_path: Path) -> None:
    async with supervised(tmp_path) as part:
        await part.wait_ready(timeout_s=30)
        part.force()
        await eventually(
            lambda: part.state is PartState.STOPPED, timeout_s=10, what="stopped for good"
        )
        assert part.num_starts == 1
