"""Real worker processes with real engine processes and a tiny Llama, and no broker to be found."""

from __future__ import annotations

import asyncio
import os
import signal
from contextlib import AsyncExitStack
from pathlib import Path

from moonpool.core.protocol import HandedBack, TokensReady
from support.processes import wait_for_exit
from support.requests import make_request
from support.tiny_llama import write_tiny_llama
from support.worker_process import WorkerProcess
from support.workers import worker_config


async def test_disaggregated_equals_local_and_nothing_outlives_its_parent(tmp_path: Path) -> None:
    """One test, since three engines take their time to start."""
    model = write_tiny_llama(tmp_path / "tiny")
    configs = [
        worker_config(tmp_path, model, "prefill-0", "prefill", layers_per_group=1),
        worker_config(tmp_path, model, "shm-0", "decode", transports=("shm",)),
        worker_config(tmp_path, model, "grpc-0", "decode", transports=("grpc",)),
        worker_config(tmp_path, model, "pinned-0", "decode", engine_cpus=(4_095,)),
    ]
    async with AsyncExitStack() as stack:
        workers = [await WorkerProcess.start(config, tmp_path) for config in configs]
        for worker in workers:
            stack.push_async_callback(worker.child.kill)
        # What the engine cannot do ends the worker, in words.
        broken = workers.pop()
        assert await broken.child.wait() == 1
        broken.ready.close()
        assert "engine_cpus = 4095: " in broken.child.log_tail()
        addresses = await asyncio.gather(*(worker.wait_ready() for worker in workers))
        to_prefill, *to_decodes = [
            await stack.enter_async_context(worker.router(address))
            for worker, address in zip(workers, addresses, strict=True)
        ]
        requests = [
            make_request(
                f"r{n}",
                prompt=range(3, 3 + length),
                max_tokens=20,
                arrival=float(n),
                ignore_eos=True,
                temperature=temperature,
                seed=n,
            )
            for n, (length, temperature) in enumerate(
                [(1, 0.0), (15, 0.0), (16, 0.0), (17, 0.0), (200, 0.0), (40, 1.0), (33, 0.7)]
            )
        ]
        answers = []
        for attempt, to_decode in enumerate(to_decodes, start=1):
            for request in requests:
                to_prefill.prefill(request, attempt)
                to_decode.decode(request, attempt, source=to_prefill.source)
            answers.append([await to_decode.answer(request, attempt) for request in requests])
        # A later attempt without a source is computed by the decode worker alone.
        (local, _) = to_decodes
        for request in requests:
            early = await to_prefill.until(request, TokensReady)
            assert isinstance(early, TokensReady)
            local.decode(request, attempt=9)
        answers.append([await local.answer(request, attempt=9) for request in requests])
        assert answers[0] == answers[1] == answers[2]
        for worker, address in zip(workers, addresses, strict=True):
            await worker.until_quiet(address)

        prefill, shm, grpc = workers
        # The engine's death is the worker's, and it says so.
        os.kill(prefill.engine_pid, signal.SIGKILL)
        assert await prefill.child.wait() == 1
        assert "SIGKILL" in prefill.child.log_tail()
        # A decode that waits for it computes a short prompt itself and hands a long one back.
        short = make_request("short", prompt=range(60), max_tokens=5)
        long = make_request("long", prompt=range(5, 150), max_tokens=5)
        for request in (short, long):
            local.decode(request, source=to_prefill.source)
        await local.answer(short)
        await local.until(long, HandedBack)
        await shm.until_quiet(addresses[1])
        # The service's death is the engine's.
        engine_pid = grpc.engine_pid
        os.kill(grpc.child.pid, signal.SIGKILL)
        assert wait_for_exit(engine_pid, timeout_s=5.0)
        # Told to stop, both end.
        engine_pid = shm.engine_pid
        assert await shm.child.stop(timeout_s=10.0) == 0
        assert wait_for_exit(engine_pid, timeout_s=5.0)
