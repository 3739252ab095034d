"""A worker's metrics over its loopback HTTP: each is there, and those of a handoff move."""

from __future__ import annotations

from pathlib import Path

import httpx

from moonpool.core.protocol import Refused
from moonpool.telemetry.names import METRICS
from moonpool.worker.books import WORKER_METRICS
from moonpool_kvstore.books import STORE_METRICS
from moonpool_router.books import ROUTER_METRICS
from support.requests import make_request
from support.worker_pair import fake_workers
from support.workers import RunningWorker


def url_of(worker: RunningWorker) -> str:
    return f"http://127.0.0.1:{worker.running.facts['metrics_port']}"


def samples(text: str) -> dict[str, float]:
    lines = (line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#"))
    return {name: float(value) for name, value in lines}


def test_every_metric_belongs_to_a_process() -> None:
    assert {*ROUTER_METRICS, *WORKER_METRICS, *STORE_METRICS} == set(METRICS)


async def test_a_handoff_is_in_the_books_of_both_sides(tmp_path: Path) -> None:
    request = make_request(prompt=100, max_tokens=5)
    too_long = make_request("r2", prompt=2_000, max_tokens=5)
    async with fake_workers(tmp_path) as workers, httpx.AsyncClient() as client:
        prefill, to_prefill = await workers.start("p0", "prefill")
        decode, to_decode = await workers.start("d0", "decode", num_blocks=32)
        to_prefill.prefill(request)
        to_decode.decode(request, source=to_prefill.source)
        await to_decode.answer(request)
        to_decode.decode(too_long)
        await to_decode.until(too_long, Refused)
        text = (await client.get(f"{url_of(decode)}/metrics")).text
        seen = samples(text)
        on_prefill = samples((await client.get(f"{url_of(prefill)}/metrics")).text)
        assert (await client.get(f"{url_of(decode)}/livez")).json() == {"status": "alive"}
        assert (await client.get(f"{url_of(decode)}/else")).status_code == 404
        assert (await client.post(f"{url_of(decode)}/metrics")).status_code == 405
    for metric in WORKER_METRICS:
        assert f"# TYPE {metric.name} {metric.kind.value}" in text, metric
    blocks = {
        state: seen[f'moonpool_kv_blocks{{state="{state}",tier="device"}}']
        for state in ("free", "cached", "active")
    }
    assert sum(blocks.values()) == 32
    assert blocks["cached"] > 0
    assert seen['moonpool_kv_transfer_bytes_total{backend="shm"}'] > 0
    assert seen['moonpool_kv_transfer_seconds_count{backend="shm"}'] > 0
    assert seen["moonpool_step_tokens_total"] == 4
    assert seen['moonpool_step_seconds_count{part="forward"}'] == 4
    assert seen['moonpool_refused_attempts_total{reason="never_fits"}'] == 1
    assert seen['moonpool_worker_requests{state="running"}'] == 0
    assert seen["moonpool_nats_connected"] == 1
    assert seen['moonpool_bus_lost_messages_total{reason="unsent"}'] == 0
    assert seen["moonpool_handoff_streams"] == 0
    assert on_prefill["moonpool_step_tokens_total"] == 100
    assert any(name.startswith('moonpool_build_info{process="d0"') for name in seen)


async def test_the_listener_can_be_left_out(tmp_path: Path) -> None:
    async with fake_workers(tmp_path) as workers:
        worker, _ = await workers.start("d0", "decode", metrics_port="off")
        assert "metrics_port" not in worker.running.facts
