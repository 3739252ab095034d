"""EngineProcess: the child that runs the model, as its service sees it.

Life
  1. `start` (main thread: the death signal follows the thread): socketpair, Popen with the memory's
     descriptors, in a session of its own, so that Ctrl-C reaches only the service.
  2. `boot`: boot message, EngineMapped, seal the memory, EngineReady. The service listens to peers
     only after the seal.
  3. `run`: frames until the engine ends. Its end is the worker's death: EngineDiedError.
  4. `stop`: close our end; the engine sees it between two steps and ends; killed if it does not.
"""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
from dataclasses import dataclass, field

from moonpool.core.config import CoreConfig, Quantization
from moonpool.core.protocol import Command
from moonpool.errors import InternalError, ModelError, MoonpoolError
from moonpool.kv.block_hash import ModelNamespace
from moonpool.kv.layout import KvDtype
from moonpool.memory.worker_memory import WorkerMemory
from moonpool.wire.engine_messages import EngineBoot, EngineReady
from moonpool.worker.engine_channel import EngineChannel, FrameHandler

ENGINE_MODULE = "moonpool.worker.engine_main"

#: A long prompt in one chunk, or a frame that must still leave.
_STOP_S = 5.0
#: Between the end of file and the exit status.
_REAP_S = 5.0
#: Two frames of 64 requests with long tables fit, so that neither side merges in normal life.
_SOCKET_BUFFER_BYTES = 4 << 20


class EngineDiedError(InternalError):
    """The engine process ended by itself; the service ends with it."""

    default_code = "engine_died"


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineOptions:
    """How the engine is started; what it computes stands in EngineBoot."""

    worker_id: str
    incarnation: str
    model_path: str
    model_name: str
    data_dir: str
    dtype: KvDtype
    compute_dtype: KvDtype
    quantization: Quantization = "none"
    #: `cpu`, or as torch names a GPU.
    device: str = "cpu"
    #: Of the engine's end of a transport.DeviceLink, left open in the engine; -1 for none.
    device_fd: int = -1
    core: CoreConfig
    namespace: ModelNamespace
    secret: bytes = field(repr=False)
    layer_group: int
    cpu_affinity: tuple[int, ...] = ()
    num_threads: int = 1
    failpoints: str = ""
    log_level: str = "info"
    #: From the start to EngineReady: loading a large model from a slow disk.
    start_timeout_s: float = 600.0


class EngineProcess:
    """One incarnation of the engine."""

    def __init__(
        self,
        *,
        process: subprocess.Popen[bytes],
        channel: EngineChannel,
        memory: WorkerMemory,
        options: EngineOptions,
    ) -> None:
        self._process = process
        self._memory = memory
        self._options = options
        self._is_stopping = False
        self.channel = channel

    @classmethod
    def start(
        cls, *, memory: WorkerMemory, options: EngineOptions, on_frame: FrameHandler
    ) -> EngineProcess:
        """Start the child. From the main thread, on the loop."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            for end in (ours, theirs):
                end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SOCKET_BUFFER_BYTES)
            command = [sys.executable, "-m", ENGINE_MODULE, str(theirs.fileno()), str(os.getpid())]
            device_fds = (options.device_fd,) if options.device_fd >= 0 else ()
            process = subprocess.Popen(
                command,
                pass_fds=(theirs.fileno(), *device_fds, *memory.fds.as_tuple()),
                start_new_session=True,
                stdin=subprocess.DEVNULL,
            )
        except BaseException:
            ours.close()
            raise
        finally:
            theirs.close()
        channel = EngineChannel(ours, on_frame)
        return cls(process=process, channel=channel, memory=memory, options=options)

    @property
    def pid(self) -> int:
        return self._process.pid

    def send(self, command: Command) -> None:
        """To the core; never waits."""
        self.channel.send(command)

    async def boot(self) -> EngineReady:
        """Bring the engine up to EngineReady. Beside `run`.

        Raises:
            MoonpoolError: The engine says why it cannot start, or is too slow.
        """
        options, fds = self._options, self._memory.fds
        self.channel.boot(
            EngineBoot(
                worker_id=options.worker_id,
                incarnation=options.incarnation,
                model_path=options.model_path,
                model_name=options.model_name,
                data_dir=options.data_dir,
                dtype=options.dtype,
                compute_dtype=options.compute_dtype,
                quantization=options.quantization,
                device=options.device,
                layout=self._memory.layout,
                core=options.core,
                namespace=options.namespace,
                secret=options.secret,
                pool_fd=fds.pool,
                leaves_fd=fds.leaves,
                control_fd=fds.control,
                bell_fd=fds.bell,
                device_fd=options.device_fd,
                layer_group=options.layer_group,
                cpu_affinity=options.cpu_affinity,
                num_threads=options.num_threads,
                failpoints=options.failpoints,
                log_level=options.log_level,
            )
        )
        try:
            async with asyncio.timeout(options.start_timeout_s):
                await self.channel.mapped()
                self._memory.seal()
                ready = await self.channel.ready()
        except TimeoutError as error:
            raise ModelError(
                f"The engine did not load {options.model_path} in {options.start_timeout_s:.0f} s.",
                code="engine_start_timeout",
            ) from error
        if isinstance(ready, EngineReady):
            return ready
        raise MoonpoolError(ready.message, code=ready.code)

    async def run(self) -> None:
        """Read frames until `stop`.

        Raises:
            EngineDiedError: The engine ended by itself.
        """
        what = await self.channel.run()
        if self._is_stopping:
            return
        status = await self._reap(_REAP_S)
        raise EngineDiedError(f"The engine process {self.pid} ended ({status}): {what}.")

    async def stop(self) -> None:
        """End the engine and wait for it. May be called twice."""
        self._is_stopping = True
        self.channel.close()
        await self._reap(_STOP_S)

    async def _reap(self, timeout_s: float) -> str:
        """Wait for the exit, kill it after `timeout_s`; the exit status in words."""
        if self._process.returncode is not None:
            # Its number may be another process's by now.
            return _status(self._process.returncode)
        loop = asyncio.get_running_loop()
        try:
            pidfd = os.pidfd_open(self.pid)
        except ProcessLookupError:
            return _status(self._process.wait())
        ended = asyncio.Event()
        loop.add_reader(pidfd, ended.set)
        try:
            async with asyncio.timeout(timeout_s):
                await ended.wait()
        except TimeoutError:
            self._process.kill()
            await ended.wait()
        finally:
            loop.remove_reader(pidfd)
            os.close(pidfd)
        return _status(self._process.wait())


def _status(code: int) -> str:
    return f"signal {signal.Signals(-code).name}" if code < 0 else f"exit status {code}"
