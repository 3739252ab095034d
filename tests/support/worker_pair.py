"""Workers with engines in threads, for a test that lets them talk."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

from moonpool.bus.memory import MemoryBroker, MemoryBus
from moonpool.inference.request import InferenceRequest
from moonpool.service.life import Phase
from moonpool.telemetry import names
from support.fake_runner import answer_alone
from support.router_client import RouterClient
from support.thread_engine import FAKE_MODEL, Gate, ThreadEngines, write_fake_model
from support.workers import RunningWorker, running_worker, worker_config


class Workers:
    """The workers of a test. Made by `fake_workers`."""

    def __init__(self, data_dir: Path, stack: AsyncExitStack) -> None:
        self.data_dir = data_dir
        self.broker = MemoryBroker()
        self._stack = stack
        self._model = write_fake_model(data_dir / "model")
        self._started: dict[RunningWorker, AsyncExitStack] = {}

    async def start(
        self,
        worker_id: str,
        role: str = "both",
        *,
        gate: Gate | None = None,
        engines: ThreadEngines | None = None,
        **settings: Any,
    ) -> tuple[RunningWorker, RouterClient]:
        """A worker and a router's session with it."""
        config = worker_config(self.data_dir, self._model, worker_id, role, **settings)
        stack = await self._stack.enter_async_context(AsyncExitStack())
        worker = await stack.enter_async_context(
            running_worker(
                config, MemoryBus(self.broker), start_engine=engines or ThreadEngines(gate)
            )
        )
        self._started[worker] = stack
        return worker, await stack.enter_async_context(worker.router())

    async def stop(self, worker: RunningWorker) -> None:
        """Drain and stop a worker before the test ends. The last started goes first."""
        await self._started.pop(worker).aclose()

    async def check_quiet(self) -> None:
        """Workers that still serve hold nothing, and remember nothing of attempts that have ended."""
        for worker in self._started:
            if worker.running.life.phase is Phase.SERVING:
                await worker.until_quiet()
                assert len(worker.service.shell.book) == 0


@contextlib.asynccontextmanager
async def fake_workers(data_dir: Path) -> AsyncIterator[Workers]:
    """Workers to be started; on exit all must be quiet, then they stop."""
    async with AsyncExitStack() as stack:
        workers = Workers(data_dir, stack)
        yield workers
        await workers.check_quiet()


def expected_answer(request: InferenceRequest) -> list[int]:
    """The tokens of the request if it had a worker for itself."""
    answer, _ = answer_alone(request, max_model_len=FAKE_MODEL.max_positions)
    return answer


def num_bytes_read(worker: RunningWorker, transport: str = "shm") -> float:
    return worker.service.metrics.value(names.KV_TRANSFER_BYTES, backend=transport)
