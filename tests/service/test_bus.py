"""Both buses keep the same promises; the NATS one against a real broker that dies and comes back."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from moonpool.bus.memory import MemoryBroker, MemoryBus
from moonpool.bus.nats import NatsBus
from moonpool.bus.protocol import Bus, BusMessage, Subscription
from moonpool.bus.subjects import Subjects, matches
from moonpool.errors import ConfigError, InvalidRequestError
from support.connected_bus import connected
from support.nats_server import NatsServer, nats_server

_DEADLINE_S = 5.0

MakeBus = Callable[[], Bus]


@pytest.fixture(params=["memory", "nats"])
def make_bus(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[MakeBus]:
    if request.param == "memory":
        broker = MemoryBroker()
        yield lambda: MemoryBus(broker)
        return
    with nats_server(tmp_path) as server:
        yield lambda: NatsBus(server.url, name="test")


@asynccontextmanager
async def two_buses(make_bus: MakeBus) -> AsyncIterator[tuple[Bus, Bus]]:
    async with make_bus() as first, make_bus() as second, asyncio.timeout(_DEADLINE_S):
        await connected(first)
        await connected(second)
        yield first, second


async def next_message(subscription: Subscription) -> BusMessage:
    async with asyncio.timeout(_DEADLINE_S):
        async for message in subscription:
            return message
    raise AssertionError("the subscription ended")


async def flushed(bus: Bus, other: Bus) -> None:
    """What `bus` subscribed before is in force: a message of its own has come round."""
    probe = await bus.subscribe("probe")
    while not await other.publish("probe", b""):
        pass
    await next_message(probe)
    await probe.close()


async def test_a_message_reaches_those_who_subscribed(make_bus: MakeBus) -> None:
    async with two_buses(make_bus) as (first, second):
        exact = await first.subscribe("a.b")
        all_of_a = await first.subscribe("a.*")
        await flushed(first, first)
        assert await second.publish("a.b", b"1")
        assert await second.publish("a.c", b"2")
        assert await next_message(exact) == BusMessage(subject="a.b", data=b"1")
        assert [(await next_message(all_of_a)).data for _ in range(2)] == [b"1", b"2"]


async def test_a_full_queue_drops_the_oldest_and_counts(make_bus: MakeBus) -> None:
    async with two_buses(make_bus) as (first, second):
        slow = await first.subscribe("s", queue_size=2)
        last = await first.subscribe("s")
        await flushed(first, first)
        for number in range(5):
            await second.publish("s", bytes([number]))
        while (await next_message(last)).data != b"\x04":
            pass
        assert [(await next_message(slow)).data for _ in range(2)] == [b"\x03", b"\x04"]
        assert first.num_dropped == 3


async def test_closing_ends_subscriptions(make_bus: MakeBus) -> None:
    async with asyncio.timeout(_DEADLINE_S):
        async with make_bus() as bus:
            subscription = await bus.subscribe("x")
            closed_early = await bus.subscribe("y")
            await closed_early.close()
            await closed_early.close()
        assert [message async for message in subscription] == []
        assert [message async for message in closed_early] == []


async def test_memory_broker_away_means_unsent() -> None:
    broker = MemoryBroker(is_up=False)
    seen: list[bool] = []
    async with MemoryBus(broker) as bus:
        bus.on_connection(seen.append)
        assert not await bus.publish("x", b"")
        assert bus.num_unsent == 1
        broker.start()
        assert bus.is_connected
        assert await bus.publish("x", b"")
        broker.stop()
    assert seen == [True, False]


async def test_nats_absent_at_boot_then_killed_and_restarted(tmp_path: Path) -> None:
    server = NatsServer(tmp_path)
    url = server.reserve_port()
    changes: asyncio.Queue[bool] = asyncio.Queue()
    try:
        async with NatsBus(url, name="test") as bus, asyncio.timeout(20):
            bus.on_connection(changes.put_nowait)
            early = await bus.subscribe("s")
            assert not bus.is_connected
            assert not await bus.publish("s", b"lost")

            for round_number in range(3):
                server.start()
                assert await changes.get()
                assert await bus.publish("s", bytes([round_number]))
                assert (await next_message(early)).data == bytes([round_number])
                server.kill()
                assert not await changes.get()
                assert not await bus.publish("s", b"lost")
            assert bus.num_unsent == 4
    finally:
        server.kill()


async def test_nats_that_never_comes_does_not_hold_up_the_exit(tmp_path: Path) -> None:
    url = NatsServer(tmp_path).reserve_port()
    async with asyncio.timeout(_DEADLINE_S):
        async with NatsBus(url, name="test") as bus:
            assert not bus.is_connected


async def test_nats_refuses_a_message_larger_than_the_broker_takes(tmp_path: Path) -> None:
    with nats_server(tmp_path) as server:
        async with NatsBus(server.url, name="test") as bus, asyncio.timeout(_DEADLINE_S):
            await connected(bus)
            with pytest.raises(InvalidRequestError, match="more than the broker takes"):
                await bus.publish("x", bytes(2 * 2**20))
            assert await bus.publish("x", b"small")


#: nats-py closes a client that is told so for good.
NO_ROOM = b"-ERR 'maximum connections exceeded'\r\n"
#: A subject at which the scripted broker sends its client away.
SENDS_AWAY = "away"


@asynccontextmanager
async def scripted_broker(
    answers: list[bytes | None], *, greeting_pause_s: float = 0.0
) -> AsyncIterator[str]:
    """A broker's URL. It accepts clients and answers the PING after, of each client in turn, as told.

    None: it answers this one and all later ones like a broker, the first PING after CONNECT only after
    `greeting_pause_s`.
    """

    async def converse(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b'INFO {"server_id":"x","max_payload":1048576,"proto":1}\r\n')
        answer = answers.pop(0) if len(answers) > 1 else answers[0]
        num_pings = 0
        with contextlib.closing(writer):
            async for line in reader:
                if line.startswith(b"PUB " + SENDS_AWAY.encode()):
                    writer.write(NO_ROOM)
                    return
                if not line.startswith(b"PING"):
                    continue
                num_pings += 1
                if num_pings > 1 and answer is not None:
                    writer.write(answer)
                    return
                pause_s = greeting_pause_s if num_pings == 2 else 0.0
                asyncio.get_running_loop().call_later(pause_s, writer.write, b"PONG\r\n")

    server = await asyncio.start_server(converse, "127.0.0.1", 0)
    async with server:
        yield f"nats://127.0.0.1:{server.sockets[0].getsockname()[1]}"


@pytest.mark.parametrize("answer", [b"", NO_ROOM])
async def test_nats_that_ends_a_new_connection_is_tried_again(answer: bytes) -> None:
    async with (
        asyncio.timeout(_DEADLINE_S),
        scripted_broker([answer, None]) as url,
        NatsBus(url, name="test") as bus,
    ):
        await connected(bus)
        assert await bus.publish("s", b"heard")


async def test_nats_that_sends_a_client_away_is_tried_again() -> None:
    changes: asyncio.Queue[bool] = asyncio.Queue()
    async with (
        asyncio.timeout(_DEADLINE_S),
        scripted_broker([None]) as url,
        NatsBus(url, name="test") as bus,
    ):
        bus.on_connection(changes.put_nowait)
        assert await changes.get()
        await bus.publish(SENDS_AWAY, b"")
        assert not await changes.get()
        assert await changes.get()
        assert await bus.publish("s", b"heard")


async def test_nats_that_answers_late_is_connected_all_the_same() -> None:
    changes: asyncio.Queue[bool] = asyncio.Queue()
    async with (
        asyncio.timeout(_DEADLINE_S),
        # Longer than nats-py is given to flush elsewhere.
        scripted_broker([None], greeting_pause_s=1.1) as url,
        NatsBus(url, name="test") as bus,
    ):
        bus.on_connection(changes.put_nowait)
        assert await changes.get()
        # What it sends is read: nats-py stops reading over a late answer to a flush that was given up.
        await bus.publish(SENDS_AWAY, b"")
        assert not await changes.get()


def test_subjects_carry_the_cluster_and_refuse_wildcards() -> None:
    subjects = Subjects("local")
    assert subjects.announce("decode-0") == "moonpool.local.worker.decode-0"
    assert matches(subjects.announces, subjects.announce("decode-0"))
    assert not matches(subjects.announces, subjects.who)
    for bad in ("a.b", "*", ">", "", "a b", "x" * 65):
        with pytest.raises(ConfigError, match="allowed are 1 to 64"):
            subjects.announce(bad)


@pytest.mark.parametrize(
    ("pattern", "subject", "is_match"),
    [
        ("a.b", "a.b", True),
        ("a.b", "a.b.c", False),
        ("a.*", "a", False),
        ("a.>", "a.b.c", True),
        ("a.>", "a", False),
        ("*.b", "a.b", True),
    ],
)
def test_matching_is_nats(pattern: str, subject: str, is_match: bool) -> None:
    assert matches(pattern, subject) is is_match
