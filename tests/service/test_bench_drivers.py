"""Drivers and the open loop against servers that a test scripts."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

import pytest

from moonpool.errors import InvalidRequestError, MoonpoolError, OverloadedError, WorkerLostError
from moonpool.inference.generation import TextPrompt, TokenPrompt
from moonpool_loadtest.bench.arrivals import ArrivalProcess
from moonpool_loadtest.bench.benchmark import BenchConfig, run_benchmark
from moonpool_loadtest.bench.driver import RequestOptions
from moonpool_loadtest.bench.grpc_driver import GrpcDriver
from moonpool_loadtest.bench.openai_driver import OpenAIDriver
from moonpool_loadtest.bench.records import Outcome
from moonpool_loadtest.bench.runner import Run, run_schedule
from moonpool_loadtest.bench.workload import BenchRequest
from support.scripted_door import ANSWER, STAY, chunk, done, scripted_door


def request(
    index: int = 0, scheduled_s: float = 0.0, prompt: TextPrompt | TokenPrompt | None = None
) -> BenchRequest:
    return BenchRequest(
        index=index,
        scheduled_s=scheduled_s,
        prompt=prompt or TokenPrompt(token_ids=(1, 2)),
        max_tokens=2,
    )


async def over_grpc(
    address: str, *requests: BenchRequest, options: RequestOptions | None = None
) -> Run:
    options = options or RequestOptions(timeout_s=10.0)
    async with GrpcDriver(address, options, api_key=None) as driver:
        return await run_schedule(requests, driver, timeout_s=options.timeout_s)


# -- gRPC --


async def test_grpc_records_every_token() -> None:
    async with scripted_door([chunk("ab", 0, 65, 66), chunk("c", 2, 67), done(3)]) as (
        door,
        address,
    ):
        run = await over_grpc(address, request())
    (record,) = run.records
    assert record.outcome is Outcome.OK
    assert record.token_ids == (65, 66, 67)
    assert record.token_times_s[0] == record.token_times_s[1] <= record.token_times_s[2]
    assert record.told.usage is not None
    assert record.told.usage.num_cached_tokens == 3
    assert record.told.ttft_parts_ms == {"queue": 1.0, "prefill": 2.0}
    assert record.told.prefill_worker == "prefill-0"
    assert 0 <= record.scheduled_s <= record.sent_s <= record.token_times_s[0] <= record.ended_s
    assert door.requests[0].sampling.ignore_eos
    assert run.wall_s > 0
    assert run.cpu_s > 0


async def test_a_slow_answer_delays_no_other() -> None:
    """Open loop: the one that comes first never ends, the others are sent when their time comes."""
    options = RequestOptions(timeout_s=1.0)
    async with scripted_door([STAY], ANSWER) as (_, address):
        run = await over_grpc(
            address, *(request(index, index * 0.05) for index in range(4)), options=options
        )
    endless = [record for record in run.records if record.outcome is Outcome.TIMEOUT]
    answered = [record for record in run.records if record.outcome is Outcome.OK]
    assert (len(endless), len(answered)) == (1, 3)
    assert all(record.sent_s >= record.scheduled_s for record in run.records)
    assert max(record.ended_s for record in answered) < endless[0].ended_s


@pytest.mark.parametrize(
    ("script", "outcome", "code"),
    [
        ([OverloadedError("full")], Outcome.REFUSED, "server_overloaded"),
        ([chunk("a", 0, 1), WorkerLostError("lost")], Outcome.FAILED, "worker_lost"),
        ([InvalidRequestError("no")], Outcome.FAILED, "invalid_value"),
    ],
)
async def test_what_went_wrong_is_recorded_and_not_retried(
    script: list[object], outcome: Outcome, code: str
) -> None:
    async with scripted_door(script) as (door, address):
        (record,) = (await over_grpc(address, request())).records
        assert len(door.requests) == 1
    assert (record.outcome, record.error_code) == (outcome, code)


async def test_a_benchmark_warms_up_and_counts_only_what_is_scheduled() -> None:
    async with scripted_door() as (door, address):
        lines: list[str] = []
        result = await run_benchmark(
            BenchConfig(
                target=address,
                num_requests=5,
                num_warmups=2,
                arrivals=ArrivalProcess(rate_rps=200.0),
                options=RequestOptions(is_chat=True),
            ),
            on_progress=lines.append,
        )
    assert len(door.requests) == 7
    assert all(message.HasField("chat") for message in door.requests)
    assert result.metrics.num_arrived == 5
    assert result.models == ("tiny",)
    assert lines == [f"5 requests over 0.0 s to {address} (tiny)"]
    assert [gate.name for gate in result.gates] == ["send_lag_p99_ms", "client_cpu_share"]


async def test_a_failed_warm_up_stops_it() -> None:
    async with scripted_door([InvalidRequestError("too long")]) as (_, address):
        with pytest.raises(MoonpoolError, match="warm-up request failed: too long"):
            await run_benchmark(BenchConfig(target=address, num_requests=5))


# -- OpenAI --


class HttpServer:
    """Answers each connection with the next list of raw pieces, the last one again and again."""

    def __init__(self, answers: Sequence[Sequence[bytes]]) -> None:
        self._answers = answers
        self.heads: list[str] = []
        self.bodies: list[bytes] = []

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        pieces = self._answers[min(len(self.heads), len(self._answers) - 1)]
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        self.heads.append(head)
        length = int(head.lower().split("content-length: ")[1].split("\r\n")[0])
        self.bodies.append(await reader.readexactly(length))
        for piece in pieces:
            writer.write(piece)
            await writer.drain()
            await asyncio.sleep(0)
        writer.close()


@asynccontextmanager
async def http_server(*answers: Sequence[bytes]) -> AsyncIterator[tuple[HttpServer, str]]:
    server = HttpServer(answers)
    listening = await asyncio.start_server(server.serve, "127.0.0.1", 0)
    async with listening:
        port = listening.sockets[0].getsockname()[1]
        yield server, f"http://127.0.0.1:{port}/v1"


def events(*chunks: object) -> bytes:
    return b"".join(b"data: " + json.dumps(part).encode() + b"\n\n" for part in chunks)


def chunked(content: bytes, size: int) -> bytes:
    pieces = [content[start : start + size] for start in range(0, len(content), size)]
    return b"".join(b"%x\r\n%s\r\n" % (len(piece), piece) for piece in pieces) + b"0\r\n\r\n"


USAGE = {
    "prompt_tokens": 5,
    "completion_tokens": 2,
    "prompt_tokens_details": {"cached_tokens": 3},
}
CHAT = events(
    {"id": "c1", "choices": [{"delta": {"role": "assistant", "content": ""}}]},
    {"id": "c1", "choices": [{"delta": {"content": "a"}}]},
    {"id": "c1", "choices": [{"delta": {"content": "b"}, "finish_reason": "length"}]},
    {"id": "c1", "choices": [], "usage": USAGE},
)
HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n"
STREAM = (
    HEAD + b"transfer-encoding: chunked\r\n\r\n",
    chunked(CHAT + b"data: [DONE]\n\n", size=23),
)


async def over_http(
    url: str, *requests: BenchRequest, options: RequestOptions | None = None
) -> Run:
    options = options or RequestOptions(model="m", is_chat=True, timeout_s=10.0)
    async with OpenAIDriver(url, options, api_key="key") as driver:
        return await run_schedule(requests, driver, timeout_s=options.timeout_s)


@pytest.mark.parametrize(
    "pieces",
    [
        STREAM,
        (HEAD + b"\r\n", CHAT, b"data: [DONE]\n\n"),
        (HEAD + b"content-length: %d\r\n\r\n" % len(CHAT), CHAT),
    ],
    ids=["chunked", "until-close", "content-length"],
)
async def test_http_tokens_are_messages_with_text(pieces: Sequence[bytes]) -> None:
    async with http_server(pieces) as (server, url):
        (record,) = (await over_http(url, request(prompt=TextPrompt(text="hi")))).records
    assert record.outcome is Outcome.OK, record
    # The first delta holds a role and no token.
    assert len(record.token_times_s) == 2
    assert record.told.usage is not None
    assert record.told.usage.num_cached_tokens == 3
    assert (record.told.finish_reason, record.told.request_id) == ("length", "c1")
    assert server.heads[0].startswith("POST /v1/chat/completions HTTP/1.1\r\n")
    assert "authorization: Bearer key" in server.heads[0]
    body = json.loads(server.bodies[0])
    assert body["messages"] == [{"role": "user", "content": "hi"}]
    assert body["stream_options"] == {"include_usage": True}
    assert (body["model"], body["max_tokens"], body["ignore_eos"]) == ("m", 2, True)


async def test_token_prompts_go_to_completions_and_the_first_model_is_asked() -> None:
    models = json.dumps({"object": "list", "data": [{"id": "first"}, {"id": "second"}]}).encode()
    completion = events(
        {"choices": [{"text": "a"}]}, {"choices": [{"text": "", "finish_reason": "stop"}]}
    )
    async with http_server(
        [b"HTTP/1.1 200 OK\r\n\r\n", models], [HEAD + b"\r\n", completion, b"data: [DONE]\n\n"]
    ) as (server, url):
        options = RequestOptions(ignore_eos=False)
        async with OpenAIDriver(url, options, api_key=None) as driver:
            assert await driver.list_models() == ("first", "second")
            (record,) = (await run_schedule([request()], driver, timeout_s=10)).records
    assert record.outcome is Outcome.OK
    assert record.num_tokens == 1
    assert server.heads[1].startswith("POST /v1/completions ")
    body = json.loads(server.bodies[1])
    assert (body["model"], body["prompt"]) == ("first", [1, 2])
    assert "ignore_eos" not in body


def failure(status: int, body: bytes) -> list[bytes]:
    return [b"HTTP/1.1 %d No\r\ncontent-length: %d\r\n\r\n" % (status, len(body)), body]


@pytest.mark.parametrize(
    ("pieces", "outcome", "code"),
    [
        (failure(503, b'{"error": {"message": "full", "code": "x"}}'), Outcome.REFUSED, "x"),
        (failure(429, b"slow down"), Outcome.REFUSED, "http_429"),
        (failure(400, b'{"error": {"message": "no", "code": 400}}'), Outcome.FAILED, "400"),
        (failure(504, b"{}"), Outcome.TIMEOUT, "http_504"),
        ([HEAD + b"\r\n", events({"error": {"message": "m", "code": "c"}})], Outcome.FAILED, "c"),
        ([HEAD + b"\r\n", b"data: nonsense\n\n"], Outcome.FAILED, "internal_error"),
        ([HEAD + b"\r\n", CHAT[:60]], Outcome.FAILED, "answer_cut_off"),
        (
            [HEAD + b"content-length: 9999\r\n\r\n", CHAT[:80]],
            Outcome.REFUSED,
            "connection_broken",
        ),
        ([HEAD + b"content-length: 9999\r\n\r\n", CHAT], Outcome.FAILED, "connection_broken"),
        ([STREAM[0], b"zz\r\n"], Outcome.FAILED, "connection_broken"),
        ([b"SSH-2.0\r\n"], Outcome.FAILED, "connection_broken"),
        ([], Outcome.REFUSED, "connection_broken"),
    ],
)
async def test_http_failures_are_records(pieces: list[bytes], outcome: Outcome, code: str) -> None:
    async with http_server(pieces) as (_, url):
        (record,) = (await over_http(url, request(prompt=TextPrompt(text="hi")))).records
    assert (record.outcome, record.error_code) == (outcome, code)
    assert record.error


async def test_nobody_listens() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    (record,) = (await over_http(f"http://127.0.0.1:{port}", request())).records
    assert (record.outcome, record.error_code) == (Outcome.REFUSED, "service_unavailable")
