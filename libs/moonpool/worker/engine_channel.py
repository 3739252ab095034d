"""EngineChannel: the service process's end of the socketpair, on the event loop.

Rules
  1. `send` never awaits: it gathers commands, and one message leaves at the end of the loop's turn.
  2. `run` is the one reader: frames of the core go to one callback, in order; what the callback
     raises ends `run`, and with it the service. So does a command that cannot be sent: without it the core
     would keep what it was to give back.
  3. When the socket is full, commands wait merged: a later BlocksArrived replaces an earlier one of
     its attempt, and an Abort takes back a Prefill or Decode that has not left. More than fits into one
     message leaves as several.
  4. End of file is the engine's death: `run` returns.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Callable

from moonpool.core.protocol import Abort, BlocksArrived, Command, Decode, Prefill
from moonpool.wire.engine_frames import (
    MAX_FRAME_BYTES,
    FrameBuffer,
    decode_from_engine,
    encode_to_engine,
)
from moonpool.wire.engine_messages import (
    EngineBoot,
    EngineCommands,
    EngineFailed,
    EngineMapped,
    EngineReady,
    EngineSteps,
    FrameTooLongError,
    FromEngine,
    TimedFrame,
)

_READ_BYTES = 1 << 20

#: Called with each frame of the core; a message with several is several calls.
FrameHandler = Callable[[TimedFrame], None]


class EngineChannel:
    """Owned by one loop.

    Args:
        sock: Our end of the socketpair; owned from here on.
        on_frame: Called for each frame of the core, on the loop.
        max_frame_bytes: The longest message that the engine takes.
    """

    def __init__(
        self, sock: socket.socket, on_frame: FrameHandler, *, max_frame_bytes: int = MAX_FRAME_BYTES
    ) -> None:
        sock.setblocking(False)
        self._sock = sock
        self._on_frame = on_frame
        self._max_frame_bytes = max_frame_bytes
        self._incoming = FrameBuffer()
        self._loop = asyncio.get_running_loop()
        self._commands: list[Command] = []
        self._partial = memoryview(b"")
        self._is_flush_planned = False
        self._is_writing = False
        self._is_open = True
        self._is_running = False
        #: A bug, for `run` to raise.
        self._failure: Exception | None = None
        self._mapped: asyncio.Future[EngineMapped] = self._loop.create_future()
        self._ready: asyncio.Future[EngineReady | EngineFailed] = self._loop.create_future()

    async def run(self) -> str:
        """Read until the engine's end of file, or `close`. Returns what was seen.

        Raises:
            EngineFrameError: What came is no frame of ours, or a command is too long to be sent.
        """
        self._is_running = True
        try:
            seen = await self._receive()
        finally:
            self._is_running = False
            self.close()
            self._sock.close()
        if self._failure is not None:
            raise self._failure
        return seen

    def boot(self, message: EngineBoot) -> None:
        """Send the boot message; first of all. Raises FrameTooLongError."""
        self._partial = memoryview(encode_to_engine(message))
        self._flush()

    async def mapped(self) -> EngineMapped:
        """Wait until the engine has mapped its memory. Beside `run`."""
        return await asyncio.shield(self._mapped)

    async def ready(self) -> EngineReady | EngineFailed:
        """Wait until the engine is loaded, or says why not. Beside `run`."""
        return await asyncio.shield(self._ready)

    def send(self, command: Command) -> None:
        """Give the core a command; dropped if the engine is gone, whose death ends everything."""
        if not self._is_open:
            return
        self._merge(command)
        if not self._is_flush_planned and not self._is_writing:
            self._is_flush_planned = True
            self._loop.call_soon(self._flush)

    def close(self) -> None:
        """Close our end: the engine ends, and so does `run`. May be called twice."""
        if not self._is_open:
            return
        self._is_open = False
        if self._is_writing:
            self._is_writing = False
            self._loop.remove_writer(self._sock.fileno())
        with contextlib.suppress(OSError):
            # A read that is under way ends with it; a mere close would leave it waiting for ever.
            self._sock.shutdown(socket.SHUT_RDWR)
        if not self._is_running:
            self._sock.close()

    def _merge(self, command: Command) -> None:
        waiting = self._commands
        if isinstance(command, BlocksArrived):
            for index, other in enumerate(waiting):
                if isinstance(other, BlocksArrived) and other.attempt_id == command.attempt_id:
                    waiting[index] = command
                    return
        elif isinstance(command, Abort):
            request_id, attempt = command.attempt_id
            self._commands = [
                other
                for other in waiting
                if not (
                    isinstance(other, Prefill | Decode)
                    and other.attempt_id.request_id == request_id
                    and other.attempt <= attempt
                )
            ]
        self._commands.append(command)

    async def _receive(self) -> str:
        while self._is_open:
            try:
                data = await self._loop.sock_recv(self._sock, _READ_BYTES)
            except OSError as error:
                return f"cannot read from the engine: {error}"
            if not data:
                break
            self._incoming.feed(data)
            for payload in self._incoming.frames():
                self._on_message(decode_from_engine(payload))
        return "the engine closed its end"

    def _flush(self) -> None:
        self._is_flush_planned = False
        try:
            self._write()
        except Exception as error:  # noqa: BLE001 - raised by run()
            self._failure = error
            self.close()

    def _write(self) -> None:
        while self._is_open and (self._partial or self._commands):
            if not self._partial:
                self._partial = memoryview(self._take_commands())
            try:
                num_sent = self._sock.send(self._partial)
            except BlockingIOError:
                if not self._is_writing:
                    self._is_writing = True
                    self._loop.add_writer(self._sock.fileno(), self._flush)
                return
            except OSError:
                # `run` sees the same end and tells it.
                self._commands = []
                self._partial = memoryview(b"")
                break
            self._partial = self._partial[num_sent:]
        if self._is_writing:
            self._is_writing = False
            self._loop.remove_writer(self._sock.fileno())

    def _take_commands(self) -> bytes:
        """The next message: all commands that have gathered, or as many of the first ones as fit."""
        num_commands = len(self._commands)
        while True:
            message = EngineCommands(commands=tuple(self._commands[:num_commands]))
            try:
                frame = encode_to_engine(message, max_bytes=self._max_frame_bytes)
            except FrameTooLongError:
                if num_commands == 1:
                    raise
                num_commands //= 2
            else:
                del self._commands[:num_commands]
                return frame

    def _on_message(self, message: FromEngine) -> None:
        if isinstance(message, EngineSteps):
            for frame in message.frames:
                self._on_frame(frame)
        elif isinstance(message, EngineMapped):
            self._mapped.set_result(message)
        else:
            self._ready.set_result(message)
