"""EngineLink: the engine process's end of the socketpair. Never blocks on its service.

Rules
  1. `send` never blocks: frames that do not fit into the socket wait merged, in one place
     (wire/engine_frames.py says how), and leave with the next call that finds room.
  2. `receive(wait=True)` is where an idle engine sleeps, until commands come or waiting frames fit.
  3. End of file means that the service is gone: EngineLinkClosed, and the process ends.
"""

from __future__ import annotations

import select
import socket

from moonpool.core.protocol import Command
from moonpool.wire.engine_frames import FrameBuffer, decode_to_engine, encode_from_engine
from moonpool.wire.engine_messages import (
    EngineBoot,
    EngineCommands,
    EngineFailed,
    EngineMapped,
    EngineReady,
    EngineSteps,
    TimedFrame,
)
from moonpool.worker.frame_merging import merge_frames

_READ_BYTES = 1 << 20


class EngineLinkClosed(Exception):  # noqa: N818 - an end, not an error
    """The service closed its end or died."""


class EngineLink:
    """Owned by the engine's one thread.

    Args:
        sock: The inherited end of the socketpair; owned from here on.
    """

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        self._sock = sock
        self._incoming = FrameBuffer()
        #: Frames that wait for room, merged.
        self._waiting: list[TimedFrame] = []
        #: The rest of a frame of which some bytes have left.
        self._partial = memoryview(b"")

    def receive_boot(self) -> EngineBoot:
        """Block until the boot message is there."""
        while True:
            self._wait(select.POLLIN)
            self._fill()
            for payload in self._incoming.frames():
                message = decode_to_engine(payload)
                assert isinstance(message, EngineBoot), message
                return message

    def announce(self, message: EngineMapped | EngineReady | EngineFailed) -> None:
        """Send a message of the start; blocks, since nothing runs yet."""
        assert not self._waiting, "announcements come before steps"
        self._partial = memoryview(encode_from_engine(message))
        while not self._flush():
            self._wait(select.POLLOUT)

    def receive(self, *, wait: bool) -> tuple[Command, ...]:
        """All commands that have come, in order.

        Args:
            wait: Sleep until there is at least one.

        Raises:
            EngineLinkClosed: The service is gone.
        """
        while True:
            self._fill()
            commands = self._decoded()
            if commands or not wait:
                return commands
            self._wait(select.POLLIN if self._flush() else select.POLLIN | select.POLLOUT)

    def send(self, frame: TimedFrame) -> None:
        """Send it, or keep it merged with those that wait."""
        merge_frames(self._waiting, frame)
        self._flush()

    def close(self) -> None:
        self._sock.close()

    def _decoded(self) -> tuple[Command, ...]:
        commands: list[Command] = []
        for payload in self._incoming.frames():
            message = decode_to_engine(payload)
            assert isinstance(message, EngineCommands), message
            commands += message.commands
        return tuple(commands)

    def _flush(self) -> bool:
        """True if nothing waits any more."""
        while True:
            while self._partial:
                try:
                    num_sent = self._sock.send(self._partial)
                except BlockingIOError:
                    return False
                except (BrokenPipeError, ConnectionResetError) as error:
                    raise EngineLinkClosed from error
                self._partial = self._partial[num_sent:]
            if not self._waiting:
                return True
            steps = EngineSteps(frames=tuple(self._waiting))
            self._waiting.clear()
            self._partial = memoryview(encode_from_engine(steps))

    def _fill(self) -> None:
        while True:
            try:
                data = self._sock.recv(_READ_BYTES)
            except BlockingIOError:
                return
            except ConnectionResetError as error:
                raise EngineLinkClosed from error
            if not data:
                raise EngineLinkClosed
            self._incoming.feed(data)
            if len(data) < _READ_BYTES:
                return

    def _wait(self, events: int) -> None:
        poll = select.poll()
        poll.register(self._sock, events)
        poll.poll()
