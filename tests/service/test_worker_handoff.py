"""A prefill and a decode worker over real gRPC and shared memory, with engines in threads."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest

from moonpool.bus.memory import MemoryBroker
from moonpool.core.protocol import TokensReady
from moonpool.inference.request import InferenceRequest
from support.fake_runner import answer_alone
from support.requests import make_request
from support.router_client import RouterClient
from support.thread_engine import Gate, ThreadEngines, write_fake_model
from support.workers import RunningWorker, running_worker, worker_config

MAX_MODEL_LEN = 2048


class Pair:
    """A prefill and a decode worker, and a router's session with each."""

    def __init__(self, tmp_path: Path, stack: AsyncExitStack) -> None:
        self._tmp_path = tmp_path
        self._stack = stack
        self._model = write_fake_model(tmp_path / "model")
        self.broker = MemoryBroker()

    async def start(
        self, worker_id: str, role: str, *, gate: Gate | None = None, **settings: Any
    ) -> RunningWorker:
        config = worker_config(self._tmp_path, self._model, worker_id, role, **settings)
        return await self._stack.enter_async_context(
            running_worker(config, self.broker, start_engine=ThreadEngines(gate))
        )

    async def session(self, worker: RunningWorker, **options: Any) -> RouterClient:
        return await self._stack.enter_async_context(worker.router(**options))


@pytest.fixture
async def stack() -> AsyncIterator[AsyncExitStack]:
    yield AsyncExitStack()


def expected(request: InferenceRequest) -> list[int]:
    answer, _ = answer_alone(request, max_model_len=MAX_MODEL_LEN)
    return answer


@pytest.mark.parametrize("transport", ["shm", "grpc"])
async def test_disaggregated_equals_alone(tmp_path: Path, transport: str) -> None:
    requests = [
        make_request(f"r{n}", prompt=length, max_tokens=12, arrival=float(n), ignore_eos=True)
        for n, length in enumerate((1, 15, 16, 17, 64, 300))
    ]
    async with AsyncExitStack() as stack:
        pair = Pair(tmp_path, stack)
        prefill = await pair.start("p0", "prefill", max_num_batched_tokens=128, max_queued_steps=8)
        decode = await pair.start("d0", "decode", transports=(transport,), is_transport_strict=True)
        to_prefill, to_decode = await pair.session(prefill), await pair.session(decode)
        for request in requests:
            to_prefill.prefill(request)
            to_decode.decode(request, source=to_prefill.source)
        for request in requests:
            assert await to_decode.answer(request) == expected(request)
            early = await to_prefill.until(request, TokensReady)
            assert isinstance(early, TokensReady)
            assert list(early.run.token_ids) == expected(request)[:1]
        await prefill.until_quiet()
        await decode.until_quiet()
