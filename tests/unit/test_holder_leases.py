"""The holder's end of leases on prefixes, and reads that are stopped before they have begun."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import numpy as np
import pytest

from moonpool.errors import MoonpoolError
from moonpool.failpoints import Failpoints
from moonpool.handoff.effects import StartRead
from moonpool.handoff.events import (
    HandoffEvent,
    PrefixLeaseClosed,
    PrefixOpenReceived,
    ReadDone,
    ReadId,
)
from moonpool.handoff.messages import (
    HolderMessage,
    LeaseId,
    PrefixFailed,
    PrefixOpen,
    PrefixOpened,
    PrefixRefusal,
    SourceRef,
    with_digests,
)
from moonpool.ids import (
    AttemptId,
    BlockHash,
    BlockId,
    Incarnation,
    RequestId,
    WorkerId,
    WorkerKey,
)
from moonpool.telemetry.metrics import Metrics
from moonpool.wire.fields import InvalidMessageError
from moonpool.wire.prefix_read import LeaseClosed, LeaseEnded, LeaseNumber
from moonpool.worker.attempt_book import AttemptBook
from moonpool.worker.books import WorkerBooks
from moonpool.worker.holder_leases import HolderLeases, ReaderRequest
from moonpool.worker.kv_reads import KvReads
from moonpool.worker.peers import Peer, PeerDirectory

A = AttemptId(RequestId("a"), 1)
KEY = WorkerKey(WorkerId("h"), Incarnation("1"))
OPEN = PrefixOpen(
    attempt_id=A,
    reader=KEY,
    holder=KEY,
    namespace="n",
    secret_fingerprint="s",
    hashes=(BlockHash(bytes(32)),),
    first=0,
)
FAILED = PrefixFailed(attempt_id=A, reason=PrefixRefusal.EXPIRED, message="late")


def opened(*blocks: int) -> PrefixOpened:
    return PrefixOpened(attempt_id=A, block_ids=tuple(map(BlockId, blocks)))


LEAVES_OF_2_AND_0 = np.array([[4, 5], [0, 1]], "<u8").tobytes()
ONE, TWO = LeaseNumber(1), LeaseNumber(2)


class World:
    """One stream of a reader."""

    def __init__(self) -> None:
        #: uint64[3 blocks, 2 layers]
        leaves = np.arange(6, dtype=np.uint64).reshape(3, 2)
        self.leases = HolderLeases(leaf_digests=leaves)
        self.events: list[HandoffEvent] = []
        self.told: list[tuple[LeaseNumber, HolderMessage | LeaseEnded]] = []
        self.says: asyncio.Queue[ReaderRequest | MoonpoolError | None] = asyncio.Queue()
        #: Whether gRPC takes what the reader is told.
        self.takes = asyncio.Event()
        self.takes.set()
        self.failure: MoonpoolError | None = None
        #: The machine refuses every lease.
        self.is_refusing = False

    def handle(self, event: HandoffEvent) -> None:
        self.events.append(event)
        if self.is_refusing and isinstance(event, PrefixOpenReceived):
            self.leases.send(event.lease_id, FAILED)
            self.leases.end(event.lease_id)

    def lease_id(self, number: int = 0) -> LeaseId:
        """Of the lease that was opened so many leases after the first."""
        opens = [event for event in self.events if isinstance(event, PrefixOpenReceived)]
        return opens[number].lease_id

    @property
    def num_closed(self) -> int:
        return sum(isinstance(event, PrefixLeaseClosed) for event in self.events)

    async def say(self, *requests: ReaderRequest | MoonpoolError | None) -> None:
        """The reader's words; None: it ends the stream."""
        for request in requests:
            self.says.put_nowait(request)
        await settle()

    async def serve(self, tasks: asyncio.TaskGroup) -> None:
        try:
            async for told in self.leases.serve(
                requests=self._requests(), tasks=tasks, handle=self.handle
            ):
                self.told.append(told)
                await self.takes.wait()
        except MoonpoolError as error:
            self.failure = error

    async def _requests(self) -> AsyncIterator[ReaderRequest]:
        while (request := await self.says.get()) is not None:
            if isinstance(request, MoonpoolError):
                raise request
            yield request


@asynccontextmanager
async def serving() -> AsyncIterator[World]:
    """The reader ends the stream in the end; nothing is open then."""
    world = World()
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(world.serve(tasks))
        yield world
        await world.say(None)
    assert len(world.leases) == 0


async def settle() -> None:
    """Let tasks run until they wait."""
    for _ in range(10):
        await asyncio.sleep(0)


async def test_the_reader_gets_blocks_with_their_leaves() -> None:
    async with serving() as world:
        await world.say((ONE, OPEN))
        world.leases.send(world.lease_id(), opened(2, 0))
        await settle()
    assert world.told == [(ONE, with_digests(opened(2, 0), LEAVES_OF_2_AND_0))]
    assert world.events == [
        PrefixOpenReceived(lease_id=world.lease_id(), open=OPEN),
        PrefixLeaseClosed(lease_id=world.lease_id()),
    ]


async def test_leases_on_one_stream_end_each_by_itself() -> None:
    async with serving() as world:
        await world.say((ONE, OPEN), (TWO, OPEN))
        first, second = world.lease_id(0), world.lease_id(1)
        assert (first != second, len(world.leases)) == (True, 2)
        await world.say((ONE, LeaseClosed()))
        assert world.events[2:] == [PrefixLeaseClosed(lease_id=first)]
        # What the machine still says of it reaches nobody.
        world.leases.send(first, opened(2))
        world.leases.end(first)
        world.leases.send(second, opened(2, 0))
        await settle()
        assert world.told == [(TWO, with_digests(opened(2, 0), LEAVES_OF_2_AND_0))]
        # Its number may be taken again.
        await world.say((ONE, OPEN))
        assert len(world.leases) == 2
    assert world.num_closed == 3


async def test_blocks_are_not_told_once_the_lease_has_ended() -> None:
    async with serving() as world:
        await world.say((ONE, OPEN))
        world.leases.send(world.lease_id(), opened(2))
        world.leases.send(world.lease_id(), FAILED)
        world.leases.end(world.lease_id())
        await settle()
        # Whoever was told may have given it back meanwhile.
        await world.say((ONE, LeaseClosed()))
    assert world.told == [(ONE, FAILED), (ONE, LeaseEnded())]
    assert world.num_closed == 0


async def test_blocks_are_not_told_once_the_reader_has_given_them_back() -> None:
    async with serving() as world:
        world.takes.clear()
        await world.say((ONE, OPEN), (TWO, OPEN))
        world.leases.send(world.lease_id(0), opened())
        await settle()
        world.leases.send(world.lease_id(1), opened(2))
        await world.say((TWO, LeaseClosed()))
        world.takes.set()
        await settle()
    assert world.told == [(ONE, with_digests(opened(), b""))]


async def test_that_nothing_is_held_is_told_before_the_end() -> None:
    async with serving() as world:
        await world.say((ONE, OPEN))
        world.leases.send(world.lease_id(), opened())
        world.leases.end(world.lease_id())
        await settle()
    assert world.told == [(ONE, with_digests(opened(), b"")), (ONE, LeaseEnded())]


@pytest.mark.parametrize(
    ("nonsense", "param"),
    [((ONE, OPEN), "lease"), (InvalidMessageError("kind is not set", param="kind"), "kind")],
)
async def test_what_no_reader_says_ends_all_its_leases(
    nonsense: ReaderRequest | MoonpoolError, param: str
) -> None:
    async with serving() as world:
        await world.say((ONE, OPEN), (TWO, OPEN), nonsense)
        assert world.failure is not None
        assert world.failure.param == param
        assert world.num_closed == 2


async def test_a_reader_that_takes_nothing_is_not_listened_to() -> None:
    async with serving() as world:
        world.is_refusing = True
        world.takes.clear()
        await world.say(*((LeaseNumber(number), OPEN) for number in range(1_000)))
        assert 1 < len(world.events) < 200
        world.takes.set()
        for _ in range(2_000):
            await asyncio.sleep(0)
        assert len(world.events) == 1_000
    assert world.told[-2:] == [(999, FAILED), (999, LeaseEnded())]


async def test_a_read_that_is_stopped_before_it_begins_tells_its_end() -> None:
    async def connect(_source: SourceRef) -> Peer:
        raise AssertionError("nobody connects")

    done: list[ReadDone] = []
    reads = KvReads(
        peers=PeerDirectory(connect),
        leaf_digests=np.zeros((3, 2), np.uint64),
        first_layer=0,
        book=AttemptBook("r"),
        books=WorkerBooks(Metrics()),
        failpoints=Failpoints.off(),
        on_done=done.append,
    )
    effect = StartRead(
        read_id=ReadId(A, 0),
        source=SourceRef(key=KEY, address="h:1"),
        source_block_ids=(BlockId(1),),
        target_block_ids=(BlockId(2),),
        first_layer=0,
        end_layer=2,
        digests=(bytes(16),),
        is_prefix=True,
    )
    async with asyncio.TaskGroup() as tasks:
        reads.start(effect, tasks)
        assert reads.num_open == 1
        reads.stop(A)
    assert done == [ReadDone(read_id=ReadId(A, 0), is_ok=False)]
    assert reads.num_open == 0
    reads.stop(A)
