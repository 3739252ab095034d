"""bfloat16, one request at a time: prefilled elsewhere or here, the tokens are the same, however KV is read.

Two routers share two workers: the one has long prompts prefilled by one worker for the other, the other never. A
cache salt of its own keeps each run from the other's blocks.
"""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import httpx
import pytest

from moonpool.cluster.local_cluster import ClusterOptions, LocalCluster
from moonpool.config.process import router_config
from moonpool.config.schema import ClusterConfig
from moonpool.inference.generation import GenerationRequest, PlacementSummary
from moonpool.rpc.channel import open_channel
from moonpool.service.life import running
from moonpool_loadtest.faults.workload import make_cases
from moonpool_router.app import build
from support.eventually import eventually
from support.router import Answered, Client
from support.tiny_llama import TinyLlama, write_tiny_llama

_MODEL = TinyLlama()
#: Who decode in turn, and how each reads from the other.
BY_TRANSPORT = {"shm-0": "shm", "nixl-0": "nixl"}
_LENGTHS = (31, 32, 33, 100, 127, 128, 129, 255, 300, 17)


@pytest.mark.timeout(300)
async def test_disaggregated_is_aggregated(tmp_path: Path) -> None:
    config = cluster_config(tmp_path)
    cases = make_cases(
        vocab_size=_MODEL.vocab_size, prompt_lengths=_LENGTHS, max_tokens=24, rng=random.Random(3)
    )
    async with LocalCluster(config, options=ClusterOptions(is_pinned=False)) as cluster:
        aggregating = router_config(
            config.model_copy(update={"local_prefill_tokens": 100_000}),
            nats_url=cluster.endpoints.nats_url,
        ).model_copy(update={"router_id": "router-local"})
        async with (
            running(build(aggregating)) as here,
            open_channel(cluster.endpoints.grpc_address) as there_channel,
            open_channel(str(here.facts["grpc_address"])) as here_channel,
        ):
            elsewhere = Client(there_channel, cluster.endpoints.grpc_address)
            local = Client(here_channel, str(here.facts["grpc_address"]))
            await eventually(local.is_serving, timeout_s=30, what="the second router serves")
            for case in cases:
                request = case.request(deadline_s=60.0)
                alone = await local.generate(salted(request, "alone"), timeout_s=60)
                answers = [
                    await elsewhere.generate(salted(request, salt), timeout_s=60)
                    for salt in ("one", "other")
                ]
                is_long = len(case.prompt) > config.local_prefill_tokens
                assert placed(alone).prefill_worker == ""
                assert {placed(answered).decode_worker for answered in answers} == set(BY_TRANSPORT)
                for answered in answers:
                    assert (placed(answered).prefill_worker != "") == is_long
                    assert answered.token_ids == alone.token_ids, (case.name, placed(answered))
        await cluster.wait_quiet()
        for worker_id, transport in BY_TRANSPORT.items():
            assert await num_bytes_read(cluster, worker_id, transport) > 0


def placed(answered: Answered) -> PlacementSummary:
    """Where it was answered; nothing of it was cached."""
    assert answered.done is not None
    assert answered.done.usage.num_cached_tokens == 0
    return answered.done.placement


async def num_bytes_read(cluster: LocalCluster, worker_id: str, transport: str) -> float:
    port = cluster.part(worker_id).fact("metrics_port")
    async with httpx.AsyncClient() as client:
        text = (await client.get(f"http://127.0.0.1:{port}/metrics")).text
    counter = f'moonpool_kv_transfer_bytes_total{{backend="{transport}"}} '
    return sum(
        float(line[len(counter) :]) for line in text.splitlines() if line.startswith(counter)
    )


def salted(request: GenerationRequest, salt: str) -> GenerationRequest:
    return replace(request, cache_salt=salt)


def cluster_config(tmp_path: Path) -> ClusterConfig:
    return ClusterConfig.model_validate(
        {
            "name": "bf16",
            "data_dir": tmp_path / "data",
            "model": str(write_tiny_llama(tmp_path / "tiny", _MODEL)),
            "dtype": "bfloat16",
            "local_prefill_tokens": 32,
            # What takes the long way is asked for, not what is faster, and who answers.
            "router": {
                "http_port": 0,
                "grpc_port": 0,
                "placement": {"disagg": "threshold", "mode": "round_robin"},
            },
            "worker": {"num_blocks": 128, "max_num_batched_tokens": 128, "is_checked": True},
            "workers": [
                {"role": "both", "name": "shm", "transports": ["shm", "nixl"]},
                {"role": "both", "name": "nixl", "transports": ["nixl"]},
            ],
        }
    )
