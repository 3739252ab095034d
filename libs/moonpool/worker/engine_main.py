"""The engine process: `python -m moonpool.worker.engine_main SOCKET_FD PARENT_PID`.

The only importer of torch and moonpool.engine outside of the engine itself.

Life
  1. Bind this life to the service's (death signal now, end of file later).
  2. Boot message; map the shared memory; EngineMapped.
  3. CPU affinity; load the model; EngineReady, or EngineFailed with the reason and exit status 1.
  4. engine_loop until the service closes its end.
"""

from __future__ import annotations

import gc
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import structlog
import torch

from moonpool.clock import SystemClock
from moonpool.config.schema import TelemetrySettings
from moonpool.core.core import Core
from moonpool.core.step import Runner
from moonpool.engine.device.held import HeldBlocks
from moonpool.engine.device.ipc import CudaError, CudaIpc, find_cuda_ipc
from moonpool.engine.device.peer_reads import PeerReads
from moonpool.engine.device.runner import load_device_runner, open_gpu
from moonpool.engine.device.streams import streams_of, thread_stream
from moonpool.engine.runner import load_runner
from moonpool.errors import ConfigError, MoonpoolError
from moonpool.failpoints import Failpoints
from moonpool.hub.model_dir import ModelDir, open_model_dir
from moonpool.kv.namespace_seeds import NamespaceSeeds
from moonpool.memory.heap import keep_freed_memory
from moonpool.memory.worker_memory import WorkerMemory, WorkerMemoryFds
from moonpool.native import kernels
from moonpool.service.log import setup_logging
from moonpool.service.parent import die_with_parent
from moonpool.wire.engine_messages import EngineBoot, EngineFailed, EngineMapped, EngineReady
from moonpool.worker.device_server import refuse_device, serve_device
from moonpool.worker.engine_link import EngineLink, EngineLinkClosed
from moonpool.worker.engine_loop import run_engine_loop
from moonpool.worker.layer_mark import LayerMarker

log = structlog.get_logger("moonpool.engine")

#: What torch, numpy and the kernels raise about memory, devices, files and shapes.
LOAD_ERRORS = (ValueError, RuntimeError, MemoryError, OSError)


def main() -> int:
    """Run one engine; the exit status."""
    socket_fd, parent_pid = (int(argument) for argument in sys.argv[1:])
    die_with_parent(parent_pid)
    # Its session has no terminal; the service alone decides when it ends.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    link = EngineLink(socket.socket(fileno=socket_fd))
    try:
        return _run(link, link.receive_boot())
    except EngineLinkClosed:
        return 0
    finally:
        link.close()


def _run(link: EngineLink, boot: EngineBoot) -> int:
    setup_logging(
        TelemetrySettings.model_validate({"log_level": boot.log_level}),
        process_name=f"{boot.worker_id}/engine",
    )
    fds = WorkerMemoryFds(
        pool=boot.pool_fd, leaves=boot.leaves_fd, control=boot.control_fd, bell=boot.bell_fd
    )
    memory = WorkerMemory.attach(boot.layout, fds)
    link.announce(EngineMapped(pid=os.getpid()))

    # A step takes and frees the same large buffers in each layer.
    keep_freed_memory()
    started = time.monotonic()
    try:
        _pin(boot.cpu_affinity)
        # The service has checked that they are allowed.
        failpoints = Failpoints.parse(
            boot.failpoints, is_allowed=True, state_dir=Path(boot.data_dir)
        )
        runner = _load_runner(boot, memory)
    except (MoonpoolError, *LOAD_ERRORS) as error:
        link.announce(load_failure(boot.model_path, error))
        if not isinstance(error, MoonpoolError):
            log.exception("engine.load_failed", model=boot.model_name)
        return 1
    # What is loaded stays: a collection that walks through it would be a pause in somebody's answer.
    gc.collect()
    gc.freeze()
    load_s = time.monotonic() - started
    link.announce(EngineReady(load_s=load_s))
    log.info(
        "engine.ready",
        model=boot.model_name,
        dtype=boot.dtype,
        device=boot.device,
        load_s=round(load_s, 2),
    )
    # Once, not in each step: that costs more than its batch's arrays.
    with torch.inference_mode():
        run_engine_loop(
            link=link,
            core=Core(boot.core, NamespaceSeeds(boot.namespace, boot.secret)),
            runner=runner,
            mark=LayerMarker(
                memory=memory,
                kernels=kernels(),
                layer_group=boot.layer_group,
                failpoints=failpoints,
            ),
            clock=SystemClock(),
            failpoints=failpoints,
        )
    return 0


def load_failure(model_path: str, error: Exception) -> EngineFailed:
    """What the service is told when a model cannot be loaded."""
    if isinstance(error, MoonpoolError):
        return EngineFailed(code=error.code, message=error.message)
    reason = "there is not enough memory" if isinstance(error, MemoryError) else str(error)
    return EngineFailed(
        code="engine_load_failed",
        message=f"The engine could not load {model_path}: {reason or type(error).__name__}",
    )


def _load_runner(boot: EngineBoot, memory: WorkerMemory) -> Runner:
    model_dir = open_model_dir(
        Path(boot.model_path), name=boot.model_name, data_dir=Path(boot.data_dir)
    )
    if boot.device != "cpu":
        return _load_device_runner(boot, memory, model_dir)
    core = boot.core
    return load_runner(
        model_dir,
        memory.pool.bytes.data,
        boot.layout,
        dtype=boot.dtype,
        compute_dtype=boot.compute_dtype,
        quantization=boot.quantization,
        max_num_seqs=core.max_num_seqs,
        max_model_len=core.max_model_len,
        num_threads=boot.num_threads,
        kernels=kernels(),
    )


def _load_device_runner(boot: EngineBoot, memory: WorkerMemory, model_dir: ModelDir) -> Runner:
    """The runner; beside it a thread that reads peers' pools on this GPU, if the service wants one."""
    where, core = open_gpu(boot.device), boot.core
    shared: CudaIpc | None = None
    if boot.device_fd >= 0:
        try:
            shared = find_cuda_ipc(where)
        except CudaError as error:
            refuse_device(socket.socket(fileno=boot.device_fd), str(error))
    held = HeldBlocks(memory.leaf_digests) if shared is not None else None
    runner = load_device_runner(
        model_dir,
        memory.pool.bytes.data,
        boot.layout,
        device=boot.device,
        dtype=boot.dtype,
        max_num_seqs=core.max_num_seqs,
        max_model_len=core.max_model_len,
        num_threads=boot.num_threads,
        shared=shared,
        held=held,
    )

    def make_reads() -> PeerReads:
        assert shared is not None
        assert held is not None
        return PeerReads(
            shared,
            pool=runner.pool,
            host=runner.host,
            host_bytes=memory.pool.bytes,
            held=held,
            kernels=kernels(),
            streams=streams_of(where),
        )

    if shared is not None:
        threading.Thread(
            target=_serve_device, args=(boot, where, make_reads), name="device", daemon=True
        ).start()
    return runner


def _serve_device(
    boot: EngineBoot, where: torch.device, make_reads: Callable[[], PeerReads]
) -> None:
    """The thread's life. What goes wrong with it is this process's end, as if it were a step's."""
    try:
        with thread_stream(where):
            serve_device(socket.socket(fileno=boot.device_fd), make_reads())
    except BaseException:
        log.exception("engine.device_thread_failed")
        os._exit(1)


def _pin(cpus: tuple[int, ...]) -> None:
    """Bind this process to `cpus`; empty for no binding."""
    if not cpus:
        return
    available = os.sched_getaffinity(0)
    try:
        os.sched_setaffinity(0, cpus)
    except OSError as error:
        raise ConfigError(
            f"engine_cpus = {', '.join(map(str, cpus))}: this process may run on "
            f"{', '.join(map(str, sorted(available)))}"
        ) from error


if __name__ == "__main__":
    sys.exit(main())
