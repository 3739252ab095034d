"""The socketpair between service and engine: neither side blocks, nothing is lost, ends are seen."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Sequence

import pytest

from moonpool.core.protocol import (
    Abort,
    BlockLedger,
    BlocksArrived,
    ChunkPlanned,
    Command,
    CoreFrame,
    Prefill,
    Release,
    Reply,
    TokensReady,
)
from moonpool.ids import AttemptId, RequestId
from moonpool.inference.output import TokenRun
from moonpool.wire.engine_frames import FrameBuffer, decode_to_engine
from moonpool.wire.engine_messages import EngineCommands, EngineFrameError, TimedFrame
from moonpool.worker.engine_channel import EngineChannel
from moonpool.worker.engine_link import EngineLink, EngineLinkClosed
from support.eventually import eventually
from support.requests import make_request

LEDGER = BlockLedger(num_total=1, num_free=1, num_cached=0, num_referenced=0)
ATTEMPT = AttemptId(RequestId("r1"), 1)


def frame(step: int, *replies: Reply) -> TimedFrame:
    return TimedFrame(frame=CoreFrame(step=step, replies=replies, ledger=LEDGER))


def token(position: int) -> TokensReady:
    return TokensReady(
        attempt_id=ATTEMPT, run=TokenRun(first_position=position, token_ids=(position,))
    )


def runs(reply: Reply) -> tuple[int, ...]:
    return reply.run.token_ids if isinstance(reply, TokensReady) else ()


def socket_pair() -> tuple[socket.socket, socket.socket]:
    """Ends that hold little, so that a test fills them."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    for end in (ours, theirs):
        end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
    return ours, theirs


async def test_frames_wait_merged_for_a_service_that_sleeps() -> None:
    ours, theirs = socket_pair()
    frames: list[TimedFrame] = []
    channel = EngineChannel(ours, frames.append)
    link = EngineLink(theirs)
    num_steps = 2000
    for step in range(1, num_steps):
        link.send(frame(step, token(step)))
    chunk = ChunkPlanned(attempt_id=ATTEMPT, start=0, end=16)
    link.send(frame(num_steps, chunk))
    link.send(frame(0))
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(channel.run())
        engine = tasks.create_task(asyncio.to_thread(receive_until_closed, link))
        await eventually(
            lambda: bool(frames) and frames[-1].frame.step == 0, timeout_s=5.0, what="all came"
        )
        channel.close()
        await engine
    replies = [reply for timed in frames for reply in timed.frame.replies]
    tokens = [t for reply in replies if reply is not chunk for t in runs(reply)]
    assert tokens == list(range(1, num_steps))
    # The chunk came with its own step, and hundreds of frames as a few.
    assert [timed.frame.step for timed in frames if chunk in timed.frame.replies] == [num_steps]
    assert len(frames) < num_steps / 5


async def test_commands_wait_merged_for_an_engine_that_computes() -> None:
    ours, theirs = socket_pair()
    channel = EngineChannel(ours, lambda _frame: None)
    long = Prefill(request=make_request("long", prompt=50_000), attempt=1)
    taken_back = Prefill(request=make_request("r1", prompt=8), attempt=1)
    other = Prefill(request=make_request("r1", prompt=8), attempt=3)
    arrived = [
        BlocksArrived(attempt_id=AttemptId(RequestId("r2"), 1), num_tokens=16 * n)
        for n in range(1, 4)
    ]
    channel.send(long)
    # The first message is under way and fills the socket.
    await asyncio.sleep(0)
    release = Release(attempt_id=ATTEMPT)
    abort = Abort(attempt_id=AttemptId(RequestId("r1"), 2))
    for command in (taken_back, arrived[0], other, release, arrived[1], abort, arrived[2]):
        channel.send(command)
    got = await asyncio.to_thread(receive, theirs, 5)
    assert got == [long, arrived[2], other, release, abort]
    channel.close()
    theirs.close()


async def test_more_than_fits_into_one_message_leaves_as_several() -> None:
    ours, theirs = socket_pair()
    # A prompt fits, two of them do not.
    channel = EngineChannel(ours, lambda _frame: None, max_frame_bytes=10_000)
    commands: list[Command] = [
        *(Prefill(request=make_request(f"r{n}", prompt=2_000), attempt=1) for n in range(3)),
        Release(attempt_id=ATTEMPT),
    ]
    for command in commands:
        channel.send(command)
    assert await asyncio.to_thread(receive, theirs, len(commands)) == commands
    channel.close()
    theirs.close()


async def test_a_command_that_cannot_be_sent_ends_the_channel() -> None:
    ours, theirs = socket_pair()
    channel = EngineChannel(ours, lambda _frame: None, max_frame_bytes=10_000)
    channel.send(Release(attempt_id=ATTEMPT))
    channel.send(Prefill(request=make_request("long", prompt=3_000), attempt=1))
    with pytest.raises(EngineFrameError):
        async with asyncio.timeout(5.0):
            await channel.run()
    assert await asyncio.to_thread(receive, theirs, 1) == [Release(attempt_id=ATTEMPT)]
    theirs.close()


async def test_the_end_of_either_side_is_seen() -> None:
    ours, theirs = socket_pair()
    channel = EngineChannel(ours, lambda _frame: None)
    link = EngineLink(theirs)
    channel.close()
    channel.close()
    with pytest.raises(EngineLinkClosed):
        link.receive(wait=True)
    with pytest.raises(EngineLinkClosed):
        link.send(frame(1, token(1)))
    link.close()

    ours, theirs = socket_pair()
    channel = EngineChannel(ours, lambda _frame: None)
    theirs.close()
    async with asyncio.timeout(5.0):
        assert "closed" in await channel.run()
    channel.send(Release(attempt_id=ATTEMPT))


def receive_until_closed(link: EngineLink) -> None:
    """What an idle engine does: sleep, and send what waits when there is room."""
    with pytest.raises(EngineLinkClosed):
        link.receive(wait=True)
    link.close()


def receive(end: socket.socket, num_commands: int) -> Sequence[Command]:
    buffer = FrameBuffer()
    commands: list[Command] = []
    end.settimeout(5.0)
    while len(commands) < num_commands:
        buffer.feed(end.recv(1 << 16))
        for payload in buffer.frames():
            message = decode_to_engine(payload)
            assert isinstance(message, EngineCommands)
            commands += message.commands
    return commands
