"""Router sessions and their outbox: when a frame leaves, what is in it, and when a session ends."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing
from dataclasses import replace

import pytest

from moonpool.clock import SystemClock
from moonpool.core.protocol import (
    BlockLedger,
    HandBackReason,
    HandedBack,
    Refused,
    RefuseReason,
    TokensReady,
)
from moonpool.errors import InvalidRequestError
from moonpool.handoff.events import HandoffEvent, RouterLost, RouterMessageReceived
from moonpool.handoff.messages import AbortRequest, RouterKey, RouterMessage
from moonpool.ids import AttemptId, RequestId
from moonpool.inference.output import FinishReason, TokenRun
from moonpool.routing.worker_view import WorkerFits
from moonpool.worker.load import Load
from moonpool.worker.outbox import OutboxContent, Report, RouterOutbox
from moonpool.worker.router_sessions import RouterSessions, SessionFrame
from support.fleet import DECODE, PREFILL

ATTEMPT = AttemptId(RequestId("r1"), 1)
OTHER = AttemptId(RequestId("r2"), 4)


def tokens(
    first: int, *token_ids: int, attempt_id: AttemptId = ATTEMPT, end: FinishReason | None = None
) -> TokensReady:
    run = TokenRun(first_position=first, token_ids=token_ids, finish_reason=end)
    return TokensReady(attempt_id=attempt_id, run=run, num_cached_tokens=0 if first == 0 else None)


def report(message: TokensReady | Refused | HandedBack, *, is_prefill_side: bool = False) -> Report:
    return Report(message=message, is_prefill_side=is_prefill_side)


def test_the_outbox_merges_tokens_and_puts_ends_last() -> None:
    outbox = RouterOutbox()
    back = HandedBack(attempt_id=OTHER, reason=HandBackReason.REVOKED)
    refused = Refused(attempt_id=OTHER, reason=RefuseReason.NO_BLOCKS)
    outbox.add(refused, is_prefill_side=True)
    outbox.add(tokens(0, 7), is_prefill_side=False)
    outbox.add(back, is_prefill_side=False)
    outbox.add(tokens(0, 5, attempt_id=OTHER), is_prefill_side=False)
    outbox.add(tokens(1, 8), is_prefill_side=False)
    outbox.add(tokens(2, end=FinishReason.LENGTH), is_prefill_side=False)
    # The prefill side's early report is another's word about the same position.
    outbox.add(tokens(0, 7), is_prefill_side=True)
    assert outbox.take() == OutboxContent(
        reports=(
            report(tokens(0, 7, 8, end=FinishReason.LENGTH)),
            report(tokens(0, 5, attempt_id=OTHER)),
            report(tokens(0, 7), is_prefill_side=True),
            report(refused, is_prefill_side=True),
            report(back),
        ),
        spans=(),
    )
    assert not outbox


def test_the_outbox_keeps_the_last_word_on_what_was_cached() -> None:
    outbox = RouterOutbox()
    for message in (
        replace(tokens(0, 7), num_cached_tokens=8, num_peer_tokens=4),
        tokens(1, 8),
        # After a preemption, some of it had to be computed.
        replace(tokens(2, 9), num_cached_tokens=4),
        tokens(3, 10),
    ):
        outbox.add(message, is_prefill_side=False)
    (only,) = outbox.take().reports
    assert only.message == replace(tokens(0, 7, 8, 9, 10), num_cached_tokens=4)


class World:
    """Sessions whose router is this test."""

    def __init__(
        self,
        *,
        silence_s: float = 5.0,
        handle: Callable[[HandoffEvent], None] = lambda _event: None,
    ) -> None:
        self.events: list[HandoffEvent] = []
        self.lost = asyncio.Event()
        self.num_free = 10
        self.fits: WorkerFits | None = None
        self._also_handle = handle
        self.sessions = RouterSessions(
            load=self.load, handle=self.handle, clock=SystemClock(), silence_s=silence_s
        )
        self.messages: asyncio.Queue[RouterMessage | Exception | None] = asyncio.Queue()
        self.frames: asyncio.Queue[SessionFrame] = asyncio.Queue()

    def load(self) -> Load:
        ledger = BlockLedger(
            num_total=10, num_free=self.num_free, num_cached=0, num_referenced=10 - self.num_free
        )
        return Load(ledger=ledger, fits=self.fits)

    def handle(self, event: HandoffEvent) -> None:
        self.events.append(event)
        if isinstance(event, RouterLost):
            self.lost.set()
        self._also_handle(event)

    async def serve(self, tasks: asyncio.TaskGroup) -> None:
        async for frame in self.sessions.serve("router-0", self.incoming(), tasks):
            self.frames.put_nowait(frame)

    async def next_frame(self, timeout_s: float = 0.9) -> SessionFrame:
        async with asyncio.timeout(timeout_s):
            return await self.frames.get()

    async def incoming(self) -> AsyncIterator[RouterMessage | None]:
        while not isinstance(message := await self.messages.get(), EOFError):
            if isinstance(message, Exception):
                raise message
            yield message


KEY = RouterKey("router-0/1")


async def test_what_was_learnt_is_told_once_to_each_router() -> None:
    world = World()
    world.fits = WorkerFits(decode=DECODE)
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(world.serve(tasks))
        assert (await world.next_frame()).load.fits == WorkerFits(decode=DECODE)
        world.sessions.report(KEY, tokens(0, 1), is_prefill_side=False)
        assert (await world.next_frame()).load.fits is None
        world.fits = WorkerFits(prefill=PREFILL, decode=DECODE)
        world.sessions.report(KEY, tokens(1, 2), is_prefill_side=False)
        assert (await world.next_frame()).load.fits == world.fits
        world.messages.put_nowait(EOFError())


async def test_a_session_lives_from_its_first_frame_to_router_lost() -> None:
    world = World()
    abort = AbortRequest(attempt_id=ATTEMPT)
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(world.serve(tasks))
        assert (await world.next_frame()).content == OutboxContent(reports=(), spans=())
        world.messages.put_nowait(None)
        world.messages.put_nowait(abort)
        # Two reports of one turn of the loop are one frame.
        world.sessions.report(KEY, tokens(0, 1), is_prefill_side=False)
        world.sessions.report(KEY, tokens(1, 2), is_prefill_side=False)
        frame = await world.next_frame()
        assert frame.content.reports == (report(tokens(0, 1, 2)),)
        world.messages.put_nowait(EOFError())
    assert world.events == [
        RouterMessageReceived(router=KEY, message=abort),
        RouterLost(router=KEY),
    ]
    assert len(world.sessions) == 0
    # Nobody listens any more.
    world.sessions.report(KEY, tokens(2, 3), is_prefill_side=False)
    assert world.sessions.is_all_told


async def test_news_of_the_load_need_no_report_and_no_heartbeat() -> None:
    world = World()
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(world.serve(tasks))
        await world.next_frame()
        world.sessions.load_changed()
        world.num_free = 3
        world.sessions.load_changed()
        frame = await world.next_frame()
        assert frame.load.ledger.num_free == 3
        world.messages.put_nowait(EOFError())


async def test_a_silent_router_is_lost() -> None:
    world = World(silence_s=0.05)
    async with asyncio.timeout(5.0), asyncio.TaskGroup() as tasks:
        tasks.create_task(world.serve(tasks))
    assert world.events == [RouterLost(router=KEY)]


async def test_a_silent_router_is_lost_though_it_takes_no_frames() -> None:
    world = World(silence_s=0.05)
    async with asyncio.timeout(5.0), asyncio.TaskGroup() as tasks:
        frames = world.sessions.serve("router-0", world.incoming(), tasks)
        # Whoever writes the first frame stands still: nobody asks for the next one.
        await anext(frames)
        await world.lost.wait()
        assert len(world.sessions) == 0
        with pytest.raises(StopAsyncIteration):
            await anext(frames)
    assert world.events == [RouterLost(router=KEY)]


async def test_a_message_that_cannot_be_read_is_told_to_the_router() -> None:
    world = World()
    async with asyncio.timeout(5.0), asyncio.TaskGroup() as tasks:
        frames = world.sessions.serve("router-0", world.incoming(), tasks)
        await anext(frames)
        world.messages.put_nowait(InvalidRequestError("No such field."))
        with pytest.raises(InvalidRequestError):
            await anext(frames)
    assert world.events == [RouterLost(router=KEY)]


async def test_a_bug_of_ours_is_not_told_to_the_router() -> None:
    world = World(handle=broken)

    async def serve() -> None:
        async with (
            asyncio.timeout(5.0),
            asyncio.TaskGroup() as tasks,
            aclosing(world.sessions.serve("router-0", world.incoming(), tasks)) as frames,
        ):
            await anext(frames)
            world.messages.put_nowait(AbortRequest(attempt_id=ATTEMPT))
            await world.lost.wait()

    with pytest.raises(ExceptionGroup) as raised:
        await serve()
    assert raised.group_contains(BrokenError)


class BrokenError(Exception):
    """What only a bug raises."""


def broken(event: HandoffEvent) -> None:
    if isinstance(event, RouterMessageReceived):
        raise BrokenError
