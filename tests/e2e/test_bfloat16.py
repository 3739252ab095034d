"""bfloat16, one request at a time: prefilled elsewhere or here, the tokens are the same.

Two routers share the workers: one sends long prompts to the prefill worker, the other never does. A
cache salt of its own keeps each run from the other's blocks.
"""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import pytest

from moonpool.cluster.local_cluster import ClusterOptions, LocalCluster
from moonpool.config.process import router_config
from moonpool.config.schema import ClusterConfig
from moonpool.inference.generation import GenerationRequest
from moonpool.rpc.channel import open_channel
from moonpool.service.life import running
from moonpool_loadtest.faults.workload import make_cases
from moonpool_router.app import build
from support.eventually import eventually
from support.router import Client
from support.tiny_llama import TinyLlama, write_tiny_llama

_MODEL = TinyLlama()
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
                one = await local.generate(salted(request, "one"), timeout_s=60)
                two = await elsewhere.generate(salted(request, "two"), timeout_s=60)
                assert one.done is not None
                assert two.done is not None
                assert one.done.placement.prefill_worker == ""
                is_long = len(case.prompt) > config.local_prefill_tokens
                assert (two.done.placement.prefill_worker != "") == is_long
                assert one.token_ids == two.token_ids, case.name
                assert (one.done.usage.num_cached_tokens, two.done.usage.num_cached_tokens) == (
                    0,
                    0,
                )
        await cluster.wait_quiet()


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
            # What takes the long way is asked for, not what is faster.
            "router": {"http_port": 0, "grpc_port": 0, "placement": {"disagg": "threshold"}},
            "worker": {"num_blocks": 128, "max_num_batched_tokens": 128, "is_checked": True},
        }
    )
