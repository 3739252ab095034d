"""The directory of store nodes: one contract for both, and Redis against a real server that comes and goes."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

import pytest
from redis.asyncio import Redis
from structlog.testing import capture_logs

from moonpool.clock import ManualClock
from moonpool.errors import ConfigError
from moonpool.ids import BlockHash, Incarnation, WorkerId, WorkerKey
from moonpool.store.directory import Directory, EmbeddedDirectory
from moonpool.store.directory_keeper import DirectoryKeeper
from moonpool.store.redis_directory import RedisDirectory
from moonpool.tiering.store_record import (
    ChainCopy,
    ChainReads,
    CopyKind,
    RingView,
    StoreMember,
    StoreRecord,
)
from support.eventually import eventually
from support.redis_server import RedisServer, redis_server

_DEADLINE_S = 10.0
_CLUSTER = "test"
#: Long enough for a loaded machine where a test is not about the limit.
_CALL_TIMEOUT_S = 1.0
#: Of records: long where a test is not about their end, short where it waits for that in real time.
_LONG_S = 30.0
_SHORT_S = 0.5


def record(
    store: str, *, life: int = 1, since_unix_s: float = 100.0, is_draining: bool = False
) -> StoreRecord:
    member = StoreMember(
        key=WorkerKey(WorkerId(store), Incarnation(f"{life:016x}")),
        address=f"{store}:50051",
        since_unix_s=since_unix_s,
        is_draining=is_draining,
    )
    return StoreRecord(
        member=member,
        copies=(
            ChainCopy(
                kind=CopyKind.REPLICA,
                tenant="acme",
                hashes=(BlockHash(bytes(32)), BlockHash(bytes(range(32)))),
                takers=(WorkerId("store-9"),),
            ),
        ),
        reads=(ChainReads(home_hash=BlockHash(bytes(range(32))), bytes_per_s=2.5e9),),
        taken=(BlockHash(bytes(range(1, 33))),),
        declined=(BlockHash(bytes(range(2, 34))),),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Lab:
    """Directories of two nodes, connected, and what makes the records of the first one end."""

    first: Directory
    second: Directory
    let_records_end: Callable[[], Awaitable[None]]


async def embedded_lab(stack: AsyncExitStack, run_dir: Path, life_time_s: float) -> Lab:
    clock = ManualClock()
    directory = await stack.enter_async_context(EmbeddedDirectory(clock, life_time_s=life_time_s))

    async def let_records_end() -> None:
        clock.advance(life_time_s)

    return Lab(first=directory, second=directory, let_records_end=let_records_end)


async def redis_lab(stack: AsyncExitStack, run_dir: Path, life_time_s: float) -> Lab:
    server = stack.enter_context(redis_server(run_dir))
    first, second = [
        await stack.enter_async_context(
            RedisDirectory(
                server.url, cluster=_CLUSTER, life_time_s=one_s, call_timeout_s=_CALL_TIMEOUT_S
            )
        )
        for one_s in (life_time_s, _LONG_S)
    ]
    for directory in (first, second):
        await directory.wait_connected()

    async def let_records_end() -> None:
        async def is_empty() -> bool:
            return await second.read() == RingView()

        await eventually(is_empty, timeout_s=_DEADLINE_S, what="no record is left")

    return Lab(first=first, second=second, let_records_end=let_records_end)


@pytest.fixture(params=[embedded_lab, redis_lab], ids=["embedded", "redis"])
def enter_lab(request: pytest.FixtureRequest, tmp_path: Path) -> EnterLab:
    async def enter(stack: AsyncExitStack, life_time_s: float = _LONG_S) -> Lab:
        lab: Lab = await request.param(stack, tmp_path, life_time_s)
        return lab

    return enter


class EnterLab(Protocol):
    async def __call__(self, stack: AsyncExitStack, life_time_s: float = _LONG_S) -> Lab:
        """`life_time_s`: of the first node's records."""
        ...


async def test_a_record_is_read_as_it_was_written(enter_lab: EnterLab) -> None:
    async with asyncio.timeout(_DEADLINE_S), AsyncExitStack() as stack:
        lab = await enter_lab(stack)
        assert await lab.second.read() == RingView()
        assert await lab.first.publish(record("store-1"))
        assert await lab.second.publish(record("store-0"))
        both = RingView(records=(record("store-0"), record("store-1")))
        assert await lab.first.read() == both
        assert await lab.second.read() == both


async def test_a_record_is_replaced_whole(enter_lab: EnterLab) -> None:
    async with asyncio.timeout(_DEADLINE_S), AsyncExitStack() as stack:
        lab = await enter_lab(stack)
        await lab.first.publish(record("store-0"))
        leaving = replace(record("store-0", is_draining=True), copies=(), reads=())
        await lab.first.publish(leaving)
        assert await lab.second.read() == RingView(records=(leaving,))


async def test_a_new_life_replaces_the_old_one(enter_lab: EnterLab) -> None:
    async with asyncio.timeout(_DEADLINE_S), AsyncExitStack() as stack:
        lab = await enter_lab(stack)
        old = record("store-0", life=9, since_unix_s=100.0)
        new = record("store-0", life=1, since_unix_s=200.0)
        await lab.second.publish(new)
        # The old process has not noticed yet that it is replaced.
        await lab.first.publish(old)
        joined = replace(new, member=replace(new.member, joined_unix_s=100.0))
        assert await lab.first.read() == RingView(records=(joined,))
        await lab.first.withdraw(old.member.key)
        assert await lab.first.read() == RingView(records=(new,))


async def test_withdrawing_may_come_twice_or_first(enter_lab: EnterLab) -> None:
    async with asyncio.timeout(_DEADLINE_S), AsyncExitStack() as stack:
        lab = await enter_lab(stack)
        key = record("store-0").member.key
        assert await lab.first.withdraw(key)
        await lab.first.publish(record("store-0"))
        assert await lab.first.withdraw(key)
        assert await lab.first.withdraw(key)
        assert await lab.second.read() == RingView()


async def test_a_node_that_falls_silent_is_gone(enter_lab: EnterLab) -> None:
    async with asyncio.timeout(_DEADLINE_S), AsyncExitStack() as stack:
        lab = await enter_lab(stack, _SHORT_S)
        assert await lab.first.publish(record("store-0"))
        await lab.let_records_end()
        assert await lab.second.read() == RingView()
        # It is heard again: here of whoever writes records that last.
        assert await lab.second.publish(record("store-0"))
        assert await lab.first.read() == RingView(records=(record("store-0"),))


async def test_keepers_see_each_other_and_leave(enter_lab: EnterLab) -> None:
    async with asyncio.timeout(_DEADLINE_S), AsyncExitStack() as stack:
        lab = await enter_lab(stack)
        first_views: asyncio.Queue[RingView] = asyncio.Queue()
        second_views: asyncio.Queue[RingView] = asyncio.Queue()
        first = DirectoryKeeper(
            lab.first,
            record=lambda: record("store-0"),
            on_view=first_views.put_nowait,
            beat_s=_DEADLINE_S,
        )
        second = DirectoryKeeper(
            lab.second,
            record=lambda: record("store-1"),
            on_view=second_views.put_nowait,
            beat_s=_DEADLINE_S,
        )
        async with first:
            assert await first_views.get() == RingView(records=(record("store-0"),))
            async with second:
                both = RingView(records=(record("store-0"), record("store-1")))
                assert await second_views.get() == both
                first.beat_now()
                assert await first_views.get() == both
            first.beat_now()
            assert await first_views.get() == RingView(records=(record("store-0"),))
        assert await lab.first.read() == RingView()


async def test_whoever_is_waited_for_beats_often() -> None:
    views: asyncio.Queue[RingView] = asyncio.Queue()
    keeper = DirectoryKeeper(
        EmbeddedDirectory(ManualClock()),
        record=lambda: record("store-0"),
        on_view=views.put_nowait,
        beat_s=100 * _DEADLINE_S,
    )
    async with asyncio.timeout(_DEADLINE_S), keeper:
        await views.get()
        keeper.hasten(True)
        keeper.beat_now()
        for _ in range(2):
            await views.get()


# -- Redis that comes and goes --


async def test_redis_absent_at_boot_then_killed_and_restarted_empty(tmp_path: Path) -> None:
    server = RedisServer(tmp_path)
    try:
        async with (
            asyncio.timeout(2 * _DEADLINE_S),
            RedisDirectory(
                server.url, cluster=_CLUSTER, call_timeout_s=_CALL_TIMEOUT_S
            ) as directory,
        ):
            assert not await directory.publish(record("store-0"))
            assert await directory.read() is None
            assert not await directory.withdraw(record("store-0").member.key)
            assert directory.num_failed_calls == 3
            for _ in range(2):
                server.start()
                await directory.wait_connected()
                # It has forgotten everything, and knows it again after the next beat.
                assert await directory.read() == RingView()
                assert await directory.publish(record("store-0"))
                assert await directory.read() == RingView(records=(record("store-0"),))
                server.kill()
                assert not await directory.publish(record("store-0"))
                assert await directory.read() is None
    finally:
        server.kill()


async def test_keepers_come_through_a_restart_of_redis(tmp_path: Path) -> None:
    views: list[RingView] = []
    with redis_server(tmp_path) as server:
        async with (
            asyncio.timeout(2 * _DEADLINE_S),
            RedisDirectory(
                server.url, cluster=_CLUSTER, call_timeout_s=_CALL_TIMEOUT_S
            ) as directory,
            DirectoryKeeper(
                directory, record=lambda: record("store-0"), on_view=views.append, beat_s=0.01
            ),
        ):
            await eventually(lambda: bool(views), timeout_s=_DEADLINE_S, what="a first view")
            server.kill()
            failed_before = directory.num_failed_calls
            await eventually(
                lambda: directory.num_failed_calls > failed_before,
                timeout_s=_DEADLINE_S,
                what="a beat that nobody hears",
            )
            views.clear()
            server.start()
            await eventually(lambda: bool(views), timeout_s=_DEADLINE_S, what="a view again")
            assert views[0] == RingView(records=(record("store-0"),))


async def test_a_beat_that_nobody_heard_is_made_again_soon(tmp_path: Path) -> None:
    server = RedisServer(tmp_path)
    seen = asyncio.Event()
    try:
        async with (
            asyncio.timeout(_DEADLINE_S),
            RedisDirectory(
                server.url, cluster=_CLUSTER, call_timeout_s=_CALL_TIMEOUT_S
            ) as directory,
            DirectoryKeeper(
                directory,
                record=lambda: record("store-0"),
                on_view=lambda _: seen.set(),
                beat_s=100 * _DEADLINE_S,
            ),
        ):
            await eventually(
                lambda: directory.num_failed_calls > 0, timeout_s=_DEADLINE_S, what="a beat"
            )
            server.start()
            await seen.wait()
    finally:
        server.kill()


async def test_a_password_that_redis_does_not_take_is_told_once(tmp_path: Path) -> None:
    server = RedisServer(tmp_path, options=("--requirepass", "right"))
    try:
        server.start()
        with capture_logs() as logs:
            url = server.url.replace("//", "//:wrong@")
            async with RedisDirectory(url, cluster=_CLUSTER):
                await eventually(
                    lambda: sum(line["event"] == "directory.not_connected" for line in logs) > 1,
                    timeout_s=_DEADLINE_S,
                    what="two tries",
                )
    finally:
        server.kill()
    (told,) = [line for line in logs if line["log_level"] == "warning"]
    assert told["event"] == "directory.unreachable"
    assert told["why"].startswith("AuthenticationError")


async def test_redis_that_hangs_holds_nobody_up(tmp_path: Path) -> None:
    with redis_server(tmp_path) as server:
        async with (
            asyncio.timeout(_DEADLINE_S),
            RedisDirectory(server.url, cluster=_CLUSTER, life_time_s=_LONG_S) as directory,
        ):
            await directory.wait_connected()
            assert await eventually_published(directory, record("store-0"))
            server.freeze()
            loop = asyncio.get_running_loop()
            started = loop.time()
            for _ in range(3):
                assert await directory.read() is None
            assert loop.time() - started < 1.0
            server.thaw()
            await directory.wait_connected()
            # What was late is not taken for the answer to this.
            assert await eventually_published(directory, record("store-1"))
            view = await eventually_read(directory)
            assert view.members[-1] == record("store-1").member


async def eventually_read(directory: RedisDirectory) -> RingView:
    """See `eventually_published`."""
    views: list[RingView] = []

    async def is_answered() -> bool:
        await directory.wait_connected()
        view = await directory.read()
        views.extend(() if view is None else (view,))
        return view is not None

    await eventually(is_answered, timeout_s=_DEADLINE_S, what="a view")
    return views[0]


async def eventually_published(directory: RedisDirectory, what: StoreRecord) -> bool:
    """A limit of 20 ms may pass on a loaded machine: the next beat comes through."""

    async def is_heard() -> bool:
        await directory.wait_connected()
        return await directory.publish(what)

    await eventually(is_heard, timeout_s=_DEADLINE_S, what="a beat that is heard")
    return True


async def test_clusters_share_a_server_and_strangers_are_left_out(tmp_path: Path) -> None:
    with redis_server(tmp_path) as server:
        async with (
            asyncio.timeout(_DEADLINE_S),
            RedisDirectory(server.url, cluster="a", call_timeout_s=_CALL_TIMEOUT_S) as here,
            RedisDirectory(server.url, cluster="b", call_timeout_s=_CALL_TIMEOUT_S) as there,
            Redis.from_url(server.url) as raw,
        ):
            await here.wait_connected()
            await there.wait_connected()
            await here.publish(record("store-0"))
            assert await there.read() == RingView()
            keys = [key async for key in raw.scan_iter()]
            assert keys
            assert all(key.startswith(b"moonpool.a.") for key in keys)
            assert all([await raw.pttl(key) > 0 for key in keys])

            name = str(record("store-0").member.key).encode()
            stolen = await raw.get(b"moonpool.a.store." + name)
            strangers = {b"garbage": b"\xc1", b"half": stolen[:-3], b"another@1": stolen}
            for stranger, value in strangers.items():
                await raw.sadd("moonpool.a.stores", stranger)
                await raw.set(b"moonpool.a.store." + stranger, value)
            assert await here.read() == RingView(records=(record("store-0"),))
            assert here.num_bad_records == len(strangers)


async def test_redis_needs_no_more_rights_than_it_says(tmp_path: Path) -> None:
    with redis_server(tmp_path) as server:
        host = server.url.removeprefix("redis://")
        rights = "~moonpool.test.* -@all +ping +sadd +srem +set +del +smembers +mget +pexpire"
        async with asyncio.timeout(_DEADLINE_S), Redis.from_url(server.url) as raw:
            await raw.execute_command("ACL", "SETUSER", "store", "on", ">pw", *rights.split())
            await raw.execute_command("ACL", "SETUSER", "guest", "on", ">pw", "-@all", "+ping")
            async with RedisDirectory(
                f"redis://store:pw@{host}", cluster=_CLUSTER, call_timeout_s=_CALL_TIMEOUT_S
            ) as directory:
                await directory.wait_connected()
                assert await directory.publish(record("store-0"))
                assert await directory.read() == RingView(records=(record("store-0"),))
                assert await directory.withdraw(record("store-0").member.key)
            async with RedisDirectory(
                f"redis://guest:pw@{host}", cluster=_CLUSTER, call_timeout_s=_CALL_TIMEOUT_S
            ) as directory:
                await directory.wait_connected()
                assert not await directory.publish(record("store-0"))
                assert await directory.read() is None
                assert directory.is_connected


@pytest.mark.parametrize("url", ["", "localhost:6379", "http://host:1", "redis://host:port/0"])
def test_a_url_of_another_kind_is_refused(url: str) -> None:
    with pytest.raises(ConfigError, match=r"store\.redis_url"):
        RedisDirectory(url, cluster=_CLUSTER)


def test_a_cluster_name_is_one_word() -> None:
    with pytest.raises(ConfigError, match="cluster name"):
        RedisDirectory("redis://127.0.0.1:1/0", cluster="a.b")
