"""Prefix reads between real worker processes with real engines and a tiny Llama, while the holder is killed."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from pathlib import Path

from moonpool.core.protocol import TokensReady
from moonpool.inference.request import InferenceRequest
from support.requests import make_request
from support.router_client import RouterClient
from support.tiny_llama import write_tiny_llama
from support.worker_process import WorkerProcess
from support.workers import worker_config


async def test_tokens_equal_the_computed_ones_also_if_the_holder_is_killed(tmp_path: Path) -> None:
    """One test, since three engines take their time to start."""
    model = write_tiny_llama(tmp_path / "tiny")
    reads = {"kv_peer_reads": "always"}
    configs = [
        # Its third reader finds a holder that dies as soon as it has said what it holds.
        worker_config(tmp_path, model, "holder-0", failpoints="hold.after_opened=kill@3"),
        worker_config(tmp_path, model, "shm-0", transports=("shm",), **reads),
        worker_config(
            tmp_path,
            model,
            "grpc-0",
            transports=("grpc",),
            failpoints="fetch.read=delay:200@2",
            **reads,
        ),
    ]
    async with AsyncExitStack() as stack:
        workers = [await WorkerProcess.start(config, tmp_path) for config in configs]
        for worker in workers:
            stack.push_async_callback(worker.child.kill)
        addresses = await asyncio.gather(*(worker.wait_ready() for worker in workers))
        to_holder, to_shm, to_grpc = [
            await stack.enter_async_context(worker.router(address))
            for worker, address in zip(workers, addresses, strict=True)
        ]
        chat = make_request("chat", prompt=range(3, 200), max_tokens=12, ignore_eos=True)
        to_holder.decode(chat)
        history = [*chat.prompt_token_ids, *await to_holder.answer(chat)]
        turn = make_request("turn", prompt=[*history, 7, 9], max_tokens=10, seed=5, temperature=0.7)
        other = make_request("other", prompt=range(100, 300), max_tokens=10, ignore_eos=True)
        to_holder.decode(other)
        computed = await to_holder.answer(other)
        # 13 blocks of prompt and answer.
        for to_reader in (to_shm, to_grpc):
            to_reader.decode(turn, peer=to_holder.peer(208))
            await to_reader.answer(turn)
            assert await num_peer_tokens(to_reader, turn) == 208
        to_holder.decode(turn)
        own = await to_holder.answer(turn)
        assert to_shm.tokens(turn) == to_grpc.tokens(turn) == own
        to_grpc.decode(other, peer=to_holder.peer(192))
        assert await to_grpc.answer(other) == computed
        assert await workers[0].child.wait() != 0
        assert await num_peer_tokens(to_grpc, other) == 0
        for worker, address in zip(workers[1:], addresses[1:], strict=True):
            await worker.until_quiet(address)


async def num_peer_tokens(client: RouterClient, request: InferenceRequest) -> int:
    first = await client.until(request, TokensReady)
    assert isinstance(first, TokensReady)
    return first.num_peer_tokens
