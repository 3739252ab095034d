"""NixlDriver over an agent that moves nothing: what ends when, and what it costs the others."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest

from moonpool.errors import TransferError
from moonpool.transport.nixl_agent import NixlError
from moonpool.transport.nixl_driver import FENCE_S, STANDSTILL_S, NixlDriver
from moonpool.transport.nixl_job import NixlConnection, NixlJob

TABLE = np.zeros((1, 3), np.uint64)


class StillAgent:
    """READs end when the test says so."""

    def __init__(self, *_arguments: Any, **_settings: Any) -> None:
        self.done: set[object] = set()
        self.failed: set[object] = set()
        self.released: list[object] = []
        self.removed: list[str] = []
        self.is_closed = False
        self.is_broken = False

    def add_peer(self, metadata: bytes) -> str:
        return metadata.decode()

    def remove_peer(self, name: str) -> None:
        self.removed.append(name)

    def read(self, _peer: str, _remote: Any, _local: Any) -> object:
        return object()

    def is_done(self, handle: object) -> bool:
        if handle in self.failed:
            raise NixlError("it failed")
        return handle in self.done

    def release(self, handle: object) -> None:
        self.released.append(handle)

    def progress(self) -> None:
        if self.is_broken:
            raise NixlError("no progress")

    def close(self) -> None:
        self.is_closed = True


class World:
    """A driver whose thread is the test, and what it says."""

    def __init__(self) -> None:
        self.now = 100.0
        self.agents: list[StillAgent] = []
        self.ended: dict[NixlJob, TransferError | None] = {}
        self.lost: list[NixlConnection] = []
        self.driver = NixlDriver(
            name="reader",
            targets=[],
            ucx=None,
            news=self,
            tell=lambda news: news(),
            agent_type=self._make_agent,
            monotonic=lambda: self.now,
        )

    def _make_agent(self, *_arguments: Any, **_settings: Any) -> Any:
        self.agents.append(StillAgent())
        return self.agents[-1]

    def on_ended(self, job: NixlJob, error: TransferError | None) -> None:
        # Whoever learns of it finds the connection marked.
        assert error is None or job.connection in self.lost
        self.ended[job] = error

    def on_lost(self, connection: NixlConnection, _why: str) -> None:
        self.lost.append(connection)

    def on_over(self) -> None: ...

    def connect(self, name: str) -> NixlConnection:
        return self.driver.open(name.encode(), name)

    def post(self, connection: NixlConnection, *, is_probe: bool = False) -> NixlJob:
        ended = asyncio.get_running_loop().create_future()
        verify = None if is_probe else lambda: np.zeros(0, np.bool_)
        job = NixlJob(connection, TABLE, TABLE, verify, ended, self.driver.drop)
        self.driver.post(job)
        return job

    def finish(self, job: NixlJob) -> None:
        self.agents[-1].done.add(job.handle)

    def fail(self, job: NixlJob) -> None:
        self.agents[-1].failed.add(job.handle)

    def pass_time(self, seconds: float) -> None:
        self.now += seconds
        self.driver.turn()


@pytest.fixture
async def world() -> World:
    return World()


async def test_a_dropped_read_ends_before_a_long_one_that_came_first(world: World) -> None:
    peer, other = world.connect("p"), world.connect("q")
    long, piece, elsewhere = world.post(peer), world.post(peer), world.post(other)
    piece.drop()
    world.finish(piece)
    world.pass_time(0.0)
    assert list(world.ended) == [piece]
    # The long one takes its time, and nobody else is touched.
    world.pass_time(STANDSTILL_S + 5)
    assert list(world.ended) == [piece]
    world.finish(long)
    world.finish(elsewhere)
    world.pass_time(0.0)
    assert world.ended == {piece: None, long: None, elsewhere: None}
    assert not world.lost


async def test_wanted_reads_of_a_peer_end_in_order(world: World) -> None:
    peer = world.connect("p")
    jobs = [world.post(peer) for _ in range(3)]
    for job in reversed(jobs):
        world.finish(job)
    world.pass_time(0.0)
    assert list(world.ended) == jobs


async def test_a_dropped_read_behind_a_long_one_waits_for_it(world: World) -> None:
    """Over TCP what was asked first comes first."""
    peer = world.connect("p")
    long, piece = world.post(peer), world.post(peer)
    piece.drop()
    world.pass_time(FENCE_S + 1)
    assert not world.ended
    world.finish(long)
    world.finish(piece)
    world.pass_time(0.0)
    assert set(world.ended) == {long, piece}
    assert not world.agents[-1].is_closed


@pytest.mark.parametrize("is_long_wanted", [False, True])
async def test_a_peer_that_stands_still_is_cut_off_and_costs_the_others_their_agent(
    world: World, is_long_wanted: bool
) -> None:
    peer, other = world.connect("p"), world.connect("q")
    probe, long, piece = world.post(peer, is_probe=True), world.post(peer), world.post(peer)
    elsewhere = world.post(other)
    piece.drop()
    if not is_long_wanted:
        long.drop()
    limit = STANDSTILL_S if is_long_wanted else FENCE_S
    world.pass_time(limit - 0.1)
    assert not world.ended
    world.pass_time(0.2)
    assert set(world.ended) == {probe, long, piece, elsewhere}
    assert None not in world.ended.values()
    assert set(world.lost) == {peer, other}
    assert world.agents[0].is_closed
    # Who connects again gets another agent.
    again = world.post(world.connect("q"))
    world.finish(again)
    world.pass_time(0.0)
    assert world.ended[again] is None
    assert len(world.agents) == 2


async def test_reads_that_end_show_that_a_peer_moves(world: World) -> None:
    peer = world.connect("p")
    jobs = [world.post(peer) for _ in range(4)]
    for job in jobs:
        job.drop()
    for job in jobs[:3]:
        world.pass_time(FENCE_S * 0.9)
        world.finish(job)
        world.pass_time(0.0)
    assert list(world.ended) == jobs[:3]
    assert not world.agents[0].is_closed


async def test_an_agent_that_fails_while_nothing_is_read_is_replaced(world: World) -> None:
    peer = world.connect("p")
    world.agents[0].is_broken = True
    world.pass_time(1.0)
    assert world.lost == [peer]
    assert world.agents[0].is_closed
    job = world.post(world.connect("p"))
    world.finish(job)
    world.pass_time(0.0)
    assert world.ended == {job: None}


@pytest.mark.parametrize("is_dropped", [False, True])
async def test_a_read_that_fails_loses_its_peer_and_nobody_else(
    world: World, is_dropped: bool
) -> None:
    peer, again, other = world.connect("p"), world.connect("p"), world.connect("q")
    jobs = [world.post(peer), world.post(peer), world.post(again)]
    elsewhere = world.post(other)
    handles = [job.handle for job in jobs]
    if is_dropped:
        # Of those that somebody waits for, only the oldest is asked for.
        jobs[1].drop()
    world.fail(jobs[1 if is_dropped else 0])
    world.pass_time(0.0)
    (agent,) = world.agents
    assert {job: error.code for job, error in world.ended.items() if error is not None} == (
        dict.fromkeys(jobs, "kv_peer_lost")
    )
    assert set(world.lost) == {peer, again}
    assert (agent.removed, set(agent.released)) == (["p"], set(handles))
    # Nothing more is posted to it; the other peer's read lives on, and so does the agent.
    late = world.post(peer)
    assert world.ended.pop(late) is not None
    world.finish(elsewhere)
    world.pass_time(0.0)
    assert world.ended.pop(elsewhere) is None
    # It may come back.
    anew = world.post(world.connect("p"))
    world.finish(anew)
    world.pass_time(0.0)
    assert world.ended.pop(anew) is None
    assert set(world.ended) == set(jobs)
    assert (len(world.agents), agent.is_closed, agent.removed) == (1, False, ["p"])


async def test_the_last_to_close_a_peer_removes_it_once_its_reads_have_ended(world: World) -> None:
    first, second, other = world.connect("p"), world.connect("p"), world.connect("q")
    job = world.post(first)
    agent = world.agents[0]
    world.driver.forget(second)
    world.driver.forget(first)
    world.driver.forget(other)
    assert agent.removed == ["q"]
    world.finish(job)
    world.pass_time(0.0)
    assert world.ended == {job: None}
    assert agent.removed == ["q", "p"]
    assert not world.lost
