"""What a worker hears of others over the bus: who is told, who is connected to, and what cannot be read."""

from __future__ import annotations

import asyncio
from pathlib import Path

from structlog.testing import capture_logs

from moonpool.bus.memory import MemoryBroker, MemoryBus
from moonpool.bus.subjects import Subjects
from moonpool.errors import TransferError
from moonpool.handoff.messages import SourceRef
from moonpool.ids import Incarnation, WorkerId, WorkerKey
from moonpool.wire.control import Announce, ReceivedAnnounce, decode_announce, encode_announce
from moonpool.worker.announcements import Announcements
from moonpool.worker.peer_scout import PeerScout
from moonpool.worker.peers import Peer, PeerDirectory
from support.announcements import make_announce
from support.thread_engine import ThreadEngines, write_fake_model
from support.workers import running_worker, worker_config

SUBJECTS = Subjects("test")
OWN = WorkerKey(WorkerId("d0"), Incarnation("a" * 16))


def received(announce: Announce) -> ReceivedAnnounce:
    return decode_announce(encode_announce(announce))


async def test_each_announcement_is_read_once_for_all_and_nonsense_told_once_a_sender() -> None:
    first: list[ReceivedAnnounce] = []
    second: list[ReceivedAnnounce] = []
    unreadable: list[None] = []
    last_came = asyncio.Event()
    async with MemoryBus(MemoryBroker()) as bus, asyncio.timeout(5), asyncio.TaskGroup() as tasks:
        announcements = Announcements(bus, SUBJECTS, on_unreadable=lambda: unreadable.append(None))
        announcements.add_listener(first.append)
        announcements.add_listener(second.append)
        announcements.add_listener(
            lambda announce: last_came.set() if announce.is_leaving else None
        )
        listening = tasks.create_task(announcements.run())
        await asyncio.sleep(0)
        with capture_logs() as logs:
            for sender in ("d1", "d2", "d1", "d1"):
                await bus.publish(SUBJECTS.announce(sender), b"\xff")
            for announce in (make_announce("d3"), make_announce("d3", is_leaving=True)):
                await bus.publish(SUBJECTS.announce("d3"), encode_announce(announce))
            await last_came.wait()
        listening.cancel()
    assert [announce.is_leaving for announce in first] == [False, True]
    assert len(unreadable) == 4
    # The same values, not equal ones.
    assert list(map(id, first)) == list(map(id, second))
    assert [(entry["log_level"], entry["subject"]) for entry in logs] == [
        ("warning", SUBJECTS.announce("d1")),
        ("warning", SUBJECTS.announce("d2")),
        ("debug", SUBJECTS.announce("d1")),
        ("debug", SUBJECTS.announce("d1")),
    ]


async def test_each_incarnation_of_another_is_tried_once() -> None:
    tried: list[SourceRef] = []

    async def connect(source: SourceRef) -> Peer:
        tried.append(source)
        raise TransferError("nobody there", code="kv_peer_lost")

    peers = PeerDirectory(connect)
    scout = PeerScout(peers=peers, own=OWN)
    async with asyncio.TaskGroup() as tasks:
        running = [tasks.create_task(peers.run()), tasks.create_task(scout.run())]
        for announce in (
            make_announce("d0", incarnation="b" * 16),
            make_announce("d1", address="h:1"),
            make_announce("d2", address="h:2"),
            make_announce("d1", address="h:1", sequence=2),
            make_announce("d2", is_leaving=True),
        ):
            scout.on_announced(received(announce))
        await settled()
        assert [source.address for source in tried] == ["h:1"]
        for incarnation in ("a", "c", "c"):
            again = make_announce("d1", incarnation=incarnation * 16, address="h:3")
            scout.on_announced(received(again))
            await settled()
        assert [source.address for source in tried] == ["h:1", "h:3"]
        for task in running:
            task.cancel()


async def test_an_ipv6_address_is_announced_as_it_is_dialled(tmp_path: Path) -> None:
    config = worker_config(
        tmp_path, write_fake_model(tmp_path / "model"), "d0", advertise_host="::1"
    )
    broker = MemoryBroker()
    async with MemoryBus(broker) as bus, asyncio.timeout(20):
        heard = await bus.subscribe(SUBJECTS.announces)
        async with running_worker(
            config, MemoryBus(broker), start_engine=ThreadEngines()
        ) as worker:
            announce = decode_announce((await anext(aiter(heard))).data)
    assert announce.grpc_address == worker.address
    assert worker.address.startswith("[::1]:")


async def settled() -> None:
    """Whoever has something to do has done it."""
    for _ in range(20):
        await asyncio.sleep(0)
