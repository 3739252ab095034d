"""Workers whose engines compute in memory of their own and read each other's there, over a stand-in for CUDA.

Engines run in threads, with torch on the CPU; all else is a worker's: services, gRPC, machines, cores.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from contextlib import AbstractContextManager, AsyncExitStack
from pathlib import Path
from typing import Any

import pytest
import torch

from moonpool.bus.memory import MemoryBroker, MemoryBus
from moonpool.core.step import Runner
from moonpool.engine.device.streams import InlineStreams, StreamMark
from moonpool.errors import ConfigError, MoonpoolError
from moonpool.hub.model_dir import ModelDir
from moonpool.inference.request import InferenceRequest
from moonpool.memory.worker_memory import WorkerMemory
from moonpool.telemetry import names
from moonpool.worker.engine_process import EngineOptions
from support.cuda_runtime import INVALID_VALUE
from support.device import DeviceEngine
from support.device_node import DeviceNode, DeviceThread
from support.engine import generate, make_core, make_runner, open_tiny
from support.eventually import eventually
from support.requests import make_request
from support.router_client import RouterClient
from support.thread_engine import ThreadEngines
from support.tiny_llama import TinyLlama, write_tiny_llama
from support.worker_pair import num_bytes_read
from support.workers import RunningWorker, running_worker, worker_config

TRANSPORTS = ("cuda_ipc", "shm", "grpc")


class CountingStreams(InlineStreams):
    """Counts the layers that come in from host memory."""

    def __init__(self) -> None:
        self.num_layers_in = 0

    def hold(self, mark: StreamMark) -> None:
        self.num_layers_in += 1

    def side(self, after: StreamMark | None = None) -> AbstractContextManager[None]:
        return contextlib.nullcontext()


class Device:
    """One worker's engine. Pass `make_runner` to its ThreadEngines."""

    def __init__(self, model: ModelDir, *, gpu: str, is_shared: bool) -> None:
        self._model = model
        self._gpu = gpu
        self._is_shared = is_shared
        self.streams = CountingStreams()
        self._thread: DeviceThread | None = None
        self.node: DeviceNode

    def make_runner(self, memory: WorkerMemory, options: EngineOptions) -> Runner:
        assert options.device == "cuda"
        self.node = DeviceNode(memory.layout, memory.pool.bytes, memory.leaf_digests, gpu=self._gpu)
        if not self._is_shared:
            self.node.runtime.errors["cudaIpcGetMemHandle"] = INVALID_VALUE
        engine = DeviceEngine(
            self._model,
            layout=memory.layout,
            buffer=memory.pool.bytes.data,
            memory=self.node.pool.memory,
            held=self.node.held,
            streams=self.streams,
        )
        if options.device_fd >= 0:
            self._thread = self.node.serve(options.device_fd)
        return engine.runner

    def join(self) -> None:
        if self._thread is not None:
            self._thread.join()
        self.node.runtime.end()


class GpuWorkers:
    """Workers of a test, each with a device."""

    def __init__(self, path: Path, stack: AsyncExitStack) -> None:
        self._path = path
        self._stack = stack
        self._broker = MemoryBroker()
        self._model_path = write_tiny_llama(path / "tiny", TinyLlama())
        self.model = open_tiny(self._model_path)

    async def start(
        self,
        worker_id: str,
        role: str,
        *,
        gpu: str = "GPU-0",
        is_shared: bool = True,
        **settings: Any,
    ) -> tuple[RunningWorker, RouterClient, Device, AsyncExitStack]:
        """What is returned last stops the worker."""
        device = Device(self.model, gpu=gpu, is_shared=is_shared)
        config = worker_config(
            self._path,
            self._model_path,
            worker_id,
            role,
            local_prefill_tokens=settings.pop("local_prefill_tokens", 8),
            device="cuda",
            allow_unverified=True,
            **{"kv_peer_reads": "always"} | settings,
        )
        stack = await self._stack.enter_async_context(AsyncExitStack())
        stack.callback(device.join)
        engines = ThreadEngines(make_runner=device.make_runner)
        worker = await stack.enter_async_context(
            running_worker(config, MemoryBus(self._broker), start_engine=engines)
        )
        return worker, await stack.enter_async_context(worker.router()), device, stack

    def expected(self, request: InferenceRequest) -> list[int]:
        """What an engine on a CPU answers if it has nothing else to do."""
        runner = make_runner(self.model, num_blocks=64)
        (answer,) = generate(make_core(64), runner, [request])
        return answer


@contextlib.asynccontextmanager
async def gpu_workers(path: Path) -> AsyncIterator[GpuWorkers]:
    async with AsyncExitStack() as stack:
        yield GpuWorkers(path, stack)


def prompt(length: int, first: int = 3) -> InferenceRequest:
    return make_request(
        f"r{length}-{first}",
        prompt=[first + number % 250 for number in range(length)],
        max_tokens=9,
        ignore_eos=True,
    )


async def test_a_handoff_goes_from_device_to_device(tmp_path: Path) -> None:
    async with gpu_workers(tmp_path) as workers:
        source, to_prefill, _, _ = await workers.start("p0", "prefill")
        decode, to_decode, device, _ = await workers.start("d0", "decode")
        assert source.config.worker.transports == TRANSPORTS
        for length in (15, 16, 33, 100):
            request = prompt(length, first=length)
            to_prefill.prefill(request)
            to_decode.decode(request, source=to_prefill.source)
            assert await to_decode.answer(request) == workers.expected(request)
        block_bytes = device.node.layout.block_bytes
        assert num_bytes_read(decode, "cuda_ipc") == (1 + 1 + 3 + 7) * block_bytes
        assert num_bytes_read(decode, "shm") == 0
        # Nothing of it came in from host memory.
        assert device.streams.num_layers_in == 0
        for worker in (source, decode):
            await worker.until_quiet()


async def test_a_prefix_goes_from_device_to_device_and_on_to_a_third(tmp_path: Path) -> None:
    """The second holder's device has what it read, before any step of its own."""
    first, second = prompt(80), prompt(81)
    async with gpu_workers(tmp_path) as workers:
        _, to_first, _, _ = await workers.start("a", "both")
        to_first.decode(first)
        assert await to_first.answer(first) == workers.expected(first)
        middle, to_middle, device, _ = await workers.start("b", "both")
        last, to_last, _, _ = await workers.start("c", "both")
        to_middle.decode(second, peer=to_first.peer(80))
        assert await to_middle.answer(second) == workers.expected(second)
        assert num_bytes_read(middle, "cuda_ipc") == 5 * device.node.layout.block_bytes
        assert device.streams.num_layers_in == 0
        to_last.decode(second, peer=to_middle.peer(80))
        assert await to_last.answer(second) == workers.expected(second)
        assert num_bytes_read(last, "cuda_ipc") == 5 * device.node.layout.block_bytes


async def test_what_came_by_another_way_comes_in_from_host_memory(tmp_path: Path) -> None:
    async with gpu_workers(tmp_path) as workers:
        _, to_prefill, _, _ = await workers.start("p0", "prefill", gpu="GPU-1")
        decode, to_decode, device, _ = await workers.start("d0", "decode")
        request = prompt(50)
        to_prefill.prefill(request)
        to_decode.decode(request, source=to_prefill.source)
        assert await to_decode.answer(request) == workers.expected(request)
        assert num_bytes_read(decode, "cuda_ipc") == 0
        assert num_bytes_read(decode, "shm") == 4 * device.node.layout.block_bytes
        assert device.streams.num_layers_in > 0


async def test_what_a_source_has_just_read_itself_is_read_from_it_all_the_same(
    tmp_path: Path,
) -> None:
    """It comes to the source's host memory from another GPU, and to its device with its next step only."""
    first, second = prompt(80), prompt(100)
    async with gpu_workers(tmp_path) as workers:
        _, to_holder, _, _ = await workers.start("a", "both", gpu="GPU-1")
        to_holder.decode(first)
        assert await to_holder.answer(first) == workers.expected(first)
        source, to_source, device, _ = await workers.start("b", "prefill")
        decode, to_decode, _, _ = await workers.start("c", "decode")
        to_decode.decode(second, source=to_source.source)
        to_source.prefill(second, peer=to_holder.peer(80))
        assert await to_decode.answer(second) == workers.expected(second)
        assert num_bytes_read(source, "shm") == 5 * device.node.layout.block_bytes
        assert num_bytes_read(decode, "cuda_ipc") == 7 * device.node.layout.block_bytes
        metrics = decode.service.metrics
        assert metrics.value(names.KV_CHECKSUM_MISMATCH, backend="cuda_ipc") == 0


async def test_a_copy_that_is_wrong_everywhere_is_computed_again(tmp_path: Path) -> None:
    async with gpu_workers(tmp_path) as workers:
        _, to_prefill, _, _ = await workers.start("p0", "prefill")
        decode, to_decode, _, _ = await workers.start(
            "d0", "decode", local_prefill_tokens=64, failpoints="transport.read=flip"
        )
        request = prompt(50)
        to_prefill.prefill(request)
        to_decode.decode(request, source=to_prefill.source)
        assert await to_decode.answer(request) == workers.expected(request)
        metrics = decode.service.metrics
        assert metrics.value(names.KV_CHECKSUM_MISMATCH, backend="cuda_ipc") > 0


async def test_an_old_incarnations_memory_is_unmapped(tmp_path: Path) -> None:
    async with gpu_workers(tmp_path) as workers:
        decode, to_decode, device, _ = await workers.start("d0", "decode")
        for first in (3, 5):
            _, to_prefill, _, stop = await workers.start("p0", "prefill")
            request = prompt(40, first)
            to_prefill.prefill(request)
            to_decode.decode(request, source=to_prefill.source)
            assert await to_decode.answer(request) == workers.expected(request)
            assert device.node.runtime.num_open == 1
            await stop.aclose()
        await eventually(
            lambda: device.node.runtime.num_open == 0,
            timeout_s=5,
            what="the memory of the worker that is gone is unmapped",
        )
        calls = device.node.runtime.calls
        assert calls.count("cudaIpcOpenMemHandle") == calls.count("cudaIpcCloseMemHandle") == 2
        assert num_bytes_read(decode, "shm") == 0


async def test_a_worker_whose_memory_cannot_be_shared_is_read_another_way(tmp_path: Path) -> None:
    async with gpu_workers(tmp_path) as workers:
        _, to_prefill, _, _ = await workers.start("p0", "prefill", is_shared=False)
        decode, to_decode, device, _ = await workers.start("d0", "decode")
        request = prompt(50)
        to_prefill.prefill(request)
        to_decode.decode(request, source=to_prefill.source)
        assert await to_decode.answer(request) == workers.expected(request)
        assert num_bytes_read(decode, "shm") == 4 * device.node.layout.block_bytes
        with pytest.raises(ExceptionGroup) as caught:
            await workers.start("d1", "decode", is_shared=False, is_transport_strict=True)
        error = _only(caught.value)
        assert isinstance(error, ConfigError)
        assert "cuda_ipc: cudaIpcGetMemHandle: invalid argument" in error.message


async def test_a_worker_whose_engine_finds_no_gpu_says_so(tmp_path: Path) -> None:
    """A real engine process, which has its end of the link and ends before it has said anything there."""
    if torch.cuda.is_available():
        pytest.skip("there is a GPU here")
    model = write_tiny_llama(tmp_path / "tiny", TinyLlama())
    config = worker_config(tmp_path, model, "w", device="cuda", allow_unverified=True)
    with pytest.raises(ExceptionGroup) as caught:
        async with running_worker(config, MemoryBus(MemoryBroker())):
            pass
    error = _only(caught.value)
    assert isinstance(error, MoonpoolError)
    assert "finds no GPU here" in error.message


async def test_only_workers_on_a_gpu_may_be_told_to_use_it(tmp_path: Path) -> None:
    with pytest.raises((ConfigError, ValueError), match="cuda_ipc is only for workers"):
        worker_config(tmp_path, tmp_path, "w", transports=TRANSPORTS)


def _only(error: BaseException) -> BaseException:
    while isinstance(error, ExceptionGroup):
        (error,) = error.exceptions
    return error
