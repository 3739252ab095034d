"""`moonpool bench` on a cluster of real processes, through both doors."""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path

from moonpool.cluster.local_cluster import ClusterOptions, LocalCluster
from moonpool.config.schema import ClusterConfig
from support.tiny_llama import write_tiny_llama


async def bench(*arguments: str) -> tuple[int, str]:
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "moonpool_loadtest.bench",
        *("--request-rate", "20", "--num-prompts", "12", "--output-len", "8"),
        *("--prompt", "tokens", "--vocab-size", "320"),
        *arguments,
        stdout=asyncio.subprocess.PIPE,
    )
    async with asyncio.timeout(60):
        out, _ = await process.communicate()
    assert process.returncode is not None
    return process.returncode, out.decode()


async def test_a_small_benchmark_of_a_cluster(tmp_path: Path) -> None:
    config = ClusterConfig.model_validate(
        {
            "data_dir": tmp_path / "data",
            "model": str(write_tiny_llama(tmp_path / "tiny")),
            "dtype": "float32",
            "local_prefill_tokens": 64,
            "router": {"http_port": 0, "grpc_port": 0},
            "worker": {"num_blocks": 256, "max_num_seqs": 8, "max_model_len": 512},
            "workers": [{"role": "prefill"}, {"role": "decode"}],
        }
    )
    output = tmp_path / "grpc.json"
    async with LocalCluster(config, options=ClusterOptions(is_pinned=False)) as cluster:
        status, table = await bench(
            *("--address", cluster.endpoints.grpc_address, "--output", str(output)),
            *("--input-len", "16:120", "--prefix-len", "32", "--slo-ttft-ms", "30000"),
        )
        assert status == 0, table
        http_status, text = await bench(
            "--base-url", f"{cluster.endpoints.http_url}/v1", "--input-len", "24", "--json"
        )
        assert http_status == 0, text
        await cluster.wait_quiet()
    assert "goodput  12 of 12 (100.0%)" in table
    document = json.loads(output.read_text())
    metrics = document["metrics"]
    assert metrics["num_by_outcome"] == {"ok": 12, "refused": 0, "timeout": 0, "failed": 0}
    assert metrics["num_output_tokens"] == 12 * 8
    assert metrics["num_cached_tokens"] >= 11 * 32 // 2
    for record in document["requests"]:
        assert len(record["token_ids"]) == len(record["token_times_s"]) == 8
        assert record["told"]["decode_worker"] == "decode-0"
        # The client's time holds the server's.
        assert (
            record["token_times_s"][0] - record["sent_s"] >= record["told"]["ttft_ms"] / 1e3 - 0.01
        )
    assert {record["told"]["prefill_worker"] for record in document["requests"]} == {
        "",
        "prefill-0",
    }
    over_http = json.loads(text)
    assert over_http["metrics"]["num_by_outcome"]["ok"] == 12
    assert over_http["metrics"]["num_output_tokens"] == 12 * 8
    assert over_http["metrics"]["num_prompt_tokens"] == 12 * 24
