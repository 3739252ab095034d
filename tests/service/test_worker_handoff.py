"""A prefill and a decode worker over real gRPC and shared memory, with engines in threads."""

from __future__ import annotations

import os
import signal
from dataclasses import replace
from pathlib import Path

import pytest

from moonpool.core.protocol import HandBackReason, HandedBack, TokensReady
from moonpool.core.step import StepPlan
from moonpool.errors import ConfigError
from moonpool.handoff.messages import SourceRef
from moonpool.ids import Incarnation, WorkerKey
from moonpool.telemetry import names
from moonpool.wire.spans import Span
from support.eventually import eventually
from support.processes import processes_called, wait_for_exit
from support.requests import make_request
from support.thread_engine import LayerGate, ThreadEngines
from support.worker_pair import expected_answer, fake_workers, num_bytes_read

TRACEPARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"

#: Bytes of a block of the fake model, all layers.
BLOCK_BYTES = 1024


@pytest.mark.parametrize("transport", ["shm", "nixl", "grpc"])
async def test_disaggregated_equals_alone(tmp_path: Path, transport: str) -> None:
    requests = [
        make_request(f"r{n}", prompt=length, max_tokens=12, arrival=float(n), ignore_eos=True)
        for n, length in enumerate((1, 15, 16, 17, 64, 300))
    ]
    async with fake_workers(tmp_path) as workers:
        _, to_prefill = await workers.start(
            "p0",
            "prefill",
            max_num_batched_tokens=128,
            max_queued_steps=8,
            transports=("shm", transport, "grpc") if transport == "nixl" else ("shm", "grpc"),
        )
        decode, to_decode = await workers.start(
            "d0", "decode", transports=(transport,), is_transport_strict=True
        )
        for request in requests:
            to_prefill.prefill(request)
            to_decode.decode(request, source=to_prefill.source)
        for request in requests:
            assert await to_decode.answer(request) == expected_answer(request)
            early = await to_prefill.until(request, TokensReady)
            assert isinstance(early, TokensReady)
            assert list(early.run.token_ids) == expected_answer(request)[:1]
        assert num_bytes_read(decode, transport) == (1 + 1 + 1 + 2 + 4 + 19) * BLOCK_BYTES


async def test_a_crash_of_nixl_is_not_the_workers(tmp_path: Path) -> None:
    """What is being read is lost and computed; the next connection takes the next transport."""
    before, during, after = (
        make_request(f"r{n}", prompt=range(100 * n, 100 * n + 60), max_tokens=5) for n in (1, 2, 3)
    )
    async with fake_workers(tmp_path) as workers:
        _, to_prefill = await workers.start("p0", "prefill", transports=("nixl", "grpc"))
        decode, to_decode = await workers.start("d0", "decode", transports=("nixl", "grpc"))
        for request, transport in ((before, "nixl"), (during, ""), (after, "grpc")):
            to_prefill.prefill(request)
            to_decode.decode(request, source=to_prefill.source)
            assert await to_decode.answer(request) == expected_answer(request)
            if transport:
                assert num_bytes_read(decode, transport) == 4 * BLOCK_BYTES
            if request is before:
                (pid,) = processes_called(
                    "moonpool.transport.nixl_source_main", to_prefill.source.key
                )
                os.kill(pid, signal.SIGKILL)
                assert wait_for_exit(pid, timeout_s=5.0)


async def test_a_worker_whose_transport_is_missing_does_not_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("UCX_TLS", "nonsense")
    async with fake_workers(tmp_path) as workers:
        for settings in (
            {"transports": ("nixl",)},
            {"transports": ("nixl", "grpc"), "is_transport_strict": True},
        ):
            with pytest.raises(ExceptionGroup) as caught:
                await workers.start("d0", "decode", **settings)
            error: BaseException = caught.value
            while isinstance(error, ExceptionGroup):
                (error,) = error.exceptions
            assert isinstance(error, ConfigError)
            assert "nixl: NIXL does not start" in error.message
        await workers.start("d0", "decode", transports=("nixl", "grpc"))


async def test_layers_are_read_while_the_next_are_computed(tmp_path: Path) -> None:
    request = make_request(prompt=100, max_tokens=5)
    gate = LayerGate([3])
    async with fake_workers(tmp_path) as workers:
        _, to_prefill = await workers.start("p0", "prefill", gate=gate)
        decode, to_decode = await workers.start("d0", "decode")
        to_prefill.prefill(request)
        to_decode.decode(request, source=to_prefill.source)
        # Three of four layers lie in decode's pool while the last is not computed.
        await eventually(
            lambda: num_bytes_read(decode) == 7 * BLOCK_BYTES * 3 / 4,
            timeout_s=5.0,
            what="three layers are read",
        )
        gate.open()
        assert await to_decode.answer(request) == expected_answer(request)
        assert num_bytes_read(decode) == 7 * BLOCK_BYTES


async def test_only_what_is_lacking_is_read(tmp_path: Path) -> None:
    first = make_request("r1", prompt=range(64), max_tokens=2)
    longer = make_request("r2", prompt=range(100), max_tokens=3)
    async with fake_workers(tmp_path) as workers:
        _, to_prefill = await workers.start("p0", "prefill")
        decode, to_decode = await workers.start("d0", "decode")
        for request in (first, longer):
            to_prefill.prefill(request)
            to_decode.decode(request, source=to_prefill.source)
            assert await to_decode.answer(request) == expected_answer(request)
        # 4 blocks, then the other 3; the fourth of `first` is cached once its tokens are final.
        assert num_bytes_read(decode) in (7 * BLOCK_BYTES, 8 * BLOCK_BYTES)


async def test_decode_may_come_long_before_prefill(tmp_path: Path) -> None:
    request = make_request(prompt=40, max_tokens=4)
    async with fake_workers(tmp_path) as workers:
        prefill, to_prefill = await workers.start("p0", "prefill")
        _, to_decode = await workers.start("d0", "decode")
        to_decode.decode(request, source=to_prefill.source)

        async def is_parked() -> bool:
            return (await prefill.ledger()).num_open_streams == 1

        await eventually(is_parked, timeout_s=5.0, what="the Open is there")
        to_prefill.prefill(request)
        assert await to_decode.answer(request) == expected_answer(request)


async def test_a_damaged_layer_is_recomputed(tmp_path: Path) -> None:
    request = make_request(prompt=60, max_tokens=6)
    engines: list[ThreadEngines] = []

    def damage(plan: StepPlan, layer: int) -> None:
        """After layer 1 is marked, flip a byte of it in the third block of the prompt."""
        if layer == 2 and len(plan.rows[0].token_ids):
            memory = engines[0].engines[0].memory
            block = int(plan.rows[0].block_tables[0][2])
            memory.pool.bytes[block * BLOCK_BYTES + BLOCK_BYTES // 4] ^= 1

    engines.append(ThreadEngines(damage))
    async with fake_workers(tmp_path) as workers:
        # One announcement for all layers: the damage is done before anything is read.
        _, to_prefill = await workers.start("p0", "prefill", engines=engines[0], layers_per_group=4)
        decode, to_decode = await workers.start("d0", "decode")
        to_prefill.prefill(request)
        to_decode.decode(request, source=to_prefill.source)
        assert await to_decode.answer(request) == expected_answer(request)
        metrics = decode.service.metrics
        assert metrics.value(names.KV_CHECKSUM_MISMATCH, backend="shm") == 1


@pytest.mark.parametrize("action", ["flip", "drop"])
async def test_reads_that_fail_cost_a_recompute(tmp_path: Path, action: str) -> None:
    request = make_request(prompt=60, max_tokens=6)
    async with fake_workers(tmp_path) as workers:
        _, to_prefill = await workers.start("p0", "prefill")
        _, to_decode = await workers.start("d0", "decode", failpoints=f"transport.read={action}@2")
        to_prefill.prefill(request)
        to_decode.decode(request, source=to_prefill.source)
        assert await to_decode.answer(request) == expected_answer(request)


async def test_a_peer_is_connected_before_it_is_needed(tmp_path: Path) -> None:
    async with fake_workers(tmp_path) as workers:
        prefill, to_prefill = await workers.start("p0", "prefill")
        decode, to_decode = await workers.start("d0", "decode")
        for worker, key in ((decode, to_prefill.key), (prefill, to_decode.key)):
            peers = worker.service.shell.peers
            await eventually(
                lambda peers=peers, key=key: peers.connected(key) is not None,
                timeout_s=5.0,
                what="each has connected to the other",
            )


async def test_a_restarted_peer_is_connected_anew(tmp_path: Path) -> None:
    request = make_request(prompt=60, max_tokens=6)
    async with fake_workers(tmp_path) as workers:
        decode, to_decode = await workers.start("d0", "decode")
        keys = []
        for attempt in (1, 2):
            prefill, to_prefill = await workers.start("p0", "prefill")
            to_prefill.prefill(request, attempt)
            to_decode.decode(request, attempt, source=to_prefill.source)
            assert await to_decode.answer(request, attempt) == expected_answer(request)
            keys.append(to_prefill.key)
            await workers.stop(prefill)
        peers = decode.service.shell.peers
        assert peers.connected(keys[0]) is None
        await eventually(
            lambda: peers.connected(keys[1]) is None,
            timeout_s=5.0,
            what="a peer that has gone is let go",
        )


@pytest.mark.parametrize("layer", [0, 2, 3])
async def test_abort_while_layers_arrive(tmp_path: Path, layer: int) -> None:
    request = make_request(prompt=100, max_tokens=5)
    gate = LayerGate([layer])
    async with fake_workers(tmp_path) as workers:
        _, to_prefill = await workers.start("p0", "prefill", gate=gate)
        _, to_decode = await workers.start("d0", "decode")
        to_prefill.prefill(request)
        to_decode.decode(request, source=to_prefill.source)
        await eventually(lambda: gate.is_reached, timeout_s=5.0, what="the gate is reached")
        to_decode.abort(request)
        to_prefill.abort(request)
        gate.open()
        await workers.check_quiet()
        # The same request again, as another attempt, is served from what was cached or computed.
        to_prefill.prefill(request, attempt=2)
        to_decode.decode(request, attempt=2, source=to_prefill.source)
        assert await to_decode.answer(request, attempt=2) == expected_answer(request)


async def test_a_lost_router_takes_its_requests_along(tmp_path: Path) -> None:
    request = make_request(prompt=100, max_tokens=500)
    gate = LayerGate([2])
    async with fake_workers(tmp_path) as workers:
        prefill, _ = await workers.start("p0", "prefill", gate=gate)
        decode, _ = await workers.start("d0", "decode")
        async with prefill.router("other") as to_prefill, decode.router("other") as to_decode:
            to_prefill.prefill(request)
            to_decode.decode(request, source=to_prefill.source)
            await eventually(lambda: gate.is_reached, timeout_s=5.0, what="the gate is reached")
        gate.open()
        await workers.check_quiet()
        assert (await decode.ledger()).num_router_sessions == 1


async def test_a_short_prompt_is_repaired_when_its_source_is_not_there(tmp_path: Path) -> None:
    short = make_request("r1", prompt=50, max_tokens=4)
    long = make_request("r2", prompt=200, max_tokens=4)
    async with fake_workers(tmp_path) as workers:
        _, to_prefill = await workers.start("p0", "prefill")
        _, to_decode = await workers.start("d0", "decode", local_prefill_tokens=64)
        source = to_prefill.source
        ghost = SourceRef(
            key=WorkerKey(source.key.worker_id, Incarnation("0" * 16)), address=source.address
        )
        nobody = SourceRef(key=source.key, address="127.0.0.1:1")
        for attempt, missing in ((1, ghost), (2, nobody)):
            to_decode.decode(short, attempt=attempt, source=missing)
            assert await to_decode.answer(short, attempt=attempt) == expected_answer(short)
        to_decode.decode(long, source=ghost)
        back = await to_decode.until(long, HandedBack)
        assert isinstance(back, HandedBack)
        assert back.reason is HandBackReason.SOURCE_LOST


async def test_the_last_report_brings_the_spans(tmp_path: Path) -> None:
    traced = replace(make_request(prompt=100, max_tokens=5), traceparent=TRACEPARENT)
    async with fake_workers(tmp_path) as workers:
        _, to_prefill = await workers.start("p0", "prefill")
        _, to_decode = await workers.start("d0", "decode")
        to_prefill.prefill(traced)
        to_decode.decode(traced, source=to_prefill.source)
        await to_decode.answer(traced)
        await to_prefill.until(traced, TokensReady)
        (prefill,) = to_prefill.spans
        transfer, decode = to_decode.spans
    assert [prefill.name, transfer.name, decode.name] == ["prefill", "kv.transfer", "decode"]
    for span in (prefill, transfer, decode):
        assert span.trace_id == "0af7651916cd43dd8448eb211c80319c"
        assert span.parent_span_id == "b7ad6b7169203331"
        assert span.attributes[names.ATTR_REQUEST_ID] == "r1"
    assert transfer.attributes[names.ATTR_BYTES] == 7 * BLOCK_BYTES
    assert transfer.attributes[names.ATTR_BACKEND] == "shm"
    assert sum(int(event.attributes["num_bytes"]) for event in transfer.events) == 7 * BLOCK_BYTES

    order = [
        moment(span, key)
        for span, key in (
            (prefill, "received"),
            (prefill, "prefill_started"),
            (prefill, "last_layer"),
            (prefill, "forward_ended"),
            (prefill, "first_token"),
            (transfer, "commit_received"),
            (transfer, "admitted"),
            (decode, "joined"),
            (decode, "first_step"),
        )
    ]
    assert order[0] > 0
    assert order == sorted(order)
    assert moment(transfer, "source_first_token") == moment(prefill, "first_token")


def moment(span: Span, name: str) -> int:
    value = span.attributes[f"moonpool.{name}_unix_ns"]
    assert isinstance(value, int)
    return value
